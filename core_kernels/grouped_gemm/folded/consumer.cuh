// The computing warps of the FP8 kernel: the tiles of the queue, from the stages of the ring to the output.
//
//   ring of stages --wgmma--> partial --fp32 add--> sum --scales, bias--> out        with the variant's steps in
//   between
#pragma once

#include "cuda/sm90.cuh"
#include "grouped_gemm/folded/producer.cuh"
#include "grouped_gemm/folded/variants.cuh"

namespace mxep::cuda::sm90 {

// Starts partial = a (64, 32 kSteps) b (128, 32 kSteps)^T. A step of 32 bytes along a row adds 2 to a descriptor.
template <int kSteps>
__device__ __forceinline__ void start_product(float (&partial)[64], uint32_t a, uint32_t b) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) wgmma_e4m3(partial, a + step * 2, b + step * 2, step != 0);
  wgmma_commit();
}

// Descriptors of a warpgroup's part of a matrix: of the ring's first stage, and from one stage to the next.
struct StageDescriptors {
  uint32_t first, step;

  __device__ __forceinline__ uint32_t at(int stage) const { return first + stage * step; }
  __device__ __forceinline__ void advance(uint32_t& descriptor, int to) const {
    descriptor = to == 0 ? first : descriptor + step;
  }
};

// A warpgroup's operands in the ring of stages: 128 rows of its own, and 128 rows that both warpgroups multiply.
template <typename Shared>
class OperandRing {
 public:
  __device__ __forceinline__ OperandRing(const Shared& s, int group, int lane)
      : at_(s),
        s_(s),
        lane_(lane),
        own_{descriptor(at_.of(s.a) + group * kWarpgroup * kTileK), kBytesA / 16},
        common_{descriptor(at_.of(s.b)), kBytesB / 16},
        stages_a_(own_),
        stages_b_(common_),
        a_(own_.first),
        b_(common_.first) {}

  // M-grouped, called when a tile begins: a flat tile exchanges the matrices.
  __device__ __forceinline__ void enter_tile(bool flat) {
    // From one lane: otherwise the compiler selects between the matrices in every stage, just before the product.
    const auto uniform = [](uint32_t value) { return __shfl_sync(~0u, value, 0); };
    stages_a_ = {uniform(flat ? common_.first : own_.first), uniform(flat ? common_.step : own_.step)};
    stages_b_ = {uniform(flat ? own_.first : common_.first), uniform(flat ? own_.step : common_.step)};
    a_ = stages_a_.at(ring_.stage);
    b_ = stages_b_.at(ring_.stage);
  }

  // Descriptors of the current stage. half: of the 128 rows of A.
  __device__ __forceinline__ uint32_t a(int half) const { return a_ + half * (64 * kTileK / 16); }
  __device__ __forceinline__ uint32_t b() const { return b_; }
  __device__ __forceinline__ int stage() const { return ring_.stage; }

  // Waits for the bytes of the current stage.
  __device__ __forceinline__ void wait() const { barrier_wait(at_.of(s_.full) + ring_.stage * 8, ring_.parity); }
  // Moves to the next stage. more: whether there is one to wait for.
  __device__ __forceinline__ void advance(bool more) {
    ring_.advance();
    stages_a_.advance(a_, ring_.stage);
    stages_b_.advance(b_, ring_.stage);
    if (more) wait();
  }
  // Tells the producers of both CTAs that this warp has read a stage.
  __device__ __forceinline__ void release(int stage) const {
    if (lane_ < kCluster) barrier_arrive(at_.of(s_.empty) + stage * 8, lane_);
  }

 private:
  const Addresses<Shared> at_;
  const Shared& s_;
  const int lane_;
  const StageDescriptors own_, common_;
  StageDescriptors stages_a_, stages_b_;
  uint32_t a_, b_;
  Ring<Shared::kStages> ring_;
};

// Multiplies one stage, 32 kSteps terms from `k` on, of the first 64 or of all 128 rows of the warpgroup. The wait for
// the next stage is during this one's last product, so that the next product follows the additions to the sum at once.
template <int kSteps, int kHalves, typename Variant>
__device__ __forceinline__ void multiply_stage(int k, int depth, const Place& at,
                                               OperandRing<typename Variant::Shared>& operands,
                                               IncreaseReader& increases, Variant& variant, float (&sum)[2][64]) {
  constexpr int kLast = kHalves - 1;
#pragma unroll
  for (int half = 0; half <= kLast; ++half) {
    float partial[64];
    start_product<kSteps>(partial, operands.a(half), operands.b());
    variant.during_product(k, half, at, increases, sum);
    const int current = operands.stage();
    if (half == kLast) operands.advance(k + kTileK < depth);
    wgmma_wait();
    variant.before_add(half);
    if (half == kLast) operands.release(current);
    variant.add(sum[half], partial, half);
  }
}

