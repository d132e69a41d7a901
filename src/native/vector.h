// Vectors of the instruction set this file is compiled for. Included only by the per-instruction-set units,
// inside their own namespace, so that nothing compiled with special flags can be linked into common code.
#pragma once
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define FV_ISA avx512
#define FV_LANES 16
#elif defined(__AVX2__)
#define FV_ISA avx2
#define FV_LANES 8
#else
#define FV_ISA base
#define FV_LANES 4
#endif

namespace fedveil::FV_ISA {

constexpr int L = FV_LANES;
typedef float V __attribute__((vector_size(L * 4), may_alias));
typedef int32_t I __attribute__((vector_size(L * 4), may_alias));
typedef uint32_t U __attribute__((vector_size(L * 4), may_alias));
typedef float Vu __attribute__((vector_size(L * 4), may_alias, aligned(4)));
typedef uint32_t Uu __attribute__((vector_size(L * 4), may_alias, aligned(4)));

// Half as many doubles in the same number of bytes: a V widens to two.
constexpr int H = L / 2;
typedef double D __attribute__((vector_size(H * 8), may_alias));
typedef float Vh __attribute__((vector_size(H * 4), may_alias));

static inline D widen(const float* p) { return __builtin_convertvector(*reinterpret_cast<const Vh*>(p), D); }
static inline D widen(V x, int half) {
    Vh parts[2];
    __builtin_memcpy(parts, &x, sizeof x);
    return __builtin_convertvector(parts[half], D);
}
static inline V narrow(const double* p) {
    const Vh parts[2] = {__builtin_convertvector(*reinterpret_cast<const D*>(p), Vh),
                         __builtin_convertvector(*reinterpret_cast<const D*>(p + H), Vh)};
    V x;
    __builtin_memcpy(&x, parts, sizeof x);
    return x;
}

static inline V splat(float x) { return x - V{}; }
static inline I splati(int32_t x) { return x - I{}; }
static inline U splatu(uint32_t x) { return x - U{}; }

static inline V root(V x) {
#if defined(__AVX512F__)
    return V(_mm512_sqrt_ps(__m512(x)));
#elif defined(__AVX2__)
    return V(_mm256_sqrt_ps(__m256(x)));
#elif defined(__SSE2__)
    return V(_mm_sqrt_ps(__m128(x)));
#elif defined(__aarch64__)
    return V(vsqrtq_f32(float32x4_t(x)));
#else
    V y;
    for (int i = 0; i < L; ++i) y[i] = __builtin_sqrtf(x[i]);
    return y;
#endif
}

}  // namespace fedveil::FV_ISA
