// The variants of the FP8 kernel, one struct each: what a kernel loads, and what a computing warp does in addition to
// the products and their fp32 sums.
//
//   variant                loads                during a product   adds        between products   end of the tile
//   M-grouped
//     RowScales            A, B                                    partial                        x row x column
//     RowScalesBias        A, B, bias                              partial                        x row x column + bias
//     RowScalesSum         A, B, then A2, B2                       partial     change of units    x row x column
//     RowScalesDualOutput  A, B or B2                              partial                        x row x column
//     BlockScales          A, B, block factors  next factors       x factors
//     BlockScalesSum       A, B, then A2, B2    next factors       x factors   factors of the second
//   K-grouped
//     SpanScales           A, B                 rescales the sum   partial                        x row x column
//     SpanScalesDualOutput A or A2, B           rescales the sum   partial                        x row x column
//
// A variant's object has a thread's values of one tile: its scales are loaded when the tile begins and used after the
// products. A variant inherits the steps that it does not change.
#pragma once

#include "grouped_gemm/folded/blockwise_factors.cuh"
#include "grouped_gemm/folded/rescale_accumulator.cuh"
#include "grouped_gemm/folded/second_product.cuh"
#include "grouped_gemm/folded/shared.cuh"
#include "op.h"

namespace mxep::cuda::sm90 {

struct DefaultSteps {
  static constexpr bool kKGrouped = false;
  static constexpr int kProducts = 1;  // of a tile, in one sum
  static constexpr int kOutputs = 1;   // of one product each; they have one operand in common
  // Whether rows that end in the first half of a warpgroup's rows are multiplied without the other half, which would be
  // rows of the next group. Products of 256 rows per group are 1 to 5% faster for it; products of 4096 are not.
  static constexpr bool kSkipsHalf = false;
  using Shared = FoldedShared;

  // The host's part: the matrices of product or output `i`, and fields of the problem.
  static Matrices matrices(const Call& call, int i) { return {&call.in[0], &call.in[2]}; }
  static void fill(Problem& p, const Call& call) {
    p.row_scale = call.in[1].as<const uint8_t>();
    p.col_scale = call.in[3].as<const uint8_t>();
  }

  __device__ __forceinline__ void begin_products(IncreaseReader& increases) {}
  // While a product of 64 rows, the terms from `k` on, is in flight.
  __device__ __forceinline__ void during_product(int k, int half, const Place& at, IncreaseReader& increases,
                                                 float (&sum)[2][64]) {}
  // Between the wait for the product and the additions to the sum.
  __device__ __forceinline__ void before_add(int half) {}
  __device__ __forceinline__ void add(float (&sum)[64], const float (&partial)[64], int half) const {
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[i] += partial[i];
  }
  __device__ __forceinline__ void end_products(int depth, IncreaseReader& increases) {}
};

struct RowScales : DefaultSteps {
  static constexpr bool kSkipsHalf = true;

  ScaleBytes scales;

  RowScales() = default;
  __device__ __forceinline__ RowScales(const uint8_t* row_scale, const uint8_t* col_scale, const Tile& tile,
                                       const Place& at) {
    scales.load_column(col_scale, tile, at);
    scales.load_rows(row_scale, tile, at);
  }
  __device__ __forceinline__ RowScales(const Problem& p, const Tile& tile, const Place& at)
      : RowScales(p.row_scale, p.col_scale, tile, at) {}

  // to, staging: as in store_half.
  template <typename Out, typename To, typename SharedOf>
  __device__ __forceinline__ void store(const To& to, const Tile& tile, const Place& at, SharedOf& s, uint8_t* staging,
                                        float (&sum)[2][64]) {
    __nv_bfloat16* col_factor = publish_column(scales.col, s.col_factor, at);
    if (!all_moderate(scales, at)) {
      scale_extreme(sum, scales.row, col_factor);
      reset_column(col_factor, at);
    }
    store_scaled<Out>(to, tile, at, sum, scales.row, col_factor, staging);
  }
};

struct RowScalesBias : RowScales {
  struct Shared : FoldedShared {
    float bias[2][2][kTileN];  // as col_factor
  };

