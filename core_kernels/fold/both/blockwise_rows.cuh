// Rows of a register tile in blockwise FP8. A tile of bf16 is one block of 128 columns wide: a warp has whole blocks.
//
//   row_maxima, of 8 lanes --two more steps--> maxima of 4 rows in each lane --> scales --> factors --shuffle--> q
#pragma once

#include "cuda/mx_math.cuh"
#include "formats.h"
#include "quantize/register_tile.cuh"

namespace mxep::cuda {

// The scale of a block from the fp32 bits of its largest magnitude; NaN unless it is finite. See
// quantize/cpu_blockwise.cc. `rule`: of powers of two.
__device__ inline float block_scale(uint32_t amax, ScaleRule rule, bool power_of_two) {
  const float power = __uint_as_float(max(e8m0_from_amax(amax, rule), 1u) << 23);
  const float scale = power_of_two ? power : __fdiv_rn(__uint_as_float(amax), 448.0f);
  return amax < kInf ? fmaxf(scale, __uint_as_float(kSmallestScale)) : __uint_as_float(kNan);
}

// `q`: the address of the thread's first value, `sf`: of the scale of its warp's first row, whose rows are `blocks`
// scales apart. exists: of the thread's columns.
template <typename T>
__device__ void quantize_rows_blockwise(const T& tile, ScaleRule rule, bool power_of_two, uint8_t* q, uint32_t pitch,
                                        float* sf, int64_t blocks, bool exists) {
  using Pair = typename T::Pair;
  constexpr int kStride = Pair::kRowsPerWord, kLaneWords = T::kWords / T::kBlockLanes, kLaneRows = kLaneWords * kStride;
  static_assert(T::kCols == kSquare && T::kColumns == 4 && kLaneRows == 4);
  uint32_t words[T::kWords];
  row_maxima(tile, words);
  const int lane = threadIdx.x % 32;
  float factors[kLaneRows];
#pragma unroll
  for (int w = 0; w < kLaneWords; ++w) {
    uint32_t word = exists ? words[w] : 0;
#pragma unroll
    for (int step = T::kBlockLanes; step < 32; step *= 2)
      word = Pair::max_words(word, __shfl_xor_sync(~0u, word, step));
#pragma unroll
    for (int i = 0; i < kStride; ++i) {
      const int r = w * kStride + i;
      const float scale = block_scale(Pair::word_bits(word, i), rule, power_of_two);
      if (lane < T::kBlockLanes) sf[(lane * kLaneRows + r) * blocks] = scale;
      factors[r] = __fdiv_rn(1.0f, scale);
    }
  }
#pragma unroll
  for (int r = 0; r < kBlock; ++r) {
    const float by = __shfl_sync(~0u, factors[r % kLaneRows], r / kLaneRows, T::kBlockLanes);
    const Pair x = tile.rows[r].at[0], y = tile.rows[r].at[1];
    const uint32_t codes =
        e4m3x4(__fmul_rn(x.low(), by), __fmul_rn(x.high(), by), __fmul_rn(y.low(), by), __fmul_rn(y.high(), by));
    if (exists) *reinterpret_cast<uint32_t*>(at_row(q, pitch, r)) = codes;
  }
}

}  // namespace mxep::cuda
