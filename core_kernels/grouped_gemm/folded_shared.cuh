// Shared memory of the folded products.
#pragma once

#include <type_traits>

#include "grouped_gemm/folded_epilogue.cuh"
#include "grouped_gemm/rescale_accumulator.cuh"
#include "grouped_gemm/second_product.cuh"
#include "grouped_gemm/tile_queue.cuh"

namespace mxep::cuda::sm90 {

constexpr int kStages = 4, kWarpgroup = 128;
constexpr int kBytesA = kTileM * kTileK, kBytesB = kTileN * kTileK;
constexpr int kComputing = 2 * kWarpgroup, kThreads = kWarpgroup + kComputing;

struct FoldedShared {
  alignas(1024) uint8_t a[kStages][kBytesA];
  alignas(1024) uint8_t b[kStages][kBytesB];
  alignas(128) uint8_t staging[8][kStagingBytes];
  __nv_bfloat16 col_factor[2][2][kTileN];  // per warpgroup, for even and odd tiles
  uint64_t full[kStages], empty[kStages];
  TileSlots tiles;
  IncreaseSlots increases;  // K-grouped
  LptSchedule lpt;          // K-grouped
};
struct FoldedSharedWithBias : FoldedShared {
  float bias[2][2][kTileN];  // as col_factor
};
struct FoldedSharedOfTwo : FoldedShared {
  UnitChange unit_change[2][2];  // as col_factor
};
static_assert(sizeof(FoldedSharedWithBias) <= 227 * 1024 && sizeof(FoldedSharedOfTwo) <= 227 * 1024);

// What a kernel computes in addition to the product: nothing, a bias to add, a second product to add, products with
// scales of blocks, or a second product with an output of its own.
enum class Plus { kNothing, kBias, kProduct, kBlockScales, kTwin };

template <Plus kPlus>
using SharedOf = std::conditional_t<kPlus == Plus::kBias, FoldedSharedWithBias,
                                    std::conditional_t<kPlus == Plus::kProduct, FoldedSharedOfTwo, FoldedShared>>;

}  // namespace mxep::cuda::sm90
