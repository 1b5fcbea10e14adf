// Walks over tiles whose rows and columns are scaled.
//
//        4 tiles across (of bf16)      A tile of 256 x 256 has 8 scale bytes of each line of sf and of sf_t, a quarter
//        .----.----.----.----.         of a sector, and DRAM pays for parts of sectors as for many. A CTA that walks
//        |  0 |  4 |  8 | 12 |         over a square of tiles keeps their scales until sectors are whole: of sf_t at
//        |  1 |  5 |  9 | 13 |         the foot of each column of tiles, of sf at the end.
//        |  2 |  6 | 10 | 14 |
//        |  3 |  7 | 11 | 15 |         A tile is asked for before the codes of the last one are written.
//        '----'----'----'----'
#pragma once

#include "quantize/register_tile.cuh"

namespace mxep::cuda {

inline constexpr int kSector = 32;  // bytes

// How many CTAs walk: first those of a whole square each, then those of one column of it, then those of a tile.
template <typename T>
struct Walks {
  static constexpr int kDown = kSector / T::kDown, kAcross = kSector / T::kBlocks;  // tiles
  static constexpr int kSquare = kDown * kAcross;
  uint32_t squares = 0, columns = 0;

  // As many of each as all SMs have time for: what is left is shared out in smaller pieces. `grid` has groups of kDown
  // strips, so that tiles one below the other have neighbouring numbers.
  static Walks of(const Grid& grid, uint32_t sms) {
    Walks walks;
    if (grid.strips != grid.all_strips && grid.strips % kDown) return walks;  // columns of tiles of two matrices
    const int64_t columns = int64_t{grid.all_strips / kDown} * grid.tiles_across;
    if (grid.tiles_across % kAcross == 0) walks.squares = static_cast<uint32_t>(columns / kAcross / sms * sms);
    walks.columns = static_cast<uint32_t>((columns - int64_t{walks.squares} * kAcross) / sms * sms);
    return walks;
  }
  int64_t ctas(const Grid& grid) const {
    return grid.tiles() - int64_t{squares} * (kSquare - 1) - int64_t{columns} * (kDown - 1);
  }

  // Of this CTA: its first tile, how many tiles there are down and across.
  __device__ uint32_t first() const {
    const uint32_t before = min(blockIdx.x, squares), rest = min(blockIdx.x - before, columns);
    return blockIdx.x + before * (kSquare - 1) + rest * (kDown - 1);
  }
  __device__ int down() const { return blockIdx.x < squares + columns ? kDown : 1; }
  __device__ int across() const { return blockIdx.x < squares ? kAcross : 1; }
};

// Scale bytes of lines, which leave in sectors.
template <int kLines>
struct ScaleSectors {
  uint8_t bytes[kLines][kSector];

  // Four lines fill all banks: those of the next four change places.
  static __device__ int slot(int i, int line) { return i ^ (line / 4 * 4 & (kSector - 1)); }

  __device__ void put(int line, int i, uint32_t byte) { bytes[line][slot(i, line)] = byte; }

  template <int kThreads>
  __device__ void write(uint8_t* out, int64_t pitch, int64_t lines, int64_t parts) const {
    write_lines<kThreads>(bytes, slot, out, pitch, lines, parts);
  }
};

// What a CTA keeps.
template <typename T>
struct Walked {
  ColumnCodes<T::kRows, T::kCols, T::kColumns> codes;  // of a tile
  ScaleSectors<T::kCols> column_scales;                // of a column of tiles
  ScaleSectors<T::kRows> row_scales[Walks<T>::kDown];  // of all tiles

  __device__ void scale_columns(const T& tile, ScaleRule rule, int down) {
    for_column_pairs(tile, [&](const typename T::Pair* values, int block, int col) {
      const auto bytes = TwoScales::of(values, rule);
      column_scales.put(col, down * T::kDown + block, bytes.low);
      column_scales.put(col + 1, down * T::kDown + block, bytes.high);
      codes.put(values, bytes.template factor<typename T::Pair>(), block, col, [](uint4 chunk, int) { return chunk; });
    });
  }

  // Of a column of `down` tiles.
  __device__ void write_column_scales(Outputs out, const Grid& grid, const Place& top, int down) const {
    const int64_t first = ((top.batch * grid.cols + top.col) * grid.rows + top.row) / kBlock;
    const int64_t blocks = min((grid.rows - top.row) / kBlock, int64_t{down} * T::kDown);
    column_scales.template write<T::kThreads>(out.sf_t + first, grid.rows / kBlock, grid.cols - top.col, blocks);
  }
  __device__ void write_row_scales(Outputs out, const Grid& grid, const Place& top, int down, int across) const {
    const int64_t pitch = grid.cols / kBlock, first = (top.batch * grid.rows + top.row) * pitch + top.col / kBlock;
    const int64_t blocks = min(pitch - top.col / kBlock, int64_t{across} * T::kBlocks);
#pragma unroll 1
    for (int i = 0; i < down; ++i)
      row_scales[i].template write<T::kThreads>(out.sf + first + i * T::kRows * pitch, pitch,
                                                grid.rows - top.row - i * T::kRows, blocks);
  }
};

template <typename T, typename Value>
__global__ void __launch_bounds__(T::kThreads, 1)
    quantize_walks(const Value* x, Grid grid, Walks<T> walks, ScaleRule rule, Outputs out) {
  extern __shared__ uint4 bytes[];
  auto& walked = *reinterpret_cast<Walked<T>*>(bytes);
  const int down = walks.down(), tiles = down * walks.across();
  const Place first = Place::of<T>(grid, walks.first());
  const Own<T> own;
  Place at = first;
  auto part = Part::of<T>(grid, at);
  T tile = load_tile<T, true>(x, grid, part);
#pragma unroll 1
  for (int i = 0;;) {
    const int strip = i % Walks<T>::kDown, across = i / Walks<T>::kDown;
    scale_rows(tile, rule, out.q + part.first, grid.cols, part.exists, [&](int row, uint32_t byte) {
      walked.row_scales[strip].put(row, across * T::kBlocks + own.col / kBlock, byte);
    });
    __syncthreads();  // the last tile has left
    walked.scale_columns(tile, rule, strip);
    __syncthreads();

    const Place last = at;
    const bool more = ++i < tiles, foot = strip + 1 == down;
    if (more) {
      at.row = foot ? first.row : at.row + T::kRows;
      at.col += foot ? T::kCols : 0;
      part = Part::of<T>(grid, at);
      tile = load_tile<T, true>(x, grid, part);
    }
    walked.codes.template write<T::kThreads>(out, grid, last);
    if (foot) walked.write_column_scales(out, grid, {first.batch, first.row, last.col}, down);
    if (!more) break;
  }
  walked.write_row_scales(out, grid, first, down, walks.across());
}

}  // namespace mxep::cuda
