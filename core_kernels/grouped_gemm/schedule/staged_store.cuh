// A warp's sums to the output, in lines of 128 bytes.
//
//   registers, in wgmma's layout --pair--> 16 rows of 128 bytes in shared memory --> out
//
// A thread holds pairs of neighbouring columns of two rows. Direct stores would write a row in parts of four bytes;
// through shared memory, 8 lanes write 128 bytes of one row.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "cuda/sm90.cuh"
#include "grouped_gemm/schedule/schedule.cuh"

namespace mxep::cuda::sm90 {

constexpr int kStagingBytes = 16 * 128;  // per warp

// Two neighbouring values of a row of the output.
template <typename Out>
using OutPair = std::conditional_t<sizeof(Out) == 2, __nv_bfloat162, float2>;

template <typename Out>
__device__ __forceinline__ OutPair<Out> rounded(float x, float y) {
  if constexpr (sizeof(Out) == 2) {
    return __floats2bfloat162_rn(x, y);
  } else {
    return {x, y};
  }
}

// The offset of a 16-byte chunk. The chunks of a row are permuted by row, so that eight rows of one chunk, or one row
// of all chunks, touch every bank once.
__device__ __forceinline__ int staged(int row, int chunk) { return row * 128 + ((chunk ^ row % 8) * 16); }

// Writes this warp's 16 rows of the columns from `pass` on, 128 bytes each, to `staging`. pair: as in store_rows.
template <typename Out, typename Pair>
__device__ __forceinline__ void stage_rows(int pass, int lane, const Pair& pair, uint8_t* staging) {
#pragma unroll
  for (int j = 0; j < 128 / sizeof(Out); j += 16) {
    // A thread's sums are columns 0, 1 of its row 0, the same of row 8, then columns 8, 9 of both, ...
    OutPair<Out> v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = pair((pass + j) / 2 + 2 * i, i % 2);
    if constexpr (sizeof(Out) == 2) {
      const auto bits = reinterpret_cast<const uint32_t*>(v);
      store_matrices(staging + staged(lane % 16, j / 8 + lane / 16), bits[0], bits[1], bits[2], bits[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int col = j + i / 2 * 8 + lane % 4 * 2, r = lane / 4 + i % 2 * 8;
        *reinterpret_cast<float2*>(staging + staged(r, col / 4) + col % 4 * 4) = v[i];
      }
    }
  }
}

// Stores 64 x kWidth values of a warpgroup; this warp has 16 rows from `row` of the tile on. pair(at, of) converts this
// thread's sums at and at + 1, which are of its row `of`, 0 or 1.
template <typename Out, int kWidth, typename Pair>
__device__ __forceinline__ void store_rows(const Problem& p, const Tile& tile, int row, const Pair& pair,
                                           uint8_t* staging) {
  constexpr int kCols = 128 / sizeof(Out), kVector = 16 / sizeof(Out);
  const int lane = threadIdx.x % 32, chunk = lane % 8;
  const int left = tile.rows - row - lane / 8;
#pragma unroll
  for (int pass = 0; pass < kWidth; pass += kCols) {
    __syncwarp();  // the rows of the previous pass have been read
    stage_rows<Out>(pass, lane, pair, staging);
    __syncwarp();
    const int col = pass + chunk * kVector;
    Out* out = static_cast<Out*>(p.out) + tile.out + static_cast<int64_t>(row + lane / 8) * p.cols + col;
#pragma unroll
    for (int i = 0; i < 4; ++i, out += int64_t{4} * p.cols) {
      const uint4 values = *reinterpret_cast<const uint4*>(staging + staged(i * 4 + lane / 8, chunk));
      if (i * 4 < left && col < tile.cols) *reinterpret_cast<uint4*>(out) = values;
    }
  }
}

}  // namespace mxep::cuda::sm90
