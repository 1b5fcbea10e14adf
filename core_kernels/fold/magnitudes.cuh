// Magnitudes of rows and columns, which CTAs pass to each other through global memory. A magnitude is a scale byte + 1,
// or 0 for NaN blocks alone. Four of them share a word.
#pragma once

#include <cstdint>

namespace mxep::cuda {

inline constexpr uint32_t kOnes = 0x01010101u;

// Of four first spans: the magnitudes of the scales that the blocks of their lines have at least, `octaves` larger.
__device__ inline uint32_t least_magnitudes(uint32_t first, uint32_t octaves) {
  return __vaddus4(first, octaves * kOnes) & __vcmpne4(first, 0);
}

// Loads and stores that bypass L1, since other CTAs run at the same time.
__device__ inline uint32_t poll(const uint32_t* from) {
  uint32_t words;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(words) : "l"(from));
  return words;
}
__device__ inline void publish(uint32_t* to, uint32_t words) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(words));
}

}  // namespace mxep::cuda
