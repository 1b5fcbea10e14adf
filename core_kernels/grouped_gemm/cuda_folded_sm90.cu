// Folded FP8 grouped products on Hopper. M-grouped operands have one scale per row, applied once, in the epilogue.
// K-grouped operands have one scale per row and span of 256 tokens: the accumulator is in units of the current span's
// scales, which never decrease within a group, and is rescaled where a scale increases.
//
//   M-grouped  out[m, n] = 2^(rs[m] + cs[g, n]) sum_k a[m, k] b[g, n, k] [+ bias[g, n]]      rows m of group g
//              or the sum of two such products, with scales of their own (second_product.cuh)
//              or with scales of blocks of 128 along k (block_factors.cuh)
//   K-grouped  out[g, i, j] = sum_t 2^(rs[t, i] + cs[t, j]) sum_m a[i, m] b[j, m]    tokens m of span t of group g
//
// Of either, two products in one launch: of the same rows with two weights, of two gradients with the same x. Each has
// its output, and a tile belongs to one of them (schedule.cuh).
//
// A cluster of two CTAs computes two tiles of 256 x 128 that share their rows of B or of A (schedule.cuh): each CTA
// loads one half of the shared rows for both. M-grouped, a flat tile has 128 rows and 256 columns: the same code with
// the matrices of a stage exchanged.
//
//   256 x 128   A rows 0 to 127 | 128 to 255  B        128 x 256 (flat)   B rows 0 to 127 | 128 to 255  A
//               warpgroup 1       2           both                        warpgroup 1       2           both
//
//   warpgroup 0     TMA: A (256, 128), B (128, 128) --> ring of 4 stages of 48 KiB
//     K-grouped     scales of spans --> notes of scale increases (rescale_accumulator.cuh)
//                                                        |  full: the bytes of the stage have arrived
//                                                        |  empty: the consumers of both CTAs have read it
//   warpgroups 1, 2      two products of 64 x 128 x 128 --> partial --fp32 add--> sum     128 x 128 values each
//                        during a product, where a scale increases: sum --rescale_accumulator.cuh--> sum
//                        between two products of a tile: sum --second_product.cuh--> sum
//                        end of the tile: sum --folded_epilogue.cuh--> out
//
// Hopper's FP8 tensor cores accumulate with about 14 mantissa bits, so that partial sums are promoted to fp32 every 128
// terms. sum and partial take 192 of a thread's 240 registers. With 48 KiB a stage, four stages are the most that fit.
//
// The warpgroups are not synchronised (no ping-pong). Without synchronisation one's fp32 promotion overlaps the other's
// WGMMA. Explicit ordering, or an offset of one or more stages, cost 1 to 3%. The gap between promotion and the next
// WGMMA is critical: ten extra instructions there cost 1 to 4%. All other work therefore runs during promotion while a
// WGMMA is in flight, or in other warps.
//
// CTAs are persistent. One thread of each reads the group ends and queues the tiles (tile_queue.cuh). Rows of the next
// group or array that a tile covers are computed but not stored.
#include <algorithm>

#include "cuda/cluster_launch.h"
#include "cuda/ops.h"
#include "cuda/tensor_map.h"
#include "grouped_gemm/folded_consumer.cuh"
#include "grouped_gemm/folded_producer.cuh"
#include "grouped_gemm/folded_shared.cuh"

