// Columns folded to the scales that their groups of rows are known to have.
#pragma once

#include "quantize_tile.cuh"

namespace mxep::cuda {

// Groups of rows and the scale byte of each one's columns, to which their blocks are folded.
struct Groups {
  const int32_t* ends;
  const uint8_t* scales;
  int count;

  // Where group `lane` ends.
  __device__ int32_t first_ends() const {
    const int lane = threadIdx.x % 32;
    return lane < count ? __ldg(ends + lane) : 0;
  }
  // The first group that ends behind `row`, which the whole warp asks for; `count` past the last end.
  __device__ int find(int64_t row, int32_t end) const {
    const int lane = threadIdx.x % 32;
    int first = 0;
#pragma unroll 1
    while (true) {
      const uint32_t behind = __ballot_sync(~0u, end > row);
      if (behind) return first + __ffs(behind) - 1;
      first += 32;
      if (first >= count) return count;
      end = first + lane < count ? __ldg(ends + first + lane) : 0;
    }
  }
};

// As many bytes as a lane has columns, the first lowest. Zero where there are fewer than `cols` columns.
template <typename T, bool kVector>
__device__ uint32_t load_bytes(const uint8_t* from, int64_t cols) {
  uint32_t bytes = 0;
  if constexpr (!kVector) {
#pragma unroll
    for (int i = 0; i < T::kColumns; ++i)
      if (i < cols) bytes |= from[i] << 8 * i;
  } else if (cols > 0) {
    if constexpr (T::kColumns == 4)
      bytes = __ldg(reinterpret_cast<const uint32_t*>(from));
    else
      bytes = __ldg(reinterpret_cast<const uint16_t*>(from));
  }
  return bytes;
}

// The codes of the codes, under `scales` of the lane's columns instead of their blocks' own.
template <typename T>
__device__ void fold_columns(const T& tile, ScaleRule rule, uint32_t scales, auto& columns) {
  for_column_pairs(tile, [&](const typename T::Pair* values, int block, int col) {
    const auto bytes = TwoScales::of(values, rule);
    const uint32_t to = scales >> 8 * (col % T::kColumns);
    // 448 * 2^-32 is zero, and so is what is smaller.
    const int up[] = {max(static_cast<int>(bytes.low - (to & 0xFF)), -32),
                      max(static_cast<int>(bytes.high - (to >> 8 & 0xFF)), -32)};
    const uint32_t powers[] = {f16x2_power(up[0]), f16x2_power(up[1])};
    columns.put(values, bytes.template factor<typename T::Pair>(), block, col,
                [&](uint4 codes, int i) { return folded(codes, powers[i]); });
    // A scale above the group's, which group_scales never gives. Steps up lose nothing, and 18 saturate all but zero.
    if (__any_sync(~0u, max(up[0], up[1]) > 15)) {
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        const int exponent = i < 2 ? up[0] : up[1];
        uint4& chunk = columns.codes[col + i / 2][columns.swizzled(2 * block + i % 2, col)];
        if (exponent > 15) chunk = folded(chunk, f16x2_power(min(exponent, 18) - 15));
      }
    }
  });
}

}  // namespace mxep::cuda
