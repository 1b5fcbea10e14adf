// bf16 grouped products on Hopper.
//
//   M-grouped  out[m, n] = sum_k a[m, k] b[g, n, k]            rows m of group g; b is (G, N, K) or (G, K, N)
//              or the sum of two such products
//   K-grouped  out[g, i, j] = sum_m a[m, i] b[m, j]            tokens m of group g; operands (tokens, N) or (N, tokens)
//
// A cluster of two CTAs computes two tiles of 128 x 256 that share their rows of B or of A (tile_choice.h): each CTA
// loads one half of the shared rows for both.
//
//   warpgroup 0     TMA: A (128, 64), B (256, 64), in boxes of 64 x 64 --> ring of 4 stages of 48 KiB
//                                                        |  full: the stage is loaded
//                                                        |  empty: all consumers of both CTAs have read the stage
//   warpgroups 1, 2      64 x 256 x 64 --> sum, 128 registers a thread; the next stage is issued before this one ends
//                        end of the tile: sum --staged_store.cuh--> out
//
// The tensor core reads B once per 64 rows of A. Of all tiles whose sums fit in the registers, this one reads the
// fewest bytes of shared memory per product. CTAs are persistent and read the group ends. Rows of the next group or
// array that a tile covers are computed but not stored. Tokens of the next group in a stage are set to zero, since they
// would enter the sums.
#include <algorithm>

#include "cuda/ops.h"
#include "cuda/sm90.cuh"
#include "cuda/tensor_map.h"
#include "grouped_gemm/schedule/product_launch.cuh"
#include "grouped_gemm/schedule/schedule.cuh"
#include "grouped_gemm/schedule/staged_store.cuh"
#include "grouped_gemm/schedule/tile_queue.cuh"

