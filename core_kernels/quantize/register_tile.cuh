// A tile in registers, quantized along columns, along both dims, or along columns and folded. Matrices have a multiple
// of 32 rows: the rows of a warp exist together or not at all.
//
//        256 columns (of bf16)         warp   32 rows x 128 columns, one scale block deep
//        .--------.--------.           lane   32 rows x 4 columns, all its values in registers
//        | warp 0 | warp 8 |
//        | warp 1 | warp 9 |   column  amax inside a lane; codes through shared memory, 256 bytes of each row of q_t
//        | ...    | ...    |   row     amax over 8 lanes, in 3 steps of a butterfly by halving; codes from registers,
//        | warp 7 | warp 15|           256 bytes of each row of q
//        '--------'--------'
#pragma once

#include <type_traits>

#include "cuda/tile.cuh"

namespace mxep::cuda {

template <typename P, int kLaneColumns, int kWarpsDown, int kWarpsAcross>
struct RegisterTile {
  using Pair = P;
  static constexpr int kColumns = kLaneColumns, kPairs = kColumns / 2;
  static constexpr int kDown = kWarpsDown, kThreads = 32 * kDown * kWarpsAcross;
  static constexpr int kRows = kBlock * kDown, kCols = 32 * kColumns * kWarpsAcross;
  static constexpr int kBlocks = kCols / kBlock, kBlockLanes = kBlock / kColumns;
  static constexpr int kWords = kBlock / Pair::kRowsPerWord;  // of row maxima

  // A lane's values of a row, loaded at once.
  struct alignas(sizeof(Pair) * kPairs) Row {
    Pair at[kPairs];
  };
  Row rows[kBlock];
};

// A thread's first row and column in its tile.
template <typename T>
struct ThreadCoord {
  int row = threadIdx.x / 32 % T::kDown * kBlock;
  int col = (threadIdx.x / 32 / T::kDown * 32 + threadIdx.x % 32) * T::kColumns;
};

// A thread's values of a tile.
struct ThreadSlice {
  int64_t first, cols;  // index of its first value in x; number of columns that exist from there on
  bool exists;

