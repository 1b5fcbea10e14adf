// Matrices that the device does not hold: x is read twice, by two launches, and no CTA waits for another.
//
//   measure_matrices   x --> maxima of all rows and columns
//   write_matrices     x, maxima --> codes and scales
//
// A CTA has a tile, and loads its 64 KiB at once. A multiprocessor runs three CTAs that measure, or two that write.
// Persistent CTAs that write, and load the next tile to shared memory meanwhile, take 7% longer on an H200.
#pragma once

#include "fold/matrix_tile.cuh"

namespace mxep::cuda {

// The CTA's tile of a launch with a CTA per tile.
__device__ inline const TileCoord& own_tile(const MatrixFold& p, TileCoord& at) {
  if (threadIdx.x == 0) at = TileCoord::of<MatrixTile>(p.grid, blockIdx.x);
  __syncthreads();
  return at;
}

__global__ void __launch_bounds__(MatrixTile::kThreads, 3)
    measure_matrices(const bf16* x, const __grid_constant__ MatrixFold p, ScaleRule rule) {
  __shared__ ColumnMaxima columns;
  __shared__ TileCoord coord;
  const TileCoord& at = own_tile(p, coord);
  const int lane = threadIdx.x % 32;
  const int64_t row = at.row + threadIdx.x / 32 * kBlock, col = at.col + lane % 16 * 8;
  const int64_t first = (at.batch * p.grid.rows + row + lane / 16) * p.grid.cols + col;
  const bf16* from = row < p.grid.rows && col < p.grid.cols ? x + first : x;
  const auto pitch_nbytes = static_cast<uint32_t>(p.grid.cols * sizeof(bf16));
  uint4 vectors[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) vectors[i] = __ldcs(reinterpret_cast<const uint4*>(at_row(from, pitch_nbytes, 2 * i)));
  raise_maxima([&](int i) { return vectors[i]; }, columns, p, rule, at);
}

__global__ void __launch_bounds__(MatrixTile::kThreads, 2)
    write_matrices(const bf16* x, const __grid_constant__ MatrixFold p, ScaleRule rule) {
  __shared__ MatrixCodes codes;
  __shared__ TileCoord coord;
  const TileCoord& at = own_tile(p, coord);
  const auto tile = load_tile<MatrixTile, true>(x, p.grid, ThreadSlice::of<MatrixTile>(p.grid, at));
  write_tile(tile, LaneMagnitudes::of(p, at), codes, p, rule, at);
}

}  // namespace mxep::cuda
