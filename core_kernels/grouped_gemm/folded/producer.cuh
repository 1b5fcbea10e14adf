// The loads of a folded product: tiles of the schedule, stage by stage.
//
//   schedule --tile--> queue, for the warps that load, compute and look for scale increases
//                        '---> A, B --TMA, one half of the common rows for both CTAs--> ring of stages
//
// M-grouped, one warp schedules and another one loads: with the state of both, a thread's 24 registers do not suffice.
#pragma once

#include "cuda/sm90.cuh"
#include "grouped_gemm/folded/shared.cuh"
#include "grouped_gemm/schedule/schedule.cuh"

namespace mxep::cuda::sm90 {

struct Operands {
  CUtensorMap a, b;  // in boxes of one half of a tile's rows
  union {
    CUtensorMap flat_a;  // M-grouped: A of flat tiles
    CUtensorMap out;     // K-grouped: in boxes of 16 rows
  };
};
// The operands of one product, or of two.
template <typename Variant>
struct Maps {
  static constexpr int kCount = Variant::kProducts * Variant::kOutputs;
  Operands of[kCount];

  __device__ const CUtensorMap* a(int product, bool flat) const { return flat ? &of[product].flat_a : &of[product].a; }
  __device__ const CUtensorMap* b(int product) const { return &of[product].b; }
};

// Starts the loads of terms k to k + 127 into a stage of the ring; the barrier `full` counts their bytes. Each CTA of a
// cluster loads one half of the common rows for both.
template <typename Shared>
__device__ __forceinline__ void load_stage(uint32_t rank, const Tile& tile, bool flat, const CUtensorMap* a,
                                           const CUtensorMap* b, int k, Shared& s, int stage, uint64_t* full) {
  constexpr uint16_t kBoth = 3;
  uint8_t *to_a = s.a[stage], *to_b = s.b[stage];
  barrier_expect(full, kBytesA + kBytesB);
  if (flat) {
    const int half = rank * kHalfN;
    load_box_multicast(to_b + half * kTileK, a, full, k, tile.a_row + half, kBoth);
#pragma unroll
    for (int row = 0; row < kTileM; row += kHalfN) load_box(to_a + row * kTileK, b, full, k, tile.b_row + row);
    return;
  }
  if (tile.shares_a) {
    const int half = rank * kHalfM;
    load_box_multicast(to_a + half * kTileK, a, full, k, tile.a_row + half, kBoth);
  } else {
#pragma unroll
    for (int row = 0; row < kTileM; row += kHalfM) load_box(to_a + row * kTileK, a, full, k, tile.a_row + row);
  }
  if (tile.shares_b) {
    const int half = rank * kHalfN;
    load_box_multicast(to_b + half * kTileK, b, full, k, tile.b_row + half, kBoth);
  } else {
#pragma unroll
    for (int row = 0; row < kTileN; row += kHalfN) load_box(to_b + row * kTileK, b, full, k, tile.b_row + row);
  }
}

// The loads of a tile, by one thread of a CTA.
template <typename Variant>
__device__ __forceinline__ void load_tile(const Problem& p, const Maps<Variant>& maps, const Tile& tile,
                                          typename Variant::Shared& s, Ring<Variant::Shared::kStages>& ring) {
  const uint32_t rank = cluster_rank();
  const bool flat = !Variant::kKGrouped && tile.flat;
  const CUtensorMap *a = maps.a(0, flat), *b = maps.b(0);
  if constexpr (Variant::kOutputs == 2) {
    a = maps.a(tile.output, flat), b = maps.b(tile.output);
    // Where the compiler sees the choice, it keeps the consumers' descriptors in per-thread registers.
    asm volatile("" : "+l"(a), "+l"(b));
  }
  const int first_end = (tile.k_end + kTileK - 1) / kTileK * kTileK;
  const int end = Variant::kProducts == 2 ? first_end + p.second_product.depth : tile.k_end;
  for (int at = tile.k_begin; at < end; at += kTileK, ring.advance()) {
    int k = at;
    if constexpr (Variant::kProducts == 2) {
      if (at == first_end) a = maps.a(1, flat), b = maps.b(1);
      if (at >= first_end) k -= first_end;
    }
    barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
    load_stage(rank, tile, flat, a, b, k, s, ring.stage, &s.full[ring.stage]);
  }
}

// K-grouped, called by one thread of a CTA: its tiles to the queue, and their loads.
template <typename Variant>
__device__ void schedule_and_load(const Problem& p, const Maps<Variant>& maps, typename Variant::Shared& s) {
  FoldedSchedule<true, Variant::kOutputs == 2> schedule(p, s.lpt);
  Ring<Variant::Shared::kStages> ring;
  TileQueue tiles(s.tiles);
  for (Tile tile; schedule.next(&tile);) {
    tiles.put(tile);
    load_tile(p, maps, tile, s, ring);
  }
  tiles.put({});  // the end
  ring.drain(s.empty);
}

// M-grouped, called by one thread of a CTA: the loads of the tiles in the queue.
template <typename Variant>
__device__ void load(const Problem& p, const Maps<Variant>& maps, typename Variant::Shared& s) {
  Ring<Variant::Shared::kStages> ring;
  TileQueue tiles(s.tiles);
  for (Tile tile; tiles.take(&tile);) load_tile(p, maps, tile, s, ring);
  ring.drain(s.empty);
}

}  // namespace mxep::cuda::sm90
