#include "noise.h"


#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace fedveil {
namespace {

constexpr uint8_t twice(uint8_t x) { return uint8_t((x << 1) ^ ((x & 0x80) ? 0x1b : 0)); }

struct Tables {
    uint8_t sbox[256];
    uint32_t mix[256];  // S-box and column mixing of one byte, little-endian
};

constexpr Tables make_tables() {
    Tables t{};
    // Walk the field with generator 3 (p) and its inverse (q): q is the inverse of p at every step.
    uint8_t p = 1, q = 1;
    do {
        p = uint8_t(p ^ twice(p));
        q = uint8_t(q ^ (q << 1));
        q = uint8_t(q ^ (q << 2));
        q = uint8_t(q ^ (q << 4));
        if (q & 0x80) q = uint8_t(q ^ 0x09);
        uint8_t s = q;
        for (int r = 1; r <= 4; ++r) s = uint8_t(s ^ ((q << r) | (q >> (8 - r))));
        t.sbox[p] = uint8_t(s ^ 0x63);
    } while (p != 1);
    t.sbox[0] = 0x63;
    for (int i = 0; i < 256; ++i) {
        uint32_t s = t.sbox[i], d = twice(t.sbox[i]);
        t.mix[i] = d | (s << 8) | (s << 16) | ((d ^ s) << 24);
    }
    return t;
}

constexpr Tables kTables = make_tables();

inline uint32_t rotate(uint32_t x, int bits) { return (x << bits) | (x >> (32 - bits)); }

inline uint32_t load_word(const uint8_t* p) {
    return uint32_t(p[0]) | (uint32_t(p[1]) << 8) | (uint32_t(p[2]) << 16) | (uint32_t(p[3]) << 24);
}

void cipher_portable(const AesKey& key, uint32_t first, uint32_t example, uint32_t step, uint32_t purpose,
                     int blocks, uint32_t* out) {
    uint32_t k[11][4];
    for (int r = 0; r < 11; ++r)
        for (int i = 0; i < 4; ++i) k[r][i] = load_word(key.round[r] + 4 * i);
    for (int b = 0; b < blocks; ++b, out += 4) {
        uint32_t s[4] = {(first + uint32_t(b)) ^ k[0][0], example ^ k[0][1], step ^ k[0][2], purpose ^ k[0][3]};
        for (int r = 1; r < 10; ++r) {
            uint32_t n[4];
            for (int i = 0; i < 4; ++i)
                n[i] = kTables.mix[s[i] & 255] ^ rotate(kTables.mix[(s[(i + 1) & 3] >> 8) & 255], 8) ^
                       rotate(kTables.mix[(s[(i + 2) & 3] >> 16) & 255], 16) ^
                       rotate(kTables.mix[s[(i + 3) & 3] >> 24], 24) ^ k[r][i];
            std::memcpy(s, n, sizeof s);
        }
        for (int i = 0; i < 4; ++i)
            out[i] = (uint32_t(kTables.sbox[s[i] & 255]) | uint32_t(kTables.sbox[(s[(i + 1) & 3] >> 8) & 255]) << 8 |
                      uint32_t(kTables.sbox[(s[(i + 2) & 3] >> 16) & 255]) << 16 |
                      uint32_t(kTables.sbox[s[(i + 3) & 3] >> 24]) << 24) ^
                     k[10][i];
    }
}

#if defined(__x86_64__)
__attribute__((target("aes,sse4.1"))) void cipher_aesni(const AesKey& key, uint32_t first, uint32_t example,
                                                        uint32_t step, uint32_t purpose, int blocks,
                                                        uint32_t* out) {
    __m128i k[11];
    for (int r = 0; r < 11; ++r) k[r] = _mm_load_si128(reinterpret_cast<const __m128i*>(key.round[r]));
    const __m128i base = _mm_set_epi32(int(purpose), int(step), int(example), 0);
    int b = 0;
    for (; b + 8 <= blocks; b += 8) {
        __m128i s[8];
        for (int i = 0; i < 8; ++i) s[i] = _mm_xor_si128(_mm_insert_epi32(base, int(first + uint32_t(b + i)), 0), k[0]);
        for (int r = 1; r < 10; ++r)
            for (int i = 0; i < 8; ++i) s[i] = _mm_aesenc_si128(s[i], k[r]);
        for (int i = 0; i < 8; ++i)
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 4 * (b + i)), _mm_aesenclast_si128(s[i], k[10]));
    }
    for (; b < blocks; ++b) {
        __m128i s = _mm_xor_si128(_mm_insert_epi32(base, int(first + uint32_t(b)), 0), k[0]);
        for (int r = 1; r < 10; ++r) s = _mm_aesenc_si128(s, k[r]);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 4 * b), _mm_aesenclast_si128(s, k[10]));
    }
}

