// Per-example gradients of small convolutional nets and the pullback through them, for gradient matching.
// Plain data shared by the binding (leak_module.cpp) and the per-instruction-set units.
#pragma once
#include <cstdint>

namespace fedveil {

constexpr int kMostConvs = 8;
constexpr int kLanes = 16;  // channels of a pixel, padded

struct Conv {
    int32_t c, h, w, oc, oh, ow, kh, kw, sh, sw, ph, pw;
    int32_t tanh;            // activation: tanh, else sigmoid
    int64_t weight, bias;    // offsets in the flat vector
};

struct LeakNet {
    int32_t convs, features, classes;
    int64_t params, dense, dense_bias;
    Conv conv[kMostConvs];
};

// What the attacker compares: the mean over n inputs of (clipped) gradients with what was seen.
struct Match {
    int32_t n, clip, on_example, cosine, noisy;  // clip: 0 none, 1 each segment, 2 the whole vector
    float bound;
    int32_t segments;
    const int64_t* begin;        // [segments + 1]
    const float *shift, *scale;  // or null: the gradient is first mapped to (g - shift) / scale
};

struct LeakKernels {
    // The matching loss of one row and its derivatives by the inputs x [n, inputs] and labels t [n, classes].
    // weight: of each squared difference, or null. Cosine: coordinates with weight 0 do not count.
    float (*match)(const LeakNet&, const Match&, const float* weights, const float* packed, const float* x, const float* t,
                   const float* seen, const float* weight, float size, float* dx, float* dt, float* state, float* space);
    int64_t (*match_space)(const LeakNet&, const Match&);
    // floats kept per row between the two calls, and floats of scratch space that a call needs
    int64_t (*kept)(const LeakNet&);
    int64_t (*scratch)(const LeakNet&);
    // g[P]: the gradient of sum_j t_j * -log softmax_j at one input. `state` must be zero where it was never written.
    void (*gradient)(const LeakNet&, const float* weights, const float* packed, const float* x, const float* t, float* g,
                     float* state, float* space);
    // dx, dt: the derivatives of <g, v> by the input and by t
    void (*pullback)(const LeakNet&, const float* weights, const float* packed, const float* state, const float* t,
                     const float* v, float* dx, float* dt, float* space);
    // weights in the order the kernels read them
    int64_t (*packed_size)(const LeakNet&);
    void (*pack)(const LeakNet&, const float* weights, float* packed);
    // q[n] <- the L-BFGS inverse Hessian times q, from `stored` pairs in a ring of `memory`; rho = 1 / <s, y>
    void (*two_loop)(const float* s, const float* y, const float* rho, float gamma, int64_t memory, int64_t stored,
                     int64_t n, float* q);
};

}  // namespace fedveil
