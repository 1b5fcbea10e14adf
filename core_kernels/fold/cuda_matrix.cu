// bf16 matrices quantized and folded along both dims: weights.
//
//   x (B, M, K) --> qf (B, M, K)    row_sf (B, M)   one scale per row
//                   qf_t (B, K, M)  col_sf (B, K)   one scale per column
//
// The scale of a row or of a column is known after all its tiles are measured. Tiles of small matrices wait on the chip
// (matrix_held.cuh), those of large ones are read again (matrix_twice.cuh):
//
//   held    read 2 bytes per value, write 2    one launch
//   twice   read 2; read 2, write 2            two launches
#include <algorithm>

#include "cuda/driver.h"
#include "cuda/ops.h"
#include "cuda/tensor_map.h"
#include "fold/matrix_held.cuh"
#include "fold/matrix_twice.cuh"

namespace mxep::cuda {

// attrs: rounding, satfinite, held.
void quantize_matrix_fold(const Call& call, cudaStream_t stream) {
  const char* op = "quantize_matrix_fold";
  const Array &x = call.in[0], &scratch = call.out[4];
  const int64_t batch = x.leading(2), rows = x.dim(-2), cols = x.dim(-1);
  if (batch == 0) return;
  const ScaleRule rule(call.attrs[0], call.attrs[1]);
  const bool held = call.attrs[2];
  MatrixFold p{};
  p.grid = Grid::of<MatrixTile>(batch, rows, cols, static_cast<uint32_t>(ceil_div(rows, MatrixTile::kRows)));
  p.tiles = grid_x(op, p.grid.tiles());
  p.per_matrix = p.grid.strips * p.grid.tiles_across;
  p.qf = call.out[0].as<uint8_t>();
  p.row_sf = call.out[1].as<uint8_t>();
  p.qf_t = call.out[2].as<uint8_t>();
  p.col_sf = call.out[3].as<uint8_t>();
  p.row_maxima = scratch.as<uint32_t>();
  p.col_maxima = p.row_maxima + batch * rows;
  p.measured = p.col_maxima + batch * cols;
  p.tickets = p.measured + batch;
  p.later = p.tickets + 1;
  const auto* zeros_end = held ? p.later : p.measured;
  check(op, cudaMemsetAsync(scratch.data, 0, (zeros_end - p.row_maxima) * sizeof(uint32_t), stream));

  if (held) {
    constexpr int kBytes = sizeof(HeldShared);
    const CUtensorMap map = bf16_matrices(op, x.data, batch, rows, cols, MatrixTile::kRows, MatrixTile::kCols);
    const unsigned ctas = std::min(p.tiles, 2 * multiprocessors(op));
    allow_shared_memory<fold_held_matrices>(op, stream, kBytes);
    launch_kernel(op, fold_held_matrices, ctas, MatrixTile::kThreads, kBytes, stream, map, p, rule);
  } else {
    for (auto kernel : {measure_matrices, write_matrices})
      launch_kernel(op, kernel, p.tiles, MatrixTile::kThreads, 0, stream, x.as<const bf16>(), p, rule);
  }
}

}  // namespace mxep::cuda
