// Folded FP8 grouped products on Hopper. M-grouped operands have one scale per row, applied once, in the epilogue.
// K-grouped operands have one scale per row and span of 256 tokens: the accumulator is in units of the current span's
// scales, which never decrease within a group, and is rescaled where a scale increases.
//
//   M-grouped  out[m, n] = 2^(rs[m] + cs[g, n]) sum_k a[m, k] b[g, n, k] [+ bias[g, n]]      rows m of group g
//              or the sum of two such products, with scales of their own (second_product.cuh)
//              or with scales of blocks of 128 along k (block_factors.cuh)
//              or with scales of blocks of 32 along k, most of which are those of the row (blocks_apart.cuh)
//   K-grouped  out[g, i, j] = sum_t 2^(rs[t, i] + cs[t, j]) sum_m a[i, m] b[j, m]    tokens m of span t of group g
//
// Of either, two products in one launch: of the same rows with two weights, of two gradients with the same x. Each has
// its output, and a tile belongs to one of them (schedule.cuh).
//
// A cluster of two CTAs computes two tiles of 256 x 128 that share their rows of B or of A (schedule.cuh): each CTA
// loads one half of the shared rows for both. Of large products, clusters of eight compute blocks of 2 x 4 tiles, which
// share both, and a second launch computes pairs on the multiprocessors that hold no such cluster:
//
//   launch_kernel --> clusters of eight --------------------------------.
//   launch_beside --> clusters of two, once all of those have started --+--> the next kernel of the stream
//
// The GPU is limited by its power, of which loads from L2 take a fifth; a block loads half of what four pairs load, and
// large products are 2% faster. M-grouped, a flat tile has 128 rows and 256 columns: the same code with the matrices of
// a stage exchanged.
//
//   256 x 128   A rows 0 to 127 | 128 to 255  B        128 x 256 (flat)   B rows 0 to 127 | 128 to 255  A
//               warpgroup 1       2           both                        warpgroup 1       2           both
//
//   warpgroup 0     TMA: A (256, 128), B (128, 128) --> ring of 4 stages of 48 KiB
//     K-grouped     scales of spans --> notes of scale increases (rescale_accumulator.cuh)
//     of blocks     blocks apart --> notes (blocks_apart.cuh)
//                                                        |  full: the bytes of the stage have arrived
//                                                        |  empty: all consumers of the sharing CTAs have read it
//   warpgroups 1, 2      two products of 64 x 128 x 128 --> partial --fp32 add--> sum     128 x 128 values each
//                        during a product, where a scale increases: sum --rescale_accumulator.cuh--> sum
//                        of a block apart: two products of 64 x 128 x 32 or 64 in bf16 --> sum
//                        between two products of a tile: sum --second_product.cuh--> sum
//                        end of the tile: sum --folded_epilogue.cuh--> out
//   warpgroup 3     of blocks: in the ring, zeros in place of blocks apart, and these in bf16 (apart_stage.cuh)
//
// Hopper's FP8 tensor cores accumulate with about 14 mantissa bits, so that partial sums are promoted to fp32 every 128
// terms. sum and partial take 192 of a thread's 240 registers, of 224 where there is a warpgroup 3. With 48 KiB a
// stage, four stages are the most that fit.
//
// The warpgroups are not synchronised (no ping-pong). Without synchronisation one's fp32 promotion overlaps the other's
// WGMMA. Explicit ordering, or an offset of one or more stages, cost 1 to 3%. The gap between promotion and the next
// WGMMA is critical: ten extra instructions there cost 1 to 4%. All other work therefore runs during promotion while a
// WGMMA is in flight, or in other warps.
//
// CTAs are persistent. One thread of each, or one warp where blocks may be apart, reads the group ends and queues the
// tiles (tile_queue.cuh). Rows of the next group or array that a tile covers are computed but not stored.
#include <algorithm>

#include "cuda/cluster_launch.h"
#include "cuda/ops.h"
#include "cuda/tensor_map.h"
#include "grouped_gemm/apart_stage.cuh"
#include "grouped_gemm/folded_consumer.cuh"
#include "grouped_gemm/folded_producer.cuh"
#include "grouped_gemm/folded_shared.cuh"

