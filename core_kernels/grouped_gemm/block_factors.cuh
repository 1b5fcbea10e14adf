// Scales of blocks: one fp32 number per row of A and 128 of k, and one per 128 rows of B and 128 of k.
//
//   sum[m, n] += row[m, k] square[n / 128, k] partial[m, n]     partial: the products of one stage, 128 of k
//
// A tile has 128 columns from a multiple of 128 on: one square per stage, so that a factor belongs to a row. An fma
// takes the place of the addition; a thread has two factors per half of its rows. A factor per column too would cost
// half of the product's rate.
//
// A thread loads the scales of its four rows itself, two stages ahead: memory takes longer than one.
#pragma once

#include "cuda/sm90.cuh"
#include "grouped_gemm/folded_epilogue.cuh"

namespace mxep::cuda::sm90 {

class BlockFactors {
 public:
  // `row`: of the tile, the thread's first; the others are 8, 64 and 72 behind it. Rows past the array take the scale
  // of its last row; they are not stored.
  __device__ BlockFactors(const Problem& p, const Tile& tile, int row) : p_(p) {
    const int blocks = (p.depth + kTileK - 1) / kTileK, squares = (p.cols + kTileN - 1) / kTileN;
    const int group = tile.b_row / p.cols, square = (tile.b_row - group * p.cols) / kTileN + group * squares;
#pragma unroll
    for (int i = 0; i < 4; ++i) row_[i] = min(tile.row_scale + row + i / 2 * 64 + i % 2 * 8, p.rows - 1) * blocks;
    // The addend is 0, which the compiler does not know. It takes a value that all lanes share into a uniform register
    // at once, and waits for the load.
    square_ = (tile.cols > 0 ? square * blocks : 0) + (row_[0] >> 31);
    next_ = fetch(blocks > 1);
    later_ = fetch(blocks > 2);
  }

  // The factors of a stage: two of each half of 64 rows. `more`: at least three stages follow.
  __device__ __forceinline__ void take(float (&factor)[2][2], bool more) {
#pragma unroll
    for (int i = 0; i < 4; ++i) factor[i / 2][i % 2] = next_.row[i] * next_.square;
    next_ = later_;
    later_ = fetch(more);
  }

 private:
  struct Scales {
    float square, row[4];
  };

  // The scales of a stage; the next call's are those of the next stage if there are `more`.
  __device__ __forceinline__ Scales fetch(bool more) {
    Scales scales;
    scales.square = load(p_.block_scale.square, square_);
    square_ += more;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scales.row[i] = load(p_.block_scale.row, row_[i]);
      row_[i] += more;
    }
    return scales;
  }
  static __device__ __forceinline__ float load(const float* from, int at) {
    float scale;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(scale) : "l"(from + static_cast<uint32_t>(at)));
    return scale;
  }

  const Problem& p_;
  int square_, row_[4];  // where those of the next fetch are
  Scales next_, later_;
};

}  // namespace mxep::cuda::sm90
