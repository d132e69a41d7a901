#include "masks.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace fedveil {

#if defined(__x86_64__)
namespace {

#define FV_AES __attribute__((target("aes,sse4.1")))
#define FV_VAES __attribute__((target("vaes,aes,avx2")))
#define FV_VAES512 __attribute__((target("vaes,aes,avx512f")))
constexpr int kTile = 256;    // bytes that are enciphered side by side: enough to hide the latency of a round
constexpr int kPiece = 4096;  // bytes that get all masks before the next ones do

FV_AES __m128i folded(__m128i key, __m128i assisted) {
    key = _mm_xor_si128(key, _mm_slli_si128(key, 4));
    key = _mm_xor_si128(key, _mm_slli_si128(key, 8));
    return _mm_xor_si128(key, assisted);
}

template <int Constant>
FV_AES void two_rounds(__m128i& even, __m128i& odd) {
    even = folded(even, _mm_shuffle_epi32(_mm_aeskeygenassist_si128(odd, Constant), 0xff));
    odd = folded(odd, _mm_shuffle_epi32(_mm_aeskeygenassist_si128(even, 0), 0xaa));
}

FV_AES void expand(const uint8_t* key, MaskKey& out) {
    __m128i* to = reinterpret_cast<__m128i*>(out.round);
    __m128i even = _mm_loadu_si128(reinterpret_cast<const __m128i*>(key));
    __m128i odd = _mm_loadu_si128(reinterpret_cast<const __m128i*>(key + 16));
    int r = 0;
    const auto keep = [&]() FV_AES {
        _mm_store_si128(to + r++, even);
        if (r < 15) _mm_store_si128(to + r++, odd);
    };
    keep();
    two_rounds<0x01>(even, odd), keep();
    two_rounds<0x02>(even, odd), keep();
    two_rounds<0x04>(even, odd), keep();
    two_rounds<0x08>(even, odd), keep();
    two_rounds<0x10>(even, odd), keep();
    two_rounds<0x20>(even, odd), keep();
    two_rounds<0x40>(even, odd), keep();
}

template <class Word, bool Subtract>
FV_AES void tile_aes(const MaskKey& key, uint64_t block, uint8_t* words) {
    const __m128i* k = reinterpret_cast<const __m128i*>(key.round);
    for (int half = 0; half < 2; ++half, words += 128) {
        __m128i s[8];
        for (int i = 0; i < 8; ++i, ++block)
            s[i] = _mm_xor_si128(_mm_set_epi64x(int64_t(__builtin_bswap64(block)), 0), k[0]);
        for (int r = 1; r < 14; ++r)
            for (int i = 0; i < 8; ++i) s[i] = _mm_aesenc_si128(s[i], k[r]);
        for (int i = 0; i < 8; ++i) {
            s[i] = _mm_aesenclast_si128(s[i], k[14]);
            __m128i* at = reinterpret_cast<__m128i*>(words + 16 * i);
            const __m128i w = _mm_loadu_si128(at);
            if constexpr (sizeof(Word) == 4)
                _mm_storeu_si128(at, Subtract ? _mm_sub_epi32(w, s[i]) : _mm_add_epi32(w, s[i]));
            else
                _mm_storeu_si128(at, Subtract ? _mm_sub_epi64(w, s[i]) : _mm_add_epi64(w, s[i]));
        }
    }
}

template <class Word, bool Subtract>
FV_VAES void tile_vaes(const MaskKey& key, uint64_t block, uint8_t* words) {
    const __m128i* k = reinterpret_cast<const __m128i*>(key.round);
    __m256i s[8];
    const __m256i first = _mm256_broadcastsi128_si256(k[0]);
    for (int i = 0; i < 8; ++i, block += 2)
        s[i] = _mm256_xor_si256(
            _mm256_set_epi64x(int64_t(__builtin_bswap64(block + 1)), 0, int64_t(__builtin_bswap64(block)), 0), first);
    for (int r = 1; r < 14; ++r) {
        const __m256i now = _mm256_broadcastsi128_si256(k[r]);
        for (int i = 0; i < 8; ++i) s[i] = _mm256_aesenc_epi128(s[i], now);
    }
    const __m256i last = _mm256_broadcastsi128_si256(k[14]);
    for (int i = 0; i < 8; ++i) {
        s[i] = _mm256_aesenclast_epi128(s[i], last);
        __m256i* at = reinterpret_cast<__m256i*>(words + 32 * i);
        const __m256i w = _mm256_loadu_si256(at);
        if constexpr (sizeof(Word) == 4)
            _mm256_storeu_si256(at, Subtract ? _mm256_sub_epi32(w, s[i]) : _mm256_add_epi32(w, s[i]));
        else
            _mm256_storeu_si256(at, Subtract ? _mm256_sub_epi64(w, s[i]) : _mm256_add_epi64(w, s[i]));
    }
}

using Tile = void (*)(const MaskKey&, uint64_t, uint8_t*);

// Whole tiles in place; the rest through a tile of its own.
template <Tile add, Tile subtract>
void add_streams(const MaskKey* keys, int count, uint8_t* words, size_t bytes) {
    for (size_t piece = 0; piece < bytes; piece += kPiece) {
        const size_t end = bytes - piece < kPiece ? bytes : piece + kPiece;
        for (int m = 0; m < count; ++m) {
            const Tile tile = keys[m].subtract ? subtract : add;
            size_t at = piece;
            for (; at + kTile <= end; at += kTile) tile(keys[m], at / 16, words + at);
            if (at == end) continue;
            uint8_t rest[kTile] = {};
            std::memcpy(rest, words + at, end - at);
            tile(keys[m], at / 16, rest);
            std::memcpy(words + at, rest, end - at);
        }
    }
}

constexpr int kWide = 512;  // bytes of a tile below

// All masks of 512 bytes at once: their counters are the same for every key, and the sum stays in registers.
template <class Word>
FV_VAES512 void tile_vaes512(const MaskKey* keys, int count, uint64_t block, uint8_t* words) {
    __m512i counter[8], total[8];
    for (int i = 0; i < 8; ++i, block += 4) {
        const auto big = [&](int k) { return int64_t(__builtin_bswap64(block + uint64_t(k))); };
        counter[i] = _mm512_set_epi64(big(3), 0, big(2), 0, big(1), 0, big(0), 0);
        total[i] = _mm512_loadu_si512(words + 64 * i);
    }
    for (int m = 0; m < count; ++m) {
        const __m128i* k = reinterpret_cast<const __m128i*>(keys[m].round);
        __m512i s[8];
        const __m512i first = _mm512_broadcast_i32x4(k[0]);
        for (int i = 0; i < 8; ++i) s[i] = _mm512_xor_si512(counter[i], first);
        for (int r = 1; r < 14; ++r) {
            const __m512i now = _mm512_broadcast_i32x4(k[r]);
            for (int i = 0; i < 8; ++i) s[i] = _mm512_aesenc_epi128(s[i], now);
        }
        const __m512i last = _mm512_broadcast_i32x4(k[14]);
        for (int i = 0; i < 8; ++i) {
            s[i] = _mm512_aesenclast_epi128(s[i], last);
            if constexpr (sizeof(Word) == 4)
                total[i] = keys[m].subtract ? _mm512_sub_epi32(total[i], s[i]) : _mm512_add_epi32(total[i], s[i]);
            else
                total[i] = keys[m].subtract ? _mm512_sub_epi64(total[i], s[i]) : _mm512_add_epi64(total[i], s[i]);
        }
    }
    for (int i = 0; i < 8; ++i) _mm512_storeu_si512(words + 64 * i, total[i]);
}

template <class Word>
void add_streams512(const MaskKey* keys, int count, uint8_t* words, size_t bytes) {
    size_t at = 0;
    for (; at + kWide <= bytes; at += kWide) tile_vaes512<Word>(keys, count, at / 16, words + at);
    if (at == bytes) return;
    uint8_t rest[kWide] = {};
    std::memcpy(rest, words + at, bytes - at);
    tile_vaes512<Word>(keys, count, at / 16, rest);
    std::memcpy(words + at, rest, bytes - at);
}

const MaskKernels kAes = {expand, add_streams<tile_aes<uint32_t, false>, tile_aes<uint32_t, true>>,
                          add_streams<tile_aes<uint64_t, false>, tile_aes<uint64_t, true>>};
const MaskKernels kVaes = {expand, add_streams<tile_vaes<uint32_t, false>, tile_vaes<uint32_t, true>>,
                           add_streams<tile_vaes<uint64_t, false>, tile_vaes<uint64_t, true>>};

const MaskKernels kVaes512 = {expand, add_streams512<uint32_t>, add_streams512<uint64_t>};

bool has(const char* name) {
    if (!__builtin_cpu_supports("aes") || !__builtin_cpu_supports("sse4.1")) return false;
    if (std::strcmp(name, "aes") == 0) return true;
    unsigned a = 0, b = 0, c = 0, d = 0;  // not every compiler knows this feature by name
    const bool vaes = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 9 & 1);
    if (std::strcmp(name, "vaes512") == 0) return vaes && __builtin_cpu_supports("avx512f");
    return std::strcmp(name, "vaes") == 0 && vaes && __builtin_cpu_supports("avx2");
}

}  // namespace

const MaskKernels* mask_kernels(const char* name) {
    if (!has(name)) return nullptr;
    if (std::strcmp(name, "vaes512") == 0) return &kVaes512;
    return std::strcmp(name, "vaes") == 0 ? &kVaes : &kAes;
}
#else
const MaskKernels* mask_kernels(const char*) { return nullptr; }
#endif

}  // namespace fedveil