namespace mxep::cuda {
namespace sm90 {
namespace {

template <bool kAlongK, typename Out, Plus kPlus>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    folded_product(const __grid_constant__ Maps<kPlus> maps, const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& s = *reinterpret_cast<SharedOf<kPlus>*>(bytes);
  constexpr bool kTwin = kPlus == Plus::kTwin;
  if (threadIdx.x == 0) {
    for (const Operands& operands : maps.of) {
      prefetch(&operands.a);
      prefetch(&operands.b);
    }
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], 8 * kCluster);  // every consuming warp of both CTAs
    }
    s.tiles.init(8 + (kAlongK ? kNoteParts : 0));
    s.increases.init(8);
    barrier_init_fence();
  }
  if constexpr (kAlongK) FoldedSchedule<true, kTwin>::template assign<kThreads>(p, s.lpt);
  cluster_sync();
  if (threadIdx.x < kWarpgroup) {
    dealloc_registers<24>();
    const int warp = kAlongK ? __shfl_sync(~0u, threadIdx.x / 32, 0) : 0;
    if (warp == 0) {
      if (threadIdx.x == 0) produce<kAlongK, kPlus>(p, maps, s);
    } else {
      IncreaseQueue notes(s.increases);
      TileQueue tiles(s.tiles);
      for (Tile tile; tiles.next(&tile);) find_increases<kTwin>(p, warp - 1, tile, notes);
    }
  } else {
    alloc_registers<240>();
    if constexpr (!kAlongK) {
      const int64_t thread = blockIdx.x * int64_t{kComputing} + threadIdx.x - kWarpgroup;
      const int64_t threads = p.clusters * kCluster * int64_t{kComputing};
      const auto out = static_cast<Out*>(p.out);
      clear_rest(p, out, thread, threads);
      if constexpr (kTwin) clear_rest(p, out + p.twin.to_out, thread, threads);
    }
    consume<kAlongK, Out, kPlus>(p, s);
  }
}

// A matrix (.., depth) in boxes of `rows` rows.
CUtensorMap boxes(const char* op, const Array& matrix, int rows) {
  return byte_matrix(op, matrix.data, matrix.leading(1), matrix.dim(-1), rows);
}

template <bool kAlongK, Plus kPlus>
Maps<kPlus> maps_of(const char* op, const Call& call) {
  const auto operands = [&](const Array& a, const Array& b) -> Operands {
    return {boxes(op, a, kHalfM), boxes(op, b, kHalfN), kAlongK ? CUtensorMap{} : boxes(op, a, kHalfN)};
  };
  Maps<kPlus> maps;
  maps.of[0] = operands(call.in[0], call.in[2]);
  if constexpr (kPlus == Plus::kProduct) maps.of[1] = operands(call.in[4], call.in[6]);
  if constexpr (kPlus == Plus::kTwin) {
    maps.of[1] = maps.of[0];  // one operand is common
    (kAlongK ? maps.of[1].a : maps.of[1].b) = boxes(op, call.in[4], kAlongK ? kHalfM : kHalfN);
  }
  return maps;
}

template <bool kAlongK, typename Out, Plus kPlus>
void launch_as(const char* op, const Call& call, Problem p, cudaStream_t stream) {
  constexpr auto kKernel = folded_product<kAlongK, Out, kPlus>;
  const unsigned ctas = resident_ctas<kKernel>(op, stream, kCluster, kThreads, sizeof(SharedOf<kPlus>));
  p.clusters = static_cast<int>(ctas) / kCluster;
  launch_kernel(op, kKernel, ctas, kThreads, sizeof(SharedOf<kPlus>), stream, maps_of<kAlongK, kPlus>(op, call), p);
}

