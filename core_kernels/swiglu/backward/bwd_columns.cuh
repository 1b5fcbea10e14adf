// SwiGLU's gradients along columns: asynchronous loads into a ring of rows, and the quantization of a warp's 32 x 32
// values, of which a lane has 4 rows of 8 columns.
#pragma once

#include "cuda/mx_math.cuh"
#include "formats.h"
#include "swiglu/tile.cuh"

namespace mxep::cuda {

// Starts an asynchronous load of kBytes into shared memory, zeros if `exists` is false. Both addresses are multiples of
// kBytes. L2 fetches whole lines, of which neighbouring warps load the rest: of 64 bytes a row the kernel of
// folded/cuda_bwd_both.cu takes 8% longer.
template <int kBytes>
__device__ void load_async(void* to, const void* from, bool exists) {
  const auto slot = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  const int bytes = exists ? kBytes : 0;
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(slot), "l"(from), "r"(bytes)
                 : "memory");
  else  // L1 keeps the rest of the sector for the neighbouring loads
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(slot), "l"(from), "n"(kBytes), "r"(bytes)
                 : "memory");
}

// Waits for this thread's part of the oldest of kFetched rows.
template <int kFetched>
__device__ void wait_for_row() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kFetched - 1) : "memory");
}

// The slot of 16 codes of a staged column. A warp's words of 8 such chunks, two of every eighth column, are in all
// banks.
__device__ inline int swizzled(int chunk, int line) { return chunk ^ (line / 4 & 7); }

// Quantizes a warp's 32 rows of its 32 columns, block `block` of the staged columns: 8 lanes exchange maxima until each
// has one column's scale, which `put_scale` takes with the number of the column.
template <int kChunks>
__device__ void scale_warp(const Vector8 (&vectors)[kRowsAtOnce], ScaleRule rule, int block,
                           uint4 (&codes)[kBlock][kChunks], auto put_scale) {
  const int lane = threadIdx.x % 32, vector = lane % 4;
  uint32_t words[4];
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    Bf16x2 largest = vectors[0].at[p];
#pragma unroll
    for (int r = 1; r < kRowsAtOnce; ++r) largest = max_magnitude(largest, vectors[r].at[p]);
    words[p] = largest.bits;
  }
  exchange_halves<16, 2>(words, Bf16x2::max_words);
  const uint32_t word = Bf16x2::max_words(words[0], __shfl_xor_sync(~0u, words[0], 4));
  const bool second = lane & 4;  // of the pair that the exchanges left here
  const int thread = (lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2 + second;
  const uint32_t byte = e8m0_from_amax(Bf16x2::word_bits(word, second), rule);
  put_scale(vector * 8 + thread, byte);
  const uint32_t factor = inverse_scale(byte), other = __shfl_xor_sync(~0u, factor, 4);
  const uint32_t factors = second ? Bf16x2::from_bits(other, factor).bits : Bf16x2::from_bits(factor, other).bits;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const Bf16x2 both{__shfl_sync(~0u, factors, p / 2 * 16 + p % 2 * 8 + vector)};
    Bf16x2 v[kRowsAtOnce];
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) v[r] = vectors[r].at[p] * both;
    const int line = vector * 8 + 2 * p, word_at = swizzled(2 * block + lane / 16, line) * 4 + lane / 4 % 4;
    reinterpret_cast<uint32_t*>(codes[line])[word_at] = e4m3x4(v[0].low(), v[1].low(), v[2].low(), v[3].low());
    reinterpret_cast<uint32_t*>(codes[line + 1])[word_at] = e4m3x4(v[0].high(), v[1].high(), v[2].high(), v[3].high());
  }
}

}  // namespace mxep::cuda
