// Sources of the tiles of cuda.cu. A source gives a thread's tile, four neighbouring values, and prefetches what
// `later` has found.
//
//   Floats<Value>   x (M, K) bf16 or fp32
//   BlockwiseRows   x (M, K) bf16, whose rows are quantized blockwise instead of folded
//   MxRows          q (M, K) E4M3, sf (M, K/32) E8M0, as bf16 values: 1 byte per value is read instead of 2 or 4
//   PackedRows      packed (R, K + K/32), row_map (M,): the same of gathered rows, zeros for padding
#pragma once

#include "cuda/mx_math.cuh"
#include "fold/code_tile.cuh"
#include "quantize/register_tile.cuh"

namespace mxep::cuda {

// What becomes of the rows, besides the folded columns.
enum class Rows { kNone, kFolded, kBlockwise };

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
  template <typename T>
  struct Shared {};
  static constexpr Rows kRows = Rows::kFolded;
  static constexpr int kThreads = 512;  // that a multiprocessor holds
  const Value* x;
  int64_t rows, cols;

  template <typename T>
  __device__ T tile(int64_t row, int64_t col, bool exists, Shared<T>&) const {
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

struct BlockwiseRows : Floats<bf16> {
  static constexpr Rows kRows = Rows::kBlockwise;
  float* sf;
  bool power_of_two;
};

// Common parts of the sources of MXFP8 rows.
struct Codes {
  using Pair = Bf16x2;
  using Four = FourValues<Pair>;
  template <typename T>
  using Shared = RowFactors<T>;
  static constexpr Rows kRows = Rows::kNone;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  static constexpr int kThreads = 512;  // its code for 80 registers spills
#else
  static constexpr int kThreads = 768;  // a lane has codes instead of values, in 80 registers
#endif

  static __device__ Four four_of(uint32_t codes, uint32_t scale) {
    const auto by = MxValues::scale_of(scale);
    return {{MxValues::scaled(codes, 0, by), MxValues::scaled(codes, 1, by)}};
  }
  template <typename T>
  static __device__ uint4* factors_of(Shared<T>& shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return shared.factors[warp][lane / T::kBlockLanes];
  }
};

struct MxRows : Codes {
  const uint8_t *q, *sf;
  int64_t rows, cols;

  template <typename T>
  __device__ CodeTile<T> tile(int64_t row, int64_t col, bool exists, Shared<T>& shared) const {
    const uint8_t* from = exists ? q + row * cols + col : q;
    const int64_t blocks = cols / kBlock;
    const uint8_t* scale = exists ? sf + (row + threadIdx.x % 8 * 4) * blocks + col / kBlock : sf;
    CodeTile<T> tile{.factors = factors_of<T>(shared), .exists = exists};
#pragma unroll
    for (int i = 0; i < 4; ++i) tile.scales[i] = __ldg(scale + (exists ? i * blocks : 0));
#pragma unroll
    for (int r = 0; r < kBlock; ++r)
      tile.codes[r] = __ldg(reinterpret_cast<const uint32_t*>(at_row(from, static_cast<uint32_t>(cols), r)));
    return tile;
  }
  __device__ int64_t later(int64_t row) const { return row; }
  template <typename T>
  __device__ void prefetch(int64_t row, int64_t left) const {
    prefetch_rows<T>(q, rows, cols, row, left);
  }
  __device__ Four four(int64_t row, int64_t col) const {
    const uint32_t codes = __ldg(reinterpret_cast<const uint32_t*>(q + row * cols + col));
    return four_of(codes, __ldg(sf + row * (cols / kBlock) + col / kBlock));
  }
};

// The value of row `row` if `row` is below `end`, or 0. Without these statements the address too is computed under the
// condition, in three times the instructions.
template <typename Value>
__device__ uint32_t load_below(const uint8_t* first, uint32_t width, uint32_t row, uint32_t end) {
  const auto address = reinterpret_cast<uint64_t>(first) + uint64_t{row} * width;
  uint32_t value;
  if constexpr (sizeof(Value) == 4)
    asm("{ .reg .pred below; setp.lt.u32 below, %2, %3; mov.b32 %0, 0; @below ld.global.nc.b32 %0, [%1]; }"
        : "=&r"(value)
        : "l"(address), "r"(row), "r"(end));
  else
    asm("{ .reg .pred below; setp.lt.u32 below, %2, %3; mov.b32 %0, 0; @below ld.global.nc.u8 %0, [%1]; }"
        : "=&r"(value)
        : "l"(address), "r"(row), "r"(end));
  return value;
}

// Rows begin at multiples of 4 bytes.
struct PackedRows : Codes {
  const uint8_t* packed;
  const int32_t* row_map;
  int64_t sources, rows, cols;  // of packed; of the map; values of a row

  __device__ int64_t width() const { return cols + cols / kBlock; }
  // The packed row of a row, -1 for padding. A row that does not exist counts as padding.
  __device__ int source(int64_t row) const {
    const int from = __ldg(row_map + row);
    return from < sources ? from : -1;
  }

  // A warp reads the map of four rows at once, of its first row if its rows do not exist. A packed row that does not
  // exist, padding too, is zeros.
  template <typename T>
  __device__ CodeTile<T> tile(int64_t row, int64_t col, bool exists, Shared<T>& shared) const {
    const bool any = __any_sync(~0u, exists);
    const auto limit = any ? static_cast<uint32_t>(min(sources, int64_t{1} << 31)) : 0;
    const auto map = reinterpret_cast<const uint4*>(row_map + (any ? row : 0));
    const uint8_t* from = packed + (exists ? col : 0);
    const uint8_t* scale = packed + cols + (exists ? col / kBlock : 0);
    asm("" : "+l"(from), "+l"(scale));  // or each row adds up the parts of these addresses again
    // In a register of each lane, where it is a factor of one instruction; in a uniform one it takes another for its
    // upper half.
    const auto width = __shfl_sync(~0u, static_cast<uint32_t>(this->width()), 0);
    CodeTile<T> tile{.factors = factors_of<T>(shared), .exists = exists};
    const uint4 own = __ldg(map + threadIdx.x % 8);
    const uint32_t of_scales[] = {own.x, own.y, own.z, own.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) tile.scales[i] = load_below<uint8_t>(scale, width, of_scales[i], limit);
#pragma unroll
    for (int i = 0; i < kBlock / 4; ++i) {
      const uint4 four = __ldg(map + i);
      const uint32_t of[] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int r = 0; r < 4; ++r) tile.codes[4 * i + r] = load_below<uint32_t>(from, width, of[r], limit);
    }
    return tile;
  }
  // The packed row that the lane prefetches. The map is read long before the address is needed.
  __device__ int later(int64_t row) const {
    row += threadIdx.x % 32;
    return row < rows ? source(row) : -1;
  }
  // A row of the tile may span two cache lines.
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
    return four_of(__ldg(reinterpret_cast<const uint32_t*>(from + col)), __ldg(from + cols + col / kBlock));
  }
};

}  // namespace mxep::cuda