  float col_bias;

  static void fill(Problem& p, const Call& call) {
    RowScales::fill(p, call);
    p.bias = call.in[4].as<const float>();
  }

  __device__ __forceinline__ RowScalesBias(const Problem& p, const Tile& tile, const Place& at) {
    scales.load_column(p.col_scale, tile, at);
    col_bias = at.col < tile.cols ? p.bias[tile.col_scale + at.col] : 0;
    scales.load_rows(p.row_scale, tile, at);
  }

  template <typename Out>
  __device__ __forceinline__ void store(const Problem& p, const Tile& tile, const Place& at, Shared& s,
                                        uint8_t* staging, float (&sum)[2][64]) {
    float* bias = s.bias[at.group][at.parity];
    __nv_bfloat16* col_factor = publish_column(scales.col, s.col_factor, at);
    bias[at.col] = col_bias;
    if (!all_moderate(scales, at)) {
      scale_extreme(sum, scales.row, col_factor);
      reset_column(col_factor, at);
    }
    scale_and_add(sum, scales.row, col_factor, bias);
    store_rounded<Out>(p, tile, at, sum, staging);
  }
};

// `scales` are of the second product. The sum changes to its units when the first product is complete.
struct RowScalesSum : RowScales {
  static constexpr int kProducts = 2;
  struct Shared : FoldedShared {
    UnitChange unit_change[2][2];  // as col_factor
  };

  // Scales of the column and the row of the warpgroup with the thread's number, in either product.
  int col_of_first = kOne, row_of_first = kOne, row_of_second = kOne;
  bool near = true;

  static Matrices matrices(const Call& call, int i) { return {&call.in[4 * i], &call.in[4 * i + 2]}; }
  static void fill(Problem& p, const Call& call) {
    RowScales::fill(p, call);
    p.second_product = {call.in[5].as<const uint8_t>(), call.in[7].as<const uint8_t>(),
                        static_cast<int>(call.in[4].dim(1))};
  }

  __device__ __forceinline__ RowScalesSum(const Problem& p, const Tile& tile, const Place& at)
      : RowScales(p.second_product.row_scale, p.second_product.col_scale, tile, at) {
    const int row = at.first_row + at.col;
    if (at.col < tile.cols) col_of_first = p.col_scale[tile.col_scale + at.col];
    if (row < tile.rows) {
      row_of_first = p.row_scale[tile.row_scale + row];
      row_of_second = p.second_product.row_scale[tile.row_scale + row];
    }
  }

  // Returns the second product's depth.
  __device__ __forceinline__ int enter_second_product(const Problem& p, const Place& at, Shared& s,
                                                      float (&sum)[2][64]) {
    near = change_units(sum, {row_of_first, row_of_second}, {col_of_first, scales.col},
                        s.unit_change[at.group][at.parity], 1 + at.group);
    return p.second_product.depth;
  }

  template <typename Out>
  __device__ __forceinline__ void store(const Problem& p, const Tile& tile, const Place& at, Shared& s,
                                        uint8_t* staging, float (&sum)[2][64]) {
    __nv_bfloat16* col_factor = publish_column(scales.col, s.col_factor, at);
    if (!all_moderate(scales, at, near)) {
      scale_far(sum, scales.row, col_factor, s.unit_change[at.group][at.parity]);
      reset_column(col_factor, at);
    }
    store_scaled<Out>(p, tile, at, sum, scales.row, col_factor, staging);
  }
};

struct RowScalesDualOutput : RowScales {
  static constexpr int kOutputs = 2;

  static Matrices matrices(const Call& call, int i) { return {&call.in[0], &call.in[2 + 2 * i]}; }
  static void fill(Problem& p, const Call& call) {
    RowScales::fill(p, call);
    p.second_output = distances(call, p.col_scale);
  }

