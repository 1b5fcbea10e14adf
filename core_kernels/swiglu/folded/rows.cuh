// Rows of computed values, quantized and folded in registers: a lane has 8 neighbouring values of a few rows, four
// lanes have a block.
#pragma once

#include "fold/code_tile.cuh"
#include "swiglu/tile.cuh"

namespace mxep::cuda {

// The largest magnitudes of the left and of the right values of pairs.
__device__ inline Bf16x2 largest(const Vector8& values) {
  return max_magnitude(max_magnitude(values.at[0], values.at[1]), max_magnitude(values.at[2], values.at[3]));
}

// The factor that quantizes a block, as bf16, above the power that folds its codes to `scale`, as f16.
__device__ inline uint32_t folding_scale(uint32_t byte, uint32_t scale) {
  return __byte_perm(fold_power(byte, scale), inverse_scale(byte), 0x7610);
}

// A value of a pair times a factor, which is the upper half of a word; the lower half is zero. The lower half of the
// product is zero too, so that it is an fp32 number without another instruction. The sum with `zeros`, -0 above 0,
// keeps the sign of a zero. Infinity is not allowed, since its product with zero is not zero.
__device__ inline float scaled(Bf16x2 values, int half, uint32_t factor, uint32_t zeros) {
  uint32_t product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(both_halves(values.bits, half)), "r"(factor), "r"(zeros));
  return __uint_as_float(product);
}

// The codes of a lane's values in a block. `zeros`: 0x80000000. kInfinite: of any values.
template <bool kInfinite>
__device__ uint2 folded_codes(const Vector8& values, uint32_t folding_scale, uint32_t zeros) {
  const uint32_t factor = folding_scale & 0xFFFF0000u, power = both_halves(folding_scale, 0);
  uint32_t codes[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const Bf16x2 a = values.at[2 * j], b = values.at[2 * j + 1];
    if constexpr (kInfinite) {
      const Bf16x2 x = a * Bf16x2::both(factor), y = b * Bf16x2::both(factor);
      codes[j] = e4m3x4(x.low(), x.high(), y.low(), y.high());
    } else {
      codes[j] = e4m3x4(scaled(a, 0, factor, zeros), scaled(a, 1, factor, zeros), scaled(b, 0, factor, zeros),
                        scaled(b, 1, factor, zeros));
    }
    codes[j] = folded(codes[j], power);
  }
  return make_uint2(codes[0], codes[1]);
}

// Quantizes and folds a lane's rows. `least`: of the row whose scale the lane has, the scale that its blocks have at
// least; -1 for none. `q` and `sf`: addresses of the first vector's codes and of its block's own scale.
__device__ inline void fold_rows(const Vector8 (&vectors)[kRowsAtOnce], ScaleRule rule, int least, uint8_t* q,
                                 int64_t q_pitch, uint8_t* sf, int64_t sf_pitch) {
  uint32_t words[kRowsAtOnce / 2];
#pragma unroll
  for (int w = 0; w < kRowsAtOnce / 2; ++w) words[w] = row_word({largest(vectors[2 * w]), largest(vectors[2 * w + 1])});
  const uint32_t byte = e8m0_from_amax(exchanged_amax(words), rule);
  sf[threadIdx.x % kRowsAtOnce * sf_pitch] = byte;
  const uint32_t scale = folding_scale(byte, max(static_cast<int>(byte), least));
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r, q += q_pitch)
    *reinterpret_cast<uint2*>(q) = folded_codes<true>(vectors[r], __shfl_sync(~0u, scale, r, kRowsAtOnce), 0);
}

}  // namespace mxep::cuda
