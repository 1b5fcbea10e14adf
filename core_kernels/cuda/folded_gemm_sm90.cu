// Folded FP8 grouped products on Hopper: one scale per row of either operand, applied once, in the epilogue. K-grouped
// one per row and span of 256 tokens: the sums are kept in units of the span's scales, which never fall, and change
// them where a scale rises.
//
//   M-grouped  out[m, n] = 2^(rs[m] + cs[g, n]) sum_k a[m, k] b[g, n, k] [+ bias[g, n]]      rows m of group g
//   K-grouped  out[g, i, j] = sum_t 2^(rs[t, i] + cs[t, j]) sum_m a[i, m] b[j, m]    tokens m of span t of group g
//
// A cluster of two CTAs works on two tiles of 256 x 128. They have their rows of B in common, or of A
// (gemm_schedule.cuh): each fetches one half of those for both.
//
//   warpgroup 0     TMA: A (256, 128), B (128, 128) --> ring of 4 stages of 48 KiB
//     K-grouped     scales of the span before and of this one --> what rises, with the stage that begins the span
//                                                        |  full: its bytes are there, and all is said of rises
//                                                        |  empty: all consumers of both CTAs are through with it
//   warpgroups 1, 2      two products of 64 x 128 x 128 --> partial --fp32 add--> sum     128 rows each
//                        where something rises: sum --folded_epilogue.cuh--> sum
//                        end of the tile: sum --folded_epilogue.cuh--> out
//
// The tensor core aligns the terms of a sum to the largest and keeps about 14 bits: `partial` is what it may sum, 128
// terms. Both sums and `partial` take 192 of a thread's 240 registers. 48 KiB a stage make four the most that fit.
//
// The two warpgroups take no turns: left alone, one adds while the tensor cores work for the other often enough, and
// every order tried between them cost 1 to 3%.
//
// CTAs are persistent; one thread of each reads the group ends and hands the tiles on (tile_queue.cuh). Rows of the
// next group or array that a tile covers are computed and not stored.
#include <algorithm>

#include "cluster_launch.h"
#include "folded_epilogue.cuh"
#include "gemm_schedule.cuh"
#include "ops.h"
#include "tensor_map.h"
#include "tile_queue.cuh"

