// From the gradient of the outputs to per-example gradients and norms.
#pragma once
#include "forward.h"

namespace fedveil::FV_ISA {
namespace {

void activate_backward(const Tensor& out, const float* y, float* dy, const Tensor& in, float* dx, int kind) {
    const float* top = y;
    each_pixel(out, dy, in, dx, [&](const float* a, float* b, int) {
        const V v = load(top + (a - dy)), d = load(a);
        store(b, kind == RELU ? (v > 0.0f ? d : V{}) : kind == TANH ? d * (1.0f - v * v) : d * (v * (1.0f - v)));
    });
    if (in.flat) for (int j = in.c; j < in.cp; ++j) dx[j] = 0.0f;
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

STAGE void conv_backward(Run& run, Op& op, int e, bool need_dx) {
    const Layer& l = *op.layer;
    Tensor &in = run.tensor[op.in], &out = run.tensor[op.out];
    const float* x = op.patch ? op.patches + int64_t(e) * op.positions * op.kp : in.x + e * in.size;
    const float* y = out.x + e * out.size + out.origin();
    const float* d = out.d + out.origin();
    float* dx = need_dx ? in.d : nullptr;
    if (dx) memset(dx, 0, size_t(in.size) * 4);
    const int32_t* chosen = op.chosen + int64_t(e) * op.cells * op.ocp;
    if (op.pool && op.sparse) {
        conv_sparse_backward(run, op, x, dx, d, y, chosen);
        return;
    }
    float* dy = run.scratch;
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
    if (!op.patch) {
        float* bias = op.g + int64_t(l.oc) * op.kp;
        for (int j = 0; j < op.ocp; j += L) {
            V s = {};
            if (l.bias >= 0) for (int p = 0; p < op.positions; ++p) s += load(dy + int64_t(p) * op.ocp + j);
            store(bias + j, s);
        }
    }
    for (int q = 0; q < op.segments; ++q) {
        Product p;
        p.a = dy, p.ra = op.iota, p.ta = op.p_row;
        p.b = x + int64_t(q) * op.segment_in, p.tb = op.base, p.terms = op.positions;
        p.c = op.g + q * op.segment, p.rc = op.o_row;
        p.bias = nullptr, p.mode = SET;
        product(p, l.oc, op.segment / L);
        if (!dx) continue;
        p.ra = op.p_row, p.ta = op.iota;
        p.b = op.w + q * op.segment, p.tb = op.o_row, p.terms = l.oc;
        p.c = dx + int64_t(q) * op.segment_in, p.rc = op.base, p.mode = ADD;
        product(p, op.positions, op.segment / L);
    }
}

void group_norm_backward(Run& run, Op& op, int e) {
    const Layer& l = *op.layer;
    const Tensor &in = run.tensor[op.in], &out = run.tensor[op.out];
    const float* x = in.x + e * in.size;
    const float *mean = op.stats + int64_t(e) * 2 * op.ocp, *rate = mean + op.ocp;
    float *gw = op.g, *gb = op.g + op.ocp, *dx = in.d;
    memset(op.g, 0, size_t(op.packed) * 4);
    const float* x0 = x + in.origin();
    const float* d0 = out.d + out.origin();
    float* dx0 = dx + in.origin();
    float *m1 = op.stats + int64_t(run.group) * 2 * op.ocp, *m2 = m1 + op.ocp;
    for (int pass = 0; pass < 2; ++pass) {
        for (int r = 0; r < in.h; ++r)
            for (int c = 0; c < in.w; ++c)
                for (int j = 0; j < in.cp; j += L) {
                    const int64_t at = (int64_t(r) * in.wp + c) * in.cp + j;
                    const V d = load(d0 + (int64_t(r) * out.wp + c) * out.cp + j);
                    const V hat = (load(x0 + at) - load(mean + j)) * load(rate + j);
                    if (pass == 0) {
                        store(gb + j, load(gb + j) + d);
                        store(gw + j, load(gw + j) + d * hat);
                    } else {
                        store(dx0 + at, load(rate + j) * (d * load(op.w + j) - load(m1 + j) - hat * load(m2 + j)));
                    }
                }
        if (pass) break;
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
                activate_backward(out, out.x + e * out.size, out.d + e * out.size, in, in.d + e * in.size, op.kind);
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

STAGE void image_backward(Run& run, int e) {
    for (int i = run.tail - 1; i >= run.first_trained; --i) {
        Op& op = run.op[i];
        Tensor &in = run.tensor[op.in], &out = run.tensor[op.out];
        const bool need_dx = i > run.first_trained;
        switch (op.kind) {
            case CONV: conv_backward(run, op, e, need_dx); break;
            case FLATTEN: flatten(in, in.d, out, out.d + e * out.size, false, nullptr); break;
            case GROUPNORM: group_norm_backward(run, op, e); break;
            case AVGPOOL:
                memset(in.d, 0, size_t(in.size) * 4);
                avg_pool(run, op, out.d, in.d, false);
                break;
            case MAXPOOL: {
                memset(in.d, 0, size_t(in.size) * 4);
                const int32_t* chosen = op.chosen + int64_t(e) * op.cells * in.cp;
                for (int cell = 0; cell < op.cells; ++cell) {
                    const float* d = out.d + out.origin() + (int64_t(cell / out.w) * out.wp + cell % out.w) * out.cp;
                    for (int j = 0; j < in.c; ++j) in.d[chosen[int64_t(cell) * in.cp + j] + j] += d[j];
                }
                break;
            }
            default: activate_backward(out, out.x + e * out.size, out.d, in, in.d, op.kind);
        }
        if (op.layer->unit >= 0 && op.g)
            run.norm[e * run.net->units + op.layer->unit] = norm_of(op.g, op.packed, run.plan->l1);
    }
}

}  // namespace
}  // namespace fedveil::FV_ISA
