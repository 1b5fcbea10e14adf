// From a warp's sums to the output: one rounding, whole rows of 256 bytes.
//
//   registers, as wgmma leaves them --> 16 rows of 256 bytes in shared memory --> out
//
// A thread holds pairs of neighbouring columns of two rows. Stored from there, a row would go out in pieces of four
// bytes; through shared memory 16 lanes write 256 bytes of one row.
#pragma once

#include <cuda_bf16.h>

#include "folded_schedule.cuh"
#include "sm90.cuh"

namespace mxep::cuda::sm90 {

constexpr int kStagingBytes = 16 * 256;  // of one warp

// 16-byte pieces of a row of 256 bytes change places by row, so that eight rows of one piece, or one row of all pieces,
// touch every bank once.
__device__ __forceinline__ int staged(int row, int piece) { return row * 256 + ((piece ^ row % 8) * 16); }

// 64 x kWidth values of a warpgroup, of which this warp has 16 rows from `row` on (counted in the tile), to out.
// pair(at, col, of): what becomes of this thread's sums at and at + 1, columns col and col + 1 of its row `of`, 0 or 1.
template <typename Out, int kWidth, typename Pair>
__device__ __forceinline__ void store_rows(const Problem& p, const Tile& tile, int row, const Pair& pair,
                                           uint8_t* staging) {
  constexpr int kCols = 256 / sizeof(Out), kVector = 16 / sizeof(Out);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int pass = 0; pass < kWidth; pass += kCols) {
    __syncwarp();  // the rows of the pass before have been read
#pragma unroll
    for (int j = 0; j < kCols; j += 16) {
      // A thread's sums are columns 0, 1 of its row 0, the same of row 8, then columns 8, 9 of both, ...
      float2 v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = pair((pass + j) / 2 + 2 * i, pass + j + i / 2 * 8 + lane % 4 * 2, i % 2);
      if constexpr (sizeof(Out) == 2) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const __nv_bfloat162 both = __floats2bfloat162_rn(v[i].x, v[i].y);
          packed[i] = reinterpret_cast<const uint32_t&>(both);
        }
        store_matrices(staging + staged(lane % 16, j / 8 + lane / 16), packed[0], packed[1], packed[2], packed[3]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int col = j + i / 2 * 8 + lane % 4 * 2, r = lane / 4 + i % 2 * 8;
          *reinterpret_cast<float2*>(staging + staged(r, col / 4) + col % 4 * 4) = v[i];
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = i * 2 + lane / 16, piece = lane % 16, col = pass + piece * kVector;
      const uint4 values = *reinterpret_cast<const uint4*>(staging + staged(r, piece));
      if (row + r >= tile.rows || col >= tile.cols) continue;
      Out* out = static_cast<Out*>(p.out) + tile.out + static_cast<int64_t>(row + r) * p.cols + col;
      *reinterpret_cast<uint4*>(out) = values;
    }
  }
}

// Rows past the last of at least one group are zeros. `thread` of `threads`: this one among those of all CTAs that take
// part.
template <typename Out>
__device__ void clear_rest(const Problem& p, int64_t thread, int64_t threads) {
  constexpr int kVector = 16 / sizeof(Out);
  const int used = min(max(p.group_ends[p.groups - 1], 0), p.rows);
  const int64_t end = static_cast<int64_t>(p.rows) * p.cols;
  for (int64_t i = static_cast<int64_t>(used) * p.cols + thread * kVector; i < end; i += threads * kVector)
    *reinterpret_cast<uint4*>(static_cast<Out*>(p.out) + i) = {};
}

}  // namespace mxep::cuda::sm90
