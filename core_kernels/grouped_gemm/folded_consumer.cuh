// The computing warps of a folded product: the tiles of the queue, from the stages of the ring to the output.
//
//   ring of stages --wgmma--> partial --fp32 add--> sum --folded_epilogue.cuh--> out
#pragma once

#include <type_traits>

#include "cuda/sm90.cuh"
#include "grouped_gemm/block_factors.cuh"
#include "grouped_gemm/folded_shared.cuh"

namespace mxep::cuda::sm90 {

// Starts partial = a (64, 32 kSteps) b (128, 32 kSteps)^T [+ partial]. A step of 32 bytes along a row adds 2 to a
// descriptor.
template <int kSteps>
__device__ __forceinline__ void start(float (&partial)[64], uint32_t a, uint32_t b, bool accumulate = false) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) wgmma_e4m3(partial, a + step * 2, b + step * 2, accumulate || step != 0);
  wgmma_commit();
}

template <int kSteps>
using Steps = std::integral_constant<int, kSteps>;
template <int kHalves>
using Halves = std::integral_constant<int, kHalves>;

// Descriptors of a warpgroup's part of a matrix: of the ring's first stage, and from one stage to the next.
struct Stages {
  uint32_t first, step;

  __device__ __forceinline__ uint32_t at(int stage) const { return first + stage * step; }
  __device__ __forceinline__ void advance(uint32_t& descriptor, int to) const {
    descriptor = to == 0 ? first : descriptor + step;
  }
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
  const Stages own{descriptor(at.of(s.a) + group * kWarpgroup * kTileK), kBytesA / 16};
  const Stages common{descriptor(at.of(s.b)), kBytesB / 16};
  Stages stages_a = own, stages_b = common;
  uint32_t a = own.first, b = common.first;
  Ring<kStages> ring;
  int odd = 0;
  for (Tile tile; tiles.next(&tile); odd ^= 1) {
    // Loaded here and used after a product. Scales of empty accumulators are ignored. Of two products, those of the
    // second are applied at the end.
    int first_row = group * kWarpgroup;  // of this warpgroup
    [[maybe_unused]] bool flat = false;
    if constexpr (!kAlongK) {
      flat = __shfl_sync(~0u, tile.flat, 0);
      // From one lane: otherwise the compiler selects between the matrices in every stage, just before the product.
      const auto uniform = [](uint32_t value) { return __shfl_sync(~0u, value, 0); };
      stages_a = {uniform(flat ? common.first : own.first), uniform(flat ? common.step : own.step)};
      stages_b = {uniform(flat ? own.first : common.first), uniform(flat ? own.step : common.step)};
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
    // Whether the rows of this warpgroup end in its first half. The other half would be rows of the next group. Without
    // it products of 256 rows per group are 1 to 5% faster; of 4096 they are not.
    constexpr bool kMayEnd = !kAlongK && !kBlocks;
    [[maybe_unused]] const bool ends = kMayEnd && __shfl_sync(~0u, tile.rows - first_row, 0) <= 64;
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
    [[maybe_unused]] float factor[2][2];  // of either half
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
      // more: whether there is another stage to wait for. In FP8 the wait is during the product of the stage before, so
      // that the next product follows the additions to the sum at once.
      const auto next_stage = [&](bool more) {
        ring.advance();
        stages_a.advance(a, ring.stage);
        stages_b.advance(b, ring.stage);
        if (more) barrier_wait(at.of(s.full) + ring.stage * 8, ring.parity);
      };
      const auto release = [&](int stage) {
        if (lane < kCluster) barrier_arrive(at.of(s.empty) + stage * 8, lane);
      };
      const auto stage = [&](int k, auto steps, auto halves) {
        constexpr int kLast = decltype(halves)::value - 1;
#pragma unroll
        for (int half = 0; half <= kLast; ++half) {
          float partial[64];
          start<steps>(partial, a + half * (64 * kTileK / 16), b);
          if constexpr (kAlongK)
            if (half == 0 && k == look) look = rescale_at(k, sum, warp % 4 * 16, group, notes);
          if constexpr (kBlocks)
            if (half == 1) blocks.reach(k + kTileK);
          const int current = ring.stage;
          if (half == kLast) next_stage(k + kTileK < depth);
          wgmma_wait();
          if constexpr (kBlocks) blocks.take(factor[1 - half], 1 - half);
          if (half == kLast) release(current);
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
      if (depth > 0) barrier_wait(at.of(s.full) + ring.stage * 8, ring.parity);
      if (kMayEnd && ends) {
#pragma unroll 1
        for (; k < whole; k += kTileK) stage(k, Steps<kTileK / 32>{}, Halves<1>{});
      }
      for (; k < whole; k += kTileK) stage(k, Steps<kTileK / 32>{}, Halves<2>{});
      if constexpr (kAlongK) {  // the group's last stage holds tokens of the next group, which are not multiplied
        const int steps = (depth - whole) / 32;
        if (steps == 3) stage(k, Steps<3>{}, Halves<2>{});
        if (steps == 2) stage(k, Steps<2>{}, Halves<2>{});
        if (steps == 1) stage(k, Steps<1>{}, Halves<2>{});
      }
    }
    if constexpr (kAlongK)
      if (depth > kSpan) notes.read();

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

}  // namespace mxep::cuda::sm90