__attribute__((target("vaes,avx512f"))) void cipher_vaes(const AesKey& key, uint32_t first, uint32_t example,
                                                         uint32_t step, uint32_t purpose, int blocks,
                                                         uint32_t* out) {
    __m512i k[11];
    for (int r = 0; r < 11; ++r)
        k[r] = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(key.round[r])));
    const __m512i base = _mm512_broadcast_i32x4(_mm_set_epi32(int(purpose), int(step), int(example), int(first)));
    const __m512i lane = _mm512_set_epi32(0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0);
    const __m512i four = _mm512_set_epi32(0, 0, 0, 4, 0, 0, 0, 4, 0, 0, 0, 4, 0, 0, 0, 4);
    __m512i counter = _mm512_add_epi32(base, lane);
    int b = 0;
    for (; b + 32 <= blocks; b += 32) {
        __m512i s[8];
        for (int i = 0; i < 8; ++i) {
            s[i] = _mm512_xor_si512(counter, k[0]);
            counter = _mm512_add_epi32(counter, four);
        }
        for (int r = 1; r < 10; ++r)
            for (int i = 0; i < 8; ++i) s[i] = _mm512_aesenc_epi128(s[i], k[r]);
        for (int i = 0; i < 8; ++i) _mm512_storeu_si512(out + 4 * b + 16 * i, _mm512_aesenclast_epi128(s[i], k[10]));
    }
    for (; b < blocks; b += 4) {
        __m512i s = _mm512_xor_si512(counter, k[0]);
        counter = _mm512_add_epi32(counter, four);
        for (int r = 1; r < 10; ++r) s = _mm512_aesenc_epi128(s, k[r]);
        s = _mm512_aesenclast_epi128(s, k[10]);
        const int n = std::min(4, blocks - b);
        _mm512_mask_storeu_epi32(out + 4 * b, __mmask16((1u << (4 * n)) - 1), s);
    }
}
#endif

}  // namespace

void expand_key(const uint8_t* key, AesKey& out) {
    std::memcpy(out.round[0], key, 16);
    uint8_t constant = 1;
    for (int r = 1; r < 11; ++r) {
        const uint8_t* before = out.round[r - 1];
        uint8_t* now = out.round[r];
        for (int i = 0; i < 4; ++i) now[i] = uint8_t(before[i] ^ kTables.sbox[before[12 + ((i + 1) & 3)]]);
        now[0] = uint8_t(now[0] ^ constant);
        constant = twice(constant);
        for (int i = 4; i < 16; ++i) now[i] = uint8_t(before[i] ^ now[i - 4]);
    }
}

Cipher portable_cipher() { return cipher_portable; }

bool has_vaes() {
#if defined(__x86_64__)
    static const bool found = [] {  // asking the CPU itself: not every compiler knows this feature by name
        unsigned a = 0, b = 0, c = 0, d = 0;
        return __builtin_cpu_supports("avx512f") && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 9 & 1);
    }();
    return found;
#else
    return false;
#endif
}

Cipher best_cipher() {
#if defined(__x86_64__)
    if (has_vaes()) return cipher_vaes;
    if (__builtin_cpu_supports("aes") && __builtin_cpu_supports("sse4.1")) return cipher_aesni;
#endif
    return cipher_portable;
}

void fill_noise(const NoiseKernels& kernels, Cipher cipher, const Stream& stream, const StaircaseShape* shape,
                int64_t first, int64_t count, float* out) {
    constexpr int kTiles = 64;
    alignas(64) uint32_t words[kTiles * 32];
    alignas(64) float values[kTiles * 32];
    const int per_tile = stream.purpose == STAIRCASE ? 16 : 32;
    const bool fused = stream.purpose == NORMAL && kernels.normals_with_cipher && cipher == best_cipher() && has_vaes();
    int64_t done = 0;
    while (done < count) {
        const int64_t at = first + done, tile = at / per_tile, skip = at - tile * per_tile;
        int tiles = int(std::min<int64_t>(kTiles, (skip + count - done + per_tile - 1) / per_tile));
        if (skip) tiles = 1;  // then whole tiles follow
        const bool direct = fused && (skip == 0 && count - done >= per_tile);
        if (direct) {  // every whole tile that is left, at once
            const int64_t whole = (count - done) / per_tile;
            const int now = int(std::min<int64_t>(whole, 1 << 20));
            kernels.normals_with_cipher(*stream.key, uint32_t(tile * 8), stream.example, stream.step, now, out + done);
            done += int64_t(now) * per_tile;
            continue;
        }
        cipher(*stream.key, uint32_t(tile * 8), stream.example, stream.step, stream.purpose, tiles * 8, words);
        const int64_t n = std::min<int64_t>(int64_t(tiles) * per_tile - skip, count - done);
        // Whole tiles go straight to their place; a first or last part goes through a buffer.
        const bool whole = skip == 0 && n == int64_t(tiles) * per_tile;
        float* to = whole ? out + done : values;
        if (stream.purpose == NORMAL)
            kernels.normals(words, tiles, to);
        else if (stream.purpose == STAIRCASE)
            kernels.staircases(words, tiles, to, *shape);
        else
            kernels.laplaces(words, tiles, to);
        if (!whole) std::memcpy(out + done, values + skip, size_t(n) * sizeof(float));
        done += n;
    }
}

}  // namespace fedveil
