// Scales of blocks: one fp32 number per row of A and 128 of k, and one per 128 rows of B and 128 of k.
//
//   sum[m, n] += row[m, k] square[n / 128, k] partial[m, n]     partial: the products of one stage, 128 of k
//
// A tile has 128 columns from a multiple of 128 on: one square per stage, so that a factor belongs to a row. An fma
// takes the place of the addition; a thread has two factors per half of its rows. A factor per column too would cost
// half of the product's rate.
//
//   memory --four stages ahead--> one number per row and lane of four --x square--> factors of four stages
//                                                                        shuffle --> the stage's factor
//
// The four lanes of a row hold the factors of four stages, one each. Shuffles run one product ahead: behind the wait
// for a product they would delay its additions.
#pragma once

#include "cuda/sm90.cuh"
#include "grouped_gemm/folded/epilogue.cuh"

namespace mxep::cuda::sm90 {

class BlockFactors {
 public:
  // `row`: of the tile, the thread's first; the others are 8, 64 and 72 behind it. Rows past the array take the scale
  // of its last row; they are not stored.
  __device__ BlockFactors(const Problem& p, const Tile& tile, int row)
      : from_(p.block_scale), last_((p.depth + kTileK - 1) / kTileK - 1), at_(threadIdx.x % kTogether) {
    const int blocks = last_ + 1, squares = (p.cols + kTileN - 1) / kTileN;
    const int group = tile.b_row / p.cols, square = (tile.b_row - group * p.cols) / kTileN + group * squares;
#pragma unroll
    for (int i = 0; i < 4; ++i) row_[i] = min(tile.row_scale + row + i / 2 * 64 + i % 2 * 8, p.rows - 1) * blocks;
    square_ = tile.cols > 0 ? square * blocks : 0;
    fetch();
    reach(0);
  }

  // Goes on with the first stage of another product, whose scales have the same shapes.
  __device__ __forceinline__ void restart(const BlockScalePointers& from) {
    from_ = from;
    at_ = threadIdx.x % kTogether;
    fetch();
    reach(0);
  }

  // Called while a product runs, before the factors of the stage at `k` are taken.
  __device__ __forceinline__ void reach(int k) {
    stage_ = k / kTileK % kTogether;
    if (stage_ == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) factors_[i] = next_[i] * next_square_;
      fetch();
    }
  }

  // The two factors of one half of 64 rows.
  __device__ __forceinline__ void take(float (&factor)[2], int half) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) factor[i] = __shfl_sync(~0u, factors_[half * 2 + i], stage_, kTogether);
  }

 private:
  static constexpr int kTogether = 4;  // stages, and the lanes of a row

  // The scales of the next four stages; past the end, the scales of the last.
  __device__ __forceinline__ void fetch() {
    const int at = min(at_, last_);
    at_ += kTogether;
    next_square_ = load(from_.square, square_ + at);
#pragma unroll
    for (int i = 0; i < 4; ++i) next_[i] = load(from_.row, row_[i] + at);
  }
  static __device__ __forceinline__ float load(const float* from, int at) {
    float scale;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(scale) : "l"(from + static_cast<uint32_t>(at)));
    return scale;
  }

  BlockScalePointers from_;
  int last_, at_;        // the last stage; this lane's stage of the next fetch
  int stage_;            // reached, of four
  int square_, row_[4];  // where their first scales are
  float factors_[4], next_square_, next_[4];
};

}  // namespace mxep::cuda::sm90
