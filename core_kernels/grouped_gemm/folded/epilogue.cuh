// Epilogue of a folded product: two powers of two and one rounding.
//
//   sum --round--x 2^row--x 2^column--> out
//   sum --x 2^row--x 2^column + bias--round--> out
#pragma once

#include <cuda_bf16.h>

#include "grouped_gemm/schedule/async_store.cuh"
#include "grouped_gemm/schedule/schedule.cuh"
#include "grouped_gemm/schedule/staged_store.cuh"

namespace mxep::cuda::sm90 {

constexpr int kTileM = 256, kTileN = 128, kTileK = 128, kHalfM = kTileM / 2, kHalfN = kTileN / 2;

// K-grouped: groups end at multiples of 32. M-grouped: tiles may be flat.
template <bool kKGrouped, bool kDualOutput>
using FoldedSchedule = Schedule<kKGrouped, kTileM, kTileN, kKGrouped ? 32 : 1, kDualOutput, !kKGrouped>;

constexpr int kNanScale = kE8m0Nan, kOne = 127;

// 2^(byte - 127); byte 0 is a subnormal number.
__device__ __forceinline__ float power(int byte) { return __int_as_float(byte ? byte << 23 : kE8m0Smallest); }

// x * 2^(row + col - 254) without intermediate overflow: each factor is half of the exponent.
__device__ __forceinline__ float scaled_extreme(float x, int row, int col) {
  const int half = (row + col) >> 1;
  const float value = x * power(half) * power(row + col - half);
  return row == kNanScale || col == kNanScale ? __int_as_float(kNan) : value;
}

// A thread's part of a tile. Of a flat tile, each warpgroup has its own columns.
struct Place {
  int group;      // the warpgroup, 0 or 1
  int first_row;  // of the warpgroup in the tile
  int row;        // of the warp in the tile: its 16 rows, and 64 below them 16 more
  int col;        // the thread's number in the warpgroup; the thread loads the scale of this column
  int lane;
  int parity;  // of the tile: the shared memory of even and odd tiles alternates
};

// The scales of one thread, E8M0: of one column, and of its rows, [half][0] and 8 rows below, [half][1].
struct ScaleBytes {
  int col, row[2][2];

  // Called when a tile begins; the scales are used after its products. Scales of empty accumulators are ignored.
  __device__ __forceinline__ void load_column(const uint8_t* col_scale, const Tile& tile, const Place& at) {
    col = any(tile) && at.col < tile.cols ? col_scale[tile.col_scale + at.col] : kOne;
  }
  __device__ __forceinline__ void load_rows(const uint8_t* row_scale, const Tile& tile, const Place& at) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = at.row + i / 2 * 64 + i % 2 * 8 + at.lane / 4;
      row[i / 2][i % 2] = any(tile) && r < tile.rows ? row_scale[tile.row_scale + r] : kOne;
    }
  }

 private:
  static __device__ __forceinline__ bool any(const Tile& tile) { return tile.k_begin < tile.k_end; }
};

// Applies extreme scales one by one. `sum`: two products of 64 x 128; row_byte: the scales of this thread's rows of
// each; col_factor: the scale bytes as bf16 exponents.
__device__ __forceinline__ void scale_extreme(float (&sum)[2][64], int (&row_byte)[2][2],
                                              const __nv_bfloat16* col_factor) {
#pragma unroll
  for (int i = 0; i < 128; ++i) {
    const int half = i / 64, col = i % 64 / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    float& x = sum[half][i % 64];
    x = scaled_extreme(x, row_byte[half][i / 2 % 2], __bfloat16_as_ushort(col_factor[col]) >> 7);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) row_byte[i / 2][i % 2] = kOne;
}

// Accumulators are multiples of 2^-18, the smallest product of two E4M3 numbers. With both scales in 2^-53 to 2^63 the
// scaled value is a normal bf16 or infinite, so that rounding before scaling is exact.
__device__ __forceinline__ bool is_moderate(int byte) { return byte > 73 && byte < 191; }

// Writes the scale of the thread's column as a bf16 exponent to shared memory. Two buffers: when one is written again,
// every warp has passed the barrier of the tile in between.
__device__ __forceinline__ __nv_bfloat16* publish_column(int scale, __nv_bfloat16 (&col_factor)[2][2][kTileN],
                                                         const Place& at) {
  __nv_bfloat16* own = col_factor[at.group][at.parity];
  own[at.col] = __ushort_as_bfloat16(scale << 7);
  return own;
}

