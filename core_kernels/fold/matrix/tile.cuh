// Two steps of cuda.cu on a tile of 256 rows x 128 columns, and their parts for columns alone.
//
//   measure   tile --> largest block of each row, or of each column, or both --> maxima in global memory
//   write     tile, maxima --> qf, qf_t; from the first tiles also row_sf and col_sf; lines with a larger block
//
//      lane    0       15          Measuring reads a tile in vectors of 8 values: half a warp has a row. A lane has 8
//      row 0  .---- ... ----.      columns of 16 rows. Four lanes share the block of a row, two the block of a column.
//      row 1  '16-- ... --31'
//
// A scale byte grows with the largest magnitude of its block. A row's scale is therefore the scale of its largest
// block, and one scale is computed per row and tile instead of one per block. Blocks without a scale count as NaN,
// which the maximum ignores.
#pragma once

#include "fold/folded_tile.cuh"
#include "fold/magnitudes.cuh"
#include "quantize/register_tile.cuh"

namespace mxep::cuda {

using MatrixTile = FoldTile<Bf16x2>;

// Rows or columns of all matrices. Magnitudes of a line: of the largest block of its first span; 0, or of its largest
// block if that exceeds the line's scale.
struct Lines {
  uint32_t *first, *larger;
  int64_t count;

  static Lines at(uint32_t* scratch, int64_t count) { return {scratch, scratch + count, count}; }
};

struct MatrixFold {
  Grid grid;  // a strip of tiles is as wide as the matrix, a group of strips is a matrix
  uint8_t *qf, *row_sf, *qf_t, *col_sf;
  Lines rows, columns;

  // Tiles of a matrix with values of the first span of a row or a column: the upper strip, then the left of the others.
  static constexpr uint32_t kFirstTiles = kSpan / MatrixTile::kCols;
  __host__ __device__ uint32_t first_tiles() const {
    const uint32_t left = grid.tiles_across < kFirstTiles ? grid.tiles_across : kFirstTiles;
    return grid.tiles_across + (grid.strips - 1) * left;
  }
  __device__ TileCoord first_tile(uint32_t i) const {
    const uint32_t left = min(grid.tiles_across, kFirstTiles), in_matrix = i % first_tiles();
    const bool upper = in_matrix < grid.tiles_across;
    const uint32_t strip = upper ? 0 : 1 + (in_matrix - grid.tiles_across) / left;
    const uint32_t across = upper ? in_matrix : (in_matrix - grid.tiles_across) % left;
    return {i / first_tiles(), int64_t{strip} * MatrixTile::kRows, int64_t{across} * MatrixTile::kCols};
  }
};
static_assert(MatrixTile::kRows == kSpan && kSpan % MatrixTile::kCols == 0);

// Nothing reads the codes before the launch ends. L2 evicts them before x.
struct StreamingStore {
  template <typename Chunk>
  __device__ void operator()(Chunk* to, const Chunk& chunk) const {
    __stcs(to, chunk);
  }
};

__device__ inline void raise(uint32_t* maximum, uint32_t value) {
  asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(maximum), "r"(value) : "memory");
}

// Two maxima of blocks, or of several blocks. NaN: none of them has a scale.
struct BlockMaxima {
  uint32_t bits = 0x7FFF7FFFu;

  // Of maxima of any sign. Infinity becomes NaN unless it has a scale: magnitude + magnitude * 0, or * 2^-126, which
  // no rounding notices.
  static __device__ BlockMaxima of(uint32_t largest, ScaleRule rule) {
    const uint32_t magnitudes = largest & 0x7FFF7FFFu, factor = rule.infinite == kE8m0Max ? 0x00800080u : 0;
    BlockMaxima maxima;
    asm("fma.rn.bf16x2 %0, %1, %2, %1;" : "=r"(maxima.bits) : "r"(magnitudes), "r"(factor));
    return maxima;
  }
  // NaN only if both are.
  static __device__ uint32_t merged(uint32_t a, uint32_t b) {
    uint32_t larger;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
  }
  // Magnitude of one of the two.
  __device__ uint32_t magnitude(bool upper, ScaleRule rule) const {
    return e8m0_from_amax((upper ? bits >> 16 : bits) << 16, rule) + 1 & 0xFF;
  }
};

using ColumnMaxima = uint32_t[MatrixTile::kDown][MatrixTile::kCols / 2];  // of the blocks of two columns

