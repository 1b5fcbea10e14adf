// A stage with blocks apart, in pieces: steps of 32 with the same powers of two (blocks_apart.cuh).
//
//   note --> pieces --start--> partial, of 64 rows --fma--> sum
//                                 '-- of the values whose power changes: 0 before the next piece
//
// Instructions that a tile executes once come from beyond the first instruction cache, at about four cycles each: the
// time of such a stage is the length of its code. Hence one code for all columns with the same powers, and no code per
// column.
#pragma once

#include <type_traits>

#include "grouped_gemm/blocks_apart.cuh"

namespace mxep::cuda::sm90 {

// 2^(row + col - 254), 2^127 at most; 0 if either is 2^-127.
__device__ __forceinline__ float factor_of(int row_power, int col_power) {
  return fminf(__int_as_float(row_power << 23) * __int_as_float(col_power << 23), 0x1p127f);
}

// The pieces of a stage for one warpgroup. Constructed by whole warps.
class Pieces {
 public:
  // `row`: the warp's first of the part `of_rows`.
  __device__ __forceinline__ Pieces(const BlocksApart& note, int of_rows, int of_cols, int row)
      : note_(note), of_rows_(of_rows), of_cols_(of_cols), row_(row + threadIdx.x % 32 / 4) {
    const BlocksApart::Summary rows = note.of[of_rows], cols = note.of[of_cols];
    none_ = __all_sync(~0u, !rows.differ() && !cols.differ() && rows.common + cols.common == 2 * kOne * 0x01010101u);
    by_row_ = __all_sync(~0u, !cols.differ());
    changes_ = __shfl_sync(~0u, rows.some() | cols.some(), 0);
    all_change_ = __shfl_sync(~0u, (rows.all() & ~cols.some()) | (cols.all() & ~rows.some()), 0);
  }

  // Whether all powers are 0: all rows and all columns are apart in opposite directions.
  __device__ __forceinline__ bool none() const { return none_; }
  // Whether the stage is one piece, and all columns have one power.
  __device__ __forceinline__ bool one() const { return by_row_ && (changes_ & 0xFF) == 0; }
  __device__ __forceinline__ bool by_row() const { return by_row_; }
  // Of 64 rows: the steps of the piece that begins at `step`, and whether it begins with new partials.
  __device__ __forceinline__ int steps(int half, int step) const {
    return __ffs(((changes_ >> half * kStepsOfStage & 0xF) | 1 << kStepsOfStage) >> (step + 1));
  }
  __device__ __forceinline__ bool is_new(int half, int step) const {
    return by_row_ && (all_change_ >> half * kStepsOfStage >> step & 1);
  }

  // Of this thread's row i, 0 or 1, of 64.
  __device__ __forceinline__ int row_power(int half, int step, int i) const {
    return note_.power[of_rows_][step][row_ + half * 64 + i * 8];
  }
  // Where all columns have one power.
  __device__ __forceinline__ float row_factor(int half, int step, int i) const {
    return factor_of(row_power(half, step, i), note_.of[of_cols_].common >> step * 8 & 0xFF);
  }
  // Of columns 4 i to 4 i + 3, i the lane.
  __device__ __forceinline__ uint32_t col_powers(int step) const {
    return reinterpret_cast<const uint32_t*>(note_.power[of_cols_][step])[threadIdx.x % 32];
  }

 private:
  const BlocksApart& note_;
  int of_rows_, of_cols_, row_;
  uint32_t changes_, all_change_;
  bool none_, by_row_;
};

// Where the power of a sum changes after a piece: sum + factor * partial, and partial = 0. After the last piece, of
// all, and partials are left. Columns with the same powers at a time.
class FactorChange {
 public:
  // From step `now` to step `next`; finds the first columns, so that a product can run meanwhile.
  __device__ __forceinline__ FactorChange(const Pieces& pieces, int half, int now, int next)
      : last_(next == kStepsOfStage), left_(~0u) {
    if (last_) next = now;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row_now_[i] = pieces.row_power(half, now, i);
      row_next_[i] = pieces.row_power(half, next, i);
    }
    cols_now_ = pieces.col_powers(now);
    cols_next_ = pieces.col_powers(next);
    find();
  }

