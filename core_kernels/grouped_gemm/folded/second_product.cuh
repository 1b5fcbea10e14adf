// The sum of two folded products: the accumulator changes from the units of the first to the units of the second.
//
//   sum of the first product, units 2^(row + col) --x 2^(row - row2 + col - col2)--> + the second product --> epilogue
//
// A factor outside 2^-kFar to 2^kFar is replaced by the nearest limit. The larger product then absorbs the smaller one,
// unless one is zero. A sum of E4M3 products is zero or at least 2^-18, and below 2^kLargest for any depth. The
// epilogue reads from the size of a value which units the value has.
#pragma once

#include "cuda/sm90.cuh"
#include "grouped_gemm/folded/epilogue.cuh"

namespace mxep::cuda::sm90 {

constexpr int kFar = 96, kLargest = 50;
constexpr int kNear = 40;  // row and column factors of 2^-kNear to 2^kNear need no test per value

// A warpgroup's scale bytes of the first product minus its scale bytes of the second product, in shared memory.
// kNanChange: the scale of the first product is NaN, and so is the sum.
struct UnitChange {
  int16_t row[128], col[128];
};
constexpr int kNanChange = 512;

// The scale bytes of a row or of a column in both products.
struct TwoScaleBytes {
  int first, second;

  // The compiler must not compute it where the loads are: a tile would begin by waiting for them.
  __device__ __forceinline__ int change() {
    asm volatile("" : "+r"(first), "+r"(second));
    return first == kNanScale ? kNanChange : first - second;
  }
};

__device__ __forceinline__ float power_of_difference(int octaves) { return __int_as_float(kOne + octaves << 23); }

// `2^octaves` as a product of two factors.
__device__ __forceinline__ void halves(int octaves, float (&factor)[2]) {
  factor[0] = power(kOne + (octaves >> 1));
  factor[1] = power(kOne + octaves - (octaves >> 1));
}

// Index i of a warpgroup's sums -> row and first column of the warpgroup's tile.
__device__ __forceinline__ int sum_row(int i) {
  return i / 64 * 64 + i / 2 % 2 * 8 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
}
__device__ __forceinline__ int sum_col(int i) { return i % 64 / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

// Called by a warpgroup between the products; `row_scales` and `col_scales` belong to the row and the column with
// the thread's number. Returns whether all changes are near.
__device__ __forceinline__ bool change_units(float (&sum)[2][64], TwoScaleBytes row_scales, TwoScaleBytes col_scales,
                                             UnitChange& change, int barrier) {
  const int thread = threadIdx.x % 128, row = row_scales.change(), col = col_scales.change();
  change.row[thread] = static_cast<int16_t>(row);
  change.col[thread] = static_cast<int16_t>(col);
  // The vote makes the result uniform for the compiler, as at the end of a tile.
  const bool near = __all_sync(~0u, threads_all(barrier, abs(row) <= kNear && abs(col) <= kNear));
  if (near) {
    float rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[i] = power_of_difference(change.row[sum_row(i / 2 * 64 + i % 2 * 2)]);
#pragma unroll
    for (int i = 0; i < 64; i += 4) {
      const auto two = *reinterpret_cast<const short2*>(&change.col[sum_col(i)]);
      const float cols[2] = {power_of_difference(two.x), power_of_difference(two.y)};
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j / 4][i + j % 4] *= rows[j / 2] * cols[j % 2];
    }
  } else {
    // In two factors of half the exponent: their product is 2^-254 to 2^254, limited to 2^-kFar to 2^kFar.
    float rows[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) halves(change.row[sum_row(i / 2 * 64 + i % 2 * 2)], rows[i]);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      float col[2];
      halves(change.col[sum_col(i / 2 * 4 + i % 2)], col);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float factor = rows[j][0] * col[0] * (rows[j][1] * col[1]);
        sum[j / 2][i / 2 * 4 + j % 2 * 2 + i % 2] *=
            fminf(fmaxf(factor, power_of_difference(-kFar)), power_of_difference(kFar));
      }
      __syncwarp();  // loads ahead would take registers that there are not
    }
  }
  return near;
}

// Applies the scales one by one, as scale_extreme does, also where a difference of units was cut off at kFar.
// row_byte, col_factor: of the second product.
__device__ __forceinline__ void scale_far(float (&sum)[2][64], int (&row_byte)[2][2], const __nv_bfloat16* col_factor,
                                          const UnitChange& change) {
#pragma unroll
  for (int i = 0; i < 128; ++i) {
    int row = row_byte[i / 64][i / 2 % 2], col = __bfloat16_as_ushort(col_factor[sum_col(i)]) >> 7;
    const int row_change = change.row[sum_row(i)], col_change = change.col[sum_col(i)];
    const int octaves = row_change + col_change;
    if (row_change == kNanChange || col_change == kNanChange) row = kNanScale;
    float& x = sum[i / 64][i % 64];
    const bool first_alone = octaves > kFar ? fabsf(x) > power_of_difference(kLargest)
                                            : octaves < -kFar && fabsf(x) < power_of_difference(kLargest - kFar);
    if (first_alone && row != kNanScale) {  // back to the first product's own units
      x *= power_of_difference(octaves > 0 ? -kFar : kFar);
      row += row_change;
      col += col_change;
    }
    x = scaled_extreme(x, row, col);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) row_byte[i / 2][i % 2] = kOne;
}

}  // namespace mxep::cuda::sm90
