// Matrices that the device does not hold: x is read twice, by two launches, and no CTA waits for another.
//
//   measure_matrices   x --> maxima of all rows and columns
//   write_matrices     x, maxima --> codes and scales; persistent CTAs, two on each multiprocessor
//
//   x --TMA--> shared memory --> registers --> codes     the next tile loads while the codes of this one are written
#pragma once

#include "fold/matrix_tile.cuh"

namespace mxep::cuda {

// A CTA has a tile. Its 64 KiB are in flight at once, those of three CTAs on a multiprocessor.
__global__ void __launch_bounds__(MatrixTile::kThreads, 3)
    measure_matrices(const bf16* x, const __grid_constant__ MatrixFold p, ScaleRule rule) {
  __shared__ ColumnMaxima columns;
  __shared__ TileCoord at;
  if (threadIdx.x == 0) at = TileCoord::of<MatrixTile>(p.grid, blockIdx.x);
  __syncthreads();
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

struct TwiceShared {
  alignas(128) StagedTile stage;
  MatrixCodes codes;
  TileCoord at[2];  // of the tile that loads at [parity]
  uint64_t full;
};

__global__ void __launch_bounds__(MatrixTile::kThreads, 2)
    write_matrices(const __grid_constant__ CUtensorMap map, const __grid_constant__ MatrixFold p, ScaleRule rule) {
  extern __shared__ uint4 memory[];
  auto& s = *reinterpret_cast<TwiceShared*>(memory);
  const auto load = [&](uint32_t number, uint32_t parity) {
    s.at[parity] = TileCoord::of<MatrixTile>(p.grid, number);
    s.stage.load(map, &s.full, s.at[parity]);
  };
  if (threadIdx.x == 0) {
    sm90::barrier_init(&s.full, 1);
    sm90::barrier_init_fence();
    load(blockIdx.x, 0);
  }
  __syncthreads();
  uint32_t parity = 0;
#pragma unroll 1
  for (uint32_t number = blockIdx.x; number < p.tiles; number += gridDim.x, parity ^= 1) {
    const TileCoord& at = s.at[parity];
    const auto magnitudes = LaneMagnitudes::of(p, at);
    sm90::barrier_wait(&s.full, parity);
    const MatrixTile tile = s.stage.registers();
    __syncthreads();  // the stage is free, and the codes of the last tile are written
    if (threadIdx.x == 0 && number + gridDim.x < p.tiles) load(number + gridDim.x, parity ^ 1);
    write_tile(tile, magnitudes, s.codes, p, rule, at);
  }
}

}  // namespace mxep::cuda
