// Shared by all quantizing kernels: tile coordinates, exchanges between lanes, writes of staged lines.
#pragma once

#include "cuda/launch.h"
#include "cuda/mx_math.cuh"

namespace mxep::cuda {

// Bytes of a DRAM sector. A partial write of a sector costs as much as a write of a whole one.
inline constexpr int kSector = 32;

struct Outputs {
  uint8_t *q, *sf, *q_t, *sf_t;  // null if the op does not have the output
};

// A batch of matrices in tiles of kRows x kCols. Tiles with neighbouring numbers run at the same time. A group of tiles
// is `group` strips high: reads of x and writes of q favour wide groups, writes of q_t favour high ones.
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

// Matrix, first row and first column of a tile.
struct TileCoord {
  int64_t batch, row, col;

  template <typename Tile>
  static __device__ TileCoord of(const Grid& grid, uint32_t tile) {
    const uint32_t in_group = grid.group * grid.tiles_across, group = tile / in_group, i = tile % in_group;
    const uint32_t first = group * grid.group, height = min(grid.group, grid.all_strips - first);
    const uint32_t strip = first + i % height, across = i / height;
    return {strip / grid.strips, int64_t{strip % grid.strips} * Tile::kRows, int64_t{across} * Tile::kCols};
  }
};

// Butterfly reduction by halving: lanes at a distance of `kStep` swap half of their 2 * kHalf words and merge,
// recursively, until one word is left. The number of shuffles is about the number of words.
template <int kStep, int kHalf, typename Word, typename Merge>
__device__ void exchange_halves(Word* words, Merge merge) {
  const bool upper = threadIdx.x & kStep;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const Word sent = upper ? words[i] : words[i + kHalf], kept = upper ? words[i + kHalf] : words[i];
    words[i] = merge(kept, __shfl_xor_sync(~0u, sent, kStep));
  }
  if constexpr (kStep > 1 && kHalf > 1) exchange_halves<kStep / 2, kHalf / 2>(words, merge);
}

struct DefaultStore {
  template <typename Chunk>
  __device__ void operator()(Chunk* to, const Chunk& chunk) const {
    *to = chunk;
  }
};

// Writes staged lines of kChunksPerLine chunks, limited to `lines` x `chunks`, to lines of `pitch` chunks. Chunk i
// of a line is staged at slot(i, line). `thread`: index of this thread among the writing threads.
template <int kThreads, typename Chunk, int kLines, int kChunksPerLine, typename Slot, typename Store = DefaultStore>
__device__ void write_lines(const Chunk (&staged)[kLines][kChunksPerLine], Slot slot, Chunk* out, int64_t pitch,
                            int64_t lines, int64_t chunks, uint32_t thread = threadIdx.x, Store store = {}) {
  constexpr int kStep = kThreads / kChunksPerLine;
  const int chunk = thread % kChunksPerLine, first = thread / kChunksPerLine;
  if (chunk >= chunks) return;
  out += first * pitch + chunk;
  const int end = static_cast<int>(min(lines, int64_t{kLines}));
#pragma unroll
  for (int i = 0; i < (kLines + kStep - 1) / kStep; ++i, out += kStep * pitch) {
    const int line = first + i * kStep;
    if (line < end) store(out, staged[line][slot(chunk, line)]);
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
    // Two dependency chains of half the length.
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

// Staging of a tile's column codes in shared memory. A chunk is the codes of 16 rows of a column.
template <int kRows, int kCols, int kLaneColumns>
struct StagedCodes {
  static constexpr int kChunks = kRows / 16;
  uint4 codes[kCols][kChunks];

  // Avoids bank conflicts between neighbouring lanes and between neighbouring chunks.
  static __device__ int swizzled(int chunk, int col) { return chunk ^ (col / kLaneColumns & 7 & (kChunks - 1)); }

  // Stages a block of 32 rows of columns `col` and `col` + 1.
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

  template <int kThreads>
  __device__ void write(Outputs out, const Grid& grid, const TileCoord& at) const {
    const int64_t first = (at.batch * grid.cols + at.col) * grid.rows + at.row;
    write_lines<kThreads>(codes, swizzled, reinterpret_cast<uint4*>(out.q_t + first), grid.rows / 16,
                          grid.cols - at.col, (grid.rows - at.row) / 16);
  }
};

// Staging of codes and of the blocks' scale bytes.
template <int kRows, int kCols, int kLaneColumns>
struct StagedColumns : StagedCodes<kRows, kCols, kLaneColumns> {
  using Codes = StagedCodes<kRows, kCols, kLaneColumns>;
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
  __device__ void write(Outputs out, const Grid& grid, const TileCoord& at) const {
    Codes::template write<kThreads>(out, grid, at);
    const int64_t first = ((at.batch * grid.cols + at.col) * grid.rows + at.row) / kBlock;
    write_lines<kThreads>(
        scales, [](int block, int) { return block; }, out.sf_t + first, grid.rows / kBlock, grid.cols - at.col,
        (grid.rows - at.row) / kBlock);
  }
};

}  // namespace mxep::cuda
