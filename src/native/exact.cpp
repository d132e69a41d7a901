#include "exact.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace fedveil {
namespace {

typedef unsigned __int128 Wide;

constexpr uint32_t kFurther = 16, kLow = 32, kSecond = 48, kNext = 64;
constexpr uint64_t kLevel = 389364290;
constexpr uint32_t kUnits[13] = {389364293, 377384811, 343612780, 293907586, 236161380, 178263962, 126408078,
                                 84205934,  52694727,  30977632,  17107473,  8875241,   4325447};
constexpr uint64_t kLn2 = 12786308645202655660u;  // ln 2 * 2**64, rounded up
constexpr Wide kLn2Fine = Wide(0xb17217f7d1cf7u) << 64 | 0x9abc9e3b39803f2fu;  // ln 2 * 2**116, rounded down

// e^-(t / 2**64) = E / 2**64 / 2**n
Wide exp_minus(Wide t, int& n) {
    n = int(t / kLn2);
    const Wide r = t - (Wide(unsigned(n)) * kLn2Fine >> 52);
    Wide p = Wide(1) << 64;
    for (unsigned i = 20; i > 0; --i) p = (Wide(1) << 64) - uint64_t(r * p >> 64) / i;
    return p;
}

// Words of a candidate's further bits; part 0 belongs to the coin.
void further(const Candidates& from, uint32_t candidate, uint32_t part, uint64_t& high, uint64_t& low) {
    uint32_t w[4];
    const Stream& s = *from.stream;
    from.cipher(*s.key, candidate, s.example, s.step, s.purpose + kFurther + kNext * part, 1, w);
    high = uint64_t(w[0]) << 32 | w[1], low = uint64_t(w[2]) << 32 | w[3];
}

uint64_t zeros(const Candidates& from, uint32_t candidate) {
    for (uint32_t part = 1;; ++part) {
        uint64_t high, low;
        further(from, candidate, part, high, low);
        if (high) return 128u * (part - 1) + unsigned(__builtin_clzll(high));
        if (low) return 128u * (part - 1) + 64 + unsigned(__builtin_clzll(low));
    }
}

// coin * units < (x << 64) >> shift, for a coin of 160 bits: 32 + 64 + 64.
bool below(uint32_t coin, uint64_t high, uint64_t low, uint32_t units, Wide x, int shift) {
    const Wide carry = Wide(low) * units;
    const Wide left = (Wide(coin) << 64 | high) * units + (carry >> 64);
    const Wide right = shift < 128 ? x >> shift : 0;
    uint64_t rest = 0;
    if (shift > 0 && shift < 128) rest = uint64_t(x << (128 - shift) >> 64);
    else if (shift >= 128 && shift < 192) rest = uint64_t(x >> (shift - 64));
    return left < right || (left == right && uint64_t(carry) < rest);
}

void places(double least, ExactShape& shape) {
    int exponent;
    std::frexp(least, &exponent);
    shape.shift = std::max(0, exponent - 25);
    double k1 = std::max(1.0, std::ceil(std::ldexp(least, -shape.shift)));
    if (k1 > 0x1p24) k1 = std::ceil(std::ldexp(least, -++shape.shift));
    shape.k1 = uint32_t(k1);
    shape.uneven = uint32_t((uint64_t(1) << 32) % shape.k1);
}

}  // namespace

ExactShape exact_gaussian(double deviation) {
    ExactShape shape{};
    shape.gaussian = true, shape.finish = PLAIN, shape.deviation = deviation;
    places(deviation / 4, shape);
    const double unit = std::ldexp(1.0, shape.shift) / deviation;
    shape.per = float(0.72134752044448170368 * unit * unit);  // log2(e) / 2
    shape.rate = 0.9 * std::min(1.0, 0.25 / (unit * shape.k1));
    return shape;
}

