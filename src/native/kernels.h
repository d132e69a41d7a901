// The arithmetic: one register-blocked product with gathered operands, from which convolutions and dense
// layers are made, and the sparse forms that max-pooling allows.
#pragma once
#include "vector.h"

namespace fedveil::FV_ISA {
namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRows[4] = {0, 12, 12, 8};  // 32 registers: rows of a tile by its width in vectors
#else
constexpr int kRows[4] = {0, 8, 6, 4};  // 16 registers
#endif

enum Store { SET, ADD, SET_RELU };

inline V load(const float* p) { return *reinterpret_cast<const V*>(p); }
inline void store(float* p, V x) { *reinterpret_cast<V*>(p) = x; }
inline V relu(V x) { return x < 0.0f ? V{} : x; }  // keeps NaN

// C[r] (=, +=) sum over t of A[ra[r] + ta[t]] * B[tb[t] … tb[t] + NR vectors]
struct Product {
    const float* a;
    const int32_t *ra, *ta;
    const float* b;
    const int32_t* tb;
    int terms;
    float* c;
    const int32_t* rc;
    const float* bias;  // or null
    Store mode;
};

template <int MR, int NR>
void tile(const Product& p, int row, int column) {
    V acc[MR][NR];
    const float* a[MR];
    for (int r = 0; r < MR; ++r) {
        a[r] = p.a + p.ra[row + r];
        for (int j = 0; j < NR; ++j) acc[r][j] = p.bias ? load(p.bias + (column + j) * L) : V{};
    }
    const float* b = p.b + column * L;
    const int32_t *ta = p.ta, *tb = p.tb;
    for (int t = 0; t < p.terms; ++t) {
        const int64_t at = ta[t];
        const float* bt = b + tb[t];
        V bv[NR];
        for (int j = 0; j < NR; ++j) bv[j] = load(bt + j * L);
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
            const V av = splat(a[r][at]);
#pragma GCC unroll 4
            for (int j = 0; j < NR; ++j) acc[r][j] += av * bv[j];
        }
    }
    for (int r = 0; r < MR; ++r) {
        float* c = p.c + p.rc[row + r] + column * L;
        for (int j = 0; j < NR; ++j) {
            if (p.mode == ADD)
                store(c + j * L, load(c + j * L) + acc[r][j]);
            else
                store(c + j * L, p.mode == SET_RELU ? relu(acc[r][j]) : acc[r][j]);
        }
    }
}

using Tile = void (*)(const Product&, int, int);
constexpr Tile kTiles[3][12] = {
    {tile<1, 1>, tile<2, 1>, tile<3, 1>, tile<4, 1>, tile<5, 1>, tile<6, 1>, tile<7, 1>, tile<8, 1>
#if defined(__AVX512F__) || defined(__aarch64__)
     , tile<9, 1>, tile<10, 1>, tile<11, 1>, tile<12, 1>
#endif
    },
    {tile<1, 2>, tile<2, 2>, tile<3, 2>, tile<4, 2>, tile<5, 2>, tile<6, 2>
#if defined(__AVX512F__) || defined(__aarch64__)
     , tile<7, 2>, tile<8, 2>, tile<9, 2>, tile<10, 2>, tile<11, 2>, tile<12, 2>
#endif
    },
    {tile<1, 3>, tile<2, 3>, tile<3, 3>, tile<4, 3>
#if defined(__AVX512F__) || defined(__aarch64__)
     , tile<5, 3>, tile<6, 3>, tile<7, 3>, tile<8, 3>
#endif
    }};

// The whole product, rows split evenly over tiles.
void product(const Product& p, int rows, int vectors) {
    for (int column = 0; column < vectors;) {
        const int left = vectors - column;
        const int nr = left == 1 ? 1 : (left & 1) ? 3 : 2;
        const int tiles = (rows + kRows[nr] - 1) / kRows[nr];
        for (int i = 0, row = 0; i < tiles; ++i) {
            const int mr = (rows - row + tiles - i - 1) / (tiles - i);
            kTiles[nr - 1][mr - 1](p, row, column);
            row += mr;
        }
        column += nr;
    }
}

// c[NR vectors] = sum over i of g[i] * b[off[i] …]: the weight gradient of one output channel at the few
// positions that won their pool.
template <int NR>
void pick(const float* b, const int32_t* off, const float* g, int n, float* c) {
    constexpr int chains = NR == 1 ? 8 : NR == 2 ? 4 : NR <= 4 ? 2 : 1;
    V acc[chains][NR] = {};
    int i = 0;
    for (; i + chains <= n; i += chains)
#pragma GCC unroll 8
        for (int u = 0; u < chains; ++u) {
            const float* row = b + off[i + u];
            const V gv = splat(g[i + u]);
#pragma GCC unroll 8
            for (int j = 0; j < NR; ++j) acc[u][j] += gv * load(row + j * L);
        }
    for (; i < n; ++i)
        for (int j = 0; j < NR; ++j) acc[0][j] += splat(g[i]) * load(b + off[i] + j * L);
    for (int j = 0; j < NR; ++j) {
        V s = acc[0][j];
        for (int u = 1; u < chains; ++u) s += acc[u][j];
        store(c + j * L, s);
    }
}

