// Activation functions f(x) = x gate(x); `Activation` in mod.rs lists them in the same order.

enum Activation { SILU, GELU, GELU_TANH, RELU2, QUICK_GELU, NO_ACTIVATION };

// Constants of the formulas, as in cpu.rs.
#define GELU_SCALE 0.7978846f
#define GELU_CUBE 0.044715f
#define NORMAL_DENSITY 0.3989423f
#define TAIL_STEP 0.3f
#define QUICK_SCALE 1.702f

// Phi(-x) = exp(-x^2 / 2) P(t) with t = 1 / (1 + TAIL_STEP x), for x >= 0: the tail of the standard normal
// distribution.
__device__ inline float normal_tail(float x) {
    const float coefficients[9] = {0.03837829f,  -0.16916612f, 0.22866008f, -0.07650647f,  0.14253552f,
                                   0.09468352f, 0.12192034f,  0.11948769f, 7.168876e-6f};
    float t = reciprocal_for<ACT>(1.0f + TAIL_STEP * x), p = 0.0f;
#pragma unroll
    for (int i = 0; i < 9; i++) p = p * t + coefficients[i];
    return exp_for<ACT>(-0.5f * x * x) * p;
}

template <int F>
__device__ inline float gate(float x) {
    if constexpr (F == SILU) {
        return sigmoid_for<ACT>(x);
    } else if constexpr (F == GELU) {
        float tail = normal_tail(fabsf(x));
        return x < 0.0f ? tail : 1.0f - tail;
    } else if constexpr (F == GELU_TANH) {
        // (1 + tanh(u)) / 2 = sigmoid(2 u)
        return sigmoid_for<ACT>(2.0f * GELU_SCALE * (x + GELU_CUBE * x * x * x));
    } else if constexpr (F == QUICK_GELU) {
        return sigmoid_for<ACT>(QUICK_SCALE * x);
    } else {
        return fmaxf(x, 0.0f);
    }
}

// factor f'(x), with g = gate(x).
template <int F>
__device__ inline float times_derivative(float factor, float x, float g) {
    if constexpr (F == SILU) {
        return factor * g * (1.0f + x * (1.0f - g));
    } else if constexpr (F == GELU) {
        return factor * (g + x * (NORMAL_DENSITY * exp_for<ACT>(-0.5f * x * x)));
    } else if constexpr (F == GELU_TANH) {
        // With g = sigmoid(2 u): f'(x) = g + g (1 - g) x d(2 u)/dx
        float slope = 2.0f * GELU_SCALE * (1.0f + 3.0f * GELU_CUBE * x * x);
        return factor * (g + g * (1.0f - g) * x * slope);
    } else if constexpr (F == QUICK_GELU) {
        return factor * g * (1.0f + QUICK_SCALE * x * (1.0f - g));
    } else {
        return factor * (2.0f * g);
    }
}
