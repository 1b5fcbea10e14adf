// Tile scheduler: every cluster computes its tiles from the group ends. tile_choice.h cuts a
// group into pairs of tiles. M-grouped pairs are assigned to clusters round robin (group_pairs.cuh), K-grouped pairs by
// the time that they take (lpt_schedule.cuh).
#pragma once

#include <cstdint>
#include <type_traits>

#include "formats.h"
#include "grouped_gemm/schedule/group_pairs.cuh"
#include "grouped_gemm/schedule/lpt_schedule.cuh"
#include "grouped_gemm/schedule/tile_choice.h"

namespace mxep::cuda::sm90 {

// From the first output's operand scales and values to the second's, in values.
struct SecondOutput {
  int64_t to_scales, to_out;
};

// Of a product with scales of blocks.
struct BlockScalePointers {
  const float *row, *square;  // (M, K / 128) and (G, N / 128, K / 128), both rounded up
};

// M-grouped: out (rows, cols), M x N, groups of rows; depth is K.
//  K-grouped: out (groups, rows, cols), groups of the contraction dim; depth is the number of tokens.
struct Problem {
  const int32_t* group_ends;
  const uint8_t *row_scale, *col_scale;  // E8M0; (M,) and (G, N), or (S, rows) and (S, cols), S slots of spans
  void* out;
  int groups, rows, cols, depth;
  int first_group;  // M-grouped: `groups` is the end of the groups that the launch computes
  int clusters;
  bool clear_rest;  // M-grouped: whether rows past the last end become zeros
  // Of folded/cuda_fp8_sm90.cu, M-grouped:
  const float* bias;  // (G, N) or null
  struct {
    const uint8_t *row_scale, *col_scale;  // (M,) and (G, N)
    int depth;
  } second_product;  // the product to add
  BlockScalePointers block_scale, second_block_scale;
  SecondOutput second_output;
};

// One CTA's tile of the output and its operands.
struct Tile {
  int a_row, b_row, k_begin, k_end;
  int64_t out;               // index of its first value
  int row_scale, col_scale;  // of its first row and column; K-grouped: in the group's last span
  int slot;                  // K-grouped: of the group's first span; the other spans follow
  int rows, cols;            // of the output from the tile's first on; at most 0 for a tile outside
  bool shares_a, shares_b;   // whether the other CTA of the cluster loads one half of its rows of A or B
  bool exists;
  bool whole;      // K-grouped: the group's ends keep the contract; otherwise the sums are NaN
  bool flat;       // half as many rows and twice as many columns
  uint8_t output;  // 0 or 1: the output that the tile belongs to
};

// Tiles of kM x kN; group ends are multiples of kEnds. kFlat: M-grouped, up to kM / 2 last rows are in flat tiles.
template <bool kKGrouped, int kM, int kN, int kEnds = 1, bool kDualOutput = false, bool kFlat = false>
class Schedule {
 public:
  // K-grouped: called by all threads of a CTA, before the first barrier of the cluster.
  template <int kThreads>
  static __device__ void assign(const Problem& p, LptSchedule& lpt) {
    const int pairs = k_grouped_pairs<kTile, kOutputs>(p.rows, p.cols);
    lpt_schedule<kThreads>(p.group_ends, p.groups, p.depth, pairs, p.clusters, blockIdx.x / kCluster, lpt);
  }

  // M-grouped: `lpt` is unused.
  __device__ Schedule(const Problem& p, const LptSchedule& lpt)
      : p_(p), pairs_(pairs_of(p, lpt)), tiles_(choose_tiles<kTile, kOutputs>(kKGrouped ? p.rows : 0, p.cols)) {}

  // Called by whole warps; all lanes have the tile.
  __device__ bool next(Tile* tile) {
    GroupPair at;
    if (!pairs_.next(&at)) return false;
    const auto [group, begin, end, pair, ends_whole] = at;
    if constexpr (!kKGrouped) tiles_ = choose_tiles<kTile, kOutputs>(end - begin, p_.cols);
    const int high = tiles_.high(), wide = tiles_.wide;
    const int place = blockIdx.x % kCluster;            // of the tile in the pair
    const int whole = tiles_.pairs_m * tiles_.pairs_n;  // pairs of tiles of kM x kN
    const bool flat = kFlat && pair >= whole;
    const int rows = kKGrouped ? p_.rows : end - begin;
    // A stacked pair may reach the rows of flat tiles.
    const int end_row = kFlat && !flat && tiles_.pairs > whole ? rows / kM * kM : rows;
    int i, j, output = kOfBoth ? place : 0;  // the tile's first row and its column of tiles
    if (flat) {
      i = rows / kM * kM;
      j = (pair - whole) * kCluster + place;
    } else {
      const int height = tiles_.panel(kTile), width = tiles_.pairs_n;
      const int panel = pair / (height * width), in_panel = pair % (height * width);
      const int in_column = min(height, tiles_.pairs_m - panel * height);
      int pair_m = panel * height + in_panel % in_column;
      if constexpr (kAlternate) output = pair_m % 2, pair_m /= 2;
      i = (pair_m * high + place / wide) * kM;
      j = in_panel / in_column * wide + place % wide;
    }
    j = (kOfBoth ? j / 2 : j) * (flat ? 2 * kN : kN);
    const int64_t row = kKGrouped ? static_cast<int64_t>(group) * p_.rows + i : begin + i;  // of out
    const int weight_row = group * p_.cols + j;
    const int slot = begin / kSpan + group, last_slot = slot + (end - begin - 1) / kSpan;
    *tile = {
        .a_row = kKGrouped ? i : static_cast<int>(row),
        .b_row = kKGrouped ? j : weight_row,
        .k_begin = kKGrouped ? begin : 0,
        .k_end = kKGrouped ? end : p_.depth,
        .out = row * p_.cols + j + output * p_.second_output.to_out,
        .row_scale = kKGrouped ? last_slot * p_.rows + i : static_cast<int>(row),
        .col_scale = kKGrouped ? last_slot * p_.cols + j : weight_row,
        .slot = slot,
        .rows = end_row - i,
        .cols = p_.cols - j,
        .shares_a = wide > 1 || flat,
        .shares_b = !flat && wide == 1,
        .exists = true,
        .whole = ends_whole,
        .flat = flat,
        .output = static_cast<uint8_t>(output),
    };
    return true;
  }

 private:
  static constexpr bool kOfBoth = kDualOutput && !kKGrouped, kAlternate = kDualOutput && kKGrouped;
  static constexpr TileShape kTile{kM, kN, kFlat};
  static constexpr Outputs kOutputs = kOfBoth      ? Outputs::kTwoInPair
                                      : kAlternate ? Outputs::kTwoAlternating
                                                   : Outputs::kOne;

  using Pairs = std::conditional_t<kKGrouped, KGroupedPairs<kEnds>, MGroupedPairs<kTile, kOutputs, kEnds>>;

  static __device__ Pairs pairs_of(const Problem& p, const LptSchedule& lpt) {
    if constexpr (kKGrouped) {
      return Pairs(lpt, p.group_ends, p.depth, k_grouped_pairs<kTile, kOutputs>(p.rows, p.cols));
    } else {
      return Pairs(p.group_ends, p.first_group, p.groups, p.rows, p.cols, blockIdx.x / kCluster, p.clusters);
    }
  }

  const Problem& p_;
  Pairs pairs_;
  TileChoice tiles_;  // of the group
};

}  // namespace mxep::cuda::sm90
