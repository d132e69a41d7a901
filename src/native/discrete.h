// e^-x from +, -, * and powers of two, as protect.noise.exp_minus: a library's exp may differ in its last bit. Only for
// files compiled with -ffp-contract=off; static, so that no instruction set gets another's code.
#pragma once
#include <cstdint>
#include <cstring>

namespace fedveil {

static inline double exp_minus(double x) {
    x = x < 700.0 ? x : 700.0;
    const double n = (x * 1.4426950408889634 + 0x1.8p52) - 0x1.8p52;  // rounded to an integer
    const double r = n * 1.9082149292705877e-10 - (x - n * 0.6931471803691238);
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    const uint64_t bits = uint64_t(1023 - int32_t(n)) << 52;
    double power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}

}  // namespace fedveil
