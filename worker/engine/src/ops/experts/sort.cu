// Stable counting sort of choices by expert: count in each chunk of choices, prefix sums, place. Counting uses integer
// atomics, whose order does not affect the sums.

// Place of an expert in the order, which starts with expert `first` and wraps around.
__device__ inline int place_of(int expert, i64 first, i64 experts) {
    int place = expert - (int)first;
    return place < 0 ? place + (int)experts : place;
}

// counts (E, chunks), in the order of experts. Grid: one block of SORT_CHUNK threads per chunk.
extern "C" __global__ void sort_count(const int* __restrict__ chosen, int* __restrict__ counts, i64 choices,
                                      i64 experts, i64 first, i64 chunks) {
    pdl_wait_and_launch();
    __shared__ int in_chunk[MAX_EXPERTS];
    for (int e = threadIdx.x; e < experts; e += SORT_CHUNK) in_chunk[e] = 0;
    __syncthreads();
    i64 choice = blockIdx.x * (i64)SORT_CHUNK + threadIdx.x;
    if (choice < choices) atomicAdd(in_chunk + place_of(chosen[choice], first, experts), 1);
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += SORT_CHUNK) counts[e * chunks + blockIdx.x] = in_chunk[e];
}

// starts (E, chunks): the row of the first choice of each expert in each chunk; offsets (E + 1,), loads (E,). Grid: one
// block per expert, which sums all counts of earlier experts itself.
extern "C" __global__ void sort_starts(const int* __restrict__ counts, int* __restrict__ starts,
                                       int* __restrict__ offsets, float* __restrict__ loads, i64 first,
                                       i64 chunks) {
    pdl_wait_and_launch();
    int earlier = 0, before = 0;
#pragma unroll 8
    for (i64 i = threadIdx.x; i < blockIdx.x * chunks; i += SORT_STARTS_THREADS) earlier += counts[i];
    block_prefix_sum<SORT_STARTS_THREADS / WARP>(earlier, before);
    int offset = before;
    for (i64 chunk = 0; chunk < chunks; chunk += SORT_STARTS_THREADS) {
        i64 at = chunk + threadIdx.x, i = blockIdx.x * chunks + at;
        int start = block_prefix_sum<SORT_STARTS_THREADS / WARP>(at < chunks ? counts[i] : 0, before);
        if (at < chunks) starts[i] = start;
    }
    if (threadIdx.x > 0) return;
    offsets[blockIdx.x] = offset, loads[(blockIdx.x + (unsigned)first) % gridDim.x] = before - offset;
    if (blockIdx.x == gridDim.x - 1) offsets[gridDim.x] = before;
}

// Grid: as of sort_count.
extern "C" __global__ void sort_places(const int* __restrict__ chosen, const int* __restrict__ starts,
                                       int* __restrict__ choice_of, int* __restrict__ row_of, i64 choices,
                                       i64 experts, i64 first, i64 chunks) {
    pdl_wait_and_launch();
    __shared__ int places[SORT_CHUNK];
    i64 choice = blockIdx.x * (i64)SORT_CHUNK + threadIdx.x;
    int place = choice < choices ? place_of(chosen[choice], first, experts) : -1;
    places[threadIdx.x] = place;
    __syncthreads();
    if (choice >= choices) return;
    int row = starts[place * chunks + blockIdx.x];
#pragma unroll 8
    for (int i = 0; i < threadIdx.x; i++) row += places[i] == place;
    row_of[choice] = row;
    choice_of[row] = (int)choice;
}
