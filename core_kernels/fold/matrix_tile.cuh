// The two steps of cuda_matrix.cu on a tile of 256 rows x 128 columns.
//
//   measure   tile --> largest block of each row and column --> maxima in global memory
//   write     tile, maxima --> qf, qf_t; from the first tiles also row_sf and col_sf
//
//      lane    0       15          Measuring reads a tile in vectors of 8 values: half a warp has a row. A lane has 8
//      row 0  .---- ... ----.      columns of 16 rows. Four lanes share the block of a row, two the block of a column.
//      row 1  '16-- ... --31'
//
// A scale byte grows with the largest magnitude of its block. A row's scale is therefore that of its largest block, and
// one scale is computed per row and tile instead of one per block. Blocks without a scale count as NaN, which the
// maximum ignores.
#pragma once

#include "cuda/sm90.cuh"
#include "fold/folded_tile.cuh"
#include "fold/magnitudes.cuh"
#include "quantize/register_tile.cuh"

namespace mxep::cuda {

using MatrixTile = FoldTile<Bf16x2>;

struct MatrixFold {
  Grid grid;  // a strip of tiles is as wide as the matrix, a group of strips is a matrix
  uint32_t tiles, per_matrix;
  uint8_t *qf, *row_sf, *qf_t, *col_sf;
  uint32_t *row_maxima, *col_maxima;  // magnitudes of all rows and columns
  uint32_t *measured, *tickets;       // of matrix_held.cuh: tiles of each matrix; tiles that a CTA has taken
  uint32_t* later;                    // of matrix_held.cuh: the tile after a dropped tile, in the queue of its CTA
};

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

// Raises the maxima of a tile's rows and columns. vector(i): row 2 * i of the lane's half of a warp, as the lane reads
// it.
__device__ inline void raise_maxima(auto vector, ColumnMaxima& columns, const MatrixFold& p, ScaleRule rule,
                                    const TileCoord& at) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = lane / 16;
  uint32_t of_columns[4] = {}, words[8];  // a word: rows 2 * i and 2 * i + 2
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    Bf16x2 rows[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint4 v = vector(i + j);
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

  const int64_t row = at.row + warp * kBlock;
  const bool exists = row < p.grid.rows && at.col + lane % 16 * 8 < p.grid.cols;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    of_columns[i] = (exists ? BlockMaxima::of(of_columns[i], rule) : BlockMaxima{}).bits;
    words[i] = (exists ? BlockMaxima::of(words[i], rule) : BlockMaxima{}).bits;
  }
  *reinterpret_cast<uint2*>(&columns[warp][lane % 16 * 4 + half * 2]) = make_uint2(of_columns[0], of_columns[1]);
  exchange_halves<4, 1>(words, BlockMaxima::merged);  // over the blocks of a row
  const BlockMaxima two{BlockMaxima::merged(words[0], __shfl_xor_sync(~0u, words[0], 8))};
  const int of_lane = lane % 4 * 8 + lane / 4 % 2 * 4 + lane / 8 % 2 * 2 + half;
  if (row < p.grid.rows) raise(p.row_maxima + at.batch * p.grid.rows + row + of_lane, two.magnitude(lane & 8, rule));
  __syncthreads();

  const int64_t col = at.col + threadIdx.x;
  if (threadIdx.x < MatrixTile::kCols && col < p.grid.cols) {
    BlockMaxima largest;
#pragma unroll
    for (int i = 0; i < MatrixTile::kDown; ++i)
      largest.bits = BlockMaxima::merged(largest.bits, columns[i][threadIdx.x / 2]);
    raise(p.col_maxima + at.batch * p.grid.cols + col, largest.magnitude(threadIdx.x % 2, rule));
  }
}

// A tile in shared memory, as the TMA unit loads it. What lies outside the matrix is zero.
struct StagedTile {
  uint2 rows[MatrixTile::kRows][MatrixTile::kCols / 4];

  __device__ void load(const CUtensorMap& map, uint64_t* full, const TileCoord& at) {
    sm90::barrier_expect(full, sizeof rows);
    sm90::load_box(rows, &map, full, static_cast<int>(at.col), static_cast<int>(at.row), static_cast<int>(at.batch));
  }
  __device__ MatrixTile registers() const {
    const ThreadCoord<MatrixTile> thread;
    MatrixTile tile;
#pragma unroll
    for (int r = 0; r < kBlock; ++r)
      tile.rows[r] = reinterpret_cast<const MatrixTile::Row&>(rows[thread.row + r][thread.col / 4]);
    return tile;
  }
  __device__ void raise_maxima(ColumnMaxima& columns, const MatrixFold& p, ScaleRule rule, const TileCoord& at) const {
    const auto* from = reinterpret_cast<const uint4*>(rows[threadIdx.x / 32 * kBlock]) + threadIdx.x % 32;
    cuda::raise_maxima([&](int i) { return from[i * 32]; }, columns, p, rule, at);
  }
};

using MatrixCodes = StagedCodes<MatrixTile::kRows, MatrixTile::kCols, MatrixTile::kColumns>;

// The magnitudes of a lane's four rows and of its four columns, in the bytes of words.
struct LaneMagnitudes {
  uint32_t rows = 0, columns = 0;

  // Loads that bypass L1, since other CTAs may have raised the maxima in the same launch.
  static __device__ uint32_t four(const uint32_t* from) {
    uint4 of;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(of.x), "=r"(of.y), "=r"(of.z), "=r"(of.w)
                 : "l"(from));
    return __byte_perm(__byte_perm(of.x, of.y, 0x0040), __byte_perm(of.z, of.w, 0x0040), 0x5410);
  }
  static __device__ LaneMagnitudes of(const MatrixFold& p, const TileCoord& at) {
    if (!ThreadSlice::of<MatrixTile>(p.grid, at).exists) return {};
    const ThreadCoord<MatrixTile> thread;
    const int64_t row = at.row + thread.row + threadIdx.x % MatrixTile::kBlockLanes * 4, col = at.col + thread.col;
    return {four(p.row_maxima + at.batch * p.grid.rows + row), four(p.col_maxima + at.batch * p.grid.cols + col)};
  }
};

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

  stage_columns(tile, column_bytes(tile, rule), rule, codes, [&](int c) { return col_scales >> c % 4 * 8 & 0xFF; });
  __syncthreads();
  const int64_t first = (at.batch * p.grid.cols + at.col) * p.grid.rows + at.row;
  write_lines<MatrixTile::kThreads>(codes.codes, codes.swizzled, reinterpret_cast<uint4*>(p.qf_t + first),
                                    p.grid.rows / 16, p.grid.cols - at.col, (p.grid.rows - at.row) / 16, threadIdx.x,
                                    StreamingStore{});
  fold_rows(tile, row_bytes(tile, rule), of.rows, p.qf + slice.first, static_cast<uint32_t>(p.grid.cols), slice.exists,
            StreamingStore{});
}

}  // namespace mxep::cuda
