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
// x is read once, 4 bytes per value are moved.
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

}  // namespace mxep::cuda