namespace mxep::cuda {
namespace sm90 {
namespace {

constexpr int kStages = 4, kWarpgroup = 128;
constexpr int kBytesA = kTileM * kTileK, kBytesB = kTileN * kTileK;
constexpr int kThreads = 3 * kWarpgroup;
constexpr int kHalfA = kTileM / kCluster, kHalfB = kTileN / kCluster;  // rows of a box

struct Shared {
  alignas(1024) uint8_t a[kStages][kBytesA];
  alignas(1024) uint8_t b[kStages][kBytesB];
  alignas(1024) uint8_t zeros[1024];  // eight rows that stand for all; as many bytes as all would have follow
  alignas(128) uint8_t staging[8][kStagingBytes];
  __nv_bfloat16 col_factor[2][2][kTileN];  // of a warpgroup, of even and odd tiles
  uint64_t full[kStages], empty[kStages];
  TileSlots tiles;
  Rises rises[kStages];  // K-grouped
  Shares shares;         // K-grouped
};

struct SharedWithBias : Shared {
  float bias[2][2][kTileN];  // as col_factor
};
static_assert(sizeof(SharedWithBias) <= 227 * 1024);

template <bool kBias>
using SharedOf = std::conditional_t<kBias, SharedWithBias, Shared>;

// Where a role is in the ring of stages.
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

template <bool kAlongK>
__device__ void produce(const Problem& p, const CUtensorMap* a, const CUtensorMap* b, Shared& s) {
  constexpr uint16_t kBoth = 3;
  const uint32_t rank = cluster_rank();
  const int at_a = rank * kHalfA, at_b = rank * kHalfB;  // this CTA's half
  FoldedSchedule<kAlongK> schedule(p, s.shares);
  Ring ring;
  TileQueue tiles(s.tiles);
  for (Tile tile; schedule.next(&tile);) {
    tiles.put(tile);
    for (int k = tile.k_begin; k < tile.k_end; k += kTileK, ring.advance()) {
      uint64_t* full = &s.full[ring.stage];
      uint8_t *to_a = s.a[ring.stage], *to_b = s.b[ring.stage];
      barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
      barrier_expect(full, kBytesA + kBytesB);
      if (tile.side_by_side) {
        load_box_multicast(to_a + at_a * kTileK, a, full, k, tile.a_row + at_a, kBoth);
        load_box(to_b, b, full, k, tile.b_row);
        load_box(to_b + kHalfB * kTileK, b, full, k, tile.b_row + kHalfB);
      } else {
        load_box(to_a, a, full, k, tile.a_row);
        load_box(to_a + kHalfA * kTileK, a, full, k, tile.a_row + kHalfA);
        load_box_multicast(to_b + at_b * kTileK, b, full, k, tile.b_row + at_b, kBoth);
      }
    }
  }
  tiles.put({});  // no more
  // The other CTA's consumers still arrive on this CTA's barriers.
  for (int i = 0; i < kStages; ++i, ring.advance()) barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
}

// Says of every stage what rises where its tokens begin. A warp for the rows of either consuming warpgroup, one for the
// columns; four neighbours a lane. Spans begin with stages: both are counted from the first token of the group.
__device__ void find_rises(const Problem& p, int part, Shared& s) {
  const bool columns = part == kColumnRises;
  const int lane = threadIdx.x % 32, line = lane * 4, first = columns ? line : part * kWarpgroup + line;
  const int pitch = columns ? p.cols : p.rows;
  TileQueue tiles(s.tiles);
  Ring ring;
  for (Tile tile; tiles.next(&tile);) {
    const int left = (columns ? tile.cols : tile.rows) - first;  // what the tile has from this lane's first on
    const uint8_t* scale = (columns ? p.col_scale + tile.b_row : p.row_scale + tile.a_row) + tile.slot * pitch + first;
    const int tokens = tile.k_end - tile.k_begin;
    for (int token = 0; token < tokens; token += kTileK, ring.advance()) {
      int power[4] = {kOne, kOne, kOne, kOne};
      if (token > 0 && token % kSpan == 0) {  // nothing is summed yet where a group begins
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (i < left) power[i] = max(kOne - (scale[i + pitch] - scale[i]), 0);
        scale += pitch;
      }
      // Fetched before: by the time that the stage is free the bytes are there.
      barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
      Rises& rises = s.rises[ring.stage];
      bool rose = false;
#pragma unroll
      for (int i = 0; i < 4; ++i) rose |= power[i] != kOne;
      const uint32_t raised = __ballot_sync(~0u, rose);
      if (raised) {
        const auto byte = [&](int i) { return static_cast<uint8_t>(power[i]); };
        *reinterpret_cast<uchar4*>(&rises.power[part][line]) = {byte(0), byte(1), byte(2), byte(3)};
        __syncwarp();
      }
      if (lane == 0) {
        rises.raised[part] = raised;
        barrier_arrive(&s.full[ring.stage], cluster_rank());
      }
    }
  }
}

// Starts partial = a (64, 32 * steps) b (128, 32 * steps)^T. 32 bytes further along a row are 2 in a descriptor. The
// other steps multiply zeros: a branch around wgmma costs a quarter of the rate.
__device__ __forceinline__ void start(float (&partial)[64], uint64_t a, uint64_t b, uint64_t zeros, int steps) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kTileK / 32; ++step) {
    const bool real = step == 0 || step < steps;  // no stage is empty
    wgmma_e4m3(partial, real ? a + step * 2 : zeros, real ? b + step * 2 : zeros, step != 0);
  }
  wgmma_commit();
}

template <bool kAlongK, typename Out, bool kBias>
__device__ void consume(const Problem& p, SharedOf<kBias>& s) {
  // From one lane, so that the compiler knows it for the same in all and keeps descriptors in uniform registers.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) - 4, group = warp / 4, lane = threadIdx.x % 32;
  const Addresses at(s);
  TileQueue tiles(s.tiles);
  const uint64_t zeros = repeated_descriptor(s.zeros);
  Ring ring;
  int odd = 0;
  for (Tile tile; tiles.next(&tile); odd ^= 1) {
    // Fetched now and used after the products. A scale has no say where there is nothing to scale.
    const int col = threadIdx.x % kWarpgroup, row = group * kWarpgroup + warp % 4 * 16;
    const bool any = tile.k_begin < tile.k_end;
    const int col_byte = any && col < tile.cols ? p.col_scale[tile.col_scale + col] : kOne;
    [[maybe_unused]] float col_bias = 0;
    if constexpr (kBias) col_bias = col < tile.cols ? p.bias[tile.col_scale + col] : 0;
    int row_byte[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = row + i / 2 * 64 + i % 2 * 8 + lane / 4;
      row_byte[i / 2][i % 2] = any && r < tile.rows ? p.row_scale[tile.row_scale + r] : kOne;
    }

    float sum[2][64] = {};
    for (int left = __shfl_sync(~0u, tile.k_end - tile.k_begin, 0); left > 0; left -= kTileK, ring.advance()) {
      // Along K, a stage is zeros beyond the end of a row; along the tokens it goes on with the next group.
      const int steps = kAlongK ? min(left, kTileK) / 32 : kTileK / 32;
      barrier_wait(at.of(s.full) + ring.stage * 8, ring.parity);
      const uint64_t b = descriptor(at.of(s.b) + ring.stage * kBytesB);
      // Read before and used behind the first product: nobody waits for it.
      const Rises& rises = s.rises[ring.stage];
      const uint32_t raised_rows = kAlongK ? rises.raised[group] : 0;
      const uint32_t raised_cols = kAlongK ? rises.raised[kColumnRises] : 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint64_t a = descriptor(at.of(s.a) + ring.stage * kBytesA + (group * kWarpgroup + half * 64) * kTileK);
        float partial[64];
        start(partial, a, b, zeros, steps);
        wgmma_wait();
        if (half == 0 && (raised_rows | raised_cols))
          rescale(sum, warp % 4 * 16, raised_rows, rises.power[group], raised_cols, rises.power[kColumnRises]);
        if (half == 1 && lane < kCluster) barrier_arrive(at.of(s.empty) + ring.stage * 8, lane);
#pragma unroll
        for (int i = 0; i < 64; ++i) sum[half][i] += partial[i];
      }
    }

    // Two buffers: when this one is written again, every warp has passed the barrier of the tile between.
    __nv_bfloat16* col_factor = s.col_factor[group][odd];
    col_factor[col] = __ushort_as_bfloat16(col_byte << 7);
    if constexpr (kBias) s.bias[group][odd][col] = col_bias;
    bool near = is_near(col_byte);
#pragma unroll
    for (int i = 0; i < 4; ++i) near &= is_near(row_byte[i / 2][i % 2]);
    // The vote tells the compiler that all lanes go the same way. Else it doubles the rest of the tile, takes the loop
    // over tiles for one in which lanes part, and feeds descriptors from registers of their own.
    if (!__all_sync(~0u, warpgroup_all(1 + group, near))) {
      scale_far(sum, row_byte, col_factor);
      warpgroup_sync(1 + group);
      col_factor[col] = 1;
      warpgroup_sync(1 + group);
    }
    if constexpr (kBias) scale_and_add(sum, row_byte, col_factor, s.bias[group][odd]);
    __nv_bfloat162 cols[16];  // of this thread
#pragma unroll
    for (int i = 0; i < 16; ++i) cols[i] = *reinterpret_cast<const __nv_bfloat162*>(col_factor + i * 8 + lane % 4 * 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor[2] = {__int_as_float(row_byte[half][0] << 23), __int_as_float(row_byte[half][1] << 23)};
      store<Out, kBias>(p, tile, row + half * 64, sum[half], factor, cols, s.staging[warp]);
    }
  }
}

