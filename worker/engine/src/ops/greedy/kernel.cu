// Greedy decoding: id = argmax of a row's logits, the lowest of equal ones; -1 if no logit is a number.

// Selects the better of two candidates. Id -1 means no candidate.
__device__ inline void take_better(float& largest, int& id, float other, int other_id) {
    bool better = other_id >= 0 && (id < 0 || other > largest || (other == largest && other_id < id));
    if (better) largest = other, id = other_id;
}

// logits (N, Vp), tokens, positions, ids (N,). Grid: one block of 1024 threads per row.
extern "C" __global__ void __launch_bounds__(1024) greedy(const float* __restrict__ logits, int* tokens, int* positions,
                                                         float* ids, i64 vocab, i64 padded, i64 last) {
    pdl_wait_and_launch();
    __shared__ float largests[1024 / WARP];
    __shared__ int bests[1024 / WARP];
    i64 row = blockIdx.x;
    logits += row * padded;
    float largest = __int_as_float(0xff800000);
    int id = -1, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll 8
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
        float logit = logits[i];
        if (logit > largest) largest = logit, id = i;
    }
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        float other = __shfl_xor_sync(FULL_WARP, largest, distance);
        take_better(largest, id, other, __shfl_xor_sync(FULL_WARP, id, distance));
    }
    if (lane == 0) largests[warp] = largest, bests[warp] = id;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int w = 1; w < blockDim.x / WARP; w++) take_better(largest, id, largests[w], bests[w]);
    ids[row] = id;
    tokens[row] = max(id, 0);
    positions[row] = min(positions[row] + 1, (int)last);
}
