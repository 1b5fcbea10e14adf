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
//                                                        |  empty: all consumers of both CTAs have read the stage
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
#include "grouped_gemm/block_factors.cuh"
#include "grouped_gemm/folded_producer.cuh"
#include "grouped_gemm/folded_shared.cuh"

namespace mxep::cuda {
namespace sm90 {
namespace {

// Starts partial = a (64, 32 kSteps) b (128, 32 kSteps)^T. A step of 32 bytes along a row adds 2 to a descriptor.
template <int kSteps>
__device__ __forceinline__ void start(float (&partial)[64], uint32_t a, uint32_t b) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) wgmma_e4m3(partial, a + step * 2, b + step * 2, step != 0);
  wgmma_commit();
}

template <int kSteps>
using Steps = std::integral_constant<int, kSteps>;

// Descriptors of a warpgroup's part of a matrix, by stage of the ring.
struct Stages {
  uint32_t first, step;

  __device__ __forceinline__ uint32_t at(int stage) const { return first + stage * step; }
};

// In place of BlockFactors, of products without scales of blocks.
struct NoFactors {
  __device__ NoFactors(const Problem&, const Tile&, int) {}
};

template <bool kAlongK, typename Out, Plus kPlus>
__device__ void consume(const Problem& p, SharedOf<kPlus>& s) {
  constexpr bool kBias = kPlus == Plus::kBias, kTwo = kPlus == Plus::kProduct, kBlocks = kPlus == Plus::kBlockScales;
  constexpr bool kTwin = kPlus == Plus::kTwin;
  // From one lane, so that the compiler knows that all lanes agree and keeps descriptors in uniform registers.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) - 4, group = warp / 4, lane = threadIdx.x % 32;
  const Addresses at(s);
  TileQueue tiles(s.tiles);
  IncreaseQueue notes(s.increases);
  // State of the next stage, computed during the additions of the previous one, so that a product follows them at once.
  const Stages own{descriptor(at.of(s.a) + group * kWarpgroup * kTileK), kBytesA / 16};
  const Stages common{descriptor(at.of(s.b)), kBytesB / 16};
  Stages stages_a = own, stages_b = common;
  uint32_t a = own.first, b = common.first;
  uint32_t is_full = 0;
  Ring<kStages> ring;
  int odd = 0;
  for (Tile tile; tiles.next(&tile); odd ^= 1) {
    // Loaded here and used after a product. Scales of empty accumulators are ignored. Of two products, those of the
    // second are applied at the end.
    int first_row = group * kWarpgroup;  // of this warpgroup
    if constexpr (!kAlongK) {
      const bool flat = __shfl_sync(~0u, tile.flat, 0);
      stages_a = flat ? common : own;
      stages_b = flat ? own : common;
      a = stages_a.at(ring.stage);
      b = stages_b.at(ring.stage);
      if (flat) {  // the tile becomes this warpgroup's columns of it
        tile.out += first_row;
        tile.col_scale += first_row;
        tile.b_row += first_row;
        tile.cols -= first_row;
        first_row = 0;
      }
    }
    const int col = threadIdx.x % kWarpgroup, row = first_row + warp % 4 * 16;
    const bool any = !kBlocks && tile.k_begin < tile.k_end;
    const uint8_t* row_scale = kTwo ? p.second.row_scale : p.row_scale;
    const uint8_t* col_scale = kTwo ? p.second.col_scale : p.col_scale;
    if constexpr (kTwin) (kAlongK ? row_scale : col_scale) += tile.twin * p.twin.to_scales;
    int col_byte = any && col < tile.cols ? col_scale[tile.col_scale + col] : kOne;
    if (kAlongK && !tile.whole) col_byte = kNanScale;
    [[maybe_unused]] float col_bias = 0;
    if constexpr (kBias) col_bias = col < tile.cols ? p.bias[tile.col_scale + col] : 0;
    int row_byte[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = row + i / 2 * 64 + i % 2 * 8 + lane / 4;
      row_byte[i / 2][i % 2] = any && r < tile.rows ? row_scale[tile.row_scale + r] : kOne;
    }
    // Of the column, and of the row of this warpgroup, with the thread's number.
    [[maybe_unused]] int col_of_first = kOne, row_of_first = kOne, row_of_second = kOne;
    [[maybe_unused]] bool near = true;
    if constexpr (kTwo) {
      const int own_row = first_row + col;
      if (col < tile.cols) col_of_first = p.col_scale[tile.col_scale + col];
      if (own_row < tile.rows) {
        row_of_first = p.row_scale[tile.row_scale + own_row];
        row_of_second = row_scale[tile.row_scale + own_row];
      }
    }

    using Factors = std::conditional_t<kBlocks, BlockFactors, NoFactors>;
    [[maybe_unused]] Factors blocks(p, tile, row + lane / 4);
    [[maybe_unused]] float factor[2][2];  // of either half's next product
    if constexpr (kBlocks) blocks.take(factor[0], 0);
    float sum[2][64] = {};
    int depth = __shfl_sync(~0u, tile.k_end - tile.k_begin, 0);
    int look = kSpan;  // the next token where a note is read
                       // A loop in a loop: a test in the inner one, where the second product begins, cost 5%.
#pragma unroll 1
    for (int product = 0; product < (kTwo ? 2 : 1); ++product) {
      if constexpr (kTwo) {
        if (product == 1) {
          near = change_units(sum, {row_of_first, row_of_second}, {col_of_first, col_byte}, s.unit_change[group][odd],
                              1 + group);
          depth = p.second.depth;
        }
      }
      const auto stage = [&](int k, auto steps) {
        barrier_wait_unless(is_full, at.of(s.full) + ring.stage * 8, ring.parity);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float partial[64];
          start<steps>(partial, a + half * (64 * kTileK / 16), b);
          if (kAlongK && half == 0 && k == look) look = rescale_at(k, sum, warp % 4 * 16, group, notes);
          if constexpr (kBlocks)
            if (half == 1) blocks.reach(k + kTileK);
          wgmma_wait();
          if constexpr (kBlocks) blocks.take(factor[1 - half], 1 - half);
          if (half == 1) {
            if (lane < kCluster) barrier_arrive(at.of(s.empty) + ring.stage * 8, lane);
            ring.advance();
            a = stages_a.at(ring.stage);
            b = stages_b.at(ring.stage);
            is_full = barrier_test(at.of(s.full) + ring.stage * 8, ring.parity);
          }
#pragma unroll
          for (int i = 0; i < 64; ++i) {
            if constexpr (kBlocks) {
              sum[half][i] = fmaf(partial[i], factor[half][i / 2 % 2], sum[half][i]);
            } else {
              sum[half][i] += partial[i];
            }
          }
        }
      };
      const int whole = kAlongK ? depth / kTileK * kTileK : depth;
      int k = 0;
      for (; k < whole; k += kTileK) stage(k, Steps<kTileK / 32>{});
      if constexpr (kAlongK) {  // the group's last stage holds tokens of the next group, which are not multiplied
        const int steps = (depth - whole) / 32;
        if (steps == 3) stage(k, Steps<3>{});
        if (steps == 2) stage(k, Steps<2>{});
        if (steps == 1) stage(k, Steps<1>{});
      }
    }
    if (kAlongK && depth > kSpan) notes.read();

    // Two buffers: when this one is written again, every warp has passed the barrier of the tile in between.
    __nv_bfloat16* col_factor = s.col_factor[group][odd];
    col_factor[col] = __ushort_as_bfloat16(col_byte << 7);
    if constexpr (kBias) s.bias[group][odd][col] = col_bias;
    bool moderate = near && is_moderate(col_byte);
#pragma unroll
    for (int i = 0; i < 4; ++i) moderate &= is_moderate(row_byte[i / 2][i % 2]);
    // The vote makes the condition uniform for the compiler. Without it the compiler duplicates the rest of the tile,
    // treats the loop over tiles as divergent, and keeps descriptors in per-thread registers.
    if (!kBlocks && !__all_sync(~0u, threads_all(1 + group, moderate))) {
      if constexpr (kTwo) {
        scale_far(sum, row_byte, col_factor, s.unit_change[group][odd]);
      } else {
        scale_extreme(sum, row_byte, col_factor);
      }
      threads_sync(1 + group);
      col_factor[col] = 1;
      threads_sync(1 + group);
    }
    if constexpr (kBias) scale_and_add(sum, row_byte, col_factor, s.bias[group][odd]);
    __nv_bfloat162 cols[16];  // of this thread
#pragma unroll
    for (int i = 0; i < 16; ++i) cols[i] = *reinterpret_cast<const __nv_bfloat162*>(col_factor + i * 8 + lane % 4 * 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor[2] = {__int_as_float(row_byte[half][0] << 23), __int_as_float(row_byte[half][1] << 23)};
      store<Out, kBias || kBlocks>(p, tile, row + half * 64, sum[half], factor, cols, s.staging[warp]);
    }
  }
}