template <bool kAlongK, typename Out, bool kBias>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    folded_product(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                   const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& s = *reinterpret_cast<SharedOf<kBias>*>(bytes);
  if (threadIdx.x == 0) {
    prefetch(&a);
    prefetch(&b);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.full[i], kAlongK ? 1 + kRiseParts : 1);
      barrier_init(&s.empty[i], 8 * kCluster);  // every consuming warp of both CTAs
    }
    s.tiles.init(8 + (kAlongK ? kRiseParts : 0));
    barrier_init_fence();
  }
  if (threadIdx.x < sizeof(s.zeros) / 16) reinterpret_cast<uint4*>(s.zeros)[threadIdx.x] = {};
  if constexpr (kAlongK) FoldedSchedule<true>::share_out<kThreads>(p, s.shares);
  shared_to_async_fence();
  cluster_sync();
  if (threadIdx.x < kWarpgroup) {
    give_registers<24>();
    const int warp = kAlongK ? __shfl_sync(~0u, threadIdx.x / 32, 0) : 0;
    if (warp == 0) {
      if (threadIdx.x == 0) produce<kAlongK>(p, &a, &b, s);
    } else {
      find_rises(p, warp - 1, s);
    }
  } else {
    take_registers<240>();
    constexpr int kConsumers = kThreads - kWarpgroup;
    if constexpr (!kAlongK)
      clear_rest<Out>(p, blockIdx.x * int64_t{kConsumers} + threadIdx.x - kWarpgroup, gridDim.x * int64_t{kConsumers});
    consume<kAlongK, Out, kBias>(p, s);
  }
}

