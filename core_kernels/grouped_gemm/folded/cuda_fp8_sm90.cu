// FP8 grouped products on Hopper, both operands contiguous along k. M-grouped operands have one scale per row, applied
// once, in the epilogue. K-grouped operands have one scale per row and span of 256 tokens: the accumulator is in units
// of the current span's scales, which never decrease within a group, and is rescaled where a scale increases.
//
//   M-grouped  out[m, n] = 2^(rs[m] + cs[g, n]) sum_k a[m, k] b[g, n, k] [+ bias[g, n]]      rows m of group g
//              or the sum of two such products, with scales of their own (second_product.cuh)
//              or with scales of blocks of 128 along k (blockwise_factors.cuh)
//   K-grouped  out[g, i, j] = sum_t 2^(rs[t, i] + cs[t, j]) sum_m a[i, m] b[j, m]    tokens m of span t of group g
//
// Of either, two products in one launch: of the same rows with two weights, of two gradients with the same x. Each has
// its output, and a tile belongs to one of them (tile_choice.h). variants.cuh lists all variants.
//
// A cluster of two CTAs computes two tiles of 256 x 128 that share their rows of B or of A (tile_choice.h): each CTA
// loads one half of the shared rows for both. M-grouped, a flat tile has 128 rows and 256 columns: the same code with
// the matrices of a stage exchanged.
//
//   256 x 128   A rows 0 to 127 | 128 to 255  B        128 x 256 (flat)   B rows 0 to 127 | 128 to 255  A
//               warpgroup 1       2           both                        warpgroup 1       2           both
//
//   warpgroup 0     group ends --> tiles (schedule.cuh)
//                   TMA: A (256, 128), B (128, 128) --> ring of stages of 48 KiB
//     K-grouped     scales of spans --> scale increases (rescale_accumulator.cuh)
//                                                        |  full: the stage is loaded
//                                                        |  empty: the consumers of both CTAs have read it
//   warpgroups 1, 2      two products of 64 x 128 x 128 --> partial --fp32 add--> sum     128 x 128 values each
//                        the variant's steps, during a product and between products: sum --> sum
//                        end of the tile: sum --epilogue.cuh--> out      K-grouped: during the next tile
//
// Hopper's FP8 tensor cores accumulate with about 14 mantissa bits, so that partial sums are promoted to fp32 every 128
// terms. sum and partial take 192 of a thread's 240 registers. With 48 KiB a stage, four stages are the most that fit.
// K-grouped, three stages leave 64 KiB for a tile's output, which is stored during the next tile (async_store.cuh).
//
// The warpgroups are not synchronised (no ping-pong). Without synchronisation one's fp32 promotion overlaps the other's
// WGMMA. Explicit ordering, or an offset of one or more stages, cost 1 to 3%. The gap between promotion and the next
// WGMMA is critical: ten extra instructions there cost 1 to 4%. All other work therefore runs during promotion while a
// WGMMA is in flight, or in other warps.
//
// CTAs are persistent. A warp of each reads the group ends and queues the tiles (tile_queue.cuh). Rows of the next
// group or array that a tile covers are computed but not stored.
#include <algorithm>

#include "cuda/ops.h"
#include "cuda/tensor_map.h"
#include "grouped_gemm/folded/consumer.cuh"
#include "grouped_gemm/folded/producer.cuh"
#include "grouped_gemm/folded/variants.cuh"
#include "grouped_gemm/schedule/product_launch.cuh"

