// y (C, N) = x (N, C)^T, in tiles that pass through shared memory. Grid: one block per tile, row by row.

extern "C" __global__ void __launch_bounds__(TRANSPOSE_TILE * TRANSPOSE_ROWS)
    transpose(const ACT* __restrict__ x, ACT* __restrict__ y, i64 rows, i64 cols) {
    pdl_wait_and_launch();
    // The additional column keeps the elements of a row or column of the tile in different banks.
    __shared__ ACT tile[TRANSPOSE_TILE][TRANSPOSE_TILE + 1];
    i64 across = (cols + TRANSPOSE_TILE - 1) / TRANSPOSE_TILE;
    i64 row = blockIdx.x / across * TRANSPOSE_TILE, col = blockIdx.x % across * TRANSPOSE_TILE;
    int j = threadIdx.x;
#pragma unroll
    for (int i = threadIdx.y; i < TRANSPOSE_TILE; i += TRANSPOSE_ROWS)
        if (row + i < rows && col + j < cols) tile[i][j] = x[(row + i) * cols + col + j];
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.y; i < TRANSPOSE_TILE; i += TRANSPOSE_ROWS)
        if (col + i < cols && row + j < rows) y[(col + i) * rows + row + j] = tile[j][i];
}
