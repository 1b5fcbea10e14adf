// What all quantizing kernels share: where tiles lie, how lanes trade values, how staged lines leave.
#pragma once

#include "cuda/launch.h"
#include "cuda/mx_math.cuh"

namespace mxep::cuda {

struct Outputs {
  uint8_t *q, *sf, *q_t, *sf_t;  // those not asked for are not touched
};

// A batch of matrices in tiles of kRows x kCols. Tiles with neighbouring numbers run at the same time; they are
// `group` strips high, since what is read of x and written of q wants them wide, what is written of q_t high.
struct Grid {
  int64_t rows, cols;
  uint32_t strips, all_strips, tiles_across, group;  // strips: of one matrix

  template <typename Tile>
  static Grid of(int64_t batch, int64_t rows, int64_t cols, uint32_t group) {
    const auto strips = static_cast<uint32_t>(ceil_div(rows, Tile::kRows));
    const auto all = static_cast<uint32_t>(batch * strips);
    return {rows, cols, strips, all, static_cast<uint32_t>(ceil_div(cols, Tile::kCols)), group < all ? group : all};
  }
  int64_t tiles() const { return int64_t{all_strips} * tiles_across; }
};

// First row and column of a tile.
struct Place {
  int64_t batch, row, col;

  template <typename Tile>
  static __device__ Place of(const Grid& grid, uint32_t tile) {
    const uint32_t in_group = grid.group * grid.tiles_across, group = tile / in_group, i = tile % in_group;
    const uint32_t first = group * grid.group, height = min(grid.group, grid.all_strips - first);
    const uint32_t strip = first + i % height, across = i / height;
    return {strip / grid.strips, int64_t{strip % grid.strips} * Tile::kRows, int64_t{across} * Tile::kCols};
  }
};

// Lanes `kStep` apart give each other half of 2 * kHalf words and merge what they get into the other half, and so on
// down to one word: that costs hardly more exchanges than there are words.
template <int kStep, int kHalf, typename Word, typename Merge>
__device__ void exchange_halves(Word* words, Merge merge) {
  const bool upper = threadIdx.x & kStep;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const Word given = upper ? words[i] : words[i + kHalf], kept = upper ? words[i + kHalf] : words[i];
    words[i] = merge(kept, __shfl_xor_sync(~0u, given, kStep));
  }
  if constexpr (kStep > 1 && kHalf > 1) exchange_halves<kStep / 2, kHalf / 2>(words, merge);
}

struct PlainStore {
  template <typename Part>
  __device__ void operator()(Part* to, const Part& part) const {
    *to = part;
  }
};

// Staged lines of kPerLine parts, as many as there are of `lines` x `parts`, to lines `pitch` parts apart. Part i of
// a line is staged at slot(i, line). `thread`: this one among those that write.
template <int kThreads, typename Part, int kLines, int kPerLine, typename Slot, typename Store = PlainStore>
__device__ void write_lines(const Part (&staged)[kLines][kPerLine], Slot slot, Part* out, int64_t pitch, int64_t lines,
                            int64_t parts, uint32_t thread = threadIdx.x, Store store = {}) {
  constexpr int kStep = kThreads / kPerLine;
  const int part = thread % kPerLine, first = thread / kPerLine;
  if (part >= parts) return;
  out += first * pitch + part;
  const int end = static_cast<int>(min(lines, int64_t{kLines}));
#pragma unroll
  for (int i = 0; i < (kLines + kStep - 1) / kStep; ++i, out += kStep * pitch) {
    const int line = first + i * kStep;
    if (line < end) store(out, staged[line][slot(part, line)]);
  }
}

// The codes of 16 values of two columns, values[r] in row r.
template <typename Pair>
__device__ void column_codes(const Pair* values, Pair factor, uint4& left, uint4& right) {
  uint32_t low[4], high[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Pair a = values[4 * i] * factor, b = values[4 * i + 1] * factor;
    const Pair c = values[4 * i + 2] * factor, d = values[4 * i + 3] * factor;
    low[i] = e4m3x4(a.low(), b.low(), c.low(), d.low());
    high[i] = e4m3x4(a.high(), b.high(), c.high(), d.high());
  }
  left = make_uint4(low[0], low[1], low[2], low[3]);
  right = make_uint4(high[0], high[1], high[2], high[3]);
}