  __device__ __forceinline__ RowScalesDualOutput(const Problem& p, const Tile& tile, const Place& at)
      : RowScales(p.row_scale, p.col_scale + tile.output * p.second_output.to_scales, tile, at) {}
};

struct BlockScales : DefaultSteps {
  BlockFactors blocks;
  float factor[2][2];  // of the thread's two rows of each half

  static void fill(Problem& p, const Call& call) {
    p.block_scale = {call.in[1].as<const float>(), call.in[3].as<const float>()};
  }

  __device__ __forceinline__ BlockScales(const Problem& p, const Tile& tile, const Place& at)
      : blocks(p, tile, at.row + at.lane / 4) {
    blocks.take(factor[0], 0);
  }

  __device__ __forceinline__ void during_product(int k, int half, const Place&, IncreaseReader&, float (&)[2][64]) {
    if (half == 1) blocks.reach(k + kTileK);
  }
  __device__ __forceinline__ void before_add(int half) { blocks.take(factor[1 - half], 1 - half); }
  __device__ __forceinline__ void add(float (&sum)[64], const float (&partial)[64], int half) const {
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[i] = fmaf(partial[i], factor[half][i / 2 % 2], sum[i]);
  }

  template <typename Out>
  __device__ __forceinline__ void store(const Problem& p, const Tile& tile, const Place& at, Shared& s,
                                        uint8_t* staging, float (&sum)[2][64]) {
    publish_column(kOne, s.col_factor, at);  // nothing reads it; without this store the loop over stages spills
    store_rounded<Out>(p, tile, at, sum, staging);
  }
};

// Both products have one depth, and operands of the same shapes.
struct BlockScalesSum : BlockScales {
  static constexpr int kProducts = 2;

  static Matrices matrices(const Call& call, int i) { return {&call.in[4 * i], &call.in[4 * i + 2]}; }
  static void fill(Problem& p, const Call& call) {
    BlockScales::fill(p, call);
    p.second_block_scale = {call.in[5].as<const float>(), call.in[7].as<const float>()};
    p.second_product.depth = static_cast<int>(call.in[4].dim(1));
  }

  using BlockScales::BlockScales;

  // Returns the second product's depth.
  __device__ __forceinline__ int enter_second_product(const Problem& p, const Place&, Shared&, float (&)[2][64]) {
    blocks.restart(p.second_block_scale);
    blocks.take(factor[0], 0);
    return p.second_product.depth;
  }
};

struct SpanScales : RowScales {
  static constexpr bool kKGrouped = true, kSkipsHalf = false;
  using Shared = KGroupedShared;

  __device__ __forceinline__ SpanScales(const uint8_t* row_scale, const uint8_t* col_scale, const Tile& tile,
                                        const Place& at)
      : RowScales(row_scale, col_scale, tile, at) {
    if (!tile.whole) scales.col = kNanScale;
  }
  __device__ __forceinline__ SpanScales(const Problem& p, const Tile& tile, const Place& at)
      : SpanScales(p.row_scale, p.col_scale, tile, at) {}

  __device__ __forceinline__ void begin_products(IncreaseReader& increases) { increases.next = kSpan; }
  __device__ __forceinline__ void during_product(int k, int half, const Place& at, IncreaseReader& increases,
                                                 float (&sum)[2][64]) {
    if (half == 0 && k == increases.next)
      increases.next = rescale_at(k, sum, at.row - at.first_row, at.group, increases);
  }
  __device__ __forceinline__ void end_products(int depth, IncreaseReader& increases) {
    if (depth > kSpan) increases.read();
  }
};

struct SpanScalesDualOutput : SpanScales {
  static constexpr int kOutputs = 2;

  static Matrices matrices(const Call& call, int i) { return {&call.in[4 * i], &call.in[2]}; }
  static void fill(Problem& p, const Call& call) {
    SpanScales::fill(p, call);
    p.second_output = distances(call, p.row_scale);
  }

  __device__ __forceinline__ SpanScalesDualOutput(const Problem& p, const Tile& tile, const Place& at)
      : SpanScales(p.row_scale + tile.output * p.second_output.to_scales, p.col_scale, tile, at) {}
};

}  // namespace mxep::cuda::sm90
