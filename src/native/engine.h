// Plain data shared by the binding and the per-instruction-set engines. Semantics: training/contract.py.
#pragma once
#include <cstdint>

#include "exact.h"

namespace fedveil {

constexpr int kMaxLayers = 128;

enum Kind : int32_t { LINEAR, CONV, RELU, TANH, SIGMOID, MAXPOOL, AVGPOOL, FLATTEN, GROUPNORM, SILU, HARDSWISH, ADDITION, DEPTHWISE };
enum Clip : int32_t { CLIP_NONE, CLIP_LAYER, CLIP_FLAT };
enum NoiseLaw : int32_t { NO_NOISE, GAUSSIAN_LAW, LAPLACE_LAW, STAIRCASE_LAW, JOINT_LAW };

struct Layer {
    int32_t kind;
    int32_t unit;            // which clipped layer its parameters are, -1: none
    int32_t c, h, w;         // input; flat inputs are [c, 1, 1]
    int32_t oc, oh, ow;      // output
    int32_t kh, kw, sh, sw, ph, pw;
    int32_t groups;
    int32_t from, also;      // the layers it takes, -1: the example (also: only ADDITION, which adds two images)
    float eps;
    int64_t weight, bias;    // offsets in the flat vector, -1: none
};

struct Net {
    int32_t count, units;
    int32_t outputs;
    int64_t inputs, params;  // inputs: of an example; what exceeds its image goes past all layers up to FLATTEN
    Layer layers[kMaxLayers];
    int64_t unit_begin[kMaxLayers + 1];  // unit u owns flat parameters unit_begin[u] … unit_begin[u + 1]
};

struct Plan {
    int32_t steps;
    double learning_rate, expected_batch, momentum, proximal, penalty, grid;
    int32_t clip, noise;
    bool for_each;  // every example carries noise of its own (Gaussian: the root of their number times the scale)
    bool l1, median, l2_max, of_mean, squared, only_sum;  // of_mean: l2_max looks at the norm of the mean, not of single examples
    const double* bounds;       // [steps] or null
    const double* scales;       // [steps] or null: of the noise on the sum, per unit of the norm where it follows one
    const double* deviations;   // [steps]: its standard deviation, to be reported
    const double* lambdas;      // [steps], staircase laws only
    const double* nus;
    const StaircaseShape* shapes;
    const Stairs* stairs;  // on a grid
};

struct Data {
    const float* x;         // [rows, inputs]
    const int64_t* labels;  // cross-entropy
    const float* targets;   // squared error [rows, outputs]
    const float* start;
};

struct Client {
    const int32_t* rows;  // [steps, width], -1 after the last
    int32_t width;
    const uint8_t* key;
    const float *control, *anchor, *shift, *scale;  // or null
};

struct Result {
    float* delta;
    bool finite;
    double loss, unclipped, noise_scale, below;
    int64_t examples, skipped;
    double *norm_mean, *norm_max;  // [units], or [1] when clip is flat
    double* of_mean;               // [steps]: norms of the batches' mean gradients; null where not wanted, never with plan.of_mean
};

struct Engine {
    const char* name;
    int lanes;
    int64_t (*workspace)(const Net&, const Plan&, const Client&);  // bytes
    void (*train)(const Net&, const Plan&, const Data&, const Client&, const NoiseKernels&, Cipher, char* workspace,
                  Result&);
};

}  // namespace fedveil