namespace mxep::cuda {
namespace sm90 {
namespace {

template <bool kAlongK, typename Out, Plus kPlus, Part kPart>
__global__ void __cluster_dims__(kCtasOf<kPart>, 1, 1) __launch_bounds__(kThreadsOf<kPlus>, 1)
    folded_product(const __grid_constant__ Maps<kPlus> maps, const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& s = *reinterpret_cast<SharedOf<kPlus>*>(bytes);
  constexpr bool kTwin = kPlus == Plus::kTwin, kStepped = kPlus == Plus::kSteps, kNotes = kAlongK || kStepped;
  if constexpr (kPart == Part::kBlocks) let_dependent_start();
  if (threadIdx.x == 0) {
    for (const Operands& operands : maps.of) {
      prefetch(&operands.a);
      prefetch(&operands.b);
    }
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], 8 * Sharing<kPart>::kPartners);  // every consuming warp of the CTAs that it loads for
    }
    constexpr int kApartWarps = kStepped ? 1 + kBlockThreads / 32 : 0;  // that load, and that write
    s.tiles.init(8 + (kAlongK ? kNoteParts : kApartWarps));
    notes_of<kStepped>(s).init(8 + kApartWarps);
    if constexpr (kStepped) {
      for (int i = 0; i < kStages; ++i) {
        barrier_init(&s.apart.loaded[i], 1);
        barrier_init(&s.apart.free[i], 1);
      }
    }
    barrier_init_fence();
  }
  if constexpr (kAlongK) FoldedSchedule<true, kTwin, kPart>::template assign<kThreadsOf<kPlus>>(p, s.lpt);
  cluster_sync();
  if (threadIdx.x < kWarpgroup) {
    dealloc_registers<kStepped ? 32 : 24>();
    const int warp = kNotes ? __shfl_sync(~0u, threadIdx.x / 32, 0) : 0;
    if (warp == 0) {
      if constexpr (kStepped) {
        produce_stepped<kPart>(p, maps, s);
        if constexpr (kPart == Part::kPairsOfBlocks) wait_for_prerequisite();
      } else if (threadIdx.x == 0) {
        produce<kAlongK, kPlus, kPart>(p, maps, s);
        if constexpr (kPart == Part::kPairsOfBlocks) wait_for_prerequisite();
      }
    } else {
      if constexpr (kStepped) {
        if (warp == 1) find_apart<kPart>(p, s.lpt, s.tiles, s.apart.notes);
      } else {
        NoteQueue notes(s.increases);
        TileQueue tiles(s.tiles);
        for (Tile tile; tiles.next(&tile);) find_increases<kTwin>(p, warp - 1, tile, notes);
      }
    }
  } else if (kStepped && threadIdx.x >= kWarpgroup + kComputing) {
    dealloc_registers<32>();
    write_apart(p, s);
  } else {
    alloc_registers<kStepped ? 224 : 240>();
    if constexpr (!kAlongK) {
      const int before = kPart == Part::kPairsOfBlocks ? p.shares.eights * kBlockCtas : 0;  // CTAs
      const int64_t thread = (before + blockIdx.x) * int64_t{kComputing} + threadIdx.x - kWarpgroup;
      const int64_t threads = (p.shares.eights * kBlockCtas + p.shares.twos * kCluster) * int64_t{kComputing};
      const auto out = static_cast<Out*>(p.out);
      clear_rest(p, out, thread, threads);
      if constexpr (kTwin) clear_rest(p, out + p.twin.to_out, thread, threads);
    }
    consume<kAlongK, Out, kPlus, kPart>(p, s);
  }
}

// Whether blocks are faster than pairs: whole blocks, some for each cluster, and sums so long that the clusters' start
// and end count little.
template <bool kAlongK, Plus kPlus>
bool in_blocks(const Problem& p) {
  constexpr int kHigh = kBlockHigh * kTileM, kWide = kBlockWide * kTileN, kEnough = 128, kLong = 4096;
  const int64_t outputs = kPlus == Plus::kTwin ? 2 : 1, rows = p.rows, cols = p.cols, groups = p.groups;
  const int64_t depth = p.depth + p.second.depth;
  if constexpr (kAlongK)
    return rows % kHigh == 0 && cols % kWide == 0 && depth >= kLong * groups &&
           outputs * groups * (rows / kHigh) * (cols / kWide) >= kEnough;
  return outputs * cols % kWide == 0 && rows >= kHigh * groups && depth >= kLong &&
         rows / kHigh * (outputs * cols / kWide) >= kEnough;
}

// The position of the second operand among the inputs.
constexpr size_t rhs_of(Plus plus) { return plus == Plus::kSteps ? 4 : 2; }

// A matrix (.., depth) in boxes of `rows` rows.
CUtensorMap boxes(const char* op, const Array& matrix, int rows) {
  return byte_matrix(op, matrix.data, matrix.leading(1), matrix.dim(-1), rows);
}

template <bool kAlongK, Plus kPlus, Part kPart>
Maps<kPlus> maps_of(const char* op, const Call& call) {
  using Of = Sharing<kPart>;
  const auto operands = [&](const Array& a, const Array& b) -> Operands {
    return {boxes(op, a, Of::kPartA), boxes(op, b, Of::kPartB), kAlongK ? CUtensorMap{} : boxes(op, a, Of::kPartFlatA)};
  };
  Maps<kPlus> maps;
  maps.of[0] = operands(call.in[0], call.in[rhs_of(kPlus)]);
  if constexpr (kPlus == Plus::kProduct) maps.of[1] = operands(call.in[4], call.in[6]);
  if constexpr (kPlus == Plus::kTwin) {
    maps.of[1] = maps.of[0];  // one operand is common
    (kAlongK ? maps.of[1].a : maps.of[1].b) = boxes(op, call.in[4], kAlongK ? Of::kPartA : Of::kPartB);
  }
  return maps;
}