template <bool kAlongK, Plus kPlus>
void launch(const char* op, const Call& call, Problem p, cudaStream_t stream) {
  p.group_ends = call.in.back().as<const int32_t>();
  if (kPlus == Plus::kBias) p.bias = call.in[4].as<const float>();
  if (kPlus == Plus::kBlockScales) p.block_scale = {call.in[1].as<const float>(), call.in[3].as<const float>()};
  p.row_scale = call.in[1].as<const uint8_t>();
  const Array& rhs = call.in[2];
  p.col_scale = call.in[3].as<const uint8_t>();
  p.out = call.out[0].data;
  // Rows of operands and scales are counted in 32 bits, as TMA counts them; tiles reach beyond the last.
  const int64_t a_rows = call.in[0].dim(0), b_rows = rhs.leading(1);
  const int64_t scales = kAlongK ? call.in[1].dim(0) * std::max(a_rows, b_rows) : call.in[1].leading(0);
  int64_t depth = call.in[0].dim(1);
  if constexpr (kPlus == Plus::kProduct) {
    p.second = {call.in[5].as<const uint8_t>(), call.in[7].as<const uint8_t>(), static_cast<int>(call.in[4].dim(1))};
    depth += call.in[4].dim(1);
  }
  if constexpr (kPlus == Plus::kTwin)
    p.twin = {call.in[5].as<const uint8_t>() - (kAlongK ? p.row_scale : p.col_scale),
              (call.out[1].as<char>() - call.out[0].as<char>()) / itemsize(call.out[0].dtype)};
  if (std::max({b_rows, scales, depth}) > INT32_MAX - kCluster * kTileM)
    throw std::runtime_error(std::string(op) + ": an operand has more than 2^31 rows, columns or scales");
  if (call.out[0].dtype == DType::bf16) {
    launch_as<kAlongK, __nv_bfloat16, kPlus>(op, call, p, stream);
  } else {
    launch_as<kAlongK, float, kPlus>(op, call, p, stream);
  }
}

// Empty sums. An operand without bytes has no tensor map.
void clear(const char* op, const Call& call, cudaStream_t stream) {
  for (const Array& out : call.out) check(op, cudaMemsetAsync(out.data, 0, out.nbytes(), stream));
}

template <Plus kPlus>
void m_grouped(const char* op, const Call& call, cudaStream_t stream) {
  const Array &lhs = call.in[0], &rhs = call.in[2];
  Problem p{};
  p.groups = static_cast<int>(rhs.dim(0));
  p.rows = static_cast<int>(lhs.dim(0));
  p.cols = static_cast<int>(rhs.dim(1));
  p.depth = static_cast<int>(lhs.dim(1));
  if (p.groups == 0) return clear(op, call, stream);  // every row is past the last end
  launch<false, kPlus>(op, call, p, stream);
}

template <Plus kPlus>
void k_grouped(const char* op, const Call& call, cudaStream_t stream) {
  const Array &lhs = call.in[0], &rhs = call.in[2];
  Problem p{};
  p.groups = static_cast<int>(call.in.back().dim(0));
  p.rows = static_cast<int>(lhs.dim(0));
  p.cols = static_cast<int>(rhs.dim(0));
  p.depth = static_cast<int>(lhs.dim(1));
  if (p.depth == 0) return clear(op, call, stream);
  launch<true, kPlus>(op, call, p, stream);
}

}  // namespace
}  // namespace sm90

void grouped_mm_fold(const Call& call, cudaStream_t stream) {
  sm90::m_grouped<sm90::Plus::kNothing>("grouped_mm_fold", call, stream);
}

void grouped_mm_fold_bias(const Call& call, cudaStream_t stream) {
  sm90::m_grouped<sm90::Plus::kBias>("grouped_mm_fold_bias", call, stream);
}

void grouped_mm_fold_sum(const Call& call, cudaStream_t stream) {
  sm90::m_grouped<sm90::Plus::kProduct>("grouped_mm_fold_sum", call, stream);
}

void grouped_mm_blockwise(const Call& call, cudaStream_t stream) {
  sm90::m_grouped<sm90::Plus::kBlockScales>("grouped_mm_blockwise", call, stream);
}

void grouped_mm_fold_pair(const Call& call, cudaStream_t stream) {
  sm90::m_grouped<sm90::Plus::kTwin>("grouped_mm_fold_pair", call, stream);
}

void grouped_wgrad_fold(const Call& call, cudaStream_t stream) {
  sm90::k_grouped<sm90::Plus::kNothing>("grouped_wgrad_fold", call, stream);
}

void grouped_wgrad_fold_pair(const Call& call, cudaStream_t stream) {
  sm90::k_grouped<sm90::Plus::kTwin>("grouped_wgrad_fold_pair", call, stream);
}

}  // namespace mxep::cuda
