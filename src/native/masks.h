// Masks of the secure sum: AES-256 counter streams added to words. The definition is src/fedveil/secure_sum/masks.py.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace fedveil {

// Zeros that stay: of memory that is freed next, compilers leave out a plain memset.
inline void wipe(void* data, size_t bytes) {
    std::memset(data, 0, bytes);
    asm volatile("" : : "r"(data) : "memory");
}

struct MaskKey {
    alignas(16) uint8_t round[15][16];
    bool subtract;
};

// Adds the stream of every key to `bytes` bytes of little-endian words, as wide as the name says, modulo 2**width.
struct MaskKernels {
    void (*expand)(const uint8_t* key, MaskKey& out);
    void (*add32)(const MaskKey* keys, int count, uint8_t* words, size_t bytes);
    void (*add64)(const MaskKey* keys, int count, uint8_t* words, size_t bytes);
};

// By name: "vaes512" (four blocks at once), "vaes" (two) or "aes"; null if this CPU has no such instructions. There are no tables here: where
// there are no instructions a library that takes as long for every key does the work.
const MaskKernels* mask_kernels(const char* name);

}  // namespace fedveil
