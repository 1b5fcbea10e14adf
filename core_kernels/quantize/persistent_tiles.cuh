// A persistent kernel over tiles whose rows and columns are quantized.
//
//        4 tiles across (of bf16)      A tile of 256 x 256 has 8 scale bytes per line of sf and of sf_t, a quarter of a
//        .----.----.----.----.         sector, and DRAM charges a partial sector like a whole one. A CTA that processes
//        |  0 |  4 |  8 | 12 |         a square of tiles collects the scales until sectors are whole: sf_t is written
//        |  1 |  5 |  9 | 13 |         at the end of each column of tiles, sf at the end of the square.
//        |  2 |  6 | 10 | 14 |
//        |  3 |  7 | 11 | 15 |         The loads of a tile start before the codes of the previous one are written.
//        '----'----'----'----'
#pragma once

#include "quantize/register_tile.cuh"

namespace mxep::cuda {

// The schedule of the CTAs: CTAs with a whole square each come first, then CTAs with one column of a square, then CTAs
// with one tile.
template <typename T>
struct PersistentTiles {
  static constexpr int kDown = kSector / T::kDown, kAcross = kSector / T::kBlocks;  // in tiles
  static constexpr int kSquare = kDown * kAcross;
  uint32_t squares = 0, columns = 0;

  // As many squares, then columns, as divide evenly among the SMs; the rest is scheduled in smaller units. `grid` has
  // groups of kDown strips, so that vertically adjacent tiles have consecutive numbers.
  static PersistentTiles of(const Grid& grid, uint32_t sms) {
    PersistentTiles schedule;
    if (grid.strips != grid.all_strips && grid.strips % kDown)
      return schedule;  // a column of tiles would span two matrices
    const int64_t columns = int64_t{grid.all_strips / kDown} * grid.tiles_across;
    if (grid.tiles_across % kAcross == 0) schedule.squares = static_cast<uint32_t>(columns / kAcross / sms * sms);
    schedule.columns = static_cast<uint32_t>((columns - int64_t{schedule.squares} * kAcross) / sms * sms);
    return schedule;
  }
  int64_t ctas(const Grid& grid) const {
    return grid.tiles() - int64_t{squares} * (kSquare - 1) - int64_t{columns} * (kDown - 1);
  }

  // The first tile of this CTA, and its number of tiles down and across.
  __device__ uint32_t first() const {
    const uint32_t before = min(blockIdx.x, squares), rest = min(blockIdx.x - before, columns);
    return blockIdx.x + before * (kSquare - 1) + rest * (kDown - 1);
  }
  __device__ int down() const { return blockIdx.x < squares + columns ? kDown : 1; }
  __device__ int across() const { return blockIdx.x < squares ? kAcross : 1; }
};

// Staging of scale bytes until whole sectors are written.
template <int kLines>
struct ScaleSectors {
  uint8_t bytes[kLines][kSector];

  // Avoids bank conflicts: four lines fill all banks, so that each group of four lines has another rotation.
  static __device__ int slot(int i, int line) { return i ^ (line / 4 * 4 & (kSector - 1)); }

  __device__ void put(int line, int i, uint32_t byte) { bytes[line][slot(i, line)] = byte; }

  template <int kThreads>
  __device__ void write(uint8_t* out, int64_t pitch, int64_t lines, int64_t chunks) const {
    write_lines<kThreads>(bytes, slot, out, pitch, lines, chunks);
  }
};

// Staging of a CTA in shared memory.
template <typename T>
struct PersistentStaging {
  StagedCodes<T::kRows, T::kCols, T::kColumns> codes;            // of a tile
  ScaleSectors<T::kCols> column_scales;                          // of a column of tiles
  ScaleSectors<T::kRows> row_scales[PersistentTiles<T>::kDown];  // of all tiles

  __device__ void scale_columns(const T& tile, ScaleRule rule, int down) {
    for_column_pairs(tile, [&](const typename T::Pair* values, int block, int col) {
      const auto bytes = TwoScales::of(values, rule);
      column_scales.put(col, down * T::kDown + block, bytes.low);
      column_scales.put(col + 1, down * T::kDown + block, bytes.high);
      codes.put(values, bytes.template factor<typename T::Pair>(), block, col, [](uint4 chunk, int) { return chunk; });
    });
  }

  // Writes the scales of a column of `down` tiles.
  __device__ void write_column_scales(Outputs out, const Grid& grid, const TileCoord& top, int down) const {
    const int64_t first = ((top.batch * grid.cols + top.col) * grid.rows + top.row) / kBlock;
    const int64_t blocks = min((grid.rows - top.row) / kBlock, int64_t{down} * T::kDown);
    column_scales.template write<T::kThreads>(out.sf_t + first, grid.rows / kBlock, grid.cols - top.col, blocks);
  }
  __device__ void write_row_scales(Outputs out, const Grid& grid, const TileCoord& top, int down, int across) const {
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
    quantize_persistent(const Value* x, Grid grid, PersistentTiles<T> schedule, ScaleRule rule, Outputs out) {
  extern __shared__ uint4 bytes[];
  auto& staging = *reinterpret_cast<PersistentStaging<T>*>(bytes);
  const int down = schedule.down(), tiles = down * schedule.across();
  const TileCoord first = TileCoord::of<T>(grid, schedule.first());
  const ThreadCoord<T> thread;
  TileCoord at = first;
  auto slice = ThreadSlice::of<T>(grid, at);
  T tile = load_tile<T, true>(x, grid, slice);
#pragma unroll 1
  for (int i = 0;;) {
    const int strip = i % PersistentTiles<T>::kDown, across = i / PersistentTiles<T>::kDown;
    scale_rows(tile, rule, out.q + slice.first, grid.cols, slice.exists, [&](int row, uint32_t byte) {
      staging.row_scales[strip].put(row, across * T::kBlocks + thread.col / kBlock, byte);
    });
    __syncthreads();  // the previous tile has been written
    staging.scale_columns(tile, rule, strip);
    __syncthreads();

    const TileCoord last = at;
    const bool more = ++i < tiles, column_ends = strip + 1 == down;
    if (more) {
      at.row = column_ends ? first.row : at.row + T::kRows;
      at.col += column_ends ? T::kCols : 0;
      slice = ThreadSlice::of<T>(grid, at);
      tile = load_tile<T, true>(x, grid, slice);
    }
    staging.codes.template write<T::kThreads>(out, grid, last);
    if (column_ends) staging.write_column_scales(out, grid, {first.batch, first.row, last.col}, down);
    if (!more) break;
  }
  staging.write_row_scales(out, grid, first, down, schedule.across());
}

}  // namespace mxep::cuda