  template <typename T>
  static __device__ ThreadSlice of(const Grid& grid, const TileCoord& at) {
    const ThreadCoord<T> thread;
    const int64_t row = at.row + thread.row, col = at.col + thread.col;
    return {(at.batch * grid.rows + row) * grid.cols + col, grid.cols - col, row < grid.rows && col < grid.cols};
  }
};

// Calls scale(values, block, col) with 32 rows of columns `col` and `col` + 1.
template <typename T>
__device__ void for_column_pairs(const T& tile, auto scale) {
  const ThreadCoord<T> thread;
#pragma unroll
  for (int p = 0; p < T::kPairs; ++p) {
    typename T::Pair values[kBlock];
#pragma unroll
    for (int r = 0; r < kBlock; ++r) values[r] = tile.rows[r].at[p];
    scale(values, thread.row / kBlock, thread.col + 2 * p);
  }
}

// Row maxima over the lanes of a block. A lane ends with the maxima of the rows from lane % kBlockLanes * kColumns on.
template <typename T>
__device__ void row_maxima(const T& tile, uint32_t (&words)[T::kWords]) {
  using Pair = typename T::Pair;
  constexpr int kStride = Pair::kRowsPerWord;
#pragma unroll
  for (int w = 0; w < T::kWords; ++w) {
    Pair largest[kStride];
#pragma unroll
    for (int i = 0; i < kStride; ++i) {
      const auto& row = tile.rows[w * kStride + i];
      largest[i] = row.at[0];
#pragma unroll
      for (int p = 1; p < T::kPairs; ++p) largest[i] = max_magnitude(largest[i], row.at[p]);
    }
    words[w] = row_word(largest);
  }
  exchange_halves<T::kBlockLanes / 2, T::kWords / 2>(words, Pair::max_words);
}

// The address in row r: one multiplication by a constant. Steps from row to row would take two additions each.
template <typename Value>
__device__ Value* at_row(Value* first, uint32_t pitch_nbytes, int r) {
  using Byte = std::conditional_t<std::is_const_v<Value>, const char, char>;
  return reinterpret_cast<Value*>(reinterpret_cast<Byte*>(first) + uint64_t{pitch_nbytes} * r);
}

// `q`: the address of the thread's first row, if it exists. store_scale(row, byte) stores the scale of the thread's
// block of a row of the tile.
template <typename T>
__device__ void scale_rows(const T& tile, ScaleRule rule, uint8_t* q, uint32_t pitch, bool exists, auto store_scale) {
  using Pair = typename T::Pair;
  constexpr int kStride = Pair::kRowsPerWord, kLaneWords = T::kWords / T::kBlockLanes;
  uint32_t words[T::kWords];
  row_maxima(tile, words);

  const ThreadCoord<T> thread;
  const int first = thread.row + threadIdx.x % T::kBlockLanes * (kLaneWords * kStride);
#pragma unroll
  for (int w = 0; w < kLaneWords; ++w) {
    uint32_t factors[kStride];
#pragma unroll
    for (int i = 0; i < kStride; ++i) {
      const uint32_t byte = e8m0_from_amax(Pair::word_bits(words[w], i), rule);
      store_scale(first + w * kStride + i, byte);
      factors[i] = inverse_scale(byte);
    }
    words[w] = Pair::pack_word(factors);
  }
#pragma unroll
  for (int w = 0; w < T::kWords; ++w) {
    const uint32_t word = __shfl_sync(~0u, words[w % kLaneWords], w / kLaneWords, T::kBlockLanes);
#pragma unroll
    for (int i = 0; i < kStride; ++i) {
      const int r = w * kStride + i;
      const Pair factor = Pair::of_row(word, i), x = tile.rows[r].at[0] * factor;
      uint8_t* to = at_row(q, pitch, r);
      if constexpr (T::kColumns == 2) {
        const uint32_t codes = e4m3x4(x.low(), x.high(), 0, 0);
        if (exists) *reinterpret_cast<uint16_t*>(to) = codes;
      } else {
        const Pair y = tile.rows[r].at[1] * factor;
        const uint32_t codes = e4m3x4(x.low(), x.high(), y.low(), y.high());
        if (exists) *reinterpret_cast<uint32_t*>(to) = codes;
      }
    }
  }
}

// A thread's values of a row, of which `cols` exist. kVector: rows start at multiples of the slice's size.
template <bool kVector, typename Row, typename Value>
__device__ Row load_row(const Value* from, int64_t cols) {
  if constexpr (kVector) {
    static_assert(sizeof(Row) == sizeof(uint2));
    const uint2 bits = __ldg(reinterpret_cast<const uint2*>(from));
    return reinterpret_cast<const Row&>(bits);
  } else {
    static_assert(sizeof(Row) == 2 * sizeof(Value));
    const Value left = cols > 0 ? from[0] : Value{0}, right = cols > 1 ? from[1] : Value{0};
    return {{pair_of(left, right)}};
  }
}

// A thread outside the matrix reads an address inside it, so that loads need no predicate.
template <typename T, bool kVector, typename Value>
__device__ T load_tile(const Value* x, const Grid& grid, const ThreadSlice& slice) {
  const Value* from = slice.exists ? x + slice.first : x;
  const auto pitch_nbytes =
      static_cast<uint32_t>(grid.cols * sizeof(Value));  // fits in 32 bits, since there are 32 rows
  T tile;
#pragma unroll
  for (int r = 0; r < kBlock; ++r)
    tile.rows[r] = load_row<kVector, typename T::Row>(at_row(from, pitch_nbytes, r), slice.cols);
  return tile;
}

}  // namespace mxep::cuda
