// Epilogue of a folded product: two powers of two and one rounding.
//
//   sum --round--x 2^row--x 2^column--> out
//   sum --x 2^row--x 2^column + bias--round--> out
#pragma once

#include <cuda_bf16.h>

#include "grouped_gemm/schedule.cuh"
#include "grouped_gemm/staged_store.cuh"

namespace mxep::cuda::sm90 {

constexpr int kTileM = 256, kTileN = 128, kTileK = 128, kHalfM = kTileM / 2, kHalfN = kTileN / 2;

// K-grouped: groups end at multiples of 32. M-grouped: tiles may be flat.
template <bool kAlongK, bool kTwin>
using FoldedSchedule = Schedule<kAlongK, kTileM, kTileN, kAlongK ? 32 : 1, kTwin, !kAlongK>;

constexpr int kNanScale = kE8m0Nan, kOne = 127;

// 2^(byte - 127); byte 0 is a subnormal number.
__device__ __forceinline__ float power(int byte) { return __int_as_float(byte ? byte << 23 : kE8m0Smallest); }

// x * 2^(row + col - 254) without intermediate overflow: each factor is half of the exponent.
__device__ __forceinline__ float scaled_extreme(float x, int row, int col) {
  const int half = (row + col) >> 1;
  const float value = x * power(half) * power(row + col - half);
  return row == kNanScale || col == kNanScale ? __int_as_float(kNan) : value;
}

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

// Stores the 64 x 128 sums of a warpgroup; this warp has 16 rows from `row` of the tile on. `factor`: of this thread's
// two rows. `col_factor`: of all its columns, in pairs. kScaled: the sums are scaled already.
template <typename Out, bool kScaled = false>
__device__ __forceinline__ void store(const Problem& p, const Tile& tile, int row, const float (&sum)[64],
                                      const float (&factor)[2], const __nv_bfloat162 (&col_factor)[16],
                                      uint8_t* staging) {
  const auto scaled = [&](int at, int of) {
    if constexpr (kScaled) return rounded<Out>(sum[at], sum[at + 1]);
    if constexpr (sizeof(Out) == 2) {
      const auto row_factor = __bfloat162bfloat162(__float2bfloat16_rn(factor[of]));
      return __hmul2(__hmul2(rounded<Out>(sum[at], sum[at + 1]), row_factor), col_factor[at / 4]);
    } else {
      const float2 cols = __bfloat1622float2(col_factor[at / 4]);
      return float2{sum[at] * factor[of] * cols.x, sum[at + 1] * factor[of] * cols.y};
    }
  };
  store_rows<Out, kTileN>(p, tile, row, scaled, staging);
}

}  // namespace mxep::cuda::sm90