namespace mxep::cuda {
namespace sm90 {
namespace {

template <typename Variant, typename Out>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    grouped_gemm_fp8_nt(const __grid_constant__ Maps<Variant> maps, const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& s = *reinterpret_cast<typename Variant::Shared*>(bytes);
  constexpr bool kKGrouped = Variant::kKGrouped, kDualOutput = Variant::kOutputs == 2;
  constexpr int kComputingWarps = kComputing / 32;
  if (threadIdx.x == 0) {
    init_product(maps, s, kComputingWarps + (kKGrouped ? kIncreaseParts : kLoaders));
    s.increases.init(kComputingWarps);
    barrier_init_fence();
  }
  if constexpr (kKGrouped) FoldedSchedule<true, kDualOutput>::template assign<kThreads>(p, s.lpt);
  cluster_sync();
  if (threadIdx.x < kWarpgroup) {
    dealloc_registers<24>();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if constexpr (!kKGrouped) {
      if (warp == 0) {
        if (threadIdx.x == 0) load<Variant>(p, maps, s);
      } else if (warp == 1) {
        put_tiles(FoldedSchedule<false, kDualOutput>(p, s.lpt), s.tiles);
      }
    } else if (warp == 0) {
      if (threadIdx.x == 0) schedule_and_load<Variant>(p, maps, s);
    } else {
      IncreaseQueue increases(s.increases);
      TileQueue tiles(s.tiles);
      for (Tile tile; tiles.next(&tile);) find_increases<kDualOutput>(p, warp - 1, tile, increases);
    }
  } else {
    alloc_registers<240>();
    if constexpr (!kKGrouped) {
      clear_rest(p, static_cast<Out*>(p.out));
      if constexpr (kDualOutput) clear_rest(p, static_cast<Out*>(p.out) + p.second_output.to_out);
    }
    consume<Variant, Out>(p, maps, s);
  }
}

template <typename Variant>
Maps<Variant> maps_of(const char* op, const Call& call) {
  // A matrix (.., depth) in boxes of `rows` rows.
  const auto boxes = [&](const Array* matrix, int rows) {
    return byte_matrix(op, matrix->data, matrix->leading(1), matrix->dim(-1), rows);
  };
  const auto flat = [&](const Array* a) { return Variant::kKGrouped ? CUtensorMap{} : boxes(a, kHalfN); };
  Maps<Variant> maps;
  const Matrices first = Variant::matrices(call, 0);
  maps.of[0] = {boxes(first.a, kHalfM), boxes(first.b, kHalfN), {flat(first.a)}};
  if constexpr (Maps<Variant>::kCount == 2) {
    const Matrices second = Variant::matrices(call, 1);
    Operands& of = maps.of[1] = maps.of[0];  // one operand may be common
    if (second.a != first.a) of.a = boxes(second.a, kHalfM), of.flat_a = flat(second.a);
    if (second.b != first.b) of.b = boxes(second.b, kHalfN);
  }
  if constexpr (Variant::kKGrouped) {
    for (int i = 0; i < Variant::kOutputs; ++i) {
      const Array& out = call.out[i];
      maps.of[i].out = byte_matrix(op, out.data, out.dim(1), out.dim(2) * itemsize(out.dtype), 16, out.dim(0));
    }
  }
  return maps;
}

template <typename Variant>
void launch(const char* op, const Call& call, cudaStream_t stream) {
  const auto [a, b] = Variant::matrices(call, 0);
  Problem p = problem_of(call, a->dim(1));
  if (clear_empty(op, call, p, stream)) return;
  Variant::fill(p, call);
  const int64_t a_rows = a->dim(0), b_rows = b->leading(1);
  const int64_t scales = Variant::kKGrouped ? call.in[1].dim(0) * std::max(a_rows, b_rows) : call.in[1].leading(0);
  const int64_t depth = a->dim(1) + p.second_product.depth;
  require_32_bits(op, std::max({b_rows, scales, depth}), kCluster * kTileM, "2^31 rows, columns or scales");
  launch_for(call.out[0].dtype, [&]<typename Out>(Out) {
    constexpr auto kKernel = grouped_gemm_fp8_nt<Variant, Out>;
    launch_resident<kKernel>(op, sizeof(typename Variant::Shared), maps_of<Variant>(op, call), p, call.share.reserved,
                             stream);
  });
}

}  // namespace
}  // namespace sm90

void grouped_mm_fold(const Call& call, cudaStream_t stream) {
  sm90::launch<sm90::RowScales>("grouped_mm_fold", call, stream);
}

void grouped_mm_fold_bias(const Call& call, cudaStream_t stream) {
  sm90::launch<sm90::RowScalesBias>("grouped_mm_fold_bias", call, stream);
}

void grouped_mm_fold_sum(const Call& call, cudaStream_t stream) {
  sm90::launch<sm90::RowScalesSum>("grouped_mm_fold_sum", call, stream);
}

void grouped_mm_blockwise(const Call& call, cudaStream_t stream) {
  sm90::launch<sm90::BlockScales>("grouped_mm_blockwise", call, stream);
}

void grouped_mm_blockwise_sum(const Call& call, cudaStream_t stream) {
  sm90::launch<sm90::BlockScalesSum>("grouped_mm_blockwise_sum", call, stream);
}

void grouped_mm_fold_pair(const Call& call, cudaStream_t stream) {
  sm90::launch<sm90::RowScalesDualOutput>("grouped_mm_fold_pair", call, stream);
}

void grouped_wgrad_fold(const Call& call, cudaStream_t stream) {
  sm90::launch<sm90::SpanScales>("grouped_wgrad_fold", call, stream);
}

void grouped_wgrad_fold_pair(const Call& call, cudaStream_t stream) {
  sm90::launch<sm90::SpanScalesDualOutput>("grouped_wgrad_fold_pair", call, stream);
}

}  // namespace mxep::cuda