// Raises the maxima of a tile's rows and columns, as far as the tile has values of their first spans.
__device__ inline void raise_maxima(const bf16* x, ColumnMaxima& columns, const MatrixFold& p, ScaleRule rule,
                                    const TileCoord& at) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = lane / 16;
  const int64_t row = at.row + warp * kBlock, first_col = at.col + lane % 16 * 8;
  const bool exists = row < p.grid.rows && first_col < p.grid.cols;
  const bf16* from = exists ? x + (at.batch * p.grid.rows + row + half) * p.grid.cols + first_col : x;
  const auto pitch_nbytes = static_cast<uint32_t>(p.grid.cols * sizeof(bf16));
  uint4 vectors[16];  // of every second row
#pragma unroll
  for (int i = 0; i < 16; ++i) vectors[i] = __ldg(reinterpret_cast<const uint4*>(at_row(from, pitch_nbytes, 2 * i)));
  uint32_t of_columns[4] = {}, words[8];  // a word: rows 2 * i and 2 * i + 2
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    Bf16x2 rows[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint4 v = vectors[i + j];
      of_columns[0] = Bf16x2::max_words(of_columns[0], v.x);
      of_columns[1] = Bf16x2::max_words(of_columns[1], v.y);
      of_columns[2] = Bf16x2::max_words(of_columns[2], v.z);
      of_columns[3] = Bf16x2::max_words(of_columns[3], v.w);
      rows[j].bits = Bf16x2::max_words(Bf16x2::max_words(v.x, v.y), Bf16x2::max_words(v.z, v.w));
    }
    words[i / 2] = row_word(rows);
  }
  // Blocks of columns: the halves of a warp have four columns each afterwards.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t sent = half ? of_columns[i] : of_columns[i + 2], kept = half ? of_columns[i + 2] : of_columns[i];
    of_columns[i] = Bf16x2::max_words(kept, __shfl_xor_sync(~0u, sent, 16));
  }
  exchange_halves<2, 4>(words, Bf16x2::max_words);  // blocks of rows: a lane has four rows of a block afterwards

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    of_columns[i] = (exists ? BlockMaxima::of(of_columns[i], rule) : BlockMaxima{}).bits;
    words[i] = (exists ? BlockMaxima::of(words[i], rule) : BlockMaxima{}).bits;
  }
  *reinterpret_cast<uint2*>(&columns[warp][lane % 16 * 4 + half * 2]) = make_uint2(of_columns[0], of_columns[1]);
  exchange_halves<4, 1>(words, BlockMaxima::merged);  // over the blocks of a row
  const BlockMaxima two{BlockMaxima::merged(words[0], __shfl_xor_sync(~0u, words[0], 8))};
  const int of_lane = lane % 4 * 8 + lane / 4 % 2 * 4 + lane / 8 % 2 * 2 + half;
  if (row < p.grid.rows && at.col < kSpan)
    raise(p.rows.first + at.batch * p.grid.rows + row + of_lane, two.magnitude(lane & 8, rule));
  __syncthreads();

  const int64_t col = at.col + threadIdx.x;
  if (at.row == 0 && threadIdx.x < MatrixTile::kCols && col < p.grid.cols) {
    BlockMaxima largest;
#pragma unroll
    for (int i = 0; i < MatrixTile::kDown; ++i)
      largest.bits = BlockMaxima::merged(largest.bits, columns[i][threadIdx.x / 2]);
    p.columns.first[at.batch * p.grid.cols + col] = largest.magnitude(threadIdx.x % 2, rule);
  }
}

using MatrixCodes = StagedCodes<MatrixTile::kRows, MatrixTile::kCols, MatrixTile::kColumns>;

// The magnitudes of the scales of a lane's four rows and of its four columns, in the bytes of words.
struct LaneMagnitudes {
  uint32_t rows = 0, columns = 0;

  static __device__ uint32_t four(const uint32_t* from) {
    const uint4 of = __ldg(reinterpret_cast<const uint4*>(from));
    const uint32_t first = __byte_perm(__byte_perm(of.x, of.y, 0x0040), __byte_perm(of.z, of.w, 0x0040), 0x5410);
    return least_magnitudes(first, kWeightHeadroom);
  }
  static __device__ LaneMagnitudes of(const MatrixFold& p, const TileCoord& at) {
    if (!ThreadSlice::of<MatrixTile>(p.grid, at).exists) return {};
    const ThreadCoord<MatrixTile> thread;
    const int64_t row = at.row + thread.row + threadIdx.x % MatrixTile::kBlockLanes * 4, col = at.col + thread.col;
    return {four(p.rows.first + at.batch * p.grid.rows + row), four(p.columns.first + at.batch * p.grid.cols + col)};
  }
};