// d[off[i] … NR vectors] += g[i] * w: the input gradient from those positions.
template <int NR>
void spread(const float* w, const int32_t* off, const float* g, int n, float* d) {
    V wv[NR];
    for (int j = 0; j < NR; ++j) wv[j] = load(w + j * L);
    for (int i = 0; i < n; ++i) {
        float* row = d + off[i];
        const V gv = splat(g[i]);
        for (int j = 0; j < NR; ++j) store(row + j * L, load(row + j * L) + gv * wv[j]);
    }
}

using Pick = void (*)(const float*, const int32_t*, const float*, int, float*);
constexpr Pick kPick[6] = {pick<1>, pick<2>, pick<3>, pick<4>, pick<5>, pick<6>};
constexpr Pick kSpread[6] = {spread<1>, spread<2>, spread<3>, spread<4>, spread<5>, spread<6>};

inline float total(V x) {
    alignas(64) float lanes[L];
    store(lanes, x);
    float s[4] = {};
    for (int i = 0; i < L; ++i) s[i & 3] += lanes[i];
    return (s[0] + s[1]) + (s[2] + s[3]);
}

// y[e * ldy + o] = <x[e], w[o]>, rows padded to whole vectors.
template <int RE, int RO>
inline void dots_tile(const float* x, int64_t ldx, const float* w, int64_t ldw, int vectors, float* y, int64_t ldy) {
    V acc[RE][RO] = {};
    for (int v = 0; v < vectors; ++v) {
        V wv[RO];
        for (int o = 0; o < RO; ++o) wv[o] = load(w + o * ldw + v * L);
        for (int e = 0; e < RE; ++e) {
            const V xv = load(x + e * ldx + v * L);
            for (int o = 0; o < RO; ++o) acc[e][o] += xv * wv[o];
        }
    }
    for (int e = 0; e < RE; ++e)
        for (int o = 0; o < RO; ++o) y[e * ldy + o] = total(acc[e][o]);
}

template <int RE>
void dots_rows(const float* x, int64_t ldx, const float* w, int64_t ldw, int outs, int vectors, float* y, int64_t ldy) {
    constexpr int RO = L == 16 ? 4 : 2;
    int o = 0;
    for (; o + RO <= outs; o += RO) dots_tile<RE, RO>(x, ldx, w + o * ldw, ldw, vectors, y + o, ldy);
    for (; o < outs; ++o) dots_tile<RE, 1>(x, ldx, w + o * ldw, ldw, vectors, y + o, ldy);
}

void dots(const float* x, int64_t ldx, int examples, const float* w, int64_t ldw, int outs, int vectors, float* y,
          int64_t ldy) {
    int e = 0;
    while (e < examples) {
        const int left = examples - e;
        const int n = left >= 5 && left != 6 ? 5 : left >= 4 ? 4 : left >= 3 ? 3 : left;
        const float* xe = x + e * ldx;
        float* ye = y + e * ldy;
        if (n == 5) dots_rows<5>(xe, ldx, w, ldw, outs, vectors, ye, ldy);
        else if (n == 4) dots_rows<4>(xe, ldx, w, ldw, outs, vectors, ye, ldy);
        else if (n == 3) dots_rows<3>(xe, ldx, w, ldw, outs, vectors, ye, ldy);
        else if (n == 2) dots_rows<2>(xe, ldx, w, ldw, outs, vectors, ye, ldy);
        else dots_rows<1>(xe, ldx, w, ldw, outs, vectors, ye, ldy);
        e += n;
    }
}

// The l2 or l1 norm of whole vectors.
float norm_of(const float* x, int64_t n, bool l1) {
    V s[4] = {};
    int64_t i = 0;
    for (; i + 4 * L <= n; i += 4 * L)
        for (int u = 0; u < 4; ++u) {
            const V v = load(x + i + u * L);
            s[u] += l1 ? (v < 0.0f ? -v : v) : v * v;
        }
    for (; i < n; i += L) {
        const V v = load(x + i);
        s[0] += l1 ? (v < 0.0f ? -v : v) : v * v;
    }
    const float t = total((s[0] + s[1]) + (s[2] + s[3]));
    return l1 ? t : __builtin_sqrtf(t);
}

void add_scaled(float* y, const float* x, float f, int64_t n) {
    for (int64_t i = 0; i < n; i += L) store(y + i, load(y + i) + f * load(x + i));
}

inline V exponential(V x) {
    x = x < -87.0f ? splat(-87.0f) : x;
    x = x > 88.0f ? splat(88.0f) : x;
    const V shifted = x * 1.44269504f + 12582912.0f;
    const V n = shifted - 12582912.0f;
    const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    V p = 0.00138146128f * r + 0.00836871006f;
    p = p * r + 0.041668389f;
    p = p * r + 0.166665211f;
    p = p * r + 0.49999994f;
    const V e = V(I((p * r) * r + r + 1.0f) + ((I(shifted) - 0x4B400000) << 23));
    return x == x ? e : x;  // the bits of a NaN must not be counted up
}

inline V sigmoid(V x) { return 1.0f / (1.0f + exponential(-x)); }

inline V tanh_of(V x) {
    const V size = x < 0.0f ? -x : x;
    const V z = x * x;
    V p = -0.00570498686f * z + 0.0206390861f;
    p = p * z + -0.0537397154f;
    p = p * z + 0.133314416f;
    p = p * z + -0.333332807f;
    const V inner = x + (p * z) * x;
    const V e = exponential(size + size);
    const V outer = 1.0f - 2.0f / (e + 1.0f);
    const V big = x < 0.0f ? -outer : outer;
    return size < 0.625f ? inner : big;
}

}  // namespace
}  // namespace fedveil::FV_ISA
