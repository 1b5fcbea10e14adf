// From a warp's sums to the output: two powers of two, one rounding, lines of 128 bytes.
//
//   registers, as wgmma leaves them --x 2^row --round--> x 2^column --> 16 rows of 128 bytes in shared memory --> out
//
// A thread holds pairs of neighbouring columns of two rows. Stored from there, a row would go out in pieces of four
// bytes; through shared memory 8 lanes write 128 bytes of one row.
#pragma once

#include <cuda_bf16.h>

#include "folded_schedule.cuh"
#include "sm90.cuh"

namespace mxep::cuda::sm90 {

constexpr int kStagingBytes = 16 * 128;  // of one warp

constexpr int kNanScale = 255, kOne = 127;

// 2^(byte - 127); the smallest is a subnormal number.
__device__ __forceinline__ float power(int byte) { return __int_as_float(byte ? byte << 23 : 0x00400000); }

// x * 2^(row + col - 254) wherever that leads: half of the way is in range if the end is.
__device__ __forceinline__ float scaled_far(float x, int row, int col) {
  const int half = (row + col) >> 1;
  const float value = x * power(half) * power(row + col - half);
  return row == kNanScale || col == kNanScale ? __int_as_float(0x7FC00000) : value;
}

// Applies the scales one by one. `sum`: two products of 64 x 128, row_byte: this thread's rows of each, col_factor: the
// scale bytes as bf16 exponents.
__device__ __forceinline__ void scale_far(float (&sum)[2][64], int (&row_byte)[2][2], const __nv_bfloat16* col_factor) {
#pragma unroll
  for (int i = 0; i < 128; ++i) {
    const int half = i / 64, col = i % 64 / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    float& x = sum[half][i % 64];
    x = scaled_far(x, row_byte[half][i / 2 % 2], __bfloat16_as_ushort(col_factor[col]) >> 7);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) row_byte[i / 2][i % 2] = kOne;
}

// A sum times two such factors is a normal number of bf16, so that it may be rounded between them.
__device__ __forceinline__ bool is_near(int byte) { return byte > 87 && byte < 167; }

// 16-byte pieces of a row of 128 bytes change places by row, so that eight rows of one piece, or one row of all pieces,
// touch every bank once.
__device__ __forceinline__ int staged(int row, int piece) { return row * 128 + ((piece ^ row % 8) * 16); }

// The 64 x 128 sums of a warpgroup, of which this warp has 16 rows from `row` on (counted in the tile), to out.
// `factor` are those of this thread's two rows, `col_factor` of all its columns, two and two.
template <typename Out>
__device__ __forceinline__ void store(const Problem& p, const Tile& tile, int row, const float (&sum)[64],
                                      const float (&factor)[2], const __nv_bfloat162 (&col_factor)[16],
                                      uint8_t* staging) {
  constexpr int kCols = 128 / sizeof(Out), kVector = 16 / sizeof(Out);
  const int lane = threadIdx.x % 32, piece = lane % 8;
  const int left = tile.rows - row - lane / 8;
#pragma unroll
  for (int pass = 0; pass < kTileN; pass += kCols) {
    __syncwarp();  // the rows of the pass before have been read
#pragma unroll
    for (int j = 0; j < kCols; j += 16) {
      // sum holds columns 0, 1 of its row 0, the same of row 8, then columns 8, 9 of both, ...
      const int at = (pass + j) / 2;
      if constexpr (sizeof(Out) == 2) {
        __nv_bfloat162 pair[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x = sum[at + 2 * i] * factor[i % 2], y = sum[at + 2 * i + 1] * factor[i % 2];
          pair[i] = __hmul2(__floats2bfloat162_rn(x, y), col_factor[at / 4 + i / 2]);
        }
        const auto bits = reinterpret_cast<const uint32_t*>(pair);
        store_matrices(staging + staged(lane % 16, j / 8 + lane / 16), bits[0], bits[1], bits[2], bits[3]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 cols = __bfloat1622float2(col_factor[at / 4 + i / 2]);
          const int col = j + i / 2 * 8 + lane % 4 * 2, r = lane / 4 + i % 2 * 8;
          *reinterpret_cast<float2*>(staging + staged(r, col / 4) + col % 4 * 4) = {
              sum[at + 2 * i] * factor[i % 2] * cols.x, sum[at + 2 * i + 1] * factor[i % 2] * cols.y};
        }
      }
    }
    __syncwarp();
    const int col = pass + piece * kVector;
    Out* out = static_cast<Out*>(p.out) + tile.out + static_cast<int64_t>(row + lane / 8) * p.cols + col;
#pragma unroll
    for (int i = 0; i < 4; ++i, out += int64_t{4} * p.cols) {
      const uint4 values = *reinterpret_cast<const uint4*>(staging + staged(i * 4 + lane / 8, piece));
      if (i * 4 < left && col < tile.cols) *reinterpret_cast<uint4*>(out) = values;
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