// Notes the lines of a lane's four blocks whose scales, in `bytes`, exceed the lines' `magnitudes`.
__device__ inline void note_larger(uint32_t bytes, uint32_t magnitudes, uint32_t* larger) {
  const uint32_t of_blocks = __vadd4(bytes, kOnes), exceed = __vcmpgtu4(of_blocks, magnitudes);
  if (exceed == 0) return;
#pragma unroll 1
  for (int i = 0; i < 4; ++i)
    if (exceed >> i * 8 & 1) raise(larger + i, of_blocks >> i * 8 & 0xFF);
}

// From the scale bytes of a lane's four column blocks, of a tile with the columns' first spans: writes the columns'
// scales, and returns their magnitudes. `col`: the lane's first column of all matrices.
__device__ inline uint32_t set_column_scales(uint32_t bytes, bool exists, int64_t col, const MatrixFold& p) {
  __shared__ uint32_t of_blocks[MatrixTile::kDown][32];
  static_assert(MatrixTile::kThreads == 32 * MatrixTile::kDown);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  of_blocks[warp][lane] = exists ? __vadd4(bytes, kOnes) : 0;
  __syncthreads();
  uint32_t first = 0;
#pragma unroll
  for (int i = 0; i < MatrixTile::kDown; ++i) first = __vmaxu4(first, of_blocks[i][lane]);
  const uint32_t magnitudes = least_magnitudes(first, kWeightHeadroom);
  if (exists && warp == 0) {
    const auto byte = [&](int i) { return first >> i * 8 & 0xFF; };
    *reinterpret_cast<uint4*>(p.columns.first + col) = make_uint4(byte(0), byte(1), byte(2), byte(3));
    *reinterpret_cast<uint4*>(p.columns.larger + col) = uint4{};
    *reinterpret_cast<uint32_t*>(p.col_sf + col) = __vsub4(magnitudes, kOnes);
  }
  return magnitudes;
}

// Writes the codes of a tile's columns. `bytes` and `scales`: of the blocks and of the columns of a lane.
__device__ inline void write_column_codes(const MatrixTile& tile, uint32_t bytes, uint32_t scales, MatrixCodes& codes,
                                          const MatrixFold& p, ScaleRule rule, const TileCoord& at) {
  stage_columns(tile, bytes, rule, codes, [&](int c) { return scales >> c % 4 * 8 & 0xFF; });
  __syncthreads();
  const int64_t first = (at.batch * p.grid.cols + at.col) * p.grid.rows + at.row;
  write_lines<MatrixTile::kThreads>(codes.codes, codes.swizzled, reinterpret_cast<uint4*>(p.qf_t + first),
                                    p.grid.rows / 16, p.grid.cols - at.col, (p.grid.rows - at.row) / 16, threadIdx.x,
                                    StreamingStore{});
}

// Writes the codes of a tile, and the scales of its rows and columns if it is the first of them.
__device__ inline void write_tile(const MatrixTile& tile, LaneMagnitudes of, MatrixCodes& codes, const MatrixFold& p,
                                  ScaleRule rule, const TileCoord& at) {
  static_assert(MatrixTile::kColumns == 4);
  const auto slice = ThreadSlice::of<MatrixTile>(p.grid, at);
  const ThreadCoord<MatrixTile> thread;
  const int64_t row = at.batch * p.grid.rows + at.row + thread.row + threadIdx.x % MatrixTile::kBlockLanes * 4;
  const int64_t col = at.batch * p.grid.cols + at.col + thread.col;
  const uint32_t col_scales = __vsub4(of.columns, kOnes);
  if (slice.exists && at.col == 0 && thread.col < kBlock)
    *reinterpret_cast<uint32_t*>(p.row_sf + row) = __vsub4(of.rows, kOnes);
  if (slice.exists && at.row == 0 && thread.row == 0) *reinterpret_cast<uint32_t*>(p.col_sf + col) = col_scales;

  const uint32_t of_columns = column_bytes(tile, rule), of_rows = row_bytes(tile, rule);
  if (slice.exists) {
    note_larger(of_columns, of.columns, p.columns.larger + col);
    note_larger(of_rows, of.rows, p.rows.larger + row);
  }
  write_column_codes(tile, of_columns, col_scales, codes, p, rule, at);
  fold_rows(tile, of_rows, of.rows, p.qf + slice.first, static_cast<uint32_t>(p.grid.cols), slice.exists,
            StreamingStore{});
}

}  // namespace mxep::cuda
