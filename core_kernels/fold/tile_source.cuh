// Where the tiles of cuda.cu come from. A source gives a thread's tile, four neighbouring values, and prefetches.
//
//   Floats<Value>   x (M, K) bf16 or fp32
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

}  // namespace mxep::cuda
