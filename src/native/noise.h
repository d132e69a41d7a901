// Counter-mode AES noise streams. The definition is src/fedveil/protect/noise.py; these give the same bits.
#pragma once
#include <cstdint>

namespace fedveil {

struct AesKey {
    alignas(16) uint8_t round[11][16];
};

void expand_key(const uint8_t* key, AesKey& out);

// Encrypts counter blocks first, first + 1, … of the stream (example, step, purpose) into 4 words per block.
using Cipher = void (*)(const AesKey& key, uint32_t first, uint32_t example, uint32_t step, uint32_t purpose,
                        int blocks, uint32_t* out);
Cipher best_cipher();      // the fastest this CPU has
Cipher portable_cipher();  // tables, any CPU
bool has_vaes();

enum Purpose : uint32_t { NORMAL = 1, LAPLACE = 2, STAIRCASE = 3, JOINT = 4 };

struct StaircaseShape {
    float per_lambda;
    uint32_t threshold;
    float slope_in, slope_out;
};

struct ExactKernels;  // exact.h

// Words to values, one set per instruction set. A tile is 8 blocks = 32 words.
struct NoiseKernels {
    void (*normals)(const uint32_t* words, int tiles, float* out);                             // 32 values a tile
    void (*laplaces)(const uint32_t* words, int tiles, float* out);                            // 32 values a tile
    void (*staircases)(const uint32_t* words, int tiles, float* out, const StaircaseShape&);  // 16 values a tile
    // Cipher and normals in one loop; needs VAES; null: there is none.
    void (*normals_with_cipher)(const AesKey& key, uint32_t first, uint32_t example, uint32_t step, int tiles, float* out);
    const ExactKernels* exact;
};

struct Stream {
    const AesKey* key;
    uint32_t step, example, purpose;
};

// Values first … first + count of a stream.
void fill_noise(const NoiseKernels& kernels, Cipher cipher, const Stream& stream, const StaircaseShape* shape,
                int64_t first, int64_t count, float* out);

}  // namespace fedveil