template <bool kAlongK, typename Out, bool kBias>
void launch_as(const char* op, const CUtensorMap& a, const CUtensorMap& b, const Problem& p, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(SharedOf<kBias>);
  const int ctas = resident_ctas<folded_product<kAlongK, Out, kBias>>(op, kCluster, kThreads, kBytes);
  folded_product<kAlongK, Out, kBias><<<ctas, kThreads, kBytes, stream>>>(a, b, p);
  check_launch(op);
}

template <bool kAlongK, bool kBias = false>
void launch(const char* op, const Call& call, Problem p, int64_t b_rows, cudaStream_t stream) {
  p.group_ends = call.in.back().as<const int32_t>();
  if (kBias) p.bias = call.in[4].as<const float>();
  p.row_scale = call.in[1].as<const uint8_t>();
  p.col_scale = call.in[3].as<const uint8_t>();
  p.out = call.out[0].data;
  // Rows of operands and scales are counted in 32 bits, as the copy engine counts them; tiles reach beyond the last.
  const int64_t a_rows = call.in[0].dim(0), depth = call.in[0].dim(1);
  const int64_t scales = kAlongK ? call.in[1].dim(0) * std::max(a_rows, b_rows) : a_rows;
  if (std::max({b_rows, scales, depth}) > INT32_MAX - 2 * kTileM)
    throw std::runtime_error(std::string(op) + ": an operand has more than 2^31 rows, columns or scales");
  const CUtensorMap a = byte_matrix(op, call.in[0].data, p.rows, p.depth, kHalfA);
  const CUtensorMap b = byte_matrix(op, call.in[2].data, b_rows, p.depth, kHalfB);
  if (call.out[0].dtype == DType::bf16) {
    launch_as<kAlongK, __nv_bfloat16, kBias>(op, a, b, p, stream);
  } else {
    launch_as<kAlongK, float, kBias>(op, a, b, p, stream);
  }
}

template <bool kBias>
void m_grouped(const char* op, const Call& call, cudaStream_t stream) {
  const Array &lhs = call.in[0], &rhs = call.in[2];
  Problem p{};
  p.groups = static_cast<int>(rhs.dim(0));
  p.rows = static_cast<int>(lhs.dim(0));
  p.cols = static_cast<int>(rhs.dim(1));
  p.depth = static_cast<int>(lhs.dim(1));
  if (p.groups == 0)  // no weights, so no tensor map of them: every row is past the last end
    return check(op, cudaMemsetAsync(call.out[0].data, 0, call.out[0].nbytes(), stream));
  launch<false, kBias>(op, call, p, rhs.leading(1), stream);
}

}  // namespace
}  // namespace sm90

void grouped_mm_fold(const Call& call, cudaStream_t stream) { sm90::m_grouped<false>("grouped_mm_fold", call, stream); }

void grouped_mm_fold_bias(const Call& call, cudaStream_t stream) {
  sm90::m_grouped<true>("grouped_mm_fold_bias", call, stream);
}

void grouped_wgrad_fold(const Call& call, cudaStream_t stream) {
  const Array &lhs = call.in[0], &rhs = call.in[2];
  sm90::Problem p{};
  p.groups = static_cast<int>(call.in[4].dim(0));
  p.rows = static_cast<int>(lhs.dim(0));
  p.cols = static_cast<int>(rhs.dim(0));
  p.depth = static_cast<int>(lhs.dim(1));
  if (p.depth == 0)  // no tokens, so no tensor map of them
    return check("grouped_wgrad_fold", cudaMemsetAsync(call.out[0].data, 0, call.out[0].nbytes(), stream));
  sm90::launch<true>("grouped_wgrad_fold", call, p, rhs.dim(0), stream);
}

}  // namespace mxep::cuda