// Scale bytes of two neighbouring columns.
struct TwoScales {
  uint32_t low, high;

  // Of a block of 32 rows.
  template <typename Pair>
  static __device__ TwoScales of(const Pair* values, ScaleRule rule) {
    // Two chains, each half as long to wait for.
    Pair even = values[0], odd = values[1];
#pragma unroll
    for (int r = 2; r < kBlock; r += 2) {
      even = max_magnitude(even, values[r]);
      odd = max_magnitude(odd, values[r + 1]);
    }
    const Pair largest = max_magnitude(even, odd).magnitude();
    return {e8m0_from_amax(largest.low_bits(), rule), e8m0_from_amax(largest.high_bits(), rule)};
  }
  template <typename Pair>
  __device__ Pair factor() const {
    return Pair::from_bits(inverse_scale(low), inverse_scale(high));
  }
};

// Codes of a tile's columns on their way out. A lane has those of 16 rows of a column, a chunk.
template <int kRows, int kCols, int kLaneColumns>
struct ColumnCodes {
  static constexpr int kChunks = kRows / 16;
  uint4 codes[kCols][kChunks];

  // Neighbouring lanes put their chunks into different banks, and so do neighbouring chunks.
  static __device__ int swizzled(int chunk, int col) { return chunk ^ (col / kLaneColumns & 7 & (kChunks - 1)); }

  // Of a block of 32 rows of columns `col` and the next.
  template <typename Pair>
  __device__ void put(const Pair* values, Pair factor, int block, int col, auto finish) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int chunk = swizzled(2 * block + half, col);
      uint4 left, right;
      column_codes(values + 16 * half, factor, left, right);
      codes[col][chunk] = finish(left, 0);
      codes[col + 1][chunk] = finish(right, 1);
    }
  }

  // Zeros for a block of a lane's columns.
  __device__ void clear(int block, int col) {
#pragma unroll
    for (int i = 0; i < 2 * kLaneColumns; ++i) codes[col + i / 2][swizzled(2 * block + i % 2, col)] = {};
  }

  template <int kThreads>
  __device__ void write(Outputs out, const Grid& grid, const Place& at) const {
    const int64_t first = (at.batch * grid.cols + at.col) * grid.rows + at.row;
    write_lines<kThreads>(codes, swizzled, reinterpret_cast<uint4*>(out.q_t + first), grid.rows / 16,
                          grid.cols - at.col, (grid.rows - at.row) / 16);
  }
};

// The same, and the scale bytes of the blocks.
template <int kRows, int kCols, int kLaneColumns>
struct Columns : ColumnCodes<kRows, kCols, kLaneColumns> {
  using Codes = ColumnCodes<kRows, kCols, kLaneColumns>;
  static constexpr int kBlocks = kRows / kBlock;
  uint8_t scales[kCols][kBlocks];

  template <typename Pair>
  __device__ void scale(const Pair* values, ScaleRule rule, int block, int col) {
    const auto bytes = TwoScales::of(values, rule);
    scales[col][block] = bytes.low;
    scales[col + 1][block] = bytes.high;
    Codes::put(values, bytes.template factor<Pair>(), block, col, [](uint4 codes, int) { return codes; });
  }

  template <int kThreads>
  __device__ void write(Outputs out, const Grid& grid, const Place& at) const {
    Codes::template write<kThreads>(out, grid, at);
    const int64_t first = ((at.batch * grid.cols + at.col) * grid.rows + at.row) / kBlock;
    write_lines<kThreads>(
        scales, [](int block, int) { return block; }, out.sf_t + first, grid.rows / kBlock, grid.cols - at.col,
        (grid.rows - at.row) / kBlock);
  }
};

}  // namespace mxep::cuda