// Multiplies the stages of one product. one_half: whether the warpgroup has no rows in its second half.
template <typename Variant>
__device__ __forceinline__ void multiply_stages(int depth, bool one_half, const Place& at,
                                                OperandRing<typename Variant::Shared>& operands,
                                                IncreaseReader& increases, Variant& variant, float (&sum)[2][64]) {
  constexpr int kAll = kTileK / 32;
  const int whole = Variant::kKGrouped ? depth / kTileK * kTileK : depth;
  int k = 0;
  if (depth > 0) operands.wait();
  if (Variant::kSkipsHalf && one_half) {
#pragma unroll 1
    for (; k < whole; k += kTileK) multiply_stage<kAll, 1>(k, depth, at, operands, increases, variant, sum);
  }
  for (; k < whole; k += kTileK) multiply_stage<kAll, 2>(k, depth, at, operands, increases, variant, sum);
  if constexpr (Variant::kKGrouped) {  // the group's last stage holds tokens of the next group, which are not
                                       // multiplied
    const int steps = (depth - whole) / 32;
    if (steps == 3) multiply_stage<3, 2>(k, depth, at, operands, increases, variant, sum);
    if (steps == 2) multiply_stage<2, 2>(k, depth, at, operands, increases, variant, sum);
    if (steps == 1) multiply_stage<1, 2>(k, depth, at, operands, increases, variant, sum);
  }
}

// The first row of a warpgroup in a tile. A flat tile becomes the warpgroup's columns of it.
template <typename Shared>
__device__ __forceinline__ int enter_tile(Tile& tile, int group, OperandRing<Shared>& operands) {
  const int first = group * kWarpgroup;
  const bool flat = __shfl_sync(~0u, tile.flat, 0);
  operands.enter_tile(flat);
  if (!flat) return first;
  tile.out += first;
  tile.col_scale += first;
  tile.b_row += first;
  tile.cols -= first;
  return 0;
}

template <typename Variant, typename Out>
__device__ void consume(const Problem& p, const Maps<Variant>& maps, typename Variant::Shared& s) {
  // From one lane, so that the compiler knows that all lanes agree and keeps descriptors in uniform registers.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) - 4, group = warp / 4, lane = threadIdx.x % 32;
  TileQueue tiles(s.tiles);
  IncreaseReader increases(s.increases);
  OperandRing<typename Variant::Shared> operands(s, group, lane);
  int parity = 0;
  for (Tile tile; tiles.next(&tile); parity ^= 1) {
    const int first_row = Variant::kKGrouped ? group * kWarpgroup : enter_tile(tile, group, operands);
    const bool one_half = Variant::kSkipsHalf && __shfl_sync(~0u, tile.rows - first_row, 0) <= 64;
    const int col = threadIdx.x % kWarpgroup, row = first_row + warp % 4 * 16;
    const Place at{group, first_row, row, col, lane, parity};
    Variant variant(p, tile, at);
    float sum[2][64] = {};
    int depth = __shfl_sync(~0u, tile.k_end - tile.k_begin, 0);
    variant.begin_products(increases);
    // A loop in a loop: a test in the inner one, where the second product begins, cost 5%.
#pragma unroll 1
    for (int product = 0; product < Variant::kProducts; ++product) {
      if constexpr (Variant::kProducts == 2)
        if (product == 1) depth = variant.enter_second_product(p, at, s, sum);
      multiply_stages(depth, one_half, at, operands, increases, variant, sum);
    }
    variant.end_products(depth, increases);
    if constexpr (Variant::kKGrouped) {
      variant.template store<Out>(maps.of[tile.output].out, tile, at, s, s.staging[warp], sum);
    } else {
      variant.template store<Out>(p, tile, at, s, s.staging[warp], sum);
    }
  }
  if constexpr (Variant::kKGrouped) end_stores();
}

}  // namespace mxep::cuda::sm90
