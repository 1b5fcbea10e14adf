// A tile scaled along columns, along both, or along columns and folded, from registers. Matrices have a multiple of 32
// rows: a warp's are all there or none is.
//
//        256 columns (of bf16)         warp   32 rows x 128 columns, one scale block deep
//        .--------.--------.           lane   32 rows x 4 columns, all its values in registers
//        | warp 0 | warp 8 |
//        | warp 1 | warp 9 |   column  amax inside a lane; codes through shared memory, 256 bytes of each row of q_t
//        | ...    | ...    |   row     amax over 8 lanes, which trade halves of their rows in 3 steps; codes from
//        | warp 7 | warp 15|           registers, 256 bytes of each row of q
//        '--------'--------'
#pragma once

#include <type_traits>

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

enum class Form { kCol, kBoth, kColFold };

template <typename T, Form kForm>
struct Stage {
  Columns<T::kRows, T::kCols, T::kColumns> columns;
};
template <typename T>
struct Stage<T, Form::kBoth> {
  Columns<T::kRows, T::kCols, T::kColumns> columns;
  uint8_t row_scales[T::kRows][T::kBlocks];
};
template <typename T>
struct Stage<T, Form::kColFold> {
  ColumnCodes<T::kRows, T::kCols, T::kColumns> columns;
};

// A thread's first row and column in its tile.
template <typename T>
struct Own {
  int row = threadIdx.x / 32 % T::kDown * kBlock;
  int col = (threadIdx.x / 32 / T::kDown * 32 + threadIdx.x % 32) * T::kColumns;
};

// scale(values, block, col): what is done to 32 rows of columns `col` and the next.
template <typename T>
__device__ void for_column_pairs(const T& tile, auto scale) {
  const Own<T> own;
#pragma unroll
  for (int p = 0; p < T::kPairs; ++p) {
    typename T::Pair values[kBlock];
#pragma unroll
    for (int r = 0; r < kBlock; ++r) values[r] = tile.rows[r].at[p];
    scale(values, own.row / kBlock, own.col + 2 * p);
  }
}

// Groups of rows and the scale byte of each one's columns, to which their blocks are folded.
struct Groups {
  const int32_t* ends;
  const uint8_t* scales;
  int count;

  // Where group `lane` ends.
  __device__ int32_t first_ends() const {
    const int lane = threadIdx.x % 32;
    return lane < count ? __ldg(ends + lane) : 0;
  }
  // The first group that ends behind `row`, which the whole warp asks for; `count` past the last end.
  __device__ int find(int64_t row, int32_t end) const {
    const int lane = threadIdx.x % 32;
    int first = 0;
#pragma unroll 1
    while (true) {
      const uint32_t behind = __ballot_sync(~0u, end > row);
      if (behind) return first + __ffs(behind) - 1;
      first += 32;
      if (first >= count) return count;
      end = first + lane < count ? __ldg(ends + first + lane) : 0;
    }
  }
};

// As many bytes as a lane has columns, the first lowest. Zero where there are fewer than `cols` columns.
template <typename T, bool kVector>
__device__ uint32_t load_bytes(const uint8_t* from, int64_t cols) {
  uint32_t bytes = 0;
  if constexpr (!kVector) {
#pragma unroll
    for (int i = 0; i < T::kColumns; ++i)
      if (i < cols) bytes |= from[i] << 8 * i;
  } else if (cols > 0) {
    if constexpr (T::kColumns == 4)
      bytes = __ldg(reinterpret_cast<const uint32_t*>(from));
    else
      bytes = __ldg(reinterpret_cast<const uint16_t*>(from));
  }
  return bytes;
}

// The codes of the codes, under `scales` of the lane's columns instead of their blocks' own.
template <typename T>
__device__ void fold_columns(const T& tile, ScaleRule rule, uint32_t scales, auto& columns) {
  for_column_pairs(tile, [&](const typename T::Pair* values, int block, int col) {
    const auto bytes = TwoScales::of(values, rule);
    const uint32_t to = scales >> 8 * (col % T::kColumns);
    // 448 * 2^-32 is zero, and so is what is smaller.
    const int up[] = {max(static_cast<int>(bytes.low - (to & 0xFF)), -32),
                      max(static_cast<int>(bytes.high - (to >> 8 & 0xFF)), -32)};
    const uint32_t powers[] = {f16x2_power(up[0]), f16x2_power(up[1])};
    columns.put(values, bytes.template factor<typename T::Pair>(), block, col,
                [&](uint4 codes, int i) { return folded(codes, powers[i]); });
    // A scale above the group's, which group_scales never gives. Steps up lose nothing, and 18 saturate all but zero.
    if (__any_sync(~0u, max(up[0], up[1]) > 15)) {
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        const int exponent = i < 2 ? up[0] : up[1];
        uint4& chunk = columns.codes[col + i / 2][columns.swizzled(2 * block + i % 2, col)];
        if (exponent > 15) chunk = folded(chunk, f16x2_power(min(exponent, 18) - 15));
      }
    }
  });
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
      largest[i] = row.at[0];
