// Integer noise. The definition is src/fedveil/protect/exact.py; these give the same integers, because every decision has
// one right answer: floats decide where their error bound allows it, integers where not.
#pragma once
#include "noise.h"

namespace fedveil {

enum ExactPurpose : uint32_t { EXACT_GAUSSIAN = 6, EXACT_LAPLACE = 7, EXACT_STAIRCASE = 8, EXACT_JOINT = 9 };
// What becomes of a magnitude m and a sign: ±m without minus zero, ±floor((m + 1) / 2), m or ~m.
enum Finish : int { PLAIN = 0, HALF = 1, CODE = 2 };

struct ExactShape {
    bool gaussian;  // else geometric: P(m) falls by half every k
    Finish finish;
    uint32_t k1, uneven;  // places in a bin: k = k1 << shift; uneven = 2**32 mod k1
    int shift;
    double deviation;
    float per;  // of the float exponent, to base 2
    double rate;  // about how many candidates are accepted
};

ExactShape exact_gaussian(double deviation);
ExactShape exact_geometric(double half, Finish finish);  // falls by half every `half` or a little more
inline ExactShape exact_laplace(double scale) { return exact_geometric(2 * scale * 0.69314718056, HALF); }
constexpr double kNarrowestExact = 0.25, kWidestExact = 0x1p46;

struct Candidates {
    const Stream* stream;
    Cipher cipher;
    const ExactShape* shape;
};

// A candidate that floats cannot decide, by integers.
bool decide(const Candidates& from, uint32_t candidate, const uint32_t* words, uint32_t low, int64_t& magnitude);

// `tiles` tiles of 16 candidates, from tile `first` on: 48 words each, 16 low ones each if shape.shift > 0. Writes the
// accepted ones, and up to 16 more values behind them; returns how many are accepted.
struct ExactKernels {
    int (*integers)(const Candidates& from, uint32_t first, int tiles, const uint32_t* words, const uint32_t* low,
                    int64_t* out);
    int (*doubles)(const Candidates& from, uint32_t first, int tiles, const uint32_t* words, const uint32_t* low,
                   double* out);
};

// The first `count` values of a stream.
template <class T>
void fill_exact(const ExactKernels& kernels, Cipher cipher, const Stream& stream, const ExactShape& shape,
                int64_t count, T* out);

struct Stairs {
    int64_t period, inner, half, per;
    uint64_t threshold;
};
void fill_staircase(const ExactKernels& kernels, Cipher cipher, const Stream& stream, const Stairs& stairs,
                    int64_t count, int64_t* out);
// False: no attempt was accepted.
bool fill_joint(const ExactKernels& kernels, Cipher cipher, const Stream& stream, const Stairs& stairs, int64_t count,
                int64_t* out);

}  // namespace fedveil