ExactShape exact_geometric(double half, Finish finish) {
    ExactShape shape{};
    shape.finish = finish, shape.rate = 0.7;
    places(half, shape);
    shape.per = 1.0f / float(shape.k1);
    return shape;
}

bool decide(const Candidates& from, uint32_t candidate, const uint32_t* words, uint32_t low, int64_t& magnitude) {
    const ExactShape& shape = *from.shape;
    const uint32_t coin = words[0], bits = words[32] >> 1;
    const uint64_t product = uint64_t(words[16]) * shape.k1, k = uint64_t(shape.k1) << shape.shift;
    const uint64_t u = (product >> 32 << shape.shift) | (low & ((uint64_t(1) << shape.shift) - 1));
    uint64_t bin = 0, units = 1;
    int halvings = 0, n;
    if (bits == 0) {
        const uint64_t more = zeros(from, candidate);
        bin = (shape.gaussian ? 35 : 31) + more;
        halvings = int(std::min<uint64_t>(more + 1, 1 << 20));
    } else if (shape.gaussian && bits >= 1u << 22) {
        uint32_t rest = (1u << 31) - kUnits[0];
        while (bits < rest) rest -= kUnits[++bin];
        units = kUnits[bin];
    } else {
        const unsigned top = 31 - unsigned(__builtin_clz(bits));
        bin = shape.gaussian ? 34 - top : 30 - top;
        units = uint64_t(1) << top;
    }
    magnitude = int64_t(bin * k + u);
    uint64_t high, rest;
    further(from, candidate, 0, high, rest);
    if (!shape.gaussian) {
        const Wide e = exp_minus(Wide(u) * kLn2 / k, n);
        return below(coin, high, rest, 1, e << 32, n);
    }
    const double s = shape.deviation;
    if (!(double(magnitude) < 23 * s)) return false;
    int exponent;
    const uint64_t mantissa = uint64_t(std::frexp(s, &exponent) * 0x1p53);
    const Wide h = (Wide(uint64_t(magnitude)) << (64 + 53 - exponent)) / mantissa;
    const uint64_t whole = uint64_t(h >> 64), part = uint64_t(h);
    const Wide t = (Wide(whole * whole) << 63) + Wide(whole) * part + (Wide(part) * part >> 65);
    if (uint64_t(t >> 64) >= 256) return false;
    const Wide e = exp_minus(t, n);
    return below(coin, high, rest, uint32_t(units), Wide(kLevel) * e << 32, n - halvings);
}

namespace {

inline int run_kernel(const ExactKernels& k, const Candidates& c, uint32_t first, int tiles, const uint32_t* w,
                      const uint32_t* l, int64_t* out) {
    return k.integers(c, first, tiles, w, l, out);
}
inline int run_kernel(const ExactKernels& k, const Candidates& c, uint32_t first, int tiles, const uint32_t* w,
                      const uint32_t* l, double* out) {
    return k.doubles(c, first, tiles, w, l, out);
}

}  // namespace

template <class T>
void fill_exact(const ExactKernels& kernels, Cipher cipher, const Stream& stream, const ExactShape& shape,
                int64_t count, T* out) {
    constexpr int kTiles = 16;
    alignas(64) uint32_t words[kTiles * 48], low[kTiles * 16];
    alignas(64) T some[kTiles * 16 + 16];
    const Candidates from = {&stream, cipher, &shape};
    uint32_t tile = 0;
    for (int64_t done = 0; done < count;) {
        const int64_t left = count - done;
        const int tiles = left > 4 * kTiles * 16 ? kTiles : std::min(kTiles, int(double(left) / (16 * shape.rate)) + 1);
        cipher(*stream.key, 12 * tile, stream.example, stream.step, stream.purpose, 12 * tiles, words);
        if (shape.shift)
            cipher(*stream.key, 4 * tile, stream.example, stream.step, stream.purpose + kLow, 4 * tiles, low);
        if (left >= kTiles * 16 + 16) {
            done += run_kernel(kernels, from, tile, tiles, words, low, out + done);
        } else {
            const int64_t n = std::min<int64_t>(left, run_kernel(kernels, from, tile, tiles, words, low, some));
            std::memcpy(out + done, some, size_t(n) * sizeof(T));
            done += n;
        }
        tile += uint32_t(tiles);
    }
}
template void fill_exact(const ExactKernels&, Cipher, const Stream&, const ExactShape&, int64_t, int64_t*);
template void fill_exact(const ExactKernels&, Cipher, const Stream&, const ExactShape&, int64_t, double*);

