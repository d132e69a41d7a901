// From the gradient of the outputs to per-example gradients and norms.
#pragma once
#include "forward.h"

namespace fedveil::FV_ISA {
namespace {

// The gradient of an activation with value y at x.
inline V slope(int kind, V x, V y, V d) {
    if (kind == RELU) return y > 0.0f ? d : V{};
    if (kind == TANH) return d * (1.0f - y * y);
    if (kind == SIGMOID) return d * (y * (1.0f - y));
    if (kind == HARDSWISH) return x <= -3.0f ? V{} : x < 3.0f ? d * (x / 3.0f + 0.5f) : d;
    const V s = sigmoid(x);
    return d * (s * (1.0f + x * (1.0f - s)));
}

void activate_backward(const Tensor& out, const float* y, const float* dy, const Tensor& in, const float* x, float* dx, int kind,
                       bool adds) {
    each_pixel(out, dy, in, dx, [&](const float* a, float* b, int) {
        const V g = slope(kind, load(x + (b - dx)), load(y + (a - dy)), load(a));
        store(b, adds ? load(b) + g : g);
    });
    if (in.flat) for (int j = in.c; j < in.cp; ++j) dx[j] = 0.0f;
}

// What an addition passes to one of its terms.
void add_backward(const Tensor& out, const float* y, const float* dy, const Tensor& in, float* dx, bool relu, bool adds) {
    each_pixel(out, dy, in, dx, [&](const float* a, float* b, int) {
        V g = load(a);
        if (relu) g = load(y + (a - dy)) > 0.0f ? g : V{};
        store(b, adds ? load(b) + g : g);
    });
}

// Max-pooling passes the gradient at one of its positions: the products run over lists of (place, gradient), one
// list per output channel.
STAGE void make_lists(Run& run, const Op& op, const float* d, const float* y, const int32_t* chosen, float* bias) {
    const Tensor& out = run.tensor[op.out];
    const int room = op.cells + L;
    for (int block = 0; block < op.ocp; block += L) {
        int32_t n[L] = {};
        V sum = {};
        float* list_g = run.list_g + int64_t(block) * room;
        int32_t* list_off = run.list_off + int64_t(block) * room;
#if defined(__AVX512F__)
        int r = 0, c = 0;
        for (int cell = 0; cell < op.cells; cell += L) {
            V g[L];
            I won[L];
            for (int i = 0; i < L; ++i) {
                if (cell + i < op.cells) {
                    const int64_t at = (int64_t(r) * out.wp + c) * out.cp + block;
                    g[i] = load(d + at);
                    if (op.relu) g[i] = load(y + at) > 0.0f ? g[i] : V{};
                    won[i] = *reinterpret_cast<const I*>(chosen + int64_t(cell + i) * op.ocp + block);
                    if (++c == out.w) c = 0, ++r;
                } else {
                    g[i] = V{};
                    won[i] = I{};
                }
                sum += g[i];
            }
            transpose(g);
            transpose(reinterpret_cast<V*>(won));
            for (int i = 0; i < L; ++i) {
                const __mmask16 on = _mm512_cmp_ps_mask(__m512(g[i]), _mm512_setzero_ps(), _CMP_NEQ_UQ);
                _mm512_storeu_ps(list_g + i * room + n[i], _mm512_maskz_compress_ps(on, __m512(g[i])));
                _mm512_storeu_si512(list_off + i * room + n[i], _mm512_maskz_compress_epi32(on, __m512i(won[i])));
                n[i] += __builtin_popcount(on);
            }
        }
#else
        for (int r = 0, cell = 0; r < out.h; ++r)
            for (int c = 0; c < out.w; ++c, ++cell) {
                const int64_t at = (int64_t(r) * out.wp + c) * out.cp + block;
                V g = load(d + at);
                if (op.relu) g = load(y + at) > 0.0f ? g : V{};
                sum += g;
                const int32_t* won = chosen + int64_t(cell) * op.ocp + block;
                for (int i = 0; i < L; ++i) {
                    const float lane = g[i];
                    list_g[i * room + n[i]] = lane;
                    list_off[i * room + n[i]] = won[i];
                    n[i] += lane != 0.0f;
                }
            }
#endif
        for (int i = 0; i < L; ++i) run.list_n[block + i] = n[i];
        if (bias) store(bias + block, sum);
    }
}

// The input gradient: around each place that won, the weights of the channels for which it did.
STAGE void pull(Run& run, const Op& op, float* dx, const float* d, const float* y, const int32_t* chosen) {
    const Tensor& out = run.tensor[op.out];
    int most = 9400 / op.kp / L * L;  // channels whose weights fit the level-1 cache
    most = most < L ? L : most;
    for (int first = 0; first < op.ocp; first += most) {
        const int end = first + most < op.ocp ? first + most : op.ocp;
        for (int cell = 0; cell < op.cells; ++cell) {
            const int64_t at = (int64_t(cell / out.w) * out.wp + cell % out.w) * out.cp;
            for (int j = first; j < end; j += L) {
                V g = load(d + at + j);
                if (op.relu) g = load(y + at + j) > 0.0f ? g : V{};
                store(run.scaled + j, g);
            }
            const int32_t* won = chosen + int64_t(cell) * op.ocp;
            for (int q = 0; q < op.window; ++q) {
                const int32_t place = op.base[op.windows[cell * op.window + q]];
                int n = 0;
#if defined(__AVX512F__)
                const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
                const __m512i step = _mm512_mullo_epi32(lane, _mm512_set1_epi32(op.kp));
                for (int j = first; j < end; j += L) {
                    const __m512 g = _mm512_load_ps(run.scaled + j);
                    const __mmask16 on = _mm512_cmp_ps_mask(g, _mm512_setzero_ps(), _CMP_NEQ_UQ) &
                                         _mm512_cmpeq_epi32_mask(_mm512_load_si512(won + j), _mm512_set1_epi32(place));
                    _mm512_storeu_ps(run.list_g + n, _mm512_maskz_compress_ps(on, g));
                    _mm512_storeu_si512(run.list_off + n,
                                        _mm512_maskz_compress_epi32(on, _mm512_add_epi32(step, _mm512_set1_epi32(j * op.kp))));
                    n += __builtin_popcount(on);
                }
#else
                for (int j = first; j < end; ++j) {
                    const float g = run.scaled[j];
                    run.list_g[n] = g;
                    run.list_off[n] = j * op.kp;
                    n += (won[j] == place) & (g != 0.0f);
                }
#endif
                if (n)
                    pick_all(true, op.segments, op.segment / L, op.w, op.segment, run.list_off, run.list_g, n, dx + place,
                             op.segment_in);
            }
        }
    }
}

STAGE void conv_sparse_backward(Run& run, Op& op, const float* x, float* dx, const float* d, const float* y,
                                const int32_t* chosen) {
    const Layer& l = *op.layer;
    make_lists(run, op, d, y, chosen, l.bias >= 0 && !op.patch ? op.g + int64_t(l.oc) * op.kp : nullptr);
    const int room = op.cells + L;
    for (int o = 0; o < l.oc; ++o)
        pick_all(false, op.segments, op.segment / L, x, op.segment_in, run.list_off + int64_t(o) * room,
                 run.list_g + int64_t(o) * room, run.list_n[o], op.g + int64_t(o) * op.kp, op.segment);
    if (dx) pull(run, op, dx, d, y, chosen);
}

// The gradient of a convolution's output before its pool and ReLU, [positions][ocp].
STAGE void conv_output_gradient(const Run& run, const Op& op, int e, float* dy) {
    const Tensor& out = run.tensor[op.out];
    const float* y = out.x + e * out.size + out.origin();
    const float* d = out.d + e * out.d_step + out.origin();
    const int32_t* chosen = op.chosen + int64_t(e) * op.cells * op.ocp;
    if (op.pool) memset(dy, 0, size_t(op.positions) * size_t(op.ocp) * 4);
    for (int r = 0, cell = 0; r < out.h; ++r)
        for (int c = 0; c < out.w; ++c, ++cell) {
            const int64_t at = (int64_t(r) * out.wp + c) * out.cp;
            for (int j = 0; j < op.ocp; j += L) {
                V v = load(d + at + j);
                if (op.relu) v = load(y + at + j) > 0.0f ? v : V{};
                if (!op.pool) {
                    store(dy + int64_t(cell) * op.ocp + j, v);
                } else {
                    alignas(64) float lanes[L];
                    store(lanes, v);
                    const int32_t* won = chosen + int64_t(cell) * op.ocp + j;
                    for (int i = 0; i < L; ++i) dy[won[i] + j + i] += lanes[i];
                }
            }
        }
}

const float* conv_input(const Run& run, const Op& op, int e) {
    return op.patch ? op.patches + int64_t(e) * op.positions * op.kp : run.tensor[op.in].x + e * run.tensor[op.in].size;
}

// The weight gradient of one example, into op.g.
STAGE void conv_weight_gradient(Run& run, Op& op, const float* x, const float* dy) {
    const Layer& l = *op.layer;
    if (!op.patch) {
        float* bias = op.g + int64_t(l.oc) * op.kp;
        for (int j = 0; j < op.ocp; j += L) {
            V s = {};
            if (l.bias >= 0) for (int p = 0; p < op.positions; ++p) s += load(dy + int64_t(p) * op.ocp + j);
            store(bias + j, s);
        }
    }
    const bool turn = op.positions >= 32 && l.oc >= 2 * L;  // many terms: each output's in a row
    const int step = padded(op.positions) + L;
    for (int p = 0; turn && p < op.positions; p += L)
        for (int o = 0; o < op.ocp; o += L) {
            V v[L];
            for (int i = 0; i < L; ++i) v[i] = p + i < op.positions ? load(dy + int64_t(p + i) * op.ocp + o) : V{};
            transpose(v);
            for (int i = 0; i < L && o + i < l.oc; ++i) store(run.turned + int64_t(o + i) * step + p, v[i]);
        }
    for (int q = 0; q < op.segments; ++q) {
        Product p;
        p.a = turn ? run.turned : dy, p.ra = turn ? op.turned_row : op.iota, p.ta = turn ? op.iota : op.p_row;
        p.b = x + int64_t(q) * op.segment_in, p.tb = op.base, p.terms = op.positions;
        p.c = op.g + q * op.segment, p.rc = op.o_row;
        p.bias = nullptr, p.mode = SET;
        product(p, l.oc, op.segment / L);
    }
}

// Inner products of n rows of `length` floats, in double: out [n][n].
void gram(const float* const* row, int n, int length, double* out) {
    for (int i = 0; i < n; ++i)
        for (int j = 0; j <= i; j += 4) {
            D s[4] = {};
            const int now = i + 1 - j < 4 ? i + 1 - j : 4;
            const float* other[4];
            for (int q = 0; q < 4; ++q) other[q] = row[j + (q < now ? q : 0)];
            for (int k = 0; k < length; k += H) {
                const D x = widen(row[i] + k);
#pragma GCC unroll 4
                for (int q = 0; q < 4; ++q) s[q] += x * widen(other[q] + k);
            }
            for (int q = 0; q < now; ++q) {
                double sum = 0;
                for (int k = 0; k < H; ++k) sum += s[q][k];
                out[i * n + j + q] = out[(j + q) * n + i] = sum;
            }
        }
}

// At least the l2 norm of what `ghost_sum` adds for one example with factor 1, from inner products of its positions.
//
// With a_t the patch (and a 1 for the bias) and d_t the output gradient at position t, the gradient is G = sum d_t (x) a_t and
// |G|^2 = sum over t, s of (a_t . a_s)(d_t . d_s). Products of floats are exact in double, so this sum errs by at most
// (terms) 2^-53 S^2 with S = sum |d_t| |a_t|. ghost_sum rounds G in float, T products and additions a coordinate: that adds
// at most (T + 2) 2^-24 S. Where S itself could overflow a float the norm counts as infinite.
STAGE double ghost_norm(Run& run, const Op& op, const float* x, const float* dy) {
    const Layer& l = *op.layer;
    const Tensor& in = run.tensor[op.in];
    const int pixels = in.h * in.w, count = op.positions;
    const float* row[4 * kGhostTerms];
    for (int i = 0; i < pixels; ++i) row[i] = x + in.origin() + (int64_t(i / in.w) * in.wp + i % in.w) * in.cp;
    gram(row, pixels, in.cp, run.gram_in);
    for (int t = 0; t < count; ++t) row[t] = dy + int64_t(t) * op.ocp;
    gram(row, count, op.ocp, run.gram_out);
    double squares = 0, sizes = 0;
    for (int t = 0; t < count; ++t)
        for (int s = 0; s <= t; ++s) {
            double both = l.bias >= 0 ? 1 : 0;
            for (int a = 0; a < l.kh; ++a)
                for (int b = 0; b < l.kw; ++b) {
                    const int tr = t / l.ow * l.sh + a - l.ph, tc = t % l.ow * l.sw + b - l.pw;
                    const int sr = s / l.ow * l.sh + a - l.ph, sc = s % l.ow * l.sw + b - l.pw;
                    if (tr < 0 || tc < 0 || sr < 0 || sc < 0 || tr >= in.h || tc >= in.w || sr >= in.h || sc >= in.w) continue;
                    both += run.gram_in[(tr * in.w + tc) * pixels + sr * in.w + sc];
                }
            const double product = both * run.gram_out[t * count + s];
            squares += t == s ? product : 2 * product;
            if (t == s) sizes += sqrt(product);
        }
    const double unsure = (double(op.kp) + op.ocp + double(count) * count + 32) * 0x1p-52 * sizes * sizes;
    if (!(sizes <= kLargestNorm / 2)) return INFINITY;
    return sqrt((squares > 0 ? squares : 0) + unsure) + (count + 2) * 0x1p-24 * sizes;
}

// Adds the gradients of `count` examples with their factors, without writing them out: products in float over the positions of
// one example, their sums in double.
STAGE void ghost_sum(Run& run, Op& op, int first, int count) {
    const Layer& l = *op.layer;
    const Tensor& in = run.tensor[op.in];
    const int64_t area = int64_t(op.positions) * op.ocp;
    for (int e = 0; e < count; ++e) {
        const double f = run.factor[(first + e) * run.net->units + l.unit];
        for (int j = 0; l.bias >= 0 && f != 0 && j < op.ocp; j += L) {
            V s = {};
            for (int p = 0; p < op.positions; ++p) s += load(run.scratch + e * area + int64_t(p) * op.ocp + j);
            double* to = op.sum + int64_t(l.oc) * op.kp + j;
            for (int half = 0; half < 2; ++half) *reinterpret_cast<D*>(to + half * H) += f * widen(s, half);
        }
    }
    for (int q = 0; q < op.segments; ++q)
        for (int at = 0; at < op.segment / L; at += kWide) {
            const int wide = op.segment / L - at < kWide ? op.segment / L - at : kWide;
            for (int e = 0; e < count; ++e) {
                Product p;
                p.scale = run.factor[(first + e) * run.net->units + l.unit];
                if (p.scale == 0) continue;
                p.a = run.scratch + e * area, p.ra = op.iota, p.ta = op.p_row;
                p.b = in.x + (first + e) * in.size + int64_t(q) * op.segment_in + at * L, p.tb = op.base, p.terms = op.positions;
                p.c = nullptr, p.wide = op.sum + q * op.segment + at * L, p.rc = op.o_row;
                p.bias = nullptr, p.mode = ADD;
                product(p, l.oc, wide);
            }
        }
}

// The factor that clips a norm to a bound; what it promises, and why it holds, is written in protect/bounded.py.
inline double factor_of(const Plan& plan, double norm, double bound) {
    const double limit = bound * (1 - kMargin);
    return plan.clip == CLIP_NONE || norm <= limit ? 1.0 : limit / norm;
}

// An example's gradient of a layer is known: measure it, and add it if its factor needs no other norm.
inline void took(Run& run, Op& op, int e) {
    const float* g = op.g + (op.apart ? e * op.packed : 0);
    const int at = e * run.net->units + op.layer->unit;
    const double norm = run.norm[at] = norm_of(g, op.packed, run.plan->l1);
    if (run.at_once && norm <= kLargestNorm)
        add_scaled(op.sum, g, factor_of(*run.plan, norm, run.bound[op.layer->unit]), op.packed);
}

STAGE void conv_backward(Run& run, Op& op, int first, int count) {
    const Layer& l = *op.layer;
    Tensor &in = run.tensor[op.in], &out = run.tensor[op.out];
    const bool need_dx = in.live;
    if (need_dx && !op.adds)
        for (int e = first; e < first + count; ++e) memset(in.d + e * in.d_step, 0, size_t(in.size) * 4);
    const int64_t area = int64_t(op.positions) * op.ocp;
    for (int e = first; e < first + count; ++e) {
        const float* x = conv_input(run, op, e);
        if (op.pool && op.sparse) {
            conv_sparse_backward(run, op, x, need_dx ? in.d + e * in.d_step : nullptr, out.d + e * out.d_step + out.origin(),
                                 out.x + e * out.size + out.origin(), op.chosen + int64_t(e) * op.cells * op.ocp);
            took(run, op, e);
            continue;
        }
        float* dy = run.scratch + (e - first) * area;
        conv_output_gradient(run, op, e, dy);
        if (op.ghost) {
            const int at = e * run.net->units + l.unit;
            const double norm = run.norm[at] = ghost_norm(run, op, x, dy);
            run.factor[at] = norm <= kLargestNorm ? factor_of(*run.plan, norm, run.bound[l.unit]) : 0;
        } else {
            conv_weight_gradient(run, op, x, dy);
            took(run, op, e);
        }
    }
    if (op.ghost && run.at_once) ghost_sum(run, op, first, count);
    if (!need_dx || (op.pool && op.sparse)) return;
    for (int q = 0; q < op.segments; ++q) {
        Product p;
        p.a = run.scratch, p.ra = op.p_row, p.ta = op.iota;
        p.b = op.w + q * op.segment, p.tb = op.o_row, p.terms = l.oc;
        p.c = in.d + first * in.d_step + int64_t(q) * op.segment_in, p.rc = op.base;
        p.bias = nullptr, p.mode = ADD;
        p.copies = count, p.a_step = area, p.c_step = in.size;
        product(p, op.positions, op.segment / L);
    }
}

// Gradients of a convolution whose factors had to wait for all norms: once more, added.
STAGE void conv_sum(Run& run, Op& op, int count) {
    const int64_t area = int64_t(op.positions) * op.ocp;
    const Tensor& out = run.tensor[op.out];
    for (int e = 0; e < count; ++e) {
        const double f = run.factor[e * run.net->units + op.layer->unit];
        const float* x = conv_input(run, op, e);
        float* dy = run.scratch + e * area;
        const bool sparse = op.pool && op.sparse;
        if (!sparse) conv_output_gradient(run, op, e, dy);
        if (op.ghost || run.skip[e]) continue;
        if (sparse)
            conv_sparse_backward(run, op, x, nullptr, out.d + e * out.d_step + out.origin(),
                                 out.x + e * out.size + out.origin(), op.chosen + int64_t(e) * op.cells * op.ocp);
        else conv_weight_gradient(run, op, x, dy);
        add_scaled(op.sum, op.g, f, op.packed);
    }
    if (op.ghost) ghost_sum(run, op, 0, count);
}

STAGE void depthwise_backward(Run& run, Op& op, int e) {
    const Layer& l = *op.layer;
    const Tensor &in = run.tensor[op.in], &out = run.tensor[op.out];
    const int64_t corner = (int64_t(in.ph - l.ph) * in.wp + in.pw - l.pw) * in.cp;
    const float *x = in.x + e * in.size + corner, *d = out.d + e * out.d_step + out.origin();
    float* g = op.g + (op.apart ? e * op.packed : 0);
    float* dx = in.live ? in.d + e * in.d_step + corner : nullptr;
    if (dx && !op.adds) memset(in.d + e * in.d_step, 0, size_t(in.size) * 4);
    memset(g, 0, size_t(op.packed) * 4);
    for (int r = 0; r < l.oh; ++r)
        for (int c = 0; c < l.ow; ++c)
            for (int j = 0; j < in.cp; j += L) {
                const int64_t from = (int64_t(r) * l.sh * in.wp + c * l.sw) * in.cp + j;
                const V v = load(d + (int64_t(r) * out.wp + c) * out.cp + j);
                float* bias = g + op.packed - op.ocp + j;
                if (l.bias >= 0) store(bias, load(bias) + v);
                for (int a = 0, t = 0; a < l.kh; ++a)
                    for (int b = 0; b < l.kw; ++b, ++t) {
                        const int64_t at = from + (int64_t(a) * in.wp + b) * in.cp, k = int64_t(t) * in.cp + j;
                        store(g + k, load(g + k) + v * load(x + at));
                        if (dx) store(dx + at, load(dx + at) + v * load(op.w + k));
                    }
            }
}

void group_norm_backward(Run& run, Op& op, int e) {
    const Layer& l = *op.layer;
    const Tensor &in = run.tensor[op.in], &out = run.tensor[op.out];
    const float* x = in.x + e * in.size;
    const float *mean = op.stats + int64_t(e) * 2 * op.ocp, *rate = mean + op.ocp;
    float *gw = op.g + (op.apart ? e * op.packed : 0), *gb = gw + op.ocp;
    memset(gw, 0, size_t(op.packed) * 4);
    const float* x0 = x + in.origin();
    const float* y0 = out.x + e * out.size + out.origin();
    const float* d0 = out.d + e * out.d_step + out.origin();
    float* dx0 = in.d + e * in.d_step + in.origin();
    float *m1 = op.stats + int64_t(run.group) * 2 * op.ocp, *m2 = m1 + op.ocp;
    for (int pass = 0; pass < 2; ++pass) {
        for (int r = 0; r < in.h; ++r)
            for (int c = 0; c < in.w; ++c)
                for (int j = 0; j < in.cp; j += L) {
                    const int64_t at = (int64_t(r) * in.wp + c) * in.cp + j;
                    const int64_t above = (int64_t(r) * out.wp + c) * out.cp + j;
                    V d = load(d0 + above);
                    if (op.relu) d = load(y0 + above) > 0.0f ? d : V{};
                    const V hat = (load(x0 + at) - load(mean + j)) * load(rate + j);
                    if (pass == 0) {
                        store(gb + j, load(gb + j) + d);
                        store(gw + j, load(gw + j) + d * hat);
                    } else {
                        const V v = load(rate + j) * (d * load(op.w + j) - load(m1 + j) - hat * load(m2 + j));
                        store(dx0 + at, op.adds ? load(dx0 + at) + v : v);
                    }
                }
        if (pass || !in.live) break;
        const int per = l.c / l.groups;
        const float count = float(per) * float(in.h * in.w);
        for (int g = 0; g < l.groups; ++g) {
            float s1 = 0, s2 = 0;
            for (int c = g * per; c < (g + 1) * per; ++c) s1 += op.w[c] * gb[c], s2 += op.w[c] * gw[c];
            for (int c = g * per; c < (g + 1) * per; ++c) m1[c] = s1 / count, m2[c] = s2 / count;
        }
        for (int c = l.c; c < op.ocp; ++c) m1[c] = m2[c] = 0.0f;
    }
    if (l.bias < 0) memset(gb, 0, size_t(op.ocp) * 4);
}

// Dense layers of the group: gradients of their inputs, and norms of their weight gradients.
STAGE void tail_backward(Run& run, int n) {
    for (int i = run.ops - 1; i >= run.tail && i >= run.first_trained; --i) {
        Op& op = run.op[i];
        Tensor &in = run.tensor[op.in], &out = run.tensor[op.out];
        const bool need_dx = i > run.first_trained;
        if (op.kind != LINEAR) {
            for (int e = 0; e < n; ++e)
                activate_backward(out, out.x + e * out.size, out.d + e * out.size, in, in.x + e * in.size, in.d + e * in.size,
                                  op.kind, false);
            continue;
        }
        int32_t row[kGroup], in_row[kGroup];
        for (int e = 0; e < n; ++e) {
            float* d = out.d + e * out.size;
            const float* y = out.x + e * out.size;
            if (op.relu) for (int j = 0; j < out.cp; j += L) store(d + j, load(y + j) > 0.0f ? load(d + j) : V{});
            for (int j = out.c; j < out.cp; ++j) d[j] = 0.0f;
            run.norm[e * run.net->units + op.layer->unit] =
                norm_of(d, out.cp, run.plan->l1) * norm_of(in.x + e * in.size, in.cp, run.plan->l1);
            row[e] = int32_t(e * out.size), in_row[e] = int32_t(e * in.size);
        }
        if (!need_dx) continue;
        Product p;
        p.a = out.d, p.ra = row, p.ta = op.iota;
        p.b = op.w, p.tb = op.o_row, p.terms = op.layer->oc;
        p.c = in.d, p.rc = in_row, p.bias = nullptr, p.mode = SET;
        product(p, n, op.kp / L);
        for (int e = 0; e < n; ++e)
            for (int j = in.c; j < in.cp; ++j) in.d[e * in.size + j] = 0.0f;
    }
}

void max_pool_backward(const Run& run, const Op& op, int e) {
    const Tensor &in = run.tensor[op.in], &out = run.tensor[op.out];
    const int32_t* chosen = op.chosen + int64_t(e) * op.cells * in.cp;
    float* dx = in.d + e * in.d_step;
    for (int cell = 0; cell < op.cells; ++cell) {
        const float* d = out.d + e * out.d_step + out.origin() + (int64_t(cell / out.w) * out.wp + cell % out.w) * out.cp;
        for (int j = 0; j < in.c; ++j) dx[chosen[int64_t(cell) * in.cp + j] + j] += d[j];
    }
}

// One layer, for one example.
void image_backward_of(Run& run, Op& op, int e) {
    Tensor &in = run.tensor[op.in], &out = run.tensor[op.out];
    float* dx = in.d + e * in.d_step;
    const float *y = out.x + e * out.size, *dy = out.d + e * out.d_step;
    switch (op.kind) {
        case FLATTEN: flatten(in, dx, out, out.d + e * out.d_step, false, nullptr); break;
        case GROUPNORM: group_norm_backward(run, op, e); break;
        case DEPTHWISE: depthwise_backward(run, op, e); break;
        case AVGPOOL:
        case MAXPOOL:
            if (!op.adds) memset(dx, 0, size_t(in.size) * 4);
            if (op.kind == AVGPOOL) avg_pool(run, op, dy, dx, false);
            else max_pool_backward(run, op, e);
            break;
        case ADDITION: {
            Tensor& also = run.tensor[op.also];
            if (in.live) add_backward(out, y, dy, in, dx, op.relu, op.adds);
            if (also.live) add_backward(out, y, dy, also, also.d + e * also.d_step, op.relu, op.adds_also);
            break;
        }
        default: activate_backward(out, y, dy, in, in.x + e * in.size, dx, op.kind, op.adds);
    }
    if (op.layer->unit >= 0) took(run, op, e);
}

STAGE void image_backward(Run& run, int first, int count) {
    for (int i = run.tail - 1; i >= run.first_trained; --i) {
        Op& op = run.op[i];
        if (!run.tensor[op.out].live) continue;
        if (op.kind == CONV) conv_backward(run, op, first, count);
        else
            for (int e = first; e < first + count; ++e) image_backward_of(run, op, e);
    }
}

}  // namespace
}  // namespace fedveil::FV_ISA
