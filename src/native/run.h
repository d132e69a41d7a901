// The state of one client's run: layers as operations, buffers, tables, and the packed form of the weights.
#pragma once
#include <math.h>
#include <string.h>

#include "engine.h"
#include "kernels.h"

namespace fedveil::FV_ISA {
namespace {

constexpr int kGroup = 32;                // most examples in a group
constexpr int kLeast = 4;                 // fewest: dense weights are read once a group
constexpr int kSmallBatch = 8;            // a batch of so many is one group: its dense sums stay in float
constexpr int64_t kGroupFloats = 160000;  // what a group may keep beyond that: stays within a usual level-2 cache
constexpr int64_t kLargeNet = 1 << 18;    // weights from which a layer is computed for the whole group at once …
constexpr int64_t kLargeFloats = 24 << 20;  // … which may then keep so much
constexpr int kGhostTerms = 16;           // positions up to which norms come from Gram matrices in such a net …
constexpr int64_t kGhostWeights = 1 << 16;  // … for layers with at least so many weights
constexpr double kMargin = 0x1p-22;       // MARGIN of protect/bounded.py, where it is said what clipping promises
constexpr double kLargestNorm = 3.4028234663852886e38;  // beyond float: as good as infinite

struct Arena {
    char* base;  // null: only count
    int64_t used;
    template <class T>
    T* take(int64_t n) {
        used = (used + 63) & ~int64_t(63);
        T* p = base ? reinterpret_cast<T*>(base + used) : nullptr;
        used += n * int64_t(sizeof(T));
        return p;
    }
};

inline int padded(int n) { return (n + L - 1) / L * L; }

struct Tensor {
    int c, h, w, cp, ph, pw, wp;
    bool flat, one, live;  // live: there are trained weights below, so it needs a gradient
    int64_t size, d_step;
    float *x, *d;  // x: [group][size]; d: the same, or [size] for images that go through one by one (d_step 0)
    int64_t origin() const { return (int64_t(ph) * wp + pw) * cp; }
};

struct Op {
    int kind, in, also, out;
    const Layer* layer;
    const Layer* pool;  // max-pool fused into a convolution
    bool relu, patch, sparse, ghost, apart, adds, adds_also;
    // apart: g holds every example's; adds: the gradient of `in` (of `also`) has begun when it is this one's turn
    int k, kp, ocp, rows, columns, positions, cells, window, segments, segment, segment_in;
    int32_t *base, *off, *row_out, *k_row, *p_row, *o_row, *iota, *turned_row, *windows, *chosen;
    // chosen [group][cells][ocp]: the winner of each pool, as an offset into the input (sparse) or into dy
    float *w, *wt, *bias, *g, *patches, *image, *stats;
    double* sum;
    int64_t packed, at, per_example;  // packed length, and where it begins in the run's vectors
};

#define STAGE __attribute__((noinline))  // one function a stage: readable profiles, smaller code

enum Input { RAW, FLAT, IMAGE };

struct Run {
    const Net* net;
    const Plan* plan;
    int ops, tensors, tail, group, first_trained;
    int part;  // examples that pass together in a batch that is larger than `group`
    Input input;
    bool together;  // a layer for all examples of the group at once, or all layers for one example after the other
    bool at_once;   // factors follow from a layer's own norms: sums are made as soon as these are known
    Op op[kMaxLayers];
    Tensor tensor[kMaxLayers + 2];
    int64_t packed, zeroed;  // zeroed: bytes of the workspace that must begin as 0
    float *scratch, *turned, *list_g, *scaled, *row_noise, *flat_noise;
    // packed vectors; null where the plan has no use for them
    float *weights, *start, *velocity, *control, *anchor, *shift, *scale, *mapped;
    int32_t *list_off, *list_n;
    double* sum;       // packed, of the step's clipped gradients
    double* norm;      // [group][units] of the current group
    double* factor;    // [group][units]
    double* all_norm;  // [width][units], median rule
    double *gram_in, *gram_out;  // of the positions of one example
    int32_t* kept;     // [width] rows of the batch without those that are not finite
    double bound[kMaxLayers];
    bool single;  // the batch is one block: the sums of dense layers are its floats, kept where the doubles would be
    int block;  // examples whose products are added in float; 0: none, all in double
    double* counts;  // noise on a grid, flat order
    int64_t* drawn;  // the same as integers, for laws that need them
    double losses[kGroup];  // of the current group
    bool skip[kGroup];      // not finite: left out of the sum
    // of the step
    double largest;
    bool bad;
    double loss;
    int64_t skipped;
};

int new_tensor(Run& run, int c, int h, int w, bool flat) {
    Tensor& t = run.tensor[run.tensors];
    memset(&t, 0, sizeof t);
    t.c = c, t.h = h, t.w = w, t.flat = flat;
    return run.tensors++;
}

bool plain_max_pool(const Layer& layer) { return layer.kind == MAXPOOL && layer.ph == 0 && layer.pw == 0; }

bool activation(int kind) { return (kind >= RELU && kind <= SIGMOID) || kind == SILU || kind == HARDSWISH; }

// Which layer follows another as the only one that takes its output.
struct Order {
    const Net* net;
    int users[kMaxLayers], input_users;
    explicit Order(const Net& n) : net(&n), users{}, input_users(0) {
        for (int i = 0; i < n.count; ++i) {
            const Layer& l = n.layers[i];
            ++(l.from < 0 ? input_users : users[l.from]);
            if (l.kind == ADDITION) ++(l.also < 0 ? input_users : users[l.also]);
        }
    }
    bool follows(int i, int before) const {
        return i < net->count && net->layers[i].from == before && users[before] == 1 && net->layers[i].kind != ADDITION;
    }
    bool follows(int i, int before, int kind) const { return follows(i, before) && net->layers[i].kind == kind; }
};

// A convolution takes the ReLU, the max-pool or both behind it with it. Monotone activations commute with max-pooling, so
// "convolution, activation, max-pool" becomes "convolution with max-pool, activation". Returns the next layer.
int build_conv(Run& run, Op& op, const Order& order, int i) {
    const Layer* layers = run.net->layers;
    const Layer& self = layers[i];
    int last = i++;
    const Layer* moved = nullptr;
    if (order.follows(i, last, RELU)) op.relu = true, last = i++;
    else if ((order.follows(i, last, TANH) || order.follows(i, last, SIGMOID)) && order.follows(i + 1, i) &&
             plain_max_pool(layers[i + 1]))
        moved = layers + i, last = i++;
    if (order.follows(i, last) && plain_max_pool(layers[i])) {
        op.pool = layers + i;
        last = i++;
        if (!op.relu && !moved && order.follows(i, last, RELU)) op.relu = true, last = i++;
    }
    op.patch = run.ops == 1 && run.input == RAW;
    const Layer& end = op.pool ? *op.pool : self;
    op.out = new_tensor(run, self.oc, end.oh, end.ow, false);
    if (moved) {
        Op& act = run.op[run.ops++];
        act.kind = moved->kind;
        act.layer = moved;
        act.in = op.out;
        act.out = new_tensor(run, self.oc, end.oh, end.ow, false);
    }
    return i;
}

// Which tensors need a gradient, and which operations find one there already.
void plan_gradients(Run& run) {
    for (int i = 0; i < run.ops; ++i) {
        const Op& op = run.op[i];
        const bool below = run.tensor[op.in].live || (op.kind == ADDITION && run.tensor[op.also].live);
        run.tensor[op.out].live = op.layer->unit >= 0 || below;
    }
    bool begun[kMaxLayers + 2] = {};
    for (int i = run.ops - 1; i >= 0; --i) {
        Op& op = run.op[i];
        op.adds = begun[op.in];
        begun[op.in] = true;
        if (op.kind != ADDITION) continue;
        op.adds_also = begun[op.also];
        begun[op.also] = true;
    }
}

// Layers to operations.
void build(Run& run, const Net& net, const Plan& plan) {
    memset(&run, 0, sizeof run);
    run.net = &net;
    run.plan = &plan;
    const Order order(net);
    const Layer& head = net.layers[0];
    const bool flat = head.kind == LINEAR || head.kind == FLATTEN || (head.h == 1 && head.w == 1 && activation(head.kind));
    run.input = flat ? FLAT : head.kind == CONV && order.input_users == 1 ? RAW : IMAGE;
    if (flat) new_tensor(run, int(net.inputs), 1, 1, true);
    else new_tensor(run, head.c, head.h, head.w, false);
    run.first_trained = -1;
    run.tail = -1;
    int made[kMaxLayers];  // the tensor of a layer's output
    for (int i = 0; i < net.count;) {
        const Layer& self = net.layers[i];
        const int source = self.from < 0 ? 0 : made[self.from], begin = i;
        if (self.kind == FLATTEN && run.tensor[source].flat) {
            made[i++] = source;
            continue;
        }
        Op& op = run.op[run.ops++];
        op.kind = self.kind;
        op.layer = &self;
        op.in = source;
        const Tensor in = run.tensor[source];
        if (in.flat && run.tail < 0) run.tail = run.ops - 1;
        if (self.weight >= 0 && run.first_trained < 0) run.first_trained = run.ops - 1;
        if (self.kind == CONV || self.kind == DEPTHWISE) {  // room around the image for whoever needs most
            run.tensor[source].ph = in.ph > self.ph ? in.ph : self.ph;
            run.tensor[source].pw = in.pw > self.pw ? in.pw : self.pw;
        }
        if (self.kind == CONV) {
            i = build_conv(run, op, order, i);
        } else {
            const bool keeps = activation(self.kind) || self.kind == GROUPNORM || self.kind == ADDITION;
            if (self.kind == LINEAR) run.tensor[source].one = self.bias >= 0;
            if (self.kind == ADDITION) op.also = self.also < 0 ? 0 : made[self.also];
            op.out = keeps ? new_tensor(run, in.c, in.h, in.w, in.flat)
                           : new_tensor(run, self.oc, self.oh, self.ow, self.kind == LINEAR || self.kind == FLATTEN);
            ++i;
            if ((self.kind == LINEAR || self.kind == GROUPNORM || self.kind == ADDITION) && order.follows(i, begin, RELU))
                op.relu = true, ++i;
        }
        for (int j = begin; j < i; ++j) made[j] = run.op[run.ops - 1].out;
    }
    if (run.tail < 0) run.tail = run.ops;
    if (run.first_trained < 0) run.first_trained = run.ops;
    for (int i = 0; i < run.tensors; ++i) {
        Tensor& t = run.tensor[i];
        t.cp = padded(t.c + t.one);
        t.wp = t.w + 2 * t.pw;
        t.size = int64_t(t.h + 2 * t.ph) * t.wp * t.cp;
    }
    plan_gradients(run);
    for (int i = 0; i < run.ops; ++i) {
        Op& op = run.op[i];
        const Layer& l = *op.layer;
        const Tensor &in = run.tensor[op.in], &out = run.tensor[op.out];
        if (op.kind == CONV) {
            op.rows = op.pool ? (op.pool->oh - 1) * op.pool->sh + op.pool->kh : l.oh;
            op.columns = op.pool ? (op.pool->ow - 1) * op.pool->sw + op.pool->kw : l.ow;
            op.positions = op.rows * op.columns;
            op.ocp = padded(l.oc);
            const bool bias_column = op.patch && l.bias >= 0;
            op.k = l.kh * l.kw * l.c + bias_column;
            op.segments = op.patch ? 1 : l.kh;
            op.segment = op.patch ? padded(op.k) : l.kw * in.cp;
            op.segment_in = op.patch ? 0 : in.wp * in.cp;
            op.kp = op.segments * op.segment;
            op.packed = int64_t(l.oc) * op.kp + (op.patch ? 0 : op.ocp);
            if (op.pool) {
                op.cells = op.pool->oh * op.pool->ow;
                op.window = op.pool->kh * op.pool->kw;
                op.sparse = 2 * op.cells <= op.positions;
            }
            op.per_example = int64_t(op.cells) * op.ocp + (op.patch ? int64_t(op.positions) * op.kp : 0);
        } else if (op.kind == LINEAR) {
            op.k = l.c + (l.bias >= 0);
            op.kp = in.cp;
            op.ocp = out.cp;
            op.packed = int64_t(l.oc) * op.kp;
        } else if (op.kind == GROUPNORM) {
            op.ocp = in.cp;
            op.packed = 2 * int64_t(in.cp);
            op.per_example = 2 * int64_t(in.cp);
        } else if (op.kind == DEPTHWISE) {
            op.ocp = in.cp;
            op.packed = int64_t(l.kh * l.kw + 1) * in.cp;
        } else if (op.kind == MAXPOOL) {
            op.cells = l.oh * l.ow;
            op.per_example = int64_t(op.cells) * in.cp;
        }
        op.at = run.packed;
        run.packed += op.packed;
    }
}

void allocate(Run& run, Arena& arena, const Client& client) {
    const int width = client.width;
    const Plan& plan = *run.plan;
    const Net& net = *run.net;
    int64_t keep = 0, most = 1, cells = 1, widest = 1, turned = 1, pixels = 1;
    const bool mapped = client.shift || client.scale;
    for (int i = 0; i < run.ops; ++i) {
        Op& op = run.op[i];
        const Layer& l = *op.layer;
        run.together |= op.kind == CONV && op.packed >= kLargeNet && !mapped;
        if (op.kind != CONV) continue;
        const int64_t length = int64_t(l.oc) * (padded(op.positions) + L);
        turned = length > turned ? length : turned;
    }
    for (int i = 0; i < run.tensors; ++i)
        if (i || run.input != RAW) keep += run.tensor[i].size * (run.together ? 2 : 1);
    for (int i = 0; i < run.ops; ++i) {
        keep += run.op[i].per_example;
        const int64_t area = int64_t(run.op[i].positions) * run.op[i].ocp;
        most = area > most ? area : most;
        cells = run.op[i].cells > cells ? run.op[i].cells : cells;
        widest = run.op[i].ocp > widest ? run.op[i].ocp : widest;
    }
    int64_t group = (run.together ? kLargeFloats : kGroupFloats) / (keep + 1);
    group = group < kLeast ? kLeast : group > kGroup ? kGroup : group;
    run.part = int(group);
    group = run.together || group >= kSmallBatch ? group : kSmallBatch;
    group = group > width ? (width > 0 ? width : 1) : group;
    if (run.together && width > 0) group = (width + (width + group - 1) / group - 1) / ((width + group - 1) / group);  // evenly
    run.group = int(group);
    for (int i = 0; i < run.tensors; ++i) {
        Tensor& t = run.tensor[i];
        if (i || run.input != RAW) t.x = arena.take<float>(group * t.size);
        if (t.live || t.flat || !run.together) t.d = arena.take<float>((t.flat || run.together ? group : 1) * t.size);
        t.d_step = t.flat || run.together ? t.size : 0;
    }
    for (int i = 0; i < run.ops; ++i) {
        Op& op = run.op[i];
        const Layer& l = *op.layer;
        const Tensor& in = run.tensor[op.in];
        if (op.kind == CONV) {
            op.ghost = run.together && !plan.l1 && !op.patch && !op.pool && op.positions <= kGhostTerms &&
                       op.packed >= kGhostWeights && l.c % L == 0 && l.oc % L == 0 && in.h * in.w <= 4 * kGhostTerms;
            if (op.ghost && in.h * in.w > pixels) pixels = in.h * in.w;
            op.g = arena.take<float>(op.ghost ? 0 : op.packed);
            op.wt = arena.take<float>(int64_t(op.k) * op.ocp);
            op.base = arena.take<int32_t>(op.positions);
            op.row_out = arena.take<int32_t>(op.positions);
            op.p_row = arena.take<int32_t>(op.positions);
            op.off = arena.take<int32_t>(op.k);
            op.k_row = arena.take<int32_t>(op.k);
            op.windows = arena.take<int32_t>(int64_t(op.cells) * op.window);
            if (op.patch) {
                op.patches = arena.take<float>(group * op.positions * op.kp + 8);
                op.image = arena.take<float>(int64_t(l.c) * (l.h + 2 * l.ph) * (l.w + 2 * l.pw) + 16);
            }
        }
        if (op.kind == CONV || op.kind == LINEAR) {
            op.o_row = arena.take<int32_t>(l.oc);
            op.turned_row = arena.take<int32_t>(l.oc);
            op.iota = arena.take<int32_t>(l.oc > op.positions ? l.oc : op.positions);
        }
        if (op.cells) op.chosen = arena.take<int32_t>(group * op.cells * run.tensor[op.out].cp);
        op.apart = run.together && (op.kind == GROUPNORM || op.kind == DEPTHWISE);
        if (op.kind == DEPTHWISE) op.g = arena.take<float>((run.together ? group : 1) * op.packed);
        if (op.kind == GROUPNORM) {
            op.g = arena.take<float>((run.together ? group : 1) * op.packed);
            op.stats = arena.take<float>(group * 2 * op.ocp + 2 * op.ocp);
        }
    }
    run.scratch = arena.take<float>(run.together ? group * most : most);
    run.turned = arena.take<float>(turned);
    run.gram_in = arena.take<double>(pixels * pixels);
    run.gram_out = arena.take<double>(int64_t(kGhostTerms) * kGhostTerms);
    run.kept = arena.take<int32_t>(run.together ? width : 0);
    run.list_off = arena.take<int32_t>((cells + L) * widest);
    run.list_g = arena.take<float>((cells + L) * widest);
    run.list_n = arena.take<int32_t>(widest);
    run.scaled = arena.take<float>(group * widest);
    auto vector = [&](bool needed) { return arena.take<float>(needed ? run.packed : 0); };
    run.weights = vector(true);
    run.start = vector(true);
    run.velocity = vector(plan.momentum != 0);
    run.control = vector(client.control);
    run.anchor = vector(client.anchor);
    run.shift = vector(mapped);
    run.scale = vector(mapped);
    run.mapped = vector(mapped);
    // Gaussian noise is drawn layer by layer, in whole tiles; the others at once. Room to read a vector after the end.
    int64_t length = net.params + 1 + L, longest = 0;
    if (plan.noise == GAUSSIAN_LAW)
        for (int u = length = 0; u < net.units; ++u) {
            const int64_t n = net.unit_begin[u + 1] - net.unit_begin[u] + 64 + L;
            length = n > length ? n : length;
        }
    for (int i = 0; i < run.ops; ++i) {
        const int64_t n = run.op[i].kp > run.op[i].ocp ? run.op[i].kp : run.op[i].ocp;
        longest = n > longest ? n : longest;
    }
    run.norm = arena.take<double>(group * (net.units + 1));
    run.factor = arena.take<double>(group * (net.units + 1));
    run.all_norm = arena.take<double>(plan.median ? int64_t(width) * (net.units + 1) : 0);
    run.row_noise = arena.take<float>(plan.noise ? longest : 0);
    run.zeroed = arena.used;
    run.flat_noise = arena.take<float>(plan.noise ? length : 0);
    run.sum = arena.take<double>(run.packed);
    const bool gridded = plan.noise && plan.grid > 0, slow = gridded && plan.noise != GAUSSIAN_LAW;
    run.counts = arena.take<double>(gridded ? net.params + 16 : 0);
    run.drawn = arena.take<int64_t>(slow ? net.params : 0);
    for (int i = 0; i < run.ops && arena.base; ++i) {
        Op& op = run.op[i];
        op.w = run.weights + op.at;
        op.sum = run.sum + op.at;
        if (op.kind == CONV && !op.patch) op.bias = op.w + int64_t(op.layer->oc) * op.kp;
        if (op.kind == DEPTHWISE) op.bias = op.w + op.packed - op.ocp;
    }
}

void fill_tables(Run& run) {
    for (int i = 0; i < run.ops; ++i) {
        Op& op = run.op[i];
        const Layer& l = *op.layer;
        const Tensor &in = run.tensor[op.in], &out = run.tensor[op.out];
        if (op.kind == CONV || op.kind == LINEAR)
            for (int o = 0; o < l.oc; ++o) op.o_row[o] = o * op.kp, op.iota[o] = o;
        if (op.kind != CONV) continue;
        for (int o = 0; o < l.oc; ++o) op.turned_row[o] = o * (padded(op.positions) + L);
        for (int p = l.oc; p < op.positions; ++p) op.iota[p] = p;
        const int top = in.ph - l.ph, left = in.pw - l.pw;  // others may need more room around the image
        for (int p = 0; p < op.positions; ++p) {
            const int r = p / op.columns, c = p % op.columns;
            op.base[p] = op.patch ? p * op.kp : ((r * l.sh + top) * in.wp + c * l.sw + left) * in.cp;
            op.p_row[p] = p * op.ocp;
            op.row_out[p] = op.pool ? p * op.ocp : (r * out.wp + c) * out.cp;
        }
        int k = 0;
        if (op.patch)
            for (; k < op.k; ++k) op.off[k] = k;
        else
            for (int a = 0; a < l.kh; ++a)
                for (int b = 0; b < l.kw; ++b)
                    for (int c = 0; c < l.c; ++c) op.off[k++] = (a * in.wp + b) * in.cp + c;
        for (k = 0; k < op.k; ++k) op.k_row[k] = k * op.ocp;
        for (int cell = 0; cell < op.cells; ++cell) {
            const int r = cell / op.pool->ow * op.pool->sh, c = cell % op.pool->ow * op.pool->sw;
            for (int j = 0; j < op.window; ++j)
                op.windows[cell * op.window + j] = (r + j / op.pool->kw) * op.columns + c + j % op.pool->kw;
        }
    }
}

// ---- between the flat vector (torch's order) and the packed form

bool flat_rows(const Op& op) { return op.kind == LINEAR || (op.kind == CONV && op.patch); }

// Calls f(packed, flat, count, stride): `count` packed neighbours that lie `stride` apart in the flat vector.
template <class F>
void each_run(const Run& run, const Op& op, F f) {
    const Layer& l = *op.layer;
    if (l.weight < 0) return;
    if (op.kind == GROUPNORM) {
        f(op.at, l.weight, l.c, 1);
        if (l.bias >= 0) f(op.at + op.ocp, l.bias, l.c, 1);
        return;
    }
    const int taps = l.kh * l.kw, cp = run.tensor[op.in].cp;
    if (op.kind == DEPTHWISE) {
        for (int t = 0; t < taps; ++t) f(op.at + int64_t(t) * cp, l.weight + t, l.c, taps);
        if (l.bias >= 0) f(op.at + int64_t(taps) * cp, l.bias, l.c, 1);
        return;
    }
    const bool rows = flat_rows(op);  // packed rows are flat rows, with the bias at their end
    const int n = rows ? op.k - (l.bias >= 0) : l.c * taps;
    for (int o = 0; o < l.oc; ++o) {
        const int64_t row = op.at + int64_t(o) * op.kp, from = l.weight + int64_t(o) * n;
        if (rows) {
            f(row, from, n, 1);
            if (l.bias >= 0) f(row + n, l.bias + o, 1, 1);
        } else {
            for (int t = 0; t < taps; ++t) f(row + t * cp, from + t, l.c, taps);
        }
    }
    if (!rows && l.bias >= 0) f(op.at + int64_t(l.oc) * op.kp, l.bias, l.oc, 1);
}

// to[j] = from[j * stride]
inline void gather(float* to, const float* from, int n, int stride) {
    int j = 0;
#if defined(__AVX512F__)
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i index = _mm512_mullo_epi32(lane, _mm512_set1_epi32(stride));
    for (; j + L <= n; j += L) _mm512_storeu_ps(to + j, _mm512_i32gather_ps(index, from + int64_t(j) * stride, 4));
#endif
    for (; j < n; ++j) to[j] = from[int64_t(j) * stride];
}

STAGE void pack(const Run& run, const float* flat, float* packed) {
    for (int i = 0; i < run.ops; ++i)
        each_run(run, run.op[i], [&](int64_t to, int64_t from, int n, int stride) {
            if (stride == 1) memcpy(packed + to, flat + from, size_t(n) * 4);
            else gather(packed + to, flat + from, n, stride);
        });
}

STAGE void unpack(const Run& run, const float* packed, float* flat) {
    for (int i = 0; i < run.ops; ++i)
        each_run(run, run.op[i], [&](int64_t to, int64_t from, int n, int stride) {
            for (int j = 0; j < n; ++j) flat[from + int64_t(j) * stride] = packed[to + j];
        });
}

// The transposed weights of the convolutions, wt [k][ocp]; rows of unused channels are left out.
STAGE void transpose_weights(Run& run) {
    for (int i = 0; i < run.ops; ++i) {
        Op& op = run.op[i];
        if (op.kind != CONV) continue;
        const Layer& l = *op.layer;
        const int taps = op.patch ? 1 : l.kh * l.kw, c = op.patch ? op.k : l.c;
        const int cp = op.patch ? op.kp : run.tensor[op.in].cp;
        for (int t = 0; t < taps; ++t) {
            const float* from = op.w + t * cp;
            float* to = op.wt + int64_t(t) * c * op.ocp;
            int o = 0;
            for (; o + L <= l.oc; o += L)
                for (int j = 0; j < c; j += L) {
                    V v[L];
                    for (int a = 0; a < L; ++a) v[a] = load(from + int64_t(o + a) * op.kp + j);
                    transpose(v);
                    for (int a = 0; a < L && j + a < c; ++a) store(to + int64_t(j + a) * op.ocp + o, v[a]);
                }
            for (; o < l.oc; ++o)
                for (int j = 0; j < c; ++j) to[int64_t(j) * op.ocp + o] = from[int64_t(o) * op.kp + j];
        }
    }
}

}  // namespace
}  // namespace fedveil::FV_ISA