namespace mxep::cuda {
namespace sm90 {
namespace {

constexpr int kM = 128, kN = 256, kK = 64;
constexpr int kConsumers = kM / 64;  // warpgroups
static_assert(kConsumers * kWarpgroup == kComputing);
constexpr int kBox = 64, kBoxBytes = kBox * kK * 2;
static_assert(kBox == kK, "boxes of either orientation are equal");

struct Bf16Stage {
  uint8_t a[kM / kBox][kBoxBytes];
  uint8_t b[kN / kBox][kBoxBytes];
};

struct Bf16Shared {
  alignas(1024) Bf16Stage stages[kStages];
  alignas(128) uint8_t staging[4 * kConsumers][kStagingBytes];
  uint64_t full[kStages], empty[kStages];
  TileSlots tiles;
  LptSchedule lpt;  // K-grouped
};
static_assert(sizeof(Bf16Shared) <= 227 * 1024);

// How an operand is stored: the contraction dim last, first, or first in a matrix per group.
enum class Side { kRows, kColumns, kColumnsOfGroup };
template <Side kSide>
constexpr bool kInColumns = kSide != Side::kRows;

// What a kernel multiplies.
template <bool kKGrouped_, Side kA_, Side kB_, int kProducts_ = 1>
struct Kind {
  static constexpr bool kKGrouped = kKGrouped_, kColumnsA = kInColumns<kA_>, kColumnsB = kInColumns<kB_>;
  static constexpr Side kA = kA_, kB = kB_;
  static constexpr int kProducts = kProducts_;
};

struct Operands {
  CUtensorMap a, b;
};
template <typename K>
struct Maps {
  Operands of[K::kProducts];
};

// Loads the boxes of the rows from `row` on, at `k` of the contraction dim. `shared`: half of them, for both CTAs.
template <Side kSide, int kBoxes>
__device__ __forceinline__ void fetch(uint8_t (&to)[kBoxes][kBoxBytes], const CUtensorMap* map, uint64_t* full, int row,
                                      int k, bool shared, int matrix = 0) {
  constexpr bool kColumns = kInColumns<kSide>;
  constexpr uint16_t kBoth = 3;
  const int share = shared ? kBoxes / kCluster : kBoxes;
  const int first = shared ? cluster_rank() * share : 0;
  for (int i = first; i < first + share; ++i) {
    const int r = row + i * kBox;
    const int x = (kColumns ? r : k) * 2, y = kColumns ? k : r;
    if constexpr (kSide == Side::kColumnsOfGroup) {
      if (shared) {
        load_box_multicast(to[i], map, full, x, y, matrix, kBoth);
      } else {
        load_box(to[i], map, full, x, y, matrix);
      }
    } else if (shared) {
      load_box_multicast(to[i], map, full, x, y, kBoth);
    } else {
      load_box(to[i], map, full, x, y);
    }
  }
}

// The start of a group's first stage. Along a row, TMA loads start at multiples of 16 bytes.
template <bool kColumns>
__device__ __forceinline__ int first_of(const Tile& tile) {
  return kColumns ? tile.k_begin : tile.k_begin / 8 * 8;
}

// The loads of a tile, by one thread.
template <typename K>
__device__ __forceinline__ void load_tile(const Problem& p, const Maps<K>& maps, const Tile& tile, Bf16Shared& s,
                                          Ring<kStages>& ring) {
  int group = 0, b_row = tile.b_row;
  if constexpr (K::kB == Side::kColumnsOfGroup) {
    group = b_row / p.cols;
    b_row -= group * p.cols;
  }
  for (const Operands& operands : maps.of) {
    for (int k = first_of<K::kColumnsA>(tile); k < tile.k_end; k += kK, ring.advance()) {
      uint64_t* full = &s.full[ring.stage];
      Bf16Stage& stage = s.stages[ring.stage];
      barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
      barrier_expect(full, sizeof(Bf16Stage));
      fetch<K::kA>(stage.a, &operands.a, full, tile.a_row, k, tile.shares_a);
      fetch<K::kB>(stage.b, &operands.b, full, b_row, k, tile.shares_b, group);
    }
  }
}

// Called by one thread: the loads of the tiles in the queue.
template <typename K>
__device__ void load(const Problem& p, const Maps<K>& maps, Bf16Shared& s) {
  Ring<kStages> ring;
  TileQueue tiles(s.tiles);
  for (Tile tile; tiles.take(&tile);) load_tile(p, maps, tile, s, ring);
  ring.drain(s.empty);
}

// Keeps tokens first..last - 1 of a stage and clears the tokens of other groups, in both operands: NaN * 0 is NaN.
template <bool kColumns>
__device__ __forceinline__ void clear_tokens(Bf16Stage& stage, int first, int last) {
  uint16_t* values = reinterpret_cast<uint16_t*>(&stage);
  for (int i = threadIdx.x - kWarpgroup; i < sizeof(Bf16Stage) / 16; i += kComputing) {
    // 16 bytes of a row: of one token, or of eight tokens, which the swizzle permutes by row.
    const int row = i / 8 % kBox, token = kColumns ? row : (i ^ row) % 8 * 8, end = kColumns ? row + 1 : token + 8;
    if (end <= first || token >= last) {
      reinterpret_cast<uint4*>(&stage)[i] = {};
    } else if (!kColumns) {
      for (int j = 0; j < 8; ++j)
        if (token + j < first || token + j >= last) values[i * 8 + j] = 0;
    }
  }
  shared_to_async_fence();
  threads_sync<kComputing>(1);
}

template <typename K, typename Out>
__device__ void consume(const Problem& p, Bf16Shared& s) {
  constexpr bool kKGrouped = K::kKGrouped;
  // 16 values of the contraction dim are 32 bytes of a row, or 16 rows.
  constexpr int kStepA = (K::kColumnsA ? 16 * 128 : 32) / 16, kStepB = (K::kColumnsB ? 16 * 128 : 32) / 16;
  // From one lane, so that the compiler knows that all lanes agree and keeps descriptors in uniform registers.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) - 4, group = warp / 4, lane = threadIdx.x % 32;
  const Addresses at(s);
  TileQueue tiles(s.tiles);
  Ring<kStages> ring;
  for (Tile tile; tiles.next(&tile);) {
    float sum[128] = {};
    if (kKGrouped && !__shfl_sync(~0u, tile.whole, 0)) {
#pragma unroll
      for (int i = 0; i < 128; ++i) sum[i] = __int_as_float(kNan);
    }
    int before = -1;  // the stage that the tensor core may still read
    int end = __shfl_sync(~0u, tile.k_end, 0);
    if constexpr (K::kProducts > 1) end = (end + kK - 1) / kK * kK * K::kProducts;
    for (int k = __shfl_sync(~0u, first_of<K::kColumnsA>(tile), 0); k < end; k += kK, ring.advance()) {
      Bf16Stage& stage = s.stages[ring.stage];
      barrier_wait(at.of(s.full) + ring.stage * 8, ring.parity);
      // Along the rows, TMA has written zeros beyond the end.
      if (kKGrouped && (k < tile.k_begin || k + kK > tile.k_end))
        clear_tokens<K::kColumnsA>(stage, tile.k_begin - k, tile.k_end - k);
      const uint32_t first_a = at.of(stage.a[group]), first_b = at.of(stage.b);
      const uint32_t a = K::kColumnsA ? columns_descriptor<kBox>(first_a) : descriptor(first_a);
      const uint32_t b = K::kColumnsB ? columns_descriptor<kBox>(first_b) : descriptor(first_b);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kK / 16; ++step)
        wgmma_bf16<K::kColumnsA, K::kColumnsB>(sum, a + step * kStepA, b + step * kStepB);
      wgmma_commit();
      wgmma_wait<1>();
      if (before >= 0 && lane < kCluster) barrier_arrive(at.of(s.empty) + before * 8, lane);
      before = ring.stage;
    }
    wgmma_wait<0>();
    if (before >= 0 && lane < kCluster) barrier_arrive(at.of(s.empty) + before * 8, lane);
    const auto pair = [&](int at, int) { return rounded<Out>(sum[at], sum[at + 1]); };
    store_rows<Out, kN>(p, tile, group * 64 + warp % 4 * 16, pair, s.staging[warp]);
  }
}

template <typename K, typename Out>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    grouped_gemm_bf16(const __grid_constant__ Maps<K> maps, const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  Bf16Shared& s = *reinterpret_cast<Bf16Shared*>(bytes);
  if (threadIdx.x == 0) {
    init_product(maps, s, kComputing / 32 + kLoaders);
    barrier_init_fence();
  }
  if constexpr (K::kKGrouped) Schedule<true, kM, kN>::assign<kThreads>(p, s.lpt);
  cluster_sync();
  if (threadIdx.x < kWarpgroup) {
    dealloc_registers<24>();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp == 0) {
      if (threadIdx.x == 0) load(p, maps, s);
    } else if (warp == 1) {
      put_tiles(Schedule<K::kKGrouped, kM, kN>(p, s.lpt), s.tiles);
    }
  } else {
    alloc_registers<240>();
    if constexpr (!K::kKGrouped) clear_rest(p, static_cast<Out*>(p.out));
    consume<K, Out>(p, s);
  }
}

// Describes `a` and `b` as matrices with all their leading dims as rows, or b as a matrix per group.
template <typename K>
Operands operands(const char* op, const Array& a, const Array& b) {
  require_32_bits(op, std::max({a.leading(1), b.leading(1), 2 * a.dim(-1), 2 * b.dim(-1)}), 4 * kN,
                  "2^31 rows or 2^30 columns");
  const bool by_group = K::kB == Side::kColumnsOfGroup;
  return {byte_matrix(op, a.data, a.leading(1), 2 * a.dim(-1), kBox),
          byte_matrix(op, b.data, by_group ? b.dim(1) : b.leading(1), 2 * b.dim(-1), kBox, by_group ? b.dim(0) : 0)};
}

// Inputs: a and b of each product, then the ends.
template <typename K>
void launch(const char* op, const Call& call, cudaStream_t stream) {
  const Problem p = problem_of(call, call.in[0].dim(K::kColumnsA ? 0 : 1));
  if (clear_empty(op, call, p, stream)) return;
  Maps<K> maps;
  for (int i = 0; i < K::kProducts; ++i) maps.of[i] = operands<K>(op, call.in[2 * i], call.in[2 * i + 1]);
  launch_for(call.out[0].dtype, [&]<typename Out>(Out) {
    launch_resident<grouped_gemm_bf16<K, Out>>(op, sizeof(Bf16Shared), maps, p, call.share.reserved, stream);
  });
}

// T: an operand is stored transposed, with the contraction dim first in A, or last in B.
using MGroupedNT = Kind<false, Side::kRows, Side::kRows>;
using MGroupedNN = Kind<false, Side::kRows, Side::kColumnsOfGroup>;
using MGroupedNNSum = Kind<false, Side::kRows, Side::kColumnsOfGroup, 2>;
using KGroupedTN = Kind<true, Side::kColumns, Side::kColumns>;
using KGroupedNT = Kind<true, Side::kRows, Side::kRows>;

}  // namespace
}  // namespace sm90

void grouped_mm_bf16(const Call& call, cudaStream_t stream) {
  sm90::launch<sm90::MGroupedNT>("grouped_mm_bf16", call, stream);
}

void grouped_mm_bf16_kn(const Call& call, cudaStream_t stream) {
  sm90::launch<sm90::MGroupedNN>("grouped_mm_bf16_kn", call, stream);
}

void grouped_mm_bf16_kn_sum(const Call& call, cudaStream_t stream) {
  sm90::launch<sm90::MGroupedNNSum>("grouped_mm_bf16_kn_sum", call, stream);
}

void grouped_wgrad_bf16(const Call& call, cudaStream_t stream) {
  sm90::launch<sm90::KGroupedTN>("grouped_wgrad_bf16", call, stream);
}

void grouped_wgrad_bf16_t(const Call& call, cudaStream_t stream) {
  sm90::launch<sm90::KGroupedNT>("grouped_wgrad_bf16_t", call, stream);
}

}  // namespace mxep::cuda