template <bool kAlongK, typename Out, Plus kPlus>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    folded_product(const __grid_constant__ Maps<kPlus> maps, const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& s = *reinterpret_cast<SharedOf<kPlus>*>(bytes);
  if (threadIdx.x == 0) {
    for (const Operands& operands : maps.of) {
      prefetch(&operands.a);
      prefetch(&operands.b);
    }
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], 8 * kCluster);  // every consuming warp of both CTAs
    }
    s.tiles.init(8 + (kAlongK ? kIncreaseParts : 0));
    s.increases.init(8);
    barrier_init_fence();
  }
  constexpr bool kTwin = kPlus == Plus::kTwin;
  if constexpr (kAlongK) FoldedSchedule<true, kTwin>::template assign<kThreads>(p, s.lpt);
  cluster_sync();
  if (threadIdx.x < kWarpgroup) {
    dealloc_registers<24>();
    const int warp = kAlongK ? __shfl_sync(~0u, threadIdx.x / 32, 0) : 0;
    if (warp == 0) {
      if (threadIdx.x == 0) produce<kAlongK>(p, maps, s);
    } else {
      TileQueue tiles(s.tiles);
      IncreaseQueue notes(s.increases);
      for (Tile tile; tiles.next(&tile);) find_increases<kTwin>(p, warp - 1, tile, notes);
    }
  } else {
    alloc_registers<240>();
    constexpr int kConsumers = kThreads - kWarpgroup;
    if constexpr (!kAlongK) {
      const int64_t thread = blockIdx.x * int64_t{kConsumers} + threadIdx.x - kWarpgroup;
      const auto out = static_cast<Out*>(p.out);
      clear_rest(p, out, thread, gridDim.x * int64_t{kConsumers});
      if constexpr (kTwin) clear_rest(p, out + p.twin.to_out, thread, gridDim.x * int64_t{kConsumers});
    }
    consume<kAlongK, Out, kPlus>(p, s);
  }
}

