// bf16 matrices quantized and folded along both dims, with a headroom: weights.
//
//   x (B, M, K) --> qf (B, M, K)    row_sf (B, M)   one scale per row
//                   qf_t (B, K, M)  col_sf (B, K)   one scale per column
//
// The first span of a line (a row or a column), 256 values, gives its scale, times 4 as headroom. Nearly no line has a
// block with a larger scale in another span; such a line is rewritten. No CTA waits for another.
//
//   measure_first    the first 256 rows and columns of x --> scales of the lines
//   write_matrices   x, scales --> codes and scales; lines with a larger block, and its scale
//   rewrite_rows,    x, these lines --> their codes and scales
//   rewrite_columns
//
// x is read once, 4 bytes per value are moved. The columns alone move 3, since a tile of the upper strip has all of the
// first spans of its columns:
//
//   write_columns<true>    the upper strip of x --> scales of the columns, their codes
//   write_columns<false>   the other strips, scales --> codes; columns with a larger block, and its scale
//   rewrite_columns        as above
#include "cuda/driver.h"
#include "cuda/ops.h"
#include "fold/matrix/lines.cuh"
#include "fold/matrix/tile.cuh"

namespace mxep::cuda {
namespace {

__global__ void __launch_bounds__(MatrixTile::kThreads, 3)
    measure_first(const bf16* x, const __grid_constant__ MatrixFold p, ScaleRule rule) {
  __shared__ ColumnMaxima columns;
  __shared__ TileCoord coord;
  if (threadIdx.x == 0) coord = p.first_tile(blockIdx.x);
  __syncthreads();
  raise_maxima(x, columns, p, rule, coord);
}

__global__ void __launch_bounds__(MatrixTile::kThreads, 2)
    write_matrices(const bf16* x, const __grid_constant__ MatrixFold p, ScaleRule rule) {
  __shared__ MatrixCodes codes;
  __shared__ TileCoord coord;
  if (threadIdx.x == 0) coord = TileCoord::of<MatrixTile>(p.grid, blockIdx.x);
  __syncthreads();
  const auto tile = load_tile<MatrixTile, true>(x, p.grid, ThreadSlice::of<MatrixTile>(p.grid, coord));
  write_tile(tile, LaneMagnitudes::of(p, coord), codes, p, rule, coord);
}

// Of the tiles of `strips`: kUpper, the first strip of every matrix, otherwise all others.
template <bool kUpper>
__global__ void __launch_bounds__(MatrixTile::kThreads, 2)
    write_columns(const bf16* x, const __grid_constant__ MatrixFold p, const __grid_constant__ Grid strips,
                  ScaleRule rule) {
  __shared__ MatrixCodes codes;
  __shared__ TileCoord coord;
  if (threadIdx.x == 0) {
    coord = TileCoord::of<MatrixTile>(strips, blockIdx.x);
    if (!kUpper) coord.row += MatrixTile::kRows;
  }
  __syncthreads();
  const auto slice = ThreadSlice::of<MatrixTile>(p.grid, coord);
  const auto tile = load_tile<MatrixTile, true>(x, p.grid, slice);
  const int64_t col = coord.batch * p.grid.cols + coord.col + ThreadCoord<MatrixTile>().col;
  const uint32_t bytes = column_bytes(tile, rule);
  uint32_t magnitudes = 0;
  if constexpr (kUpper) {
    magnitudes = set_column_scales(bytes, slice.exists, col, p);
  } else if (slice.exists) {
    magnitudes = LaneMagnitudes::four(p.columns.first + col);
    note_larger(bytes, magnitudes, p.columns.larger + col);
  }
  write_column_codes(tile, bytes, __vsub4(magnitudes, kOnes), codes, p, rule, coord);
}

}  // namespace

// attrs: rounding, satfinite.
void quantize_matrix_fold(const Call& call, cudaStream_t stream) {
  const char* op = "quantize_matrix_fold";
  const Array &x = call.in[0], &scratch = call.out[4];
  const int64_t batch = x.leading(2), rows = x.dim(-2), cols = x.dim(-1);
  if (batch == 0) return;
  const ScaleRule rule(call.attrs[0], call.attrs[1]);
  MatrixFold p{};
  p.grid = Grid::of<MatrixTile>(batch, rows, cols, static_cast<uint32_t>(ceil_div(rows, MatrixTile::kRows)));
  p.qf = call.out[0].as<uint8_t>();
  p.row_sf = call.out[1].as<uint8_t>();
  p.qf_t = call.out[2].as<uint8_t>();
  p.col_sf = call.out[3].as<uint8_t>();
  p.rows = Lines::at(scratch.as<uint32_t>(), batch * rows);
  p.columns = Lines::at(p.rows.larger + p.rows.count, batch * cols);
  check(op, cudaMemsetAsync(scratch.data, 0, scratch.nbytes(), stream));
  const auto* from = x.as<const bf16>();
  launch_kernel(op, measure_first, grid_x(op, batch * p.first_tiles()), MatrixTile::kThreads, 0, stream, from, p, rule);
  launch_kernel(op, write_matrices, grid_x(op, p.grid.tiles()), MatrixTile::kThreads, 0, stream, from, p, rule);
  const auto ctas_of = [&](const Lines& lines, int of_cta) { return grid_x(op, ceil_div(lines.count, of_cta)); };
  launch_kernel(op, rewrite_rows, ctas_of(p.rows, kRowsOfCta), kRewriters, 0, stream, from, p, rule);
  launch_kernel(op, rewrite_columns, ctas_of(p.columns, kColumnsOfCta), kRewriters, 0, stream, from, p, rule);
}

// attrs: rounding, satfinite.
void quantize_matrix_fold_t(const Call& call, cudaStream_t stream) {
  const char* op = "quantize_matrix_fold_t";
  const Array& x = call.in[0];
  const int64_t batch = x.leading(2), rows = x.dim(-2), cols = x.dim(-1), lower = rows - MatrixTile::kRows;
  if (batch == 0) return;
  const ScaleRule rule(call.attrs[0], call.attrs[1]);
  MatrixFold p{};
  p.grid = Grid::of<MatrixTile>(batch, rows, cols, 1);
  p.qf_t = call.out[0].as<uint8_t>();
  p.col_sf = call.out[1].as<uint8_t>();
  p.columns = Lines::at(call.out[2].as<uint32_t>(), batch * cols);
  const auto* from = x.as<const bf16>();
  const auto launch = [&](auto kernel, const Grid& strips) {
    launch_kernel(op, kernel, grid_x(op, strips.tiles()), MatrixTile::kThreads, 0, stream, from, p, strips, rule);
  };
  launch(write_columns<true>, Grid::of<MatrixTile>(batch, MatrixTile::kRows, cols, 1));
  if (lower <= 0) return;
  launch(write_columns<false>, Grid::of<MatrixTile>(batch, lower, cols, p.grid.strips - 1));
  const unsigned ctas = grid_x(op, ceil_div(p.columns.count, kColumnsOfCta));
  launch_kernel(op, rewrite_columns, ctas, kRewriters, 0, stream, from, p, rule);
}

}  // namespace mxep::cuda
