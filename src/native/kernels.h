// The arithmetic: one register-blocked product with gathered operands, from which convolutions and dense
// layers are made, and the sparse forms that max-pooling allows.
#pragma once
#include "vector.h"

namespace fedveil::FV_ISA {
namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kWide = 4;
constexpr int kRows[5] = {0, 8, 8, 8, 6};  // 32 registers: rows of a tile by its width in vectors
#else
constexpr int kWide = 3;
constexpr int kRows[5] = {0, 8, 6, 4, 0};  // 16 registers
#endif
constexpr int kPanel = 6144;  // floats of B that stay in the level-1 cache while all rows pass
constexpr int kPackFrom = 16;  // rows and terms from which it pays to copy them side by side first

enum Store { SET, ADD, SET_RELU, ADD_RELU };

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
    double* wide = nullptr;  // or where to put the products in double precision (SET or ADD) instead of c
    double scale = 1;              // of what is put there
    const float* panel = nullptr;  // the present columns of B, side by side
    int copies = 1;                // the same product for so many A, which lie a_step apart, into C c_step apart
    int64_t a_step = 0, c_step = 0;
};

template <int MR, int NR, bool PACKED>
void tile(const Product& p, int row, int column) {
    V acc[MR][NR];
    const float* a[MR];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
        a[r] = p.a + p.ra[row + r];
#pragma GCC unroll 4
        for (int j = 0; j < NR; ++j) acc[r][j] = p.bias ? load(p.bias + (column + j) * L) : V{};
    }
    const float* b = PACKED ? p.panel : p.b + column * L;
    const int32_t *ta = p.ta, *tb = p.tb;
    for (int t = 0; t < p.terms; ++t) {
        const int64_t at = ta[t];
        const float* bt = b + (PACKED ? t * (NR * L) : tb[t]);
        V bv[NR];
#pragma GCC unroll 4
        for (int j = 0; j < NR; ++j) bv[j] = load(bt + j * L);
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
            const V av = splat(a[r][at]);
#pragma GCC unroll 4
            for (int j = 0; j < NR; ++j) acc[r][j] += av * bv[j];
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
        if (p.wide) {
            double* c = p.wide + p.rc[row + r] + column * L;
#pragma GCC unroll 4
            for (int j = 0; j < NR; ++j)
                for (int half = 0; half < 2; ++half) {
                    D* to = reinterpret_cast<D*>(c + j * L + half * H);
                    *to = (p.mode == ADD ? *to : D{}) + p.scale * widen(acc[r][j], half);
                }
            continue;
        }
        float* c = p.c + p.rc[row + r] + column * L;
#pragma GCC unroll 4
        for (int j = 0; j < NR; ++j) {
            V y = acc[r][j];
            if (p.mode == ADD || p.mode == ADD_RELU) y += load(c + j * L);
            store(c + j * L, p.mode == SET_RELU || p.mode == ADD_RELU ? relu(y) : y);
        }
    }
}

using Tile = void (*)(const Product&, int, int);
#define FV_TILES(P) \
    {{tile<1, 1, P>, tile<2, 1, P>, tile<3, 1, P>, tile<4, 1, P>, tile<5, 1, P>, tile<6, 1, P>, tile<7, 1, P>, tile<8, 1, P>}, FV_WIDE_TILES(P)}
#if defined(__AVX512F__) || defined(__aarch64__)
#define FV_WIDE_TILES(P) \
    {tile<1, 2, P>, tile<2, 2, P>, tile<3, 2, P>, tile<4, 2, P>, tile<5, 2, P>, tile<6, 2, P>, tile<7, 2, P>, tile<8, 2, P>}, \
    {tile<1, 3, P>, tile<2, 3, P>, tile<3, 3, P>, tile<4, 3, P>, tile<5, 3, P>, tile<6, 3, P>, tile<7, 3, P>, tile<8, 3, P>}, \
    {tile<1, 4, P>, tile<2, 4, P>, tile<3, 4, P>, tile<4, 4, P>, tile<5, 4, P>, tile<6, 4, P>}
#else
#define FV_WIDE_TILES(P) \
    {tile<1, 2, P>, tile<2, 2, P>, tile<3, 2, P>, tile<4, 2, P>, tile<5, 2, P>, tile<6, 2, P>}, \
    {tile<1, 3, P>, tile<2, 3, P>, tile<3, 3, P>, tile<4, 3, P>}
#endif
constexpr Tile kTiles[2][4][8] = {FV_TILES(false), FV_TILES(true)};
#undef FV_TILES
#undef FV_WIDE_TILES

