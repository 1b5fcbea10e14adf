// Where the tiles of cuda.cu come from. A source gives a thread's tile, four neighbouring values, and prefetches what
// `later` has found.
//
//   Floats<Value>   x (M, K) bf16 or fp32
//   MxRows          q (M, K) E4M3, sf (M, K/32) E8M0, as bf16 values: 1 byte per value is read instead of 2 or 4
//   PackedRows      packed (R, K + K/32), row_map (M,): the same of gathered rows, zeros for padding
#pragma once

#include "cuda/mx_math.cuh"
#include "quantize/register_tile.cuh"

namespace mxep::cuda {

template <typename P>
struct FourValues {
  P at[2];
};

// Prefetches into L2 a row of each lane, `row` plus its number, in the columns of a tile.
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
  __device__ int64_t later(int64_t row) const { return row; }
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

// Codes and scales of MXFP8 as bf16 values.
struct MxValues {
  using Pair = Bf16x2;
  using Four = FourValues<Pair>;
  static constexpr bool kRowsToo = false;

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
  // The tile of a lane: its codes of 32 rows, and the scales of four of them; the eight lanes of the block have all 32.
  template <typename T>
  static __device__ T tile_of(const uint32_t (&codes)[kBlock], const Bf16x2 (&scales)[4]) {
    static_assert(T::kColumns == 4 && T::kBlockLanes == 8);
    T tile;
#pragma unroll
    for (int r = 0; r < kBlock; ++r) {
      const Four values = scaled(codes[r], {__shfl_sync(~0u, scales[r % 4].bits, r / 4, T::kBlockLanes)});
      tile.rows[r] = {{values.at[0], values.at[1]}};
    }
    return tile;
  }
};

struct MxRows : MxValues {
  const uint8_t *q, *sf;
  int64_t rows, cols;

  template <typename T>
  __device__ T tile(int64_t row, int64_t col, bool exists) const {
    const uint8_t* from = exists ? q + row * cols + col : q;
    const int64_t blocks = cols / kBlock;
    const uint8_t* scale = exists ? sf + (row + threadIdx.x % 8 * 4) * blocks + col / kBlock : sf;
    Bf16x2 scales[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) scales[i] = scale_of(__ldg(scale + (exists ? i * blocks : 0)));
    uint32_t codes[kBlock];
#pragma unroll
    for (int r = 0; r < kBlock; ++r)
      codes[r] = __ldg(reinterpret_cast<const uint32_t*>(at_row(from, static_cast<uint32_t>(cols), r)));
    return tile_of<T>(codes, scales);
  }
  __device__ int64_t later(int64_t row) const { return row; }
  template <typename T>
  __device__ void prefetch(int64_t row, int64_t left) const {
    prefetch_rows<T>(q, rows, cols, row, left);
  }
  __device__ Four four(int64_t row, int64_t col) const {
    const uint32_t codes = __ldg(reinterpret_cast<const uint32_t*>(q + row * cols + col));
    return scaled(codes, scale_of(__ldg(sf + row * (cols / kBlock) + col / kBlock)));
  }
};

// Rows begin at multiples of 4 bytes.
struct PackedRows : MxValues {
  const uint8_t* packed;
  const int32_t* row_map;
  int64_t sources, rows, cols;  // of packed; of the map; values of a row

  __device__ int64_t width() const { return cols + cols / kBlock; }
  // The packed row of a row, -1 for padding. A row that does not exist counts as padding.
  __device__ int source(int64_t row) const {
    const int from = __ldg(row_map + row);
    return from < sources ? from : -1;
  }

  template <typename T>
  __device__ T tile(int64_t row, int64_t col, bool exists) const {
    // Each lane reads the map of one row.
    const int lane = threadIdx.x % 32, own = __any_sync(~0u, exists) ? source(row + lane) : -1;
    const uint8_t* from = packed + (exists ? col : 0);
    const uint8_t* scale = packed + cols + (exists ? col / kBlock : 0);
    const auto width = static_cast<uint32_t>(this->width());
    Bf16x2 scales[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int of = __shfl_sync(~0u, own, lane % 8 * 4 + i);
      scales[i] = scale_of(of < 0 ? 0 : __ldg(scale + static_cast<uint64_t>(of) * width));
    }
    uint32_t codes[kBlock];
#pragma unroll
    for (int r = 0; r < kBlock; ++r) {
      const int of = __shfl_sync(~0u, own, r);
      codes[r] = of < 0 ? 0 : __ldg(reinterpret_cast<const uint32_t*>(from + static_cast<uint64_t>(of) * width));
    }
    return tile_of<T>(codes, scales);
  }
  // The packed row that the lane prefetches. The map is read long before the address is needed.
  __device__ int later(int64_t row) const {
    row += threadIdx.x % 32;
    return row < rows ? source(row) : -1;
  }
  // A row of the tile may lie in two cache lines.
  template <typename T>
  __device__ void prefetch(int of, int64_t left) const {
    if (of < 0) return;
    const uint8_t* from = packed + of * width() + left;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + min(cols - left, int64_t{T::kCols}) - 1));
  }
  __device__ Four four(int64_t row, int64_t col) const {
    const int of = source(row);
    if (of < 0) return {{Pair::both(0), Pair::both(0)}};
    const uint8_t* from = packed + of * width();
    return scaled(__ldg(reinterpret_cast<const uint32_t*>(from + col)), scale_of(__ldg(from + cols + col / kBlock)));
  }
};

}  // namespace mxep::cuda