template <bool kAlongK, typename Out, Plus kPlus>
void launch_as(const char* op, const Maps<kPlus>& maps, const Problem& p, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(SharedOf<kPlus>);
  constexpr auto kKernel = folded_product<kAlongK, Out, kPlus>;
  const unsigned ctas = resident_ctas<kKernel>(op, stream, kCluster, kThreads, kBytes);
  launch_kernel(op, kKernel, ctas, kThreads, kBytes, stream, maps, p);
}

// A matrix (.., depth) in boxes of `rows` rows.
CUtensorMap boxes(const char* op, const Array& matrix, int rows) {
  return byte_matrix(op, matrix.data, matrix.leading(1), matrix.dim(-1), rows);
}

template <bool kAlongK, Plus kPlus>
void launch(const char* op, const Call& call, Problem p, cudaStream_t stream) {
  p.group_ends = call.in.back().as<const int32_t>();
  if (kPlus == Plus::kBias) p.bias = call.in[4].as<const float>();
  if (kPlus == Plus::kBlockScales) p.block_scale = {call.in[1].as<const float>(), call.in[3].as<const float>()};
  p.row_scale = call.in[1].as<const uint8_t>();
  p.col_scale = call.in[3].as<const uint8_t>();
  p.out = call.out[0].data;
  // Rows of operands and scales are counted in 32 bits, as TMA counts them; tiles reach beyond the last.
  const int64_t a_rows = call.in[0].dim(0), b_rows = call.in[2].leading(1);
  const int64_t scales = kAlongK ? call.in[1].dim(0) * std::max(a_rows, b_rows) : call.in[1].leading(0);
  int64_t depth = call.in[0].dim(1);
  Maps<kPlus> maps;
  const auto operands = [&](const Array& a, const Array& b) -> Operands {
    return {boxes(op, a, kHalfA), boxes(op, b, kHalfB), kAlongK ? CUtensorMap{} : boxes(op, a, kHalfB)};
  };
  maps.of[0] = operands(call.in[0], call.in[2]);
  if constexpr (kPlus == Plus::kProduct) {
    maps.of[1] = operands(call.in[4], call.in[6]);
    p.second = {call.in[5].as<const uint8_t>(), call.in[7].as<const uint8_t>(), static_cast<int>(call.in[4].dim(1))};
    depth += call.in[4].dim(1);
  }
  if constexpr (kPlus == Plus::kTwin) {
    maps.of[1] = maps.of[0];  // one operand is common
    (kAlongK ? maps.of[1].a : maps.of[1].b) = boxes(op, call.in[4], kAlongK ? kHalfA : kHalfB);
    p.twin = {call.in[5].as<const uint8_t>() - (kAlongK ? p.row_scale : p.col_scale),
              (call.out[1].as<char>() - call.out[0].as<char>()) / itemsize(call.out[0].dtype)};
  }
  if (std::max({b_rows, scales, depth}) > INT32_MAX - 2 * kTileM)
    throw std::runtime_error(std::string(op) + ": an operand has more than 2^31 rows, columns or scales");
  if (call.out[0].dtype == DType::bf16) {
    launch_as<kAlongK, __nv_bfloat16>(op, maps, p, stream);
  } else {
    launch_as<kAlongK, float>(op, maps, p, stream);
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
