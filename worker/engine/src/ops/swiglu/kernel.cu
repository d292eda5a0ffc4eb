// SwiGLU, the gated activation of Llama. h (N, 2 F) holds g and u side by side in each row; a (N, F).
//
// Grid: one block per SWIGLU_ROWS rows, which its threads fetch together.

// a = silu(g) u, silu(g) = g sigmoid(g)
extern "C" __global__ void swiglu_fwd(const ACT* __restrict__ h, ACT* __restrict__ a, i64 rows, i64 ffn) {
    pdl_wait_and_launch();
    bool wide = is_wide(h, ffn) && is_wide(a, ffn);
    i64 first = blockIdx.x * (i64)SWIGLU_ROWS;
    for (i64 c = threadIdx.x * 8ll; c < ffn; c += blockDim.x * 8ll) {
        Packed<ACT> gs[SWIGLU_ROWS], us[SWIGLU_ROWS];
#pragma unroll
        for (int i = 0; i < SWIGLU_ROWS; i++) {
            if (first + i >= rows) break;
            const ACT *g = h + (first + i) * 2 * ffn, *u = g + ffn;
            gs[i] = fetch8(g, c, ffn, wide);
            us[i] = fetch8(u, c, ffn, wide);
        }
#pragma unroll
        for (int i = 0; i < SWIGLU_ROWS; i++) {
            if (first + i >= rows) break;
            Vec8 x = unpack(gs[i]), y = unpack(us[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) y.x[j] *= x.x[j] * sigmoid_for<ACT>(x.x[j]);
            store8(a + (first + i) * ffn, c, ffn, wide, y);
        }
    }
}

// du = da silu(g); dg = da u sigmoid(g) (1 + g (1 - sigmoid(g)))
extern "C" __global__ void swiglu_bwd(const ACT* __restrict__ h, const ACT* __restrict__ da, ACT* __restrict__ dh,
                                      i64 rows, i64 ffn) {
    pdl_wait_and_launch();
    bool wide = is_wide(h, ffn) && is_wide(da, ffn) && is_wide(dh, ffn);
    i64 first = blockIdx.x * (i64)SWIGLU_ROWS;
    for (i64 c = threadIdx.x * 8ll; c < ffn; c += blockDim.x * 8ll) {
        Packed<ACT> gs[SWIGLU_ROWS], us[SWIGLU_ROWS], das[SWIGLU_ROWS];
#pragma unroll
        for (int i = 0; i < SWIGLU_ROWS; i++) {
            if (first + i >= rows) break;
            const ACT *g = h + (first + i) * 2 * ffn, *u = g + ffn;
            gs[i] = fetch8(g, c, ffn, wide);
            us[i] = fetch8(u, c, ffn, wide);
            das[i] = fetch8(da + (first + i) * ffn, c, ffn, wide);
        }
#pragma unroll
        for (int i = 0; i < SWIGLU_ROWS; i++) {
            if (first + i >= rows) break;
            ACT *dg = dh + (first + i) * 2 * ffn, *du = dg + ffn;
            Vec8 x = unpack(gs[i]), y = unpack(us[i]), d = unpack(das[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float gate = sigmoid_for<ACT>(x.x[j]), up = y.x[j];
                y.x[j] = d.x[j] * x.x[j] * gate;
                d.x[j] *= up * gate * (1.0f + x.x[j] * (1.0f - gate));
            }
            store8(du, c, ffn, wide, y);
            store8(dg, c, ffn, wide, d);
        }
    }
}