template <bool kAlongK, typename Out, Plus kPlus, Part kPart>
void launch_part(const char* op, const Call& call, Problem p, int clusters, cudaStream_t stream) {
  p.turns = turns_of(p.shares, kPart);
  constexpr auto kKernel = folded_product<kAlongK, Out, kPlus, kPart>;
  const int ctas = clusters * kCtasOf<kPart>;
  const auto maps = maps_of<kAlongK, kPlus, kPart>(op, call);
  if constexpr (kPart == Part::kPairsOfBlocks) {
    launch_beside(op, kKernel, ctas, kThreadsOf<kPlus>, sizeof(SharedOf<kPlus>), stream, maps, p);
  } else {
    launch_kernel(op, kKernel, ctas, kThreadsOf<kPlus>, sizeof(SharedOf<kPlus>), stream, maps, p);
  }
}

template <bool kAlongK, typename Out, Plus kPlus>
void launch_as(const char* op, const Call& call, Problem p, cudaStream_t stream) {
  const auto resident = [&]<Part kPart>() {
    constexpr auto kKernel = folded_product<kAlongK, Out, kPlus, kPart>;
    constexpr unsigned kCtas = kCtasOf<kPart>;
    return static_cast<int>(resident_ctas<kKernel>(op, stream, kCtas, kThreadsOf<kPlus>, sizeof(SharedOf<kPlus>)) /
                            kCtas);
  };
  if constexpr (sizeof(Out) == 2) {  // fp32 outputs are rare: they do without blocks
    if (in_blocks<kAlongK, kPlus>(p)) {
      const int clusters = resident.template operator()<Part::kBlocks>();
      const int pairs = resident.template operator()<Part::kPairsOfBlocks>() - clusters * kPairsOfBlock;
      if (clusters > 0) {
        p.shares = shares_of(clusters, std::max(pairs, 0));
        launch_part<kAlongK, Out, kPlus, Part::kBlocks>(op, call, p, clusters, stream);
        if (pairs > 0) launch_part<kAlongK, Out, kPlus, Part::kPairsOfBlocks>(op, call, p, pairs, stream);
        return;
      }
    }
  }
  const int pairs = resident.template operator()<Part::kPairs>();
  p.shares = shares_of(0, pairs);
  launch_part<kAlongK, Out, kPlus, Part::kPairs>(op, call, p, pairs, stream);
}

template <bool kAlongK, Plus kPlus>
void launch(const char* op, const Call& call, Problem p, cudaStream_t stream) {
  p.group_ends = call.in.back().as<const int32_t>();
  if (kPlus == Plus::kBias) p.bias = call.in[4].as<const float>();
  if (kPlus == Plus::kBlockScales) p.block_scale = {call.in[1].as<const float>(), call.in[3].as<const float>()};
  p.row_scale = call.in[1].as<const uint8_t>();
  const Array &rhs = call.in[rhs_of(kPlus)], &rhs_scales = call.in[rhs_of(kPlus) + 1];
  p.col_scale = rhs_scales.as<const uint8_t>();
  p.out = call.out[0].data;
  // Rows of operands and scales are counted in 32 bits, as TMA counts them; tiles reach beyond the last.
  const int64_t a_rows = call.in[0].dim(0), b_rows = rhs.leading(1);
  const int64_t scales = kAlongK ? call.in[1].dim(0) * std::max(a_rows, b_rows) : call.in[1].leading(0);
  int64_t depth = call.in[0].dim(1);
  if constexpr (kPlus == Plus::kProduct) {
    p.second = {call.in[5].as<const uint8_t>(), call.in[7].as<const uint8_t>(), static_cast<int>(call.in[4].dim(1))};
    depth += call.in[4].dim(1);
  }
  if constexpr (kPlus == Plus::kSteps) {
    const Array &row_apart = call.in[3], &col_apart = call.in[7];
    p.steps = {call.in[2].as<const uint8_t>(), call.in[6].as<const uint8_t>(), row_apart.as<const uint32_t>(),
               col_apart.as<const uint32_t>(), static_cast<int>(row_apart.dim(1))};
  }
  if constexpr (kPlus == Plus::kTwin)
    p.twin = {call.in[5].as<const uint8_t>() - (kAlongK ? p.row_scale : p.col_scale),
              (call.out[1].as<char>() - call.out[0].as<char>()) / itemsize(call.out[0].dtype)};
  if (std::max({b_rows, scales, depth}) > INT32_MAX - kBlockCtas * kTileM)
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
  const Array &lhs = call.in[0], &rhs = call.in[rhs_of(kPlus)];
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

void grouped_mm_fold_stepped(const Call& call, cudaStream_t stream) {
  sm90::m_grouped<sm90::Plus::kSteps>("grouped_mm_fold_stepped", call, stream);
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
