// From rows of data to outputs and losses.
#pragma once
#include "run.h"

namespace fedveil::FV_ISA {
namespace {

void finish_pads(const Tensor& t, float* row) {
    for (int i = t.c; i < t.cp; ++i) row[i] = 0.0f;
    if (t.one) row[t.c] = 1.0f;
}

template <class F>
void each_pixel(const Tensor& a, const float* pa, const Tensor& b, float* pb, F f) {
    pa += a.origin(), pb += b.origin();
    for (int r = 0; r < a.h; ++r, pa += int64_t(a.wp) * a.cp, pb += int64_t(b.wp) * b.cp)
        for (int c = 0; c < a.w; ++c)
            for (int j = 0; j < a.cp && j < b.cp; j += L) f(pa + c * a.cp + j, pb + c * b.cp + j, j);
}

// Short runs are copied as RUN floats; what they write too much is overwritten by the next run or cleared at the end.
template <int RUN>
void copy_patches(const Op& op, float* to, int hp, int wp) {
    const Layer& l = *op.layer;
    const int n = op.k - (l.bias >= 0), spill = RUN && n + RUN - l.kw < op.kp ? n + RUN - l.kw : RUN ? op.kp : n;
    for (int r = 0; r < op.rows; ++r)
        for (int c = 0; c < op.columns; ++c, to += op.kp) {
            const float* corner = op.image + int64_t(r) * l.sh * wp + c * l.sw;
            float* at = to;
            for (int i = 0; i < l.c; ++i, corner += int64_t(hp) * wp) {
                const float* from = corner;
                for (int a = 0; a < l.kh; ++a, at += l.kw, from += wp) memcpy(at, from, size_t(RUN ? RUN : l.kw) * 4);
            }
            for (int j = n; j < spill; ++j) to[j] = 0.0f;
            if (l.bias >= 0) to[n] = 1.0f;
        }
}

STAGE void load_example(Run& run, const float* x, int e) {
    Tensor& t = run.tensor[0];
    if (run.input == FLAT) {
        float* to = t.x + e * t.size;
        memcpy(to, x, size_t(t.c) * 4);
        finish_pads(t, to);
    } else if (run.input == IMAGE) {
        float* to = t.x + e * t.size + t.origin();
        for (int r = 0; r < t.h; ++r)
            for (int w = 0; w < t.w; ++w)
                for (int c = 0; c < t.c; ++c) to[(int64_t(r) * t.wp + w) * t.cp + c] = x[(int64_t(c) * t.h + r) * t.w + w];
    } else {
        Op& op = run.op[0];
        const Layer& l = *op.layer;
        const int hp = l.h + 2 * l.ph, wp = l.w + 2 * l.pw;
        for (int c = 0; c < l.c; ++c)
            for (int r = 0; r < l.h; ++r)
                memcpy(op.image + (int64_t(c) * hp + r + l.ph) * wp + l.pw, x + (int64_t(c) * l.h + r) * l.w,
                       size_t(l.w) * 4);
        float* to = op.patches + int64_t(e) * op.positions * op.kp;
        if (l.kw <= 4) copy_patches<4>(op, to, hp, wp);
        else if (l.kw <= 8) copy_patches<8>(op, to, hp, wp);
        else copy_patches<0>(op, to, hp, wp);
    }
}

STAGE void conv_forward(Run& run, Op& op, int e, int count) {
    const Layer& l = *op.layer;
    const Tensor &in = run.tensor[op.in], &out = run.tensor[op.out];
    float* y = out.x + e * out.size + out.origin();
    Product p;
    p.copies = count, p.a_step = op.patch ? int64_t(op.positions) * op.kp : in.size, p.c_step = out.size;
    p.a = op.patch ? op.patches + int64_t(e) * op.positions * op.kp : in.x + e * in.size;
    p.ra = op.base;
    p.ta = op.off;
    p.b = op.wt;
    p.tb = op.k_row;
    p.terms = op.k;
    p.c = op.pool ? run.scratch : y;
    p.rc = op.row_out;
    p.bias = !op.patch && l.bias >= 0 ? op.bias : nullptr;
    p.mode = op.relu && !op.pool ? SET_RELU : SET;
    product(p, op.positions, op.ocp / L);
    if (!op.pool) return;
    int32_t* chosen = op.chosen + int64_t(e) * op.cells * op.ocp;
    const int32_t* place = op.sparse ? op.base : op.p_row;
    for (int cell = 0; cell < op.cells; ++cell) {
        const int32_t* window = op.windows + cell * op.window;
        float* to = y + (int64_t(cell / out.w) * out.wp + cell % out.w) * out.cp;
        for (int j = 0; j < op.ocp; j += L) {
            V best = load(run.scratch + int64_t(window[0]) * op.ocp + j);
            I which = splati(place[window[0]]);
            for (int q = 1; q < op.window; ++q) {
                const V v = load(run.scratch + int64_t(window[q]) * op.ocp + j);
                const I better = I(v > best) | I(v != v);
                best = better ? v : best;
                which = better ? splati(place[window[q]]) : which;
            }
            store(to + j, op.relu ? relu(best) : best);
            *reinterpret_cast<I*>(chosen + int64_t(cell) * op.ocp + j) = which;
        }
    }
}

STAGE void max_pool_forward(Run& run, Op& op, int e) {
    const Layer& l = *op.layer;
    const Tensor &in = run.tensor[op.in], &out = run.tensor[op.out];
    const float* x = in.x + e * in.size;
    float* y = out.x + e * out.size + out.origin();
    int32_t* chosen = op.chosen + int64_t(e) * op.cells * in.cp;
    for (int cell = 0; cell < op.cells; ++cell) {
        const int r = cell / l.ow, c = cell % l.ow;
        for (int j = 0; j < in.cp; j += L) {
            V best = splat(-INFINITY);
            I which = splati(-1);
            for (int a = 0; a < l.kh; ++a)
                for (int b = 0; b < l.kw; ++b) {
                    const int rr = r * l.sh - l.ph + a, cc = c * l.sw - l.pw + b;
                    if (rr < 0 || cc < 0 || rr >= in.h || cc >= in.w) continue;
                    const int32_t at = int32_t(in.origin() + (int64_t(rr) * in.wp + cc) * in.cp);
                    const V v = load(x + at + j);
                    const I better = I(v > best) | I(v != v) | I(which < 0);
                    best = better ? v : best;
                    which = better ? splati(at) : which;
                }
            store(y + (int64_t(r) * out.wp + c) * out.cp + j, best);
            *reinterpret_cast<I*>(chosen + int64_t(cell) * in.cp + j) = which;
        }
    }
}

void avg_pool(const Run& run, const Op& op, const float* x, float* y, bool forward) {
    const Layer& l = *op.layer;
    const Tensor &in = run.tensor[op.in], &out = run.tensor[op.out];
    const float part = 1.0f / float(l.kh * l.kw);
    for (int r = 0; r < l.oh; ++r)
        for (int c = 0; c < l.ow; ++c)
            for (int j = 0; j < in.cp; j += L) {
                const int64_t at = out.origin() + (int64_t(r) * out.wp + c) * out.cp + j;
                V s = forward ? V{} : load(x + at) * part;
                for (int a = 0; a < l.kh; ++a)
                    for (int b = 0; b < l.kw; ++b) {
                        const int rr = r * l.sh - l.ph + a, cc = c * l.sw - l.pw + b;
                        if (rr < 0 || cc < 0 || rr >= in.h || cc >= in.w) continue;
                        const int64_t from = in.origin() + (int64_t(rr) * in.wp + cc) * in.cp + j;
                        if (forward) s += load(x + from);
                        else store(y + from, load(y + from) + s);
                    }
                if (forward) store(y + at, s * part);
            }
}

void group_norm_forward(Run& run, Op& op, int e) {
    const Layer& l = *op.layer;
    const Tensor &in = run.tensor[op.in], &out = run.tensor[op.out];
    const float* x = in.x + e * in.size;
    float* y = out.x + e * out.size;
    float *mean = op.stats + int64_t(e) * 2 * op.ocp, *rate = mean + op.ocp;
    float* s = op.stats + int64_t(run.group) * 2 * op.ocp;
    const int per = l.c / l.groups;
    const float count = float(per) * float(in.h * in.w);
    for (int pass = 0; pass < 2; ++pass) {
        memset(s, 0, size_t(op.ocp) * 4);
        each_pixel(in, x, in, y, [&](const float* a, float*, int j) {
            const V v = load(a) - (pass ? load(mean + j) : V{});
            store(s + j, load(s + j) + (pass ? v * v : v));
        });
        for (int g = 0; g < l.groups; ++g) {
            float t = 0;
            for (int c = g * per; c < (g + 1) * per; ++c) t += s[c];
            for (int c = g * per; c < (g + 1) * per; ++c)
                (pass ? rate : mean)[c] = pass ? 1.0f / __builtin_sqrtf(t / count + l.eps) : t / count;
        }
    }
    each_pixel(in, x, out, y, [&](const float* a, float* b, int j) {
        const V v = (load(a) - load(mean + j)) * load(rate + j) * load(op.w + j) + load(op.w + op.ocp + j);
        store(b, op.relu ? relu(v) : v);
    });
}

// y = a + b, with the ReLU behind it.
void add_forward(const Run& run, const Op& op, int e) {
    const Tensor &a = run.tensor[op.in], &b = run.tensor[op.also], &out = run.tensor[op.out];
    const float *pa = a.x + e * a.size, *pb = b.x + e * b.size;
    float* y = out.x + e * out.size;
    each_pixel(a, pa, out, y, [](const float* from, float* to, int) { store(to, load(from)); });
    each_pixel(b, pb, out, y, [&](const float* from, float* to, int) {
        const V v = load(to) + load(from);
        store(to, op.relu ? relu(v) : v);
    });
}

// A kernel of its own for every channel.
STAGE void depthwise_forward(const Run& run, const Op& op, int e) {
    const Layer& l = *op.layer;
    const Tensor &in = run.tensor[op.in], &out = run.tensor[op.out];
    const float* x = in.x + e * in.size + (int64_t(in.ph - l.ph) * in.wp + in.pw - l.pw) * in.cp;
    float* y = out.x + e * out.size + out.origin();
    for (int r = 0; r < l.oh; ++r)
        for (int c = 0; c < l.ow; ++c)
            for (int j = 0; j < in.cp; j += L) {
                const float* corner = x + (int64_t(r) * l.sh * in.wp + c * l.sw) * in.cp + j;
                V s = load(op.bias + j);
                for (int a = 0, t = 0; a < l.kh; ++a)
                    for (int b = 0; b < l.kw; ++b, ++t)
                        s += load(corner + (int64_t(a) * in.wp + b) * in.cp) * load(op.w + int64_t(t) * in.cp + j);
                store(y + (int64_t(r) * out.wp + c) * out.cp + j, s);
            }
}

inline V hard_swish(V x) {
    const V gate = x + 3.0f;
    return x * (gate < 0.0f ? V{} : gate > 6.0f ? splat(6.0f) : gate) / 6.0f;
}

void activate(const Tensor& in, const float* x, const Tensor& out, float* y, int kind) {
    each_pixel(in, x, out, y, [&](const float* a, float* b, int) {
        const V v = load(a);
        store(b, kind == RELU        ? relu(v)
                 : kind == TANH      ? tanh_of(v)
                 : kind == SILU      ? v * sigmoid(v)
                 : kind == HARDSWISH ? hard_swish(v)
                                     : sigmoid(v));
    });
    if (in.flat) {
        finish_pads(out, y);
    } else if (kind == SIGMOID && in.c < in.cp) {  // sigmoid(0) is not 0: the padding must stay so
        float* row = y + out.origin();
        for (int r = 0; r < out.h; ++r, row += int64_t(out.wp) * out.cp)
            for (int c = 0; c < out.w; ++c)
                for (int j = out.c; j < out.cp; ++j) row[c * out.cp + j] = 0.0f;
    }
}

// more: what an example has beyond its image, behind the image in the flat vector (see Net.inputs).
STAGE void flatten(const Tensor& image, float* x, const Tensor& flat, float* y, bool forward, const float* more) {
    float* from = x + image.origin();
    const int area = image.h * image.w;
    for (int r = 0; r < image.h; ++r)
        for (int c = 0; c < image.w; ++c) {
            float* pixel = from + (int64_t(r) * image.wp + c) * image.cp;
            float* to = y + r * image.w + c;
            if (forward) for (int j = 0; j < image.c; ++j) to[int64_t(j) * area] = pixel[j];
            else for (int j = 0; j < image.c; ++j) pixel[j] = to[int64_t(j) * area];
        }
    if (!forward) return;
    for (int j = area * image.c; j < flat.c; ++j) y[j] = more[j - area * image.c];
    finish_pads(flat, y);
}

// One layer for `count` examples. `rows` are those of the group.
void image_forward(Run& run, Op& op, const float* const* rows, int first, int count) {
    const Layer& begin = run.net->layers[0];
    const Tensor &in = run.tensor[op.in], &out = run.tensor[op.out];
    if (op.kind == CONV && !op.pool) {
        conv_forward(run, op, first, count);
        return;
    }
    for (int e = first; e < first + count; ++e) {
        float* x = in.x ? in.x + e * in.size : nullptr;
        float* y = out.x + e * out.size;
        switch (op.kind) {
            case CONV: conv_forward(run, op, e, 1); break;
            case MAXPOOL: max_pool_forward(run, op, e); break;
            case AVGPOOL: avg_pool(run, op, x, y, true); break;
            case FLATTEN: flatten(in, x, out, y, true, rows[e] + int64_t(begin.c) * begin.h * begin.w); break;
            case GROUPNORM: group_norm_forward(run, op, e); break;
            case ADDITION: add_forward(run, op, e); break;
            case DEPTHWISE: depthwise_forward(run, op, e); break;
            default: activate(in, x, out, y, op.kind);
        }
    }
}

STAGE void forward(Run& run, const float* const* rows, int n) {
    const int now = run.together ? n : 1;
    for (int first = 0; first < n; first += now) {
        for (int e = first; e < first + now; ++e) load_example(run, rows[e], e);
        for (int i = 0; i < run.tail; ++i) image_forward(run, run.op[i], rows, first, now);
    }
    for (int i = run.tail; i < run.ops; ++i) {
        Op& op = run.op[i];
        const Tensor &in = run.tensor[op.in], &out = run.tensor[op.out];
        if (op.kind == LINEAR)
            dots(in.x, in.size, n, op.w, op.kp, op.layer->oc, op.kp / L, out.x, out.size);
        for (int e = 0; e < n; ++e) {
            float* y = out.x + e * out.size;
            if (op.kind != LINEAR) activate(in, in.x + e * in.size, out, y, op.kind);
            else {
                if (op.relu) for (int j = 0; j < out.cp; j += L) store(y + j, relu(load(y + j)));
                finish_pads(out, y);
            }
        }
    }
}

// ---- loss: fills the gradient of the outputs and the losses of the group

STAGE void loss_gradient(Run& run, const Data& data, const int32_t* rows, int n) {
    const Tensor& out = run.tensor[run.op[run.ops - 1].out];
    for (int e = 0; e < n; ++e) {
        const float* z = out.x + e * out.size;
        float* d = out.d + e * out.size;
        if (run.plan->squared) {
            const float* y = data.targets + int64_t(rows[e]) * out.c;
            double s = 0;
            for (int j = 0; j < out.c; ++j) {
                const float gap = z[j] - y[j];
                s += double(gap) * gap;
                d[j] = 2.0f * gap / float(out.c);
            }
            run.losses[e] = s / out.c;
        } else {
            const int64_t label = data.labels[rows[e]];
            float top = z[0];
            for (int j = 1; j < out.c; ++j) top = z[j] > top ? z[j] : top;
            float s = 0;
            for (int j = 0; j < out.c; ++j) s += d[j] = expf(z[j] - top);
            const float scale = 1.0f / s;
            for (int j = 0; j < out.c; ++j) d[j] *= scale;
            d[label] -= 1.0f;
            run.losses[e] = double(logf(s)) - double(z[label] - top);
        }
    }
}

}  // namespace
}  // namespace fedveil::FV_ISA