void fill_staircase(const ExactKernels& kernels, Cipher cipher, const Stream& stream, const Stairs& stairs,
                    int64_t count, int64_t* out) {
    fill_exact(kernels, cipher, stream, exact_geometric(double(stairs.half), CODE), count, out);
    const uint64_t in = 2 * uint64_t(stairs.inner), rest = 2 * uint64_t(stairs.period - stairs.inner);
    const uint64_t in_mask = ~uint64_t(0) >> __builtin_clzll(in - 1), rest_mask = ~uint64_t(0) >> __builtin_clzll(rest - 1);
    constexpr int kMost = 64;
    alignas(64) uint32_t words[4 * kMost];
    for (int64_t first = 0; first < count; first += kMost) {
        const int n = int(std::min<int64_t>(kMost, count - first));
        cipher(*stream.key, uint32_t(first), stream.example, stream.step, stream.purpose + kSecond, n, words);
        for (int i = 0; i < n; ++i) {
            uint32_t* w = words + 4 * i;
            const bool inside = (uint64_t(w[0]) << 32 | w[1]) < stairs.threshold;
            const uint64_t size = inside ? in : rest, mask = inside ? in_mask : rest_mask;
            uint64_t v = (uint64_t(w[2]) << 32 | w[3]) & mask;
            for (uint32_t attempt = 1; v >= size; ++attempt) {
                uint32_t more[4];
                cipher(*stream.key, uint32_t(first + i), stream.example | attempt << 16, stream.step,
                       stream.purpose + kSecond, 1, more);
                v = (uint64_t(more[2]) << 32 | more[3]) & mask;
            }
            const int64_t code = out[first + i], z = code < 0 ? ~code : code;
            const int64_t half_steps = 2 * stairs.period * (z / stairs.per) + int64_t(inside ? v : v + in);
            const int64_t y = (half_steps + 1) >> 1;
            out[first + i] = code < 0 ? -y : y;
        }
    }
}

bool fill_joint(const ExactKernels& kernels, Cipher cipher, const Stream& stream, const Stairs& stairs, int64_t count,
                int64_t* out) {
    const ExactShape shape = exact_geometric(double(stairs.half), PLAIN);
    for (uint32_t attempt = 0; attempt < 1u << 15; ++attempt) {
        const Stream now = {stream.key, stream.step, stream.example | attempt << 16, stream.purpose};
        fill_exact(kernels, cipher, now, shape, count, out);
        int64_t r = 0;
        for (int64_t i = 0; i < count; ++i) r += out[i] < 0 ? -out[i] : out[i];
        const int64_t steps = r / stairs.period + (r % stairs.period >= stairs.inner);
        const uint64_t q = uint64_t(steps * stairs.period - r + stairs.inner), half = uint64_t(stairs.half);
        uint32_t w[4];
        cipher(*now.key, 0, now.example, now.step, now.purpose + kSecond, 1, w);
        int n;
        const Wide e = exp_minus(Wide(q % half) * kLn2 / half, n);
        // The coin's 128 bits and 32 zeros.
        const int shift = n + int(std::min<uint64_t>(q / half, 1000));
        if (below(w[0], uint64_t(w[1]) << 32 | w[2], uint64_t(w[3]) << 32, 1, e << 32, shift)) return true;
    }
    return false;
}

}  // namespace fedveil
