// The compiled engine without Python, for machines that only an emulator offers: golden noise, and a small training run.
// Prints the noise as bits (must be equal everywhere) and the update (equal up to rounding). See native_arm.sh.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "engine.h"

using namespace fedveil;
namespace fedveil::base {
extern const Engine engine;
extern const NoiseKernels noise_kernels;
}  // namespace fedveil::base

static int wrong = 0;

static void check(const char* name, const float* values, const uint32_t* golden, int n) {
    for (int i = 0; i < n; ++i) {
        uint32_t bits;
        std::memcpy(&bits, values + i, 4);
        if (bits != golden[i]) std::printf("WRONG %s %d: %08x, not %08x\n", name, i, bits, golden[i]), ++wrong;
    }
}

int main() {
    uint8_t key[16];
    for (int i = 0; i < 16; ++i) key[i] = uint8_t(i);
    AesKey schedule;
    expand_key(key, schedule);
    const NoiseKernels& kernels = base::noise_kernels;
    const Cipher cipher = portable_cipher();

    // The numbers of tests/protect/test_noise.py.
    const uint32_t normal[] = {0xbf903bb3, 0x3fa5bc93, 0xbe876546}, laplace[] = {0xbe586c50, 0xbd090529, 0xc02063bc};
    const double sigmas[] = {1.0, 37.5, 6.0e6, 0x1p40};
    std::vector<float> values(5000);
    fill_noise(kernels, cipher, {&schedule, 3, 0, NORMAL}, nullptr, 0, 5000, values.data());
    check("normal", values.data(), normal, 3);
    uint32_t sum = 0, bits;
    auto add = [&] {
        for (float v : values) std::memcpy(&bits, &v, 4), sum = sum * 31 + bits;
    };
    add();
    fill_noise(kernels, cipher, {&schedule, 3, 0, LAPLACE}, nullptr, 0, 5000, values.data());
    check("laplace", values.data(), laplace, 3);
    add();
    std::vector<int64_t> integers(5000);
    // The numbers of tests/protect/test_exact.py, and many more for the comparison.
    const int64_t gaussian[4][4] = {{2, 1, -1, 0},
                                    {21, -7, 25, 21},
                                    {-10222765, 3224030, -1159757, 3800531},
                                    {-1873341621974, 590809895891, -212527734939, 696454726786}};
    const int64_t rounded[4][4] = {{-2, 1, 0, 2},
                                   {-51, -6, -4, 19},
                                   {-8134269, -995647, -572733, 2996411},
                                   {-1490620377043, -182454164035, -104954358526, 549098105237}};
    integers.resize(200000);
    for (int k = 0; k < 4; ++k) {
        fill_exact(*kernels.exact, cipher, {&schedule, 3, 0, EXACT_GAUSSIAN}, exact_gaussian(sigmas[k]), 200000, integers.data());
        for (int i = 0; i < 4; ++i)
            if (integers[size_t(i)] != gaussian[k][i]) std::printf("WRONG gaussian %d %d\n", k, i), ++wrong;
        for (int64_t v : integers) sum = sum * 31 + uint32_t(v) + 7 * uint32_t(uint64_t(v) >> 32);
        fill_exact(*kernels.exact, cipher, {&schedule, 3, 0, EXACT_LAPLACE}, exact_laplace(sigmas[k]), 200000, integers.data());
        for (int i = 0; i < 4; ++i)
            if (integers[size_t(i)] != rounded[k][i]) std::printf("WRONG rounded laplace %d %d\n", k, i), ++wrong;
        for (int64_t v : integers) sum = sum * 31 + uint32_t(v) + 7 * uint32_t(uint64_t(v) >> 32);
    }
    std::printf("noise %08x\n", sum);

    // Convolution with padding, ReLU, pool, two dense layers; clipping, grid noise, one example that is NaN.
    Net net{};
    net.count = 6, net.units = 3, net.outputs = 3, net.inputs = 64, net.params = 383;
    net.layers[0] = {CONV, 0, 1, 8, 8, 4, 8, 8, 3, 3, 1, 1, 1, 1, 1, -1, -1, 0, 0, 36};
    net.layers[1] = {RELU, -1, 4, 8, 8, 4, 8, 8, 1, 1, 1, 1, 0, 0, 1, 0, -1, 0, -1, -1};
    net.layers[2] = {MAXPOOL, -1, 4, 8, 8, 4, 4, 4, 2, 2, 2, 2, 0, 0, 1, 1, -1, 0, -1, -1};
    net.layers[3] = {FLATTEN, -1, 4, 4, 4, 64, 1, 1, 1, 1, 1, 1, 0, 0, 1, 2, -1, 0, -1, -1};
    net.layers[4] = {LINEAR, 1, 64, 1, 1, 5, 1, 1, 1, 1, 1, 1, 0, 0, 1, 3, -1, 0, 40, 360};
    net.layers[5] = {LINEAR, 2, 5, 1, 1, 3, 1, 1, 1, 1, 1, 1, 0, 0, 1, 4, -1, 0, 365, 380};
    net.unit_begin[0] = 0, net.unit_begin[1] = 40, net.unit_begin[2] = 365, net.unit_begin[3] = 383;
    std::vector<float> x(20 * 64), start(383), delta(383);
    fill_noise(kernels, cipher, {&schedule, 5, 0, NORMAL}, nullptr, 0, 20 * 64, x.data());
    fill_noise(kernels, cipher, {&schedule, 6, 0, NORMAL}, nullptr, 0, 383, start.data());
    for (float& v : start) v *= 0.2f;
    x[7 * 64 + 9] = 0.0f / (x[0] - x[0]);  // NaN
    std::vector<int64_t> labels(20);
    std::vector<int32_t> rows(10 * 6);
    for (int i = 0; i < 20; ++i) labels[size_t(i)] = i % 3;
    for (int i = 0; i < 60; ++i) rows[size_t(i)] = i % 6 < 5 ? (i * 7) % 20 : -1;
    std::vector<double> bounds(10, 0.5), scales(10, 0.05);
    for (int clip : {int(CLIP_LAYER), int(CLIP_FLAT)}) {
        Plan plan{};
        plan.steps = 10, plan.learning_rate = 0.2, plan.expected_batch = 5, plan.momentum = 0.5;
        plan.clip = clip, plan.noise = GAUSSIAN_LAW, plan.grid = clip == CLIP_FLAT ? 0x1p-20 : 0.0;
        plan.bounds = bounds.data(), plan.scales = plan.deviations = scales.data();
        const Data data = {x.data(), labels.data(), nullptr, start.data()};
        const Client client = {rows.data(), 6, key, nullptr, nullptr, nullptr, nullptr};
        double mean[3], most[3];
        Result result{};
        result.delta = delta.data(), result.norm_mean = mean, result.norm_max = most;
        const size_t bytes = size_t(base::engine.workspace(net, plan, client) + 63) / 64 * 64;
        char* space = static_cast<char*>(std::aligned_alloc(64, bytes));
        base::engine.train(net, plan, data, client, kernels, cipher, space, result);
        std::free(space);
        if (!result.finite || result.skipped == 0) std::printf("WRONG run\n"), ++wrong;
        std::printf("run %d examples %d skipped %d loss %.5f\n", clip, int(result.examples), int(result.skipped), result.loss);
        for (int i = 0; i < 383; ++i) std::printf("%.4f ", double(delta[size_t(i)]));
        std::printf("\n");
    }
    std::printf(wrong ? "WRONG\n" : "golden values: right\n");
    return wrong != 0;
}