  __device__ __forceinline__ void apply(float (&sum)[64], float (&partial)[64]) {
    uint32_t changed[2] = {};
#pragma unroll 1
    for (; found_; find()) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        changed[row] |= changes_[row];
        if (!__any_sync(~0u, changes_[row] != 0)) continue;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const int at = index(row, i);
          if (changes_[row] & 1u << i) sum[at] = fmaf(partial[at], factor_[row], sum[at]);
        }
      }
    }
    if (last_) return;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      if (!__any_sync(~0u, changed[row] != 0)) continue;
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (changed[row] & 1u << i) partial[index(row, i)] = 0;
    }
  }

 private:
  // Of this thread's column i, in wgmma's layout.
  static constexpr __device__ int index(int row, int i) { return i / 2 * 4 + row * 2 + i % 2; }

  __device__ __forceinline__ void find() {
    const int lane = threadIdx.x % 32;
    const uint32_t lanes = __ballot_sync(~0u, left_ != 0);
    found_ = lanes != 0;
    if (!found_) return;
    const int first = (__ffs(left_) - 1) & 24;
    const uint32_t both = (cols_now_ >> first & 0xFF) | (cols_next_ >> first & 0xFF) << 8;
    const uint32_t of = __shfl_sync(~0u, both, __ffs(lanes) - 1);
    const int now = of & 0xFF, next = of >> 8;
    const uint32_t differ = (cols_now_ ^ now * 0x01010101u) | (cols_next_ ^ next * 0x01010101u);
    uint32_t equal[4];  // bit i: column 4 i, 4 i + 1, ..
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool is = (differ & 0xFFu << i * 8) == 0;
      equal[i] = __ballot_sync(~0u, is);
      if (is) left_ &= ~(0xFFu << i * 8);
    }
    // A thread has columns 8 i + c and 8 i + c + 1, c = 2 (lane % 4): a bit each.
    const uint32_t even = lane & 1 ? equal[2] : equal[0], odd = lane & 1 ? equal[3] : equal[1];
    const uint32_t columns =
        lane & 2 ? (even >> 1 & 0x55555555u) | (odd & 0xAAAAAAAAu) : (even & 0x55555555u) | (odd & 0x55555555u) << 1;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      factor_[row] = factor_of(row_now_[row], now);
      changes_[row] = last_ || row_now_[row] + now != row_next_[row] + next ? columns : 0;
    }
  }

  bool last_, found_;
  uint32_t left_, cols_now_, cols_next_, changes_[2];
  int row_now_[2], row_next_[2];
  float factor_[2];
};

// start(partial, half, step, steps, accumulate) starts a product of 64 x 128 x 32 steps.
template <typename Start>
__device__ __forceinline__ void multiply_in_pieces(float (&sum)[2][64], const Pieces& pieces, const Start& start) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float partial[64] = {};  // without a value here the compiler keeps their registers in other stages too
#pragma unroll 1
    for (int step = 0; step < kStepsOfStage;) {
      const int steps = pieces.steps(half, step), now = step;
      const bool accumulate = !pieces.is_new(half, step);
      const auto start_steps = [&]<int kSteps>() {
        start(partial, half, step, std::integral_constant<int, kSteps>{}, accumulate);
      };
      if (steps == 4) {
        start_steps.template operator()<4>();
      } else if (steps == 3) {
        start_steps.template operator()<3>();
      } else if (steps == 2) {
        start_steps.template operator()<2>();
      } else {
        start_steps.template operator()<1>();
      }
      step += steps;
      if (pieces.by_row() && (step == kStepsOfStage || pieces.is_new(half, step))) {
        const float factor[2] = {pieces.row_factor(half, now, 0), pieces.row_factor(half, now, 1)};
        wgmma_wait();
#pragma unroll
        for (int i = 0; i < 64; ++i) sum[half][i] = fmaf(partial[i], factor[i / 2 % 2], sum[half][i]);
      } else {
        FactorChange change(pieces, half, now, step);
        wgmma_wait();
        change.apply(sum[half], partial);
      }
    }
  }
}

}  // namespace mxep::cuda::sm90