// The whole product: rows split evenly over tiles, terms cut so that a panel of B stays in the cache. (The few terms of
// a product into doubles are never cut.)
void product(const Product& whole, int rows, int vectors) {
    alignas(64) float panel[kPanel];
    const bool packed = rows * whole.copies >= kPackFrom && whole.terms >= kPackFrom;
    for (int column = 0; column < vectors;) {
        const int left = vectors - column;
        const int nr = left <= kWide ? left : left == kWide + 1 ? kWide - 1 : kWide;
        const int most = kPanel / (nr * L), cuts = (whole.terms + most - 1) / most;
        const int tiles = (rows + kRows[nr] - 1) / kRows[nr];
        int term = 0;
        for (int cut = 0; cut < cuts; ++cut) {
            Product p = whole;
            p.terms = (whole.terms - term + cuts - cut - 1) / (cuts - cut);
            p.ta += term, p.tb += term;
            term += p.terms;
            const bool first = cut == 0, last = cut == cuts - 1;
            if (!first) p.bias = nullptr;
            if (whole.mode == SET_RELU) p.mode = last ? (first ? SET_RELU : ADD_RELU) : first ? SET : ADD;
            else if (!first) p.mode = ADD;
            if (packed) {
                p.panel = panel;
                for (int t = 0; t < p.terms; ++t)
                    for (int j = 0; j < nr; ++j) store(panel + (t * nr + j) * L, load(p.b + p.tb[t] + (column + j) * L));
            }
            for (int copy = 0; copy < whole.copies; ++copy, p.a += whole.a_step, p.c += whole.c_step)
                for (int i = 0, row = 0; i < tiles; ++i) {
                    const int mr = (rows - row + tiles - i - 1) / (tiles - i);
                    kTiles[packed][nr - 1][mr - 1](p, row, column);
                    row += mr;
                }
        }
        column += nr;
    }
}

// SG segments of NR vectors: c[s * sc …] (=, +=) sum over i of g[i] * b[off[i] + s * sb …]. The weight gradient of one
// output channel at the few positions that won their pool, or the input gradient around one of them.
template <int SG, int NR, bool ADDING>
void pick(const float* b, int64_t sb, const int32_t* off, const float* g, int n, float* c, int64_t sc) {
    constexpr int chains = SG * NR <= 2 ? 4 : SG * NR <= 5 ? 2 : 1;
    V acc[chains][SG][NR] = {};
    int i = 0;
    for (; i + chains <= n; i += chains)
#pragma GCC unroll 4
        for (int u = 0; u < chains; ++u) {
            const float* row = b + off[i + u];
            const V gv = splat(g[i + u]);
#pragma GCC unroll 8
            for (int s = 0; s < SG; ++s, row += sb)
#pragma GCC unroll 8
                for (int j = 0; j < NR; ++j) acc[u][s][j] += gv * load(row + j * L);
        }
    if constexpr (chains > 1)
        for (; i < n; ++i) {
            const float* row = b + off[i];
            const V gv = splat(g[i]);
#pragma GCC unroll 8
            for (int s = 0; s < SG; ++s, row += sb)
#pragma GCC unroll 8
                for (int j = 0; j < NR; ++j) acc[0][s][j] += gv * load(row + j * L);
        }
#pragma GCC unroll 8
    for (int s = 0; s < SG; ++s, c += sc)
#pragma GCC unroll 8
        for (int j = 0; j < NR; ++j) {
            V y = acc[0][s][j];
#pragma GCC unroll 4
            for (int u = 1; u < chains; ++u) y += acc[u][s][j];
            store(c + j * L, ADDING ? load(c + j * L) + y : y);
        }
}

using Pick = void (*)(const float*, int64_t, const int32_t*, const float*, int, float*, int64_t);
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kPickRoom = 24;  // accumulators
#else
constexpr int kPickRoom = 12;
#endif
template <int SG, int NR, bool ADDING>
constexpr Pick pick_or_null() {
    if constexpr (SG * NR <= kPickRoom) return pick<SG, NR, ADDING>;
    else return nullptr;
}
#define FV_PICKS(S, A) \
    {pick_or_null<S, 1, A>(), pick_or_null<S, 2, A>(), pick_or_null<S, 3, A>(), \
     pick_or_null<S, 4, A>(), pick_or_null<S, 5, A>(), pick_or_null<S, 6, A>()}
constexpr Pick kPick[2][5][6] = {
    {FV_PICKS(1, false), FV_PICKS(2, false), FV_PICKS(3, false), FV_PICKS(4, false), FV_PICKS(5, false)},
    {FV_PICKS(1, true), FV_PICKS(2, true), FV_PICKS(3, true), FV_PICKS(4, true), FV_PICKS(5, true)}};
#undef FV_PICKS