#pragma unroll
      for (int p = 1; p < T::kPairs; ++p) largest[i] = max_magnitude(largest[i], row.at[p]);
    }
    words[w] = row_word(largest);
  }
  exchange_halves<T::kBlockLanes / 2, T::kWords / 2>(words, Pair::max_words);
}

// The address in row r: one multiplication by a constant, where steps from row to row are two additions each.
template <typename Value>
__device__ Value* at_row(Value* first, uint32_t pitch_nbytes, int r) {
  using Byte = std::conditional_t<std::is_const_v<Value>, const char, char>;
  return reinterpret_cast<Value*>(reinterpret_cast<Byte*>(first) + uint64_t{pitch_nbytes} * r);
}

// `q`: where the thread's first row goes, if it is there.
template <typename T>
__device__ void scale_rows(const T& tile, ScaleRule rule, uint8_t* q, uint32_t pitch, bool exist, auto& stage) {
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
  for (int r = 0; r < kBlock; ++r) {
    const int w = r / kStride;
    const uint32_t word = __shfl_sync(~0u, words[w % kOwnWords], w / kOwnWords, T::kBlockLanes);
    const Pair factor = Pair::of_row(word, r % kStride), x = tile.rows[r].at[0] * factor;
    uint8_t* to = at_row(q, pitch, r);
    if constexpr (T::kColumns == 2) {
      const uint32_t codes = e4m3x4(x.low(), x.high(), 0, 0);
      if (exist) *reinterpret_cast<uint16_t*>(to) = codes;
    } else {
      const Pair y = tile.rows[r].at[1] * factor;
      const uint32_t codes = e4m3x4(x.low(), x.high(), y.low(), y.high());
      if (exist) *reinterpret_cast<uint32_t*>(to) = codes;
    }
  }
}

// A thread's part of a row, of which `cols` values are there; kVector: rows start at multiples of its size.
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

// `from`: the thread's first value; the pitch in bytes fits because there are 32 rows.
template <typename T, bool kVector, typename Value>
__device__ T load_tile(const Value* from, int64_t pitch, int64_t cols) {
  T tile;
#pragma unroll
  for (int r = 0; r < kBlock; ++r)
    tile.rows[r] = load_row<kVector, typename T::Row>(at_row(from, pitch * sizeof(Value), r), cols);
  return tile;
}

template <typename T, Form kForm, bool kVector, typename Value>
__global__ void __launch_bounds__(T::kThreads, 512 / T::kThreads)
    quantize_tiles(const Value* x, Groups groups, Grid grid, ScaleRule rule, Outputs out) {
  extern __shared__ uint4 bytes[];
  auto& stage = *reinterpret_cast<Stage<T, kForm>*>(bytes);
  const Place at = Place::of<T>(grid, blockIdx.x);
  const Own<T> own;
  const int64_t first = (at.batch * grid.rows + at.row + own.row) * grid.cols + at.col + own.col;
  const int64_t cols = grid.cols - at.col - own.col;
  const bool exist = at.row + own.row < grid.rows && cols > 0;

  // Asked for before x, so that the scales are there when x is.
  const int32_t ends = kForm == Form::kColFold ? groups.first_ends() : 0;
  // What is not there is read from where something is, and not written.
  const T tile = load_tile<T, kVector>(exist ? x + first : x, grid.cols, cols);
  if constexpr (kForm == Form::kColFold) {
    const int group = groups.find(at.row + own.row, ends);
    if (group < groups.count) {
      const uint8_t* scales = groups.scales + group * grid.cols + at.col + own.col;
      fold_columns(tile, rule, load_bytes<T, kVector>(scales, cols), stage.columns);
    } else {
      stage.columns.clear(own.row / kBlock, own.col);
    }
  } else {
    if constexpr (kForm == Form::kBoth) scale_rows(tile, rule, out.q + first, grid.cols, exist, stage);
    for_column_pairs(tile,
                     [&](const auto* values, int block, int col) { stage.columns.scale(values, rule, block, col); });
  }
  __syncthreads();

  stage.columns.template write<T::kThreads>(out, grid, at);
  if constexpr (kForm == Form::kBoth) {
    const int64_t first_scale = ((at.batch * grid.rows + at.row) * grid.cols + at.col) / kBlock;
    write_lines<T::kThreads>(
        stage.row_scales, [](int block, int) { return block; }, out.sf + first_scale, grid.cols / kBlock,
        grid.rows - at.row, (grid.cols - at.col) / kBlock);
  }
}

}  // namespace mxep::cuda
