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

// A square of L vectors turned over.
#if defined(__AVX512F__)
template <int S>
static inline void exchange(V* v) {  // swap the off-diagonal blocks of size S
    __m512i low, high;
    alignas(64) int32_t a[16], b[16];
    for (int i = 0; i < 16; ++i) {
        a[i] = (i & S) ? 16 + (i ^ S) : i;
        b[i] = (i & S) ? 16 + i : i ^ S;
    }
    low = _mm512_load_si512(a), high = _mm512_load_si512(b);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
        if (!(i & S)) {
            const __m512 x = __m512(v[i]), y = __m512(v[i + S]);
            v[i] = V(_mm512_permutex2var_ps(x, low, y));
            v[i + S] = V(_mm512_permutex2var_ps(x, high, y));
        }
}
static inline void transpose(V* v) {
    exchange<8>(v);
    exchange<4>(v);
    exchange<2>(v);
    exchange<1>(v);
}
#elif defined(__AVX2__)
static inline void transpose(V* v) {
    __m256 a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(__m256(v[i]), __m256(v[i + 1]));
        a[i + 1] = _mm256_unpackhi_ps(__m256(v[i]), __m256(v[i + 1]));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        v[i] = V(_mm256_permute2f128_ps(b[i], b[i + 4], 0x20));
        v[i + 4] = V(_mm256_permute2f128_ps(b[i], b[i + 4], 0x31));
    }
}
#else
static inline void transpose(V* v) {
    for (int i = 0; i < L; ++i)
        for (int j = 0; j < i; ++j) {
            const float t = v[i][j];
            v[i][j] = v[j][i];
            v[j][i] = t;
        }
}
#endif

}  // namespace fedveil::FV_ISA
