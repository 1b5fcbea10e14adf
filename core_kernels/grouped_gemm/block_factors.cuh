// Scales of blocks: one fp32 number per row of A and 128 of k, and one per 128 rows of B and 128 of k.
//
//   sum[m, n] += row[m, k] square[n / 128, k] partial[m, n]     partial: the products of one stage, 128 of k
//
// A tile has 128 columns from a multiple of 128 on: one square per stage, so that a factor belongs to a row. An fma
// with two factors per thread takes the place of the addition. A factor per column too would cost half of the product's
// rate.
//
//   warps 1, 2 of warpgroup 0   row x square --> factor[stage]: 128 rows each, then arrive on full[stage]
//   consumers                   during the first product of a stage: factor[stage] --> registers
#pragma once

#include "cuda/sm90.cuh"
#include "grouped_gemm/folded_epilogue.cuh"
#include "grouped_gemm/tile_queue.cuh"

namespace mxep::cuda::sm90 {

constexpr int kFactorParts = 2;  // warps that provide factors

// Called by whole warps. Rows past the array take the scale of its last row; they are not stored.
template <int kStages>
__device__ void put_factors(const Problem& p, int part, TileSlots& slots, float (&factor)[kStages][kTileM],
                            uint64_t (&full)[kStages], uint64_t (&empty)[kStages]) {
  const int first = part * (kTileM / kFactorParts) + threadIdx.x % 32 * 4;  // of four rows of the tile
  const int blocks = (p.depth + kTileK - 1) / kTileK, squares = (p.cols + kTileN - 1) / kTileN, last = p.rows - 1;
  TileQueue tiles(slots);
  Ring<kStages> ring;
  for (Tile tile; tiles.next(&tile);) {
    int row = tile.row_scale + first;
    const int group = tile.b_row / p.cols;
    const int square = (tile.b_row - group * p.cols) / kTileN + group * squares;
    const float* of_square = p.block_scale.square + (tile.cols > 0 ? square * blocks : 0);
#pragma unroll 1
    for (int block = 0; block < blocks; ++block, ring.advance()) {
      asm volatile("" : "+r"(row));  // nothing is computed ahead of the loop: a thread has 24 registers
      const float* of_row = p.block_scale.row + block;
      const float scale = __ldg(of_square + block);
      const float4 rows = {__ldg(of_row + min(row, last) * blocks), __ldg(of_row + min(row + 1, last) * blocks),
                           __ldg(of_row + min(row + 2, last) * blocks), __ldg(of_row + min(row + 3, last) * blocks)};
      barrier_wait(&empty[ring.stage], ring.parity ^ 1);
      *reinterpret_cast<float4*>(&factor[ring.stage][first]) = {rows.x * scale, rows.y * scale, rows.z * scale,
                                                                rows.w * scale};
      threads_sync<32>(3 + part);  // not __syncwarp, of which no instruction is left: racecheck would see a race
      if (threadIdx.x % 32 == 0) barrier_arrive(&full[ring.stage], cluster_rank());
    }
  }
}

// The factors of this thread's rows from `row` of the tile on: two of each half of 64 rows. `stage`: the address of the
// stage's factors.
__device__ __forceinline__ void load_factors(uint32_t stage, int row, float (&factor)[2][2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm volatile("ld.shared.f32 %0, [%1];"
                 : "=f"(factor[i / 2][i % 2])
                 : "r"(stage + (row + i / 2 * 64 + i % 2 * 8) * 4)
                 : "memory");
  __syncwarp();  // before any lane gives the stage back
}

}  // namespace mxep::cuda::sm90
