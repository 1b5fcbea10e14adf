// Where the tiles of cuda.cu come from. A source gives a thread's tile, four neighbouring values, and prefetches.
//
//   Floats<Value>   x (M, K) bf16 or fp32
//   MxRows          q (M, K) E4M3, sf (M, K/32) E8M0, as bf16 values: 1 byte per value is read instead of 2 or 4
#pragma once

#include "cuda/mx_math.cuh"
#include "quantize/register_tile.cuh"

namespace mxep::cuda {

template <typename P>
struct FourValues {
  P at[2];
};

// Prefetches into L2 the rows of a warp, `row` on, in the columns of a tile.
template <typename T, typename Value>
__device__ void prefetch_rows(const Value* x, int64_t rows, int64_t cols, int64_t row, int64_t left) {
  constexpr int kLine = 128 / sizeof(Value);
  row += threadIdx.x % 32;
  if (row >= rows) return;
#pragma unroll
  for (int i = 0; i < T::kCols; i += kLine)
    if (left + i < cols) asm volatile("prefetch.global.L2 [%0];" ::"l"(x + row * cols + left + i));
}

template <typename Value>
struct Floats {
  using Pair = decltype(pair_of(Value{}, Value{}));
  using Four = FourValues<Pair>;
  static constexpr bool kRowsToo = true;  // the rows are folded as well as the columns
  const Value* x;
  int64_t rows, cols;

  template <typename T>
  __device__ T tile(int64_t row, int64_t col, bool exists) const {
    return load_tile<T, true>(x, Grid{rows, cols, 0, 0, 0, 0}, ThreadSlice{row * cols + col, cols - col, exists});
  }
  template <typename T>
  __device__ void prefetch(int64_t row, int64_t left) const {
    prefetch_rows<T>(x, rows, cols, row, left);
  }
  __device__ Four four(int64_t row, int64_t col) const {
    using Vector = std::conditional_t<sizeof(Value) == 2, uint2, uint4>;
    const Vector bits = __ldg(reinterpret_cast<const Vector*>(x + row * cols + col));
    return reinterpret_cast<const Four&>(bits);
  }
};

struct MxRows {
  using Pair = Bf16x2;
  using Four = FourValues<Pair>;
  static constexpr bool kRowsToo = false;
  const uint8_t *q, *sf;
  int64_t rows, cols;

  // Two codes, in the upper bytes of two halves -> values times 2^-120, which are the bits of E4M3 in the fields of
  // bf16. The code of NaN, 0x7F, gets all exponent bits.
  static __device__ Bf16x2 unscaled(uint32_t codes) {
    const uint32_t magnitude = codes >> 4 & 0x07F007F0u, nan = magnitude + 0x00100010u & 0x08000800u;
    return {codes & 0x80008000u | magnitude | nan * 15};
  }
  // Four codes times `scale`: exact up to the one rounding to bf16.
  static __device__ Four scaled(uint32_t codes, Bf16x2 scale) {
    const Bf16x2 bias{0x7B807B80u};  // 2^120
    return {{unscaled(__byte_perm(codes, 0, 0x1404)) * bias * scale,
             unscaled(__byte_perm(codes, 0, 0x3424)) * bias * scale}};
  }
  // A scale in both halves.
  static __device__ Bf16x2 scale_of(uint32_t byte) {
    const uint32_t bits = byte == 255 ? 0x7FC0u : byte ? byte << 7 : 0x0040u;
    return {bits * 0x00010001u};
  }

  template <typename T>
  __device__ T tile(int64_t row, int64_t col, bool exists) const {
    static_assert(T::kColumns == 4 && T::kBlockLanes == 8);
    const uint8_t* from = exists ? q + row * cols + col : q;
    // A lane loads the scales of four rows of its block; the eight lanes of the block have all 32.
    const int64_t blocks = cols / kBlock;
    const uint8_t* scale = exists ? sf + (row + threadIdx.x % 8 * 4) * blocks + col / kBlock : sf;
    Bf16x2 scales[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) scales[i] = scale_of(__ldg(scale + (exists ? i * blocks : 0)));
    uint32_t codes[kBlock];
#pragma unroll
    for (int r = 0; r < kBlock; ++r)
      codes[r] = __ldg(reinterpret_cast<const uint32_t*>(at_row(from, static_cast<uint32_t>(cols), r)));
    T tile;
#pragma unroll
    for (int r = 0; r < kBlock; ++r) {
      const Four values = scaled(codes[r], {__shfl_sync(~0u, scales[r % 4].bits, r / 4, T::kBlockLanes)});
      tile.rows[r] = {{values.at[0], values.at[1]}};
    }
    return tile;
  }
  template <typename T>
  __device__ void prefetch(int64_t row, int64_t left) const {
    prefetch_rows<T>(q, rows, cols, row, left);
  }
  __device__ Four four(int64_t row, int64_t col) const {
    const uint32_t codes = __ldg(reinterpret_cast<const uint32_t*>(q + row * cols + col));
    return scaled(codes, scale_of(__ldg(sf + row * (cols / kBlock) + col / kBlock)));
  }
};

}  // namespace mxep::cuda
