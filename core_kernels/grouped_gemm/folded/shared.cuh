// Shared memory of the folded products.
#pragma once

#include <type_traits>

#include "grouped_gemm/folded/epilogue.cuh"
#include "grouped_gemm/folded/rescale_accumulator.cuh"
#include "grouped_gemm/folded/second_product.cuh"
#include "grouped_gemm/schedule/async_store.cuh"
#include "grouped_gemm/schedule/product_launch.cuh"
#include "grouped_gemm/schedule/tile_queue.cuh"
#include "op.h"

namespace mxep::cuda::sm90 {

constexpr int kBytesA = kTileM * kTileK, kBytesB = kTileN * kTileK;

// kDepth: stages of the ring. kStaging: bytes in which a warp stages its part of the output.
template <int kDepth, int kStaging>
struct FoldedSharedOf {
  static constexpr int kStages = kDepth;
  alignas(1024) uint8_t a[kStages][kBytesA];
  alignas(1024) uint8_t b[kStages][kBytesB];
  alignas(1024) uint8_t staging[8][kStaging];
  __nv_bfloat16 col_factor[2][2][kTileN];  // per warpgroup, for even and odd tiles
  uint64_t full[kStages], empty[kStages];
  TileSlots tiles;
  IncreaseSlots increases;  // K-grouped
  LptSchedule lpt;          // K-grouped
};
using FoldedShared = FoldedSharedOf<kStages, kStagingBytes>;
using KGroupedShared = FoldedSharedOf<kStages - 1, kAsyncStagingBytes>;
static_assert(sizeof(KGroupedShared) <= 227 * 1024);

// Operands of one product or output.
struct Matrices {
  const Array *a, *b;
};

// Of two outputs. scales: of the first operand that they do not have in common; input 5 is the second one's.
inline SecondOutput distances(const Call& call, const uint8_t* scales) {
  return {call.in[5].as<const uint8_t>() - scales,
          (call.out[1].as<char>() - call.out[0].as<char>()) / itemsize(call.out[0].dtype)};
}

}  // namespace mxep::cuda::sm90
