// Matrices that the device holds on the chip: x is read once. CTAs are persistent, two on each multiprocessor.
//
//   tickets --> TMA --> shared memory --measure--> shared memory --> registers --write--> qf, qf_t
//               tile i + 1                         tile i + 1        tile i
//
// A CTA holds two tiles, one in registers, one in shared memory or on its way there. It writes the first once all tiles
// of its matrix are measured, and until then measures the second. 264 CTAs hold 528 tiles, 33 MB of x.
//
// Every wait ends, whatever else runs on the device. Tiles are taken in the order of tickets by CTAs that run, and a
// tile that a CTA has taken is measured before the CTA waits for anything but the load. A CTA waits for a matrix only
// when all its tiles are taken. While some are not, a CTA with two measured tiles drops the older one, puts it into a
// queue of its own, and takes another. It reads dropped tiles again when their matrix is measured.
#pragma once

#include "fold/matrix_tile.cuh"

namespace mxep::cuda {

inline constexpr uint32_t kNoTile = ~0u;

// Adds one. Who reads the sum sees all that this CTA has written before its last barrier.
__device__ inline void count(uint32_t* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ inline uint32_t counted(const uint32_t* counter) {
  uint32_t now;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  return now;
}

// Tiles of thread 0: which one the CTA loads next, and what it may do with the one in registers.
struct TileChoice {
  const MatrixFold& p;
  uint32_t first = kNoTile, last = kNoTile;  // of the queue of dropped tiles

  __device__ bool measured(uint32_t tile) const {
    const uint32_t matrix = tile / p.per_matrix;
    return counted(p.measured + matrix) >= p.per_matrix;
  }
  __device__ bool all_taken(uint32_t tile) const { return poll(p.tickets) >= (tile / p.per_matrix + 1) * p.per_matrix; }
  __device__ void drop(uint32_t tile) {
    if (first == kNoTile)
      first = tile;
    else
      p.later[last] = tile;
    last = tile;
  }
  // A tile that is dropped and whose matrix is measured, or one that nobody has taken, or kNoTile.
  __device__ uint32_t next(bool& dropped) {
    dropped = first != kNoTile && measured(first);
    if (!dropped) {
      const uint32_t ticket = atomicAdd(p.tickets, 1);
      if (ticket < p.tiles) return ticket;
      if (first == kNoTile) return kNoTile;
      while (!measured(first)) __nanosleep(64);  // all tiles are taken
      dropped = true;
    }
    const uint32_t tile = first;
    first = tile == last ? kNoTile : p.later[tile];
    return tile;
  }
};

enum class Fate : uint32_t { kWrite, kDrop, kWait };  // kWait: until the other tile is measured

struct HeldShared {
  alignas(128) StagedTile stage;
  MatrixCodes codes;
  ColumnMaxima columns;
  TileCoord at[2];  // of the staged tile at [parity], of the tile in registers at [parity ^ 1]
  uint64_t full;
  uint32_t staged, measured;
  Fate fate;
};

__global__ void __launch_bounds__(MatrixTile::kThreads, 2)
    fold_held_matrices(const __grid_constant__ CUtensorMap map, const __grid_constant__ MatrixFold p, ScaleRule rule) {
  extern __shared__ uint4 memory[];
  auto& s = *reinterpret_cast<HeldShared*>(memory);
  TileChoice choice{p};
  // Thread 0 starts the load of the next tile. A dropped tile is measured.
  const auto load_next = [&](uint32_t parity) {
    bool dropped;
    s.staged = choice.next(dropped);
    s.measured = dropped;
    if (s.staged == kNoTile) return;
    s.at[parity] = TileCoord::of<MatrixTile>(p.grid, s.staged);
    s.stage.load(map, &s.full, s.at[parity]);
  };
  const auto fate_of = [&](uint32_t held, bool other_waits) {
    while (!choice.measured(held)) {
      if (other_waits) return Fate::kWait;
      if (!choice.all_taken(held)) return Fate::kDrop;
      __nanosleep(64);
    }
    return Fate::kWrite;
  };

  if (threadIdx.x == 0) {
    sm90::barrier_init(&s.full, 1);
    sm90::barrier_init_fence();
    load_next(0);
  }
  __syncthreads();
  MatrixTile tile;
  uint32_t held = kNoTile, staged = s.staged, parity = 0;
  bool measured = false;
  Fate fate = Fate::kWait;
#pragma unroll 1
  while (held != kNoTile || staged != kNoTile) {
    if (held != kNoTile && fate != Fate::kWait) {
      const TileCoord& at = s.at[parity ^ 1];
      if (fate == Fate::kWrite)
        write_tile(tile, LaneMagnitudes::of(p, at), s.codes, p, rule, at);
      else if (threadIdx.x == 0)
        choice.drop(held);
      held = kNoTile;
      continue;
    }
    sm90::barrier_wait(&s.full, parity);
    if (!measured) {
      s.stage.raise_maxima(s.columns, p, rule, s.at[parity]);
      measured = true;
      __syncthreads();
      if (threadIdx.x == 0) count(p.measured + s.at[parity].batch);
      if (held == kNoTile) continue;
    } else {
      tile = s.stage.registers();
      held = staged;
      measured = false;
      parity ^= 1;
      __syncthreads();  // the stage is free
      if (threadIdx.x == 0) load_next(parity);
    }
    if (threadIdx.x == 0) s.fate = fate_of(held, s.staged != kNoTile && !s.measured && !measured);
    __syncthreads();
    staged = s.staged;
    measured |= s.measured != 0;
    fate = s.fate;
  }
}

}  // namespace mxep::cuda
