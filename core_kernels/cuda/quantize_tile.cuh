// A tile scaled along columns, or along both, from registers.
//
//        256 columns (of bf16)         warp   32 rows x 128 columns, one scale block deep
//        .--------.--------.           lane   32 rows x 4 columns, all its values in registers
//        | warp 0 | warp 8 |
//        | warp 1 | warp 9 |   column  amax inside a lane; codes through shared memory, 256 bytes of each row of q_t
//        | ...    | ...    |   row     amax over 8 lanes, which trade halves of their rows in 3 steps; codes from
//        | warp 7 | warp 15|           registers, 256 bytes of each row of q
//        '--------'--------'
#pragma once

#include "tile.cuh"

namespace mxep::cuda {

template <typename P, int kLaneColumns, int kWarpsDown, int kWarpsAcross>
struct RegisterTile {
  using Pair = P;
  static constexpr int kColumns = kLaneColumns, kPairs = kColumns / 2;
  static constexpr int kDown = kWarpsDown, kThreads = 32 * kDown * kWarpsAcross;
  static constexpr int kRows = kBlock * kDown, kCols = 32 * kColumns * kWarpsAcross;
  static constexpr int kBlocks = kCols / kBlock, kBlockLanes = kBlock / kColumns;
  static constexpr int kWords = kBlock / Pair::kRowsPerWord;  // of row maxima

  // What a lane has of a row, and what it loads at once.
  struct alignas(sizeof(Pair) * kPairs) Row {
    Pair at[kPairs];
  };
  Row rows[kBlock];
};

template <typename T, bool kRow>
struct Stage {
  Columns<T::kRows, T::kCols, T::kColumns> columns;
  uint8_t row_scales[kRow ? T::kRows : 1][T::kBlocks];
};

// A thread's first row and column in its tile.
template <typename T>
struct Own {
  int row = threadIdx.x / 32 % T::kDown * kBlock;
  int col = (threadIdx.x / 32 / T::kDown * 32 + threadIdx.x % 32) * T::kColumns;
};

template <typename T>
__device__ void scale_columns(const T& tile, ScaleRule rule, auto& stage) {
  const Own<T> own;
#pragma unroll
  for (int p = 0; p < T::kPairs; ++p) {
    typename T::Pair values[kBlock];
#pragma unroll
    for (int r = 0; r < kBlock; ++r) values[r] = tile.rows[r].at[p];
    stage.columns.scale(values, rule, own.row / kBlock, own.col + 2 * p);
  }
}

// Row maxima over the lanes of a block; a lane ends with those of the rows from lane % kBlockLanes * kColumns on.
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
      largest[i] = row.at[0].magnitude();
#pragma unroll
      for (int p = 1; p < T::kPairs; ++p) largest[i] = max_magnitude(largest[i], row.at[p].magnitude());
    }
    words[w] = row_word(largest);
  }
  exchange_halves<T::kBlockLanes / 2, T::kWords / 2>(words, Pair::max_words);
}

// `q`: where the thread's first row goes; `rows`: how many do.
template <typename T>
__device__ void scale_rows(const T& tile, ScaleRule rule, uint8_t* q, int64_t pitch, int rows, auto& stage) {
  using Pair = typename T::Pair;
  constexpr int kStride = Pair::kRowsPerWord, kOwnWords = T::kWords / T::kBlockLanes;
  uint32_t words[T::kWords];
  row_maxima(tile, words);

  const Own<T> own;
  const int first = own.row + threadIdx.x % T::kBlockLanes * (kOwnWords * kStride);
#pragma unroll
  for (int w = 0; w < kOwnWords; ++w) {
    uint32_t factors[kStride];
#pragma unroll
    for (int i = 0; i < kStride; ++i) {
      const uint32_t byte = e8m0_from_amax(Pair::word_bits(words[w], i), rule);
      stage.row_scales[first + w * kStride + i][own.col / kBlock] = byte;
      factors[i] = inverse_scale(byte);
    }
    words[w] = Pair::pack_word(factors);
  }
#pragma unroll
  for (int r = 0; r < kBlock; ++r, q += pitch) {
    const int w = r / kStride;
    const uint32_t word = __shfl_sync(~0u, words[w % kOwnWords], w / kOwnWords, T::kBlockLanes);
    const Pair factor = Pair::of_row(word, r % kStride), x = tile.rows[r].at[0] * factor;
    if constexpr (T::kColumns == 2) {
      const uint32_t codes = e4m3x4(x.low(), x.high(), 0, 0);
      if (r < rows) *reinterpret_cast<uint16_t*>(q) = codes;
    } else {
      const Pair y = tile.rows[r].at[1] * factor;
      const uint32_t codes = e4m3x4(x.low(), x.high(), y.low(), y.high());
      if (r < rows) *reinterpret_cast<uint32_t*>(q) = codes;
    }
  }
}

// A thread's part of a row; kVector: rows start at multiples of its size. Zero where the matrix has nothing.
template <bool kVector, typename Row, typename Value>
__device__ Row load_row(const Value* from, bool exists, int64_t cols) {
  if constexpr (kVector) {
    static_assert(sizeof(Row) == sizeof(uint2));
    const uint2 bits = exists && cols > 0 ? __ldg(reinterpret_cast<const uint2*>(from)) : make_uint2(0, 0);
    return reinterpret_cast<const Row&>(bits);
  } else {
    static_assert(sizeof(Row) == 2 * sizeof(Value));
    const Value left = exists && cols > 0 ? from[0] : Value{0}, right = exists && cols > 1 ? from[1] : Value{0};
    return {{pair_of(left, right)}};
  }
}

template <typename T, bool kRow, bool kVector, typename Value>
__global__ void __launch_bounds__(T::kThreads, 512 / T::kThreads)
    quantize_tiles(const Value* x, Grid grid, ScaleRule rule, Outputs out) {
  extern __shared__ uint4 bytes[];
  auto& stage = *reinterpret_cast<Stage<T, kRow>*>(bytes);
  const Place at = Place::of<T>(grid, blockIdx.x);
  const Own<T> own;
  const int64_t first = (at.batch * grid.rows + at.row + own.row) * grid.cols + at.col + own.col;
  const int64_t cols = grid.cols - at.col - own.col;
  const int rows = static_cast<int>(min(grid.rows - at.row - own.row, int64_t{kBlock}));

  T tile;
  const Value* from = x + first;
#pragma unroll
  for (int r = 0; r < kBlock; ++r, from += grid.cols)
    tile.rows[r] = load_row<kVector, typename T::Row>(from, r < rows, cols);
  if constexpr (kRow) scale_rows(tile, rule, out.q + first, grid.cols, cols > 0 ? rows : 0, stage);
  scale_columns(tile, rule, stage);
  __syncthreads();

  stage.columns.template write<T::kThreads>(out, grid, at);
  if constexpr (kRow) {
    const int64_t first_scale = ((at.batch * grid.rows + at.row) * grid.cols + at.col) / kBlock;
    write_lines<T::kThreads>(
        stage.row_scales, [](int block, int) { return block; }, out.sf + first_scale, grid.cols / kBlock,
        grid.rows - at.row, (grid.cols - at.col) / kBlock);
  }
}

}  // namespace mxep::cuda
