// Maxima of tiles whose CTAs have not published them, computed from x with few registers, because the CTA's own tile
// fills the register file.
//
//   column_maxima     a span's 256 rows of four columns a lane      tile_row_maxima   a warp's 32 rows of one tile
#pragma once

#include "cuda/mx_math.cuh"
#include "fold/magnitudes.cuh"
#include "formats.h"
#include "quantize/register_tile.cuh"

namespace mxep::cuda {

// The largest magnitudes of four columns, `col` and on, in the kSpan rows from `row` on: scale bytes + 1; 0 for NaN
// blocks.
template <typename Source>
__device__ uint32_t column_maxima(const Source& x, int64_t row, int64_t col, ScaleRule rule) {
  using Pair = typename Source::Pair;
  uint32_t largest = 0;
#pragma unroll 1
  for (int block = 0; block < kSpan / kBlock; ++block) {
    Pair left = Pair::both(0), right = Pair::both(0);
#pragma unroll 4
    for (int i = 0; i < kBlock; ++i, ++row) {
      const auto four = x.four(row, col);
      left = max_magnitude(left, four.at[0]);
      right = max_magnitude(right, four.at[1]);
    }
    left = left.magnitude();
    right = right.magnitude();
    const uint32_t bytes = e8m0_from_amax(left.low_bits(), rule) | e8m0_from_amax(left.high_bits(), rule) << 8 |
                           e8m0_from_amax(right.low_bits(), rule) << 16 | e8m0_from_amax(right.high_bits(), rule) << 24;
    largest = __vmaxu4(largest, __vadd4(bytes, kOnes));
  }
  return largest;
}

// The largest magnitudes of 32 rows, `row` and on, in the tile that begins at column `left`. A lane's result is of rows
// lane % 8 * 4 to lane % 8 * 4 + 3. Called by whole warps.
template <typename T, typename Value>
__device__ uint32_t tile_row_maxima(const Value* x, int64_t cols, ScaleRule rule, int64_t row, int64_t left) {
  const int lane = threadIdx.x % 32;
  const int64_t col = left + lane * T::kColumns;
  const bool exists = col < cols;  // the same for all lanes of a block
  x += row * cols + (exists ? col : 0);
  uint32_t own = 0;
#pragma unroll 1
  for (int word = 0; word < kBlock / 4; ++word) {
    uint32_t magnitudes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i, x += cols) {
      const auto values = load_row<true, typename T::Row>(x, T::kColumns);
      uint32_t amax = 0;  // fp32 bits: a NaN has the largest
#pragma unroll
      for (int p = 0; p < T::kPairs; ++p) {
        const auto two = values.at[p].magnitude();
        amax = max(amax, max(two.low_bits(), two.high_bits()));
      }
#pragma unroll
      for (int step = 1; step < T::kBlockLanes; step *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, step));
      uint32_t magnitude = exists ? (e8m0_from_amax(amax, rule) + 1) & 0xFF : 0;
#pragma unroll
      for (int step = T::kBlockLanes; step < 32; step *= 2)
        magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, step));
      magnitudes |= magnitude << i * 8;
    }
    if (lane % 8 == word) own = magnitudes;
  }
  return own;
}

}  // namespace mxep::cuda
