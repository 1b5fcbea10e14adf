// A warp's sums to the output of a folded K-grouped product, without a wait for the stores.
//
//   registers --> boxes of 16 rows of 128 bytes, in shared memory --TMA store--> out       during the next tile
//
// A warp has four boxes: the bf16 values of a tile, half of the fp32 values. Each pair of boxes is a group of stores of
// lane 0, which waits until the group before the last one has read its boxes. Then the warp writes to these again.
#pragma once

#include "cuda/sm90.cuh"
#include "grouped_gemm/schedule/schedule.cuh"
#include "grouped_gemm/schedule/staged_store.cuh"

namespace mxep::cuda::sm90 {

constexpr int kBoxesOfGroup = 2, kAsyncStagingBytes = 2 * kBoxesOfGroup * kStagingBytes;  // of a warp

// As store_rows, for the first or the second half of a warpgroup's rows. out: a map with boxes of 16 rows of 128 bytes,
// in the 128-byte swizzle, which is the order of `staged`. boxes: kAsyncStagingBytes of the warp.
template <typename Out, int kWidth, typename Pair>
__device__ __forceinline__ void store_rows_async(const CUtensorMap& out, const Tile& tile, int row, int half,
                                                 const Pair& pair, uint8_t* boxes) {
  constexpr int kCols = 128 / sizeof(Out), kGroupCols = kBoxesOfGroup * kCols;
  const int lane = threadIdx.x % 32;
  const bool issues = lane == 0;
  // Four pointers: with offsets from one, the compiler needs 24 instructions more for a bf16 tile.
  uint8_t* const at[] = {boxes, boxes + kStagingBytes, boxes + 2 * kStagingBytes, boxes + 3 * kStagingBytes};
#pragma unroll
  for (int first = 0; first < kWidth; first += kGroupCols) {
    const int box = (half * kWidth + first) / kGroupCols % 2 * kBoxesOfGroup;
    if (issues) stores_wait_read<1>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kBoxesOfGroup; ++i) stage_rows<Out>(first + i * kCols, lane, pair, at[box + i]);
    shared_to_async_fence();
    __syncwarp();
    if (issues) {
      const int group = tile.slot - tile.k_begin / kSpan;
#pragma unroll
      for (int i = 0; i < kBoxesOfGroup; ++i) {
        const int col = first + i * kCols;
        if (row < tile.rows && col < tile.cols)
          store_box(&out, at[box + i], (tile.b_row + col) * static_cast<int>(sizeof(Out)), tile.a_row + row, group);
      }
      stores_commit();
    }
  }
}

// Called when no tile is left: shared memory is read until the stores end.
__device__ __forceinline__ void end_stores() {
  if (threadIdx.x % 32 == 0) stores_wait();
}

}  // namespace mxep::cuda::sm90
