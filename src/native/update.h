// Noise (protect.noised.Drawing) and the step of the weights.
#pragma once
#include "exact.h"
#include "run.h"

namespace fedveil::FV_ISA {
namespace {

struct Source {
    const AesKey* key;
    const NoiseKernels* kernels;
    Cipher cipher;
    void fill(const Stream& stream, const StaircaseShape* shape, int64_t first, int64_t count, float* out) const {
        fill_noise(*kernels, cipher, stream, shape, first, count, out);
    }
};

// Says whether there is noise in this step, and draws it unless it is Gaussian.
STAGE bool draw_noise(Run& run, const Source& source, int step, int batch) {
    const Plan& plan = *run.plan;
    const int64_t count = run.net->params;
    if (plan.scales[step] == 0 || (plan.for_each && batch == 0)) return false;
    if (plan.noise == GAUSSIAN_LAW) return true;
    Stream stream = {source.key, uint32_t(step), 0, NORMAL};
    float* to = run.flat_noise;
    if (plan.noise == LAPLACE_LAW) {
        stream.purpose = LAPLACE;
        source.fill(stream, nullptr, 0, count, to);
    } else if (plan.noise == STAIRCASE_LAW) {
        stream.purpose = STAIRCASE;
        source.fill(stream, plan.shapes + step, 0, count, to);
    } else {
        stream.purpose = JOINT;
        const double lambda = plan.lambdas[step], nu = plan.nus[step];
        for (uint32_t attempt = 0;; ++attempt) {
            if (attempt == (1u << 15)) {
                run.bad = true;
                return false;
            }
            stream.example = attempt << 16;
            source.fill(stream, nullptr, 0, count + 1, to);
            int64_t norm = 0;
            for (int64_t i = 0; i < count; ++i) norm += int64_t(rint(fabs(double(to[i])) * 16777216.0));
            const double r = double(norm) * 0x1p-24 / lambda, period = floor(r);
            const double exponent = lambda * (period + (r - period >= nu ? 1.0 : 0.0) - r + nu);
            if (fabs(double(to[count])) >= exponent) break;
        }
        const float per = float(1 / lambda);
        for (int64_t i = 0; i < count; ++i) to[i] *= per;
    }
    return true;
}

typedef double Du __attribute__((vector_size(H * 8), may_alias, aligned(8)));
typedef int64_t I64 __attribute__((vector_size(H * 8), may_alias));
typedef float Half __attribute__((vector_size(H * 4), may_alias, aligned(4)));

inline D nearest(D x) {  // ties to even
#if defined(__AVX512F__)
    return D(_mm512_roundscale_pd(__m512d(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__)
    return D(_mm256_round_pd(__m256d(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    for (int i = 0; i < H; ++i) x[i] = rint(x[i]);
    return x;
#endif
}

// The integers of the law's exact form (protect.law), as doubles. False: the plan's noise does not fit its grid.
STAGE bool draw_integers(Run& run, const Source& source, int step, int batch, double width) {
    const Plan& plan = *run.plan;
    const int64_t count = run.net->params;
    const ExactKernels& kernels = *source.kernels->exact;
    const bool stairs = plan.noise == STAIRCASE_LAW || plan.noise == JOINT_LAW;
    if (width <= 0 || (plan.for_each && batch == 0)) {
        memset(run.counts, 0, size_t(count) * 8);
        return true;
    }
    if (!stairs && !(width >= kNarrowestExact && width <= kWidestExact)) return false;
    Stream stream = {source.key, uint32_t(step), 0, EXACT_GAUSSIAN};
    if (plan.noise == GAUSSIAN_LAW) {
        fill_exact(kernels, source.cipher, stream, exact_gaussian(width), count, run.counts);
        return true;
    }
    stream.purpose = plan.noise == LAPLACE_LAW ? EXACT_LAPLACE : plan.noise == STAIRCASE_LAW ? EXACT_STAIRCASE : EXACT_JOINT;
    if (plan.noise == LAPLACE_LAW) fill_exact(kernels, source.cipher, stream, exact_laplace(width), count, run.drawn);
    else if (plan.noise == STAIRCASE_LAW) fill_staircase(kernels, source.cipher, stream, plan.stairs[step], count, run.drawn);
    else if (!fill_joint(kernels, source.cipher, stream, plan.stairs[step], count, run.drawn)) return false;
    for (int64_t i = 0; i < count; ++i) run.counts[i] = double(run.drawn[i]);
    return true;
}

// Drawing.add on a grid: the sum rounded to it, with its noise. Bad if it does not fit. Doubles hold both integers, so
// that their sum is rounded as that of 64-bit integers would be.
STAGE void snap_sum(Run& run, const Source& source, int step, int batch, double deviation) {
    const double grid = run.plan->grid;
    if (!draw_integers(run, source, step, batch, deviation / grid)) {
        run.bad = true;
        return;
    }
    I64 lost = {};
    for (int i = 0; i < run.ops; ++i)
        each_run(run, run.op[i], [&](int64_t to, int64_t from, int n, int stride) {
            double* sum = run.sum + to;
            float* floats = reinterpret_cast<float*>(run.op[i].sum) + (to - run.op[i].at);
            const bool single = run.single && run.op[i].kind == LINEAR;
            const double* y = run.counts + from;
            for (int j = 0; j < n; j += H) {
                const int now = n - j < H ? n - j : H;
                D x = {}, noise;
                if (now < H) for (int k = 0; k < now; ++k) x[k] = single ? double(floats[j + k]) : sum[j + k];
                else if (single) x = __builtin_convertvector(*reinterpret_cast<const Half*>(floats + j), D);
                else x = *reinterpret_cast<const Du*>(sum + j);
                if (stride == 1) noise = *reinterpret_cast<const Du*>(y + j);  // there is room behind the last
                else for (int k = 0; k < H; ++k) noise[k] = y[int64_t(j + (k < now ? k : 0)) * stride];
                const D units = x / grid;
                lost |= ~(I64)((units < 0x1p62) & (units > -0x1p62));
                const D out = (nearest(units) + noise) * grid;
                if (now < H) {
                    for (int k = 0; k < now; ++k)
                        if (single) floats[j + k] = float(out[k]);
                        else sum[j + k] = out[k];
                } else if (single) {
                    *reinterpret_cast<Half*>(floats + j) = __builtin_convertvector(out, Half);
                } else {
                    *reinterpret_cast<Du*>(sum + j) = out;
                }
            }
        });
    for (int k = 0; k < H; ++k) run.bad |= lost[k] != 0;
}

// The noise of one layer's parameters, in flat order.
const float* layer_noise(Run& run, const Source& source, int step, int unit) {
    const int64_t begin = run.net->unit_begin[unit], end = run.net->unit_begin[unit + 1];
    if (run.plan->noise != GAUSSIAN_LAW) return run.flat_noise + begin;
    const int64_t first = begin / 32 * 32, count = (end - first + 31) / 32 * 32;
    source.fill({source.key, uint32_t(step), 0, NORMAL}, nullptr, first, count, run.flat_noise);
    return run.flat_noise + (begin - first);
}

// ---- the step

// v = momentum * v + (sum + coefficient * noise) / expected batch + …;  w -= learning rate * v, over packed vectors
// begin … end. Returns NaN if a weight is no longer finite, else 0. noise(i) gives the noise at packed place i.
struct Rule {
    float per, rate, momentum, proximal, penalty;
    bool extras;
};

Rule rule_of(const Run& run) {
    const Plan& plan = *run.plan;
    Rule r;
    r.per = float(1.0 / plan.expected_batch), r.rate = float(plan.learning_rate), r.momentum = float(plan.momentum);
    r.proximal = float(plan.proximal), r.penalty = run.anchor ? float(plan.penalty) : 0.0f;
    r.extras = run.scale || r.proximal != 0 || r.penalty != 0 || run.control || r.momentum != 0;
    return r;
}

template <class F>
inline V update(Run& run, const Op& op, const Rule& rule, int64_t begin, int64_t end, F noise) {
    V bad = {};
    const bool single = run.single && op.kind == LINEAR;
    const float* floats = reinterpret_cast<const float*>(op.sum) - op.at;
    for (int64_t i = begin; i < end; i += L) {
        V v = ((single ? load(floats + i) : narrow(run.sum + i)) + noise(i)) * rule.per;
        V w = load(run.weights + i);
        if (rule.extras) {
            if (run.scale) v = v * load(run.scale + i) + load(run.shift + i);
            if (rule.proximal != 0) v += rule.proximal * (w - load(run.start + i));
            if (rule.penalty != 0) v += rule.penalty * (w - load(run.anchor + i));
            if (run.control) v += load(run.control + i);
            if (rule.momentum != 0) {
                v += rule.momentum * load(run.velocity + i);
                store(run.velocity + i, v);
            }
        }
        w -= rule.rate * v;
        store(run.weights + i, w);
        bad += w - w;  // NaN for NaN and infinity
    }
    return bad;
}

// z: the layer's noise in flat order, weight first; null: none.
STAGE float update_op(Run& run, const Op& op, float coefficient, const float* z) {
    const Rule rule = rule_of(run);
    if (!z) return total(update(run, op, rule, op.at, op.at + op.packed, [](int64_t) { return V{}; }));
    const Layer& l = *op.layer;
    const int64_t weight = run.net->unit_begin[l.unit];
    const float* zb = l.bias >= 0 ? z + (l.bias - weight) : z;
    z += l.weight - weight;
    V bad = {};
    // One packed row, or part of it, whose noise has been put in order.
    auto step = [&](int64_t at, int length) {
        bad += update(run, op, rule, at, at + length, [&](int64_t i) { return coefficient * load(run.row_noise + (i - at)); });
    };
    if (flat_rows(op)) {
        const int n = op.k - (l.bias >= 0), whole = n / L * L;
        I inside, last;  // lanes of the last vector that are weights; the lane of the bias
        for (int i = 0; i < L; ++i) inside[i] = i < n - whole ? -1 : 0, last[i] = l.bias >= 0 && i == n - whole ? -1 : 0;
        for (int o = 0; o < l.oc; ++o, z += n) {
            const int64_t row = op.at + int64_t(o) * op.kp;
            const V tail = V((I(*reinterpret_cast<const Vu*>(z + whole)) & inside) | (I(splat(zb[o])) & last));
            bad += update(run, op, rule, row, row + op.kp, [&](int64_t i) {
                return coefficient * (i - row < whole ? V(*reinterpret_cast<const Vu*>(z + (i - row))) : tail);
            });
        }
        return total(bad);
    }
    int64_t at = op.at;
    if (op.kind == DEPTHWISE) {
        memset(run.row_noise, 0, size_t(op.ocp) * 4);
        for (int t = 0; t < l.kh * l.kw; ++t, at += op.ocp) {
            gather(run.row_noise, z + t, l.c, l.kh * l.kw);
            step(at, op.ocp);
        }
    } else if (op.kind == CONV) {
        const int taps = l.kh * l.kw, cp = run.tensor[op.in].cp;
        memset(run.row_noise, 0, size_t(op.kp) * 4);
        for (int o = 0; o < l.oc; ++o, z += l.c * taps, at += op.kp) {
            for (int t = 0; t < taps; ++t) gather(run.row_noise + t * cp, z + t, l.c, taps);
            step(at, op.kp);
        }
    } else {
        memset(run.row_noise, 0, size_t(op.ocp) * 4);
        memcpy(run.row_noise, z, size_t(l.c) * 4);
        step(at, op.ocp);
        at += op.ocp;
    }
    memset(run.row_noise, 0, size_t(op.ocp) * 4);
    if (l.bias >= 0) memcpy(run.row_noise, zb, size_t(l.oc) * 4);
    step(at, op.ocp);
    return total(bad);
}

}  // namespace
}  // namespace fedveil::FV_ISA
