// The work of a K-grouped folded product that three warps do ahead of the consumers.
//
//   scales of spans --rescale_accumulator.cuh--> notes of scale increases
//   a group's last stage, if it ends inside one: the next group's tokens --> zeros
#pragma once

#include "cuda/sm90.cuh"
#include "grouped_gemm/folded_shared.cuh"

namespace mxep::cuda::sm90 {

// Clears the next group's tokens, from `tokens` on, in a tile's last stage. Each warp clears one part of the rows. The
// 16-byte chunks of a row are swizzled as in load_box.
__device__ inline void clear_next_group(FoldedShared& s, int part, int stage, uint32_t parity, int tokens) {
  const int lane = threadIdx.x % 32;
  uint8_t* rows = part == kColumnPart ? s.b[stage] : s.a[stage] + part * kWarpgroup * kTileK;
  barrier_wait(&s.landed[stage], parity);
  for (int row = lane; row < kWarpgroup; row += 32)
    for (int chunk = tokens / 16; chunk < kTileK / 16; ++chunk)
      *reinterpret_cast<uint4*>(rows + row * kTileK + (chunk ^ row % 8) * 16) = {};
  shared_to_async_fence();
  threads_sync<kIncreaseParts * 32>(3);  // consumers use 1 and 2
  if (part == 0 && lane == 0) barrier_arrive(&s.full[stage], cluster_rank());
}

// Called by one warp per part.
template <bool kTwin>
__device__ void scan_ahead(const Problem& p, int part, FoldedShared& s) {
  TileQueue tiles(s.tiles);
  IncreaseQueue notes(s.increases);
  int stage = 0;
  uint32_t landed = 0;  // a bit per stage: the parity of its next wait
  for (Tile tile; tiles.next(&tile);) {
    find_increases<kTwin>(p, part, tile, notes);
    const int tokens = tile.k_end - tile.k_begin, rest = tokens % kTileK;
    stage = (stage + tokens / kTileK) % kStages;
    if (rest == 0) continue;
    clear_next_group(s, part, stage, landed >> stage & 1, rest);
    landed ^= 1 << stage;
    stage = (stage + 1) % kStages;
  }
}

}  // namespace mxep::cuda::sm90