// All segments and vectors of one list. `width` is a segment's length in vectors.
inline void pick_all(bool adding, int segments, int width, const float* b, int64_t sb, const int32_t* off,
                     const float* g, int n, float* c, int64_t sc) {
    for (int at = 0; at < width;) {
        const int left = width - at;
        const int nr = left <= 6 ? left : left < 12 ? (left + 1) / 2 : 6;
        int most = kPickRoom / nr;
        most = most > 5 ? 5 : most;
        for (int s = 0; s < segments;) {
            const int rounds = (segments - s + most - 1) / most, sg = (segments - s + rounds - 1) / rounds;
            kPick[adding][sg - 1][nr - 1](b + s * sb + at * L, sb, off, g, n, c + s * sc + at * L, sc);
            s += sg;
        }
        at += nr;
    }
}

typedef float F4 __attribute__((vector_size(16)));

inline F4 quarter(V x) {  // folded to four lanes
#if defined(__AVX512F__)
    const __m512 v = __m512(x);
    return F4(_mm_add_ps(_mm_add_ps(_mm512_castps512_ps128(v), _mm512_extractf32x4_ps(v, 1)),
                         _mm_add_ps(_mm512_extractf32x4_ps(v, 2), _mm512_extractf32x4_ps(v, 3))));
#elif defined(__AVX2__)
    const __m256 v = __m256(x);
    return F4(_mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)));
#else
    return F4(x);
#endif
}

inline float total(V x) {
    const F4 q = quarter(x);
    return (q[0] + q[2]) + (q[1] + q[3]);  // as totals() does: an output must not depend on the tile it is computed in
}

#if defined(__clang__) || __GNUC__ >= 12
#define FV_MIX(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
typedef int32_t I4 __attribute__((vector_size(16)));
#define FV_MIX(a, b, i, j, k, l) __builtin_shuffle(a, b, I4{i, j, k, l})
#endif

inline F4 totals(V a, V b, V c, V d) {
    const F4 qa = quarter(a), qb = quarter(b), qc = quarter(c), qd = quarter(d);
    const F4 ab = FV_MIX(qa, qb, 0, 4, 1, 5) + FV_MIX(qa, qb, 2, 6, 3, 7);
    const F4 cd = FV_MIX(qc, qd, 0, 4, 1, 5) + FV_MIX(qc, qd, 2, 6, 3, 7);
    return FV_MIX(ab, cd, 0, 1, 4, 5) + FV_MIX(ab, cd, 2, 3, 6, 7);
}

// y[e * ldy + o] = <x[e], w[o]>, rows padded to whole vectors.
template <int RE, int RO>
inline void dots_tile(const float* x, int64_t ldx, const float* w, int64_t ldw, int vectors, float* y, int64_t ldy) {
    V acc[RE][RO] = {};
    for (int v = 0; v < vectors; ++v) {
        V wv[RO];
#pragma GCC unroll 4
        for (int o = 0; o < RO; ++o) wv[o] = load(w + o * ldw + v * L);
#pragma GCC unroll 8
        for (int e = 0; e < RE; ++e) {
            const V xv = load(x + e * ldx + v * L);
#pragma GCC unroll 4
            for (int o = 0; o < RO; ++o) acc[e][o] += xv * wv[o];
        }
    }
#pragma GCC unroll 8
    for (int e = 0; e < RE; ++e) {
        if constexpr (RO == 4) {
            const F4 t = totals(acc[e][0], acc[e][1], acc[e][2], acc[e][3]);
            __builtin_memcpy(y + e * ldy, &t, 16);
        } else {
            for (int o = 0; o < RO; ++o) y[e * ldy + o] = total(acc[e][o]);
        }
    }
}

template <int RE>
void dots_rows(const float* x, int64_t ldx, const float* w, int64_t ldw, int outs, int vectors, float* y, int64_t ldy) {
    constexpr int RO = L == 16 || RE <= 2 ? 4 : 2;
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

// The l2 or l1 norm of whole vectors, in double: squares of floats neither vanish nor overflow there.
double norm_of(const float* x, int64_t n, bool l1) {
    D s[4] = {};
    auto term = [l1](const float* p) {
        const D v = widen(p);
        return l1 ? (v < 0.0 ? -v : v) : v * v;
    };
    int64_t i = 0;
    for (; i + 4 * H <= n; i += 4 * H)
        for (int u = 0; u < 4; ++u) s[u] += term(x + i + u * H);
    for (; i < n; i += H) s[0] += term(x + i);
    D t = (s[0] + s[1]) + (s[2] + s[3]);
    for (int left = H / 2; left; left /= 2)  // by halves: one after the other they would wait for each other
        for (int j = 0; j < left; ++j) t[j] += t[j + left];
    return l1 ? t[0] : __builtin_sqrt(t[0]);
}

void add_scaled(double* y, const float* x, double f, int64_t n) {
    for (int64_t i = 0; i < n; i += H) {
        D* to = reinterpret_cast<D*>(y + i);
        *to += f * widen(x + i);
    }
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
