// A 64-bit checksum in two stages. Integer sums do not depend on the order of their terms, so atomics give the same
// bits in every run.

typedef unsigned long long u64;

// Adds the sums of all threads of a block; thread 0 gets the result.
__device__ inline u64 block_sum_u64(u64 sum) {
    __shared__ u64 total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    atomicAdd(&total, sum);
    __syncthreads();
    return total;
}

// partials[block] = sum of mix(words[i] ^ i GOLDEN) over the words of that block.
extern "C" __global__ void checksum_partials(const u32* __restrict__ words, u64* partials, i64 len) {
    pdl_wait_and_launch();
    u64 sum = 0;
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < len; i += gridDim.x * (i64)blockDim.x) {
        u64 z = words[i] ^ (u64)i * 0x9e3779b97f4a7c15ull;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        sum += z ^ z >> 31;
    }
    sum = block_sum_u64(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// out = the digits of sum(partials) in base 2^16, from the lowest. One block.
extern "C" __global__ void checksum_final(const u64* partials, i64 count, float* out) {
    pdl_wait_and_launch();
    u64 sum = 0;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) sum += partials[i];
    sum = block_sum_u64(sum);
    if (threadIdx.x < CHECKSUM_DIGITS) out[threadIdx.x] = (float)(sum >> (16 * threadIdx.x) & 0xffffu);
}
