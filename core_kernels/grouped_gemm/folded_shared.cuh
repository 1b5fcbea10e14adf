// Shared memory of the folded products.
#pragma once

#include <type_traits>

#include "grouped_gemm/blocks_apart.cuh"
#include "grouped_gemm/folded_epilogue.cuh"
#include "grouped_gemm/rescale_accumulator.cuh"
#include "grouped_gemm/second_product.cuh"
#include "grouped_gemm/tile_queue.cuh"

namespace mxep::cuda::sm90 {

constexpr int kStages = 4, kWarpgroup = 128;
constexpr int kBytesA = kTileM * kTileK, kBytesB = kTileN * kTileK;
constexpr int kComputing = 2 * kWarpgroup;  // threads

// The CTAs of a cluster by the rows that they share. Those of a block, 2 x 4, share rows of A along it and rows of B
// across it; each loads a part for all of them. A pair shares rows of A or rows of B.
template <Part kPart>
struct Sharing {
  static constexpr bool kBlock = kPart == Part::kBlocks;
  static constexpr int kOfA = kBlock ? kBlockWide : kCluster, kOfB = kCluster;       // CTAs with the same rows
  static constexpr int kPartA = kTileM / kOfA, kPartB = kTileN / kOfB;               // rows of a box
  static constexpr int kPartFlatA = kTileN / kOfA;                                   // of A in flat tiles
  static constexpr int kPartners = kBlock ? kBlockWide + kBlockHigh - 1 : kCluster;  // of a CTA, and itself

  int a, b;                 // this CTA's part
  uint16_t with_a, with_b;  // masks of the CTAs that have the same rows

  __device__ explicit Sharing(int rank) : a(rank), b(rank), with_a(3), with_b(3) {
    if constexpr (kBlock) {
      a = rank % kBlockWide, b = rank / kBlockWide;
      with_a = 0xF << b * kBlockWide, with_b = 0x11 << a;
    }
  }
  // The rank of partner i.
  __device__ static uint32_t partner(uint32_t rank, int i) {
    if (!kBlock) return i;
    return i < kBlockWide ? rank / kBlockWide * kBlockWide + i : (rank + kBlockWide) % kBlockCtas;
  }
};

// Of stages with blocks apart (apart_stage.cuh). Barriers of a place of the ring: `loaded`, the bytes of such a stage
// have arrived; `free`, a block in bf16 may be written.
constexpr int kBlockThreads = kWarpgroup, kBlockBarrier = 3, kLines = kTileM + kTileN;
struct ApartSlots {
  NoteSlots<StageApart> notes;
  uint64_t loaded[kStages], free[kStages];
  int terms[kStages];      // of each line, of stages in bf16
  uint4 codes[2][kLines];  // of a block, by halves
};

struct FoldedShared {
  alignas(1024) uint8_t a[kStages][kBytesA];
  alignas(1024) uint8_t b[kStages][kBytesB];
  alignas(128) uint8_t staging[8][kStagingBytes];
  __nv_bfloat16 col_factor[2][2][kTileN];  // per warpgroup, for even and odd tiles
  uint64_t full[kStages], empty[kStages];
  TileSlots tiles;
  union {
    NoteSlots<ScaleIncreases> increases;  // K-grouped
    ApartSlots apart;                     // Plus::kSteps
  };
  LptSchedule lpt;  // K-grouped
};

template <bool kStepped>
__device__ __forceinline__ auto& notes_of(FoldedShared& s) {
  if constexpr (kStepped) {
    return s.apart.notes;
  } else {
    return s.increases;
  }
}

struct FoldedSharedWithBias : FoldedShared {
  float bias[2][2][kTileN];  // as col_factor
};
struct FoldedSharedOfTwo : FoldedShared {
  UnitChange unit_change[2][2];  // as col_factor
};
static_assert(sizeof(ApartSlots) <= sizeof(NoteSlots<ScaleIncreases>));
static_assert(sizeof(FoldedSharedWithBias) <= 227 * 1024 && sizeof(FoldedSharedOfTwo) <= 227 * 1024);

// What a kernel computes beside the product: nothing, a bias to add, a second product to add, products with scales of
// blocks, scales of blocks of 32, or a second product with an output of its own.
enum class Plus { kNothing, kBias, kProduct, kBlockScales, kSteps, kTwin };

template <Plus kPlus>
constexpr int kThreadsOf = kWarpgroup + kComputing + (kPlus == Plus::kSteps ? kBlockThreads : 0);
template <Plus kPlus>
using SharedOf = std::conditional_t<kPlus == Plus::kBias, FoldedSharedWithBias,
                                    std::conditional_t<kPlus == Plus::kProduct, FoldedSharedOfTwo, FoldedShared>>;

}  // namespace mxep::cuda::sm90
