// Queue of tiles from the scheduling thread of a CTA to the warps that load and compute. The scheduler's divisions take
// a while, so that it runs a tile ahead.
#pragma once

#include "cuda/sm90.cuh"
#include "grouped_gemm/schedule/schedule.cuh"

namespace mxep::cuda::sm90 {

// In shared memory. full: the tile is written; empty: all reading warps have it.
struct TileSlots {
  static constexpr int kSlots = 2;
  Tile tiles[kSlots];
  uint64_t full[kSlots], empty[kSlots];

  // Called by one thread, before the first barrier.
  __device__ void init(int warps) {
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], warps);
    }
  }
};

class TileQueue {
 public:
  __device__ explicit TileQueue(TileSlots& slots) : slots_(slots) {}

  // A tile with exists = false is the end.
  __device__ void put(const Tile& tile) {
    barrier_wait(&slots_.empty[at_], parity_ ^ 1);
    slots_.tiles[at_] = tile;
    barrier_arrive(&slots_.full[at_], cluster_rank());
    advance();
  }
  // Called by one thread.
  __device__ bool take(Tile* tile) {
    barrier_wait(&slots_.full[at_], parity_);
    *tile = slots_.tiles[at_];
    barrier_arrive(&slots_.empty[at_], cluster_rank());
    advance();
    return tile->exists;
  }
  // Called by whole warps.
  __device__ bool next(Tile* tile) {
    barrier_wait(&slots_.full[at_], parity_);
    *tile = slots_.tiles[at_];
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&slots_.empty[at_], cluster_rank());
    advance();
    return __shfl_sync(~0u, tile->exists, 0);  // from one lane, so that the compiler knows that all lanes agree
  }

 private:
  __device__ void advance() {
    if (++at_ == TileSlots::kSlots) at_ = 0, parity_ ^= 1;
  }

  TileSlots& slots_;
  int at_ = 0;
  uint32_t parity_ = 0;
};

// Called by a warp: all tiles of an M-grouped schedule, and the end.
template <typename Schedule>
__device__ void put_tiles(Schedule schedule, TileSlots& slots) {
  const bool puts = threadIdx.x % 32 == 0;
  TileQueue tiles(slots);
  for (Tile tile; schedule.next(&tile); __syncwarp())
    if (puts) tiles.put(tile);
  if (puts) tiles.put({});
}

}  // namespace mxep::cuda::sm90