// Whether all scales of the warpgroup are moderate; a barrier of the warpgroup. The vote makes the condition uniform
// for the compiler. Without it the compiler duplicates the rest of the tile, treats the loop over tiles as divergent,
// and keeps descriptors in per-thread registers.
__device__ __forceinline__ bool all_moderate(const ScaleBytes& scales, const Place& at, bool vote = true) {
  vote = vote && is_moderate(scales.col);
#pragma unroll
  for (int i = 0; i < 4; ++i) vote &= is_moderate(scales.row[i / 2][i % 2]);
  return __all_sync(~0u, threads_all(1 + at.group, vote));
}

// Called by the warpgroup when the extreme scales are applied: the store applies ones.
__device__ __forceinline__ void reset_column(__nv_bfloat16* col_factor, const Place& at) {
  threads_sync(1 + at.group);
  col_factor[at.col] = 1;
  threads_sync(1 + at.group);
}

// Applies moderate scales and adds the bias. Scaling by powers of two is exact, so that fp32 rounds once. It runs
// before the store: the registers of the store do not hold a third operand.
__device__ __forceinline__ void scale_and_add(float (&sum)[2][64], const int (&row_byte)[2][2],
                                              const __nv_bfloat16* col_factor, const float* bias) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int col = i * 8 + threadIdx.x % 4 * 2;
    const float2 factor = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(col_factor + col));
    const float2 add = *reinterpret_cast<const float2*>(bias + col);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float* x = &sum[j / 2][i * 4 + j % 2 * 2];
      const float row_factor = __int_as_float(row_byte[j / 2][j % 2] << 23);
      x[0] = fmaf(x[0] * row_factor, factor.x, add.x);
      x[1] = fmaf(x[1] * row_factor, factor.y, add.y);
    }
  }
}

// Stores one half of a warpgroup's rows. M-grouped.
template <typename Out, typename Pair>
__device__ __forceinline__ void store_half(const Problem& p, const Tile& tile, const Place& at, int half,
                                           const Pair& pair, uint8_t* staging) {
  store_rows<Out, kTileN>(p, tile, at.row + half * 64, pair, staging);
}
// K-grouped.
template <typename Out, typename Pair>
__device__ __forceinline__ void store_half(const CUtensorMap& out, const Tile& tile, const Place& at, int half,
                                           const Pair& pair, uint8_t* boxes) {
  store_rows_async<Out, kTileN>(out, tile, at.row + half * 64, half, pair, boxes);
}

// Stores a warpgroup's sums and applies moderate scales. to, staging: as in store_half. `col_factor`: of all columns.
template <typename Out, typename To>
__device__ __forceinline__ void store_scaled(const To& to, const Tile& tile, const Place& at, const float (&sum)[2][64],
                                             const int (&row_byte)[2][2], const __nv_bfloat16* col_factor,
                                             uint8_t* staging) {
  __nv_bfloat162 cols[16];  // of this thread, in pairs
#pragma unroll
  for (int i = 0; i < 16; ++i) cols[i] = *reinterpret_cast<const __nv_bfloat162*>(col_factor + i * 8 + at.lane % 4 * 2);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float factor[2] = {__int_as_float(row_byte[half][0] << 23), __int_as_float(row_byte[half][1] << 23)};
    const auto scaled = [&](int i, int row) {
      const float x = sum[half][i], y = sum[half][i + 1];
      if constexpr (sizeof(Out) == 2) {
        const auto row_factor = __bfloat162bfloat162(__float2bfloat16_rn(factor[row]));
        return __hmul2(__hmul2(rounded<Out>(x, y), row_factor), cols[i / 4]);
      } else {
        const float2 col = __bfloat1622float2(cols[i / 4]);
        return float2{x * factor[row] * col.x, y * factor[row] * col.y};
      }
    };
    store_half<Out>(to, tile, at, half, scaled, staging);
  }
}

// Stores a warpgroup's sums, which are scaled already.
template <typename Out>
__device__ __forceinline__ void store_rounded(const Problem& p, const Tile& tile, const Place& at,
                                              const float (&sum)[2][64], uint8_t* staging) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto pair = [&](int i, int) { return rounded<Out>(sum[half][i], sum[half][i + 1]); };
    store_half<Out>(p, tile, at, half, pair, staging);
  }
}

}  // namespace mxep::cuda::sm90
