// The loads of a folded product: tiles of the schedule, stage by stage.
//
//   schedule --tile--> queue, for the warps that compute and look for scale increases
//                '---> A, B --TMA, a part of the common rows for all CTAs that have them--> ring of stages
//
// Where blocks may be apart, another warp queues the tiles (blocks_apart.cuh):
//
//   queue --tile--> A, B --TMA--> ring of stages, and after a stage a free place for each of its blocks that is apart
//   notes --blocks apart---'
#pragma once

#include "cuda/sm90.cuh"
#include "grouped_gemm/folded_shared.cuh"
#include "grouped_gemm/schedule.cuh"

namespace mxep::cuda::sm90 {

struct Operands {
  CUtensorMap a, b, flat_a;  // in boxes of the parts of Sharing; flat_a: A of flat tiles, M-grouped
};
// The operands of one product, or of two.
template <Plus kPlus>
struct Maps {
  Operands of[kPlus == Plus::kProduct || kPlus == Plus::kTwin ? 2 : 1];

  __device__ const CUtensorMap* a(int product, bool flat) const { return flat ? &of[product].flat_a : &of[product].a; }
  __device__ const CUtensorMap* b(int product) const { return &of[product].b; }
};

// Starts the loads of a stage of the ring, terms k to k + 127, which arrive at `full`.
template <Part kPart>
__device__ __forceinline__ void load_stage(const Sharing<kPart>& shared, const Tile& tile, bool flat,
                                           const CUtensorMap* a, const CUtensorMap* b, int k, FoldedShared& s,
                                           int stage, uint64_t* full) {
  using Of = Sharing<kPart>;
  uint8_t *to_a = s.a[stage], *to_b = s.b[stage];
  barrier_expect(full, kBytesA + kBytesB);
  if (flat) {
    const int part = shared.a * Of::kPartFlatA;
    load_box_multicast(to_b + part * kTileK, a, full, k, tile.a_row + part, shared.with_a);
#pragma unroll
    for (int row = 0; row < kTileM; row += Of::kPartB) load_box(to_a + row * kTileK, b, full, k, tile.b_row + row);
    return;
  }
  if (Of::kBlock || tile.shares_a) {
    const int part = shared.a * Of::kPartA;
    load_box_multicast(to_a + part * kTileK, a, full, k, tile.a_row + part, shared.with_a);
  } else {
#pragma unroll
    for (int row = 0; row < kTileM; row += Of::kPartA) load_box(to_a + row * kTileK, a, full, k, tile.a_row + row);
  }
  if (tile.shares_b) {
    const int part = shared.b * Of::kPartB;
    load_box_multicast(to_b + part * kTileK, b, full, k, tile.b_row + part, shared.with_b);
  } else {
#pragma unroll
    for (int row = 0; row < kTileN; row += Of::kPartB) load_box(to_b + row * kTileK, b, full, k, tile.b_row + row);
  }
}

// Called by one thread of a CTA.
template <bool kAlongK, Plus kPlus, Part kPart>
__device__ void produce(const Problem& p, const Maps<kPlus>& maps, FoldedShared& s) {
  const Sharing<kPart> shared(cluster_rank());
  FoldedSchedule<kAlongK, kPlus == Plus::kTwin, kPart> schedule(p, s.lpt);
  Ring<kStages> ring;
  TileQueue tiles(s.tiles);
  for (Tile tile; schedule.next(&tile);) {
    tiles.put(tile);
    const bool flat = !kAlongK && tile.flat;
    const CUtensorMap *a = maps.a(0, flat), *b = maps.b(0);
    if constexpr (kPlus == Plus::kTwin) {
      a = maps.a(tile.twin, flat), b = maps.b(tile.twin);
      // Where the compiler sees the choice, it keeps the consumers' descriptors in per-thread registers.
      asm volatile("" : "+l"(a), "+l"(b));
    }
    const int first_end = (tile.k_end + kTileK - 1) / kTileK * kTileK;
    const int end = kPlus == Plus::kProduct ? first_end + p.second.depth : tile.k_end;
    for (int at = tile.k_begin; at < end; at += kTileK, ring.advance()) {
      int k = at;
      if constexpr (kPlus == Plus::kProduct) {
        if (at == first_end) a = maps.a(1, flat), b = maps.b(1);
        if (at >= first_end) k -= first_end;
      }
      barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
      load_stage(shared, tile, flat, a, b, k, s, ring.stage, &s.full[ring.stage]);
    }
  }
  tiles.put({});  // the end
  ring.drain(s.empty);
}

// The same where blocks may be apart: those of the tiles in the queue; called by a warp, of which one thread loads.
template <Part kPart>
__device__ void produce_stepped(const Problem& p, const Maps<Plus::kSteps>& maps, FoldedShared& s) {
  const Sharing<kPart> shared(cluster_rank());
  Ring<kStages> ring;
  TileQueue tiles(s.tiles);
  NoteQueue notes(s.apart.notes);
  const bool loads = threadIdx.x == 0;
  for (Tile tile; tiles.next(&tile);) {
    const CUtensorMap *a = maps.a(0, tile.flat), *b = maps.b(0);
    StageApart next = next_apart(notes);
#pragma unroll 1
    for (int k = 0; k < p.depth; k += kTileK) {
      const bool apart = k == next.at();
      barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
      uint64_t* full = apart ? &s.apart.loaded[ring.stage] : &s.full[ring.stage];
      if (loads) load_stage(shared, tile, tile.flat, a, b, k, s, ring.stage, full);
      ring.advance();
      if (!apart) continue;
#pragma unroll 1
      for (int more = __popc(next.blocks()); more > 0; --more, ring.advance()) {  // places for blocks in bf16
        barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
        if (loads) barrier_arrive(&s.apart.free[ring.stage], cluster_rank());
      }
      next = next_apart(notes);
    }
  }
  ring.drain(s.empty);
}

}  // namespace mxep::cuda::sm90
