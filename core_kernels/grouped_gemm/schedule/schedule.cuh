// Tile scheduler: every cluster computes its tiles from the group ends. tile_choice.h cuts a
// group into pairs of tiles. M-grouped pairs are assigned to clusters round robin, K-grouped pairs by the time that
// they take (lpt_schedule.cuh).
#pragma once

#include <cstdint>

#include "formats.h"
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
  __device__ Schedule(const Problem& p, const LptSchedule& lpt) : p_(p), lpt_(lpt) {
    if constexpr (!kKGrouped) next_ = blockIdx.x / kCluster;
    enter_group(kKGrouped ? 0 : p.first_group);
  }

  __device__ bool next(Tile* tile) {
    int pair;  // in the group
    if constexpr (kKGrouped) {
      if (next_ == lpt_.count) return false;
      const int number = lpt_.number(next_++), i = number / tiles_.pairs;
      const int group = lpt_.group(i);
      if (group != group_) enter_group(group);
      pair = number - i * tiles_.pairs;
    } else {
      while (group_ < p_.groups && next_ >= tiles_.pairs) {
        next_ -= tiles_.pairs;
        enter_group(group_ + 1);
      }
      if (group_ >= p_.groups) return false;
      pair = next_;
      next_ += p_.clusters;
    }
    const int high = tiles_.high(), wide = tiles_.wide;
    const int place = blockIdx.x % kCluster;            // of the tile in the pair
    const int whole = tiles_.pairs_m * tiles_.pairs_n;  // pairs of tiles of kM x kN
    const bool flat = kFlat && pair >= whole;
    int i, j, output = kOfBoth ? place : 0;  // the tile's first row and its column of tiles
    if (flat) {
      i = (end_ - begin_) / kM * kM;
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
    const int64_t row = kKGrouped ? static_cast<int64_t>(group_) * p_.rows + i : begin_ + i;  // of out
    const int weight_row = group_ * p_.cols + j;
    const int slot = begin_ / kSpan + group_, last_slot = slot + (end_ - begin_ - 1) / kSpan;
    *tile = {
        .a_row = kKGrouped ? i : static_cast<int>(row),
        .b_row = kKGrouped ? j : weight_row,
        .k_begin = kKGrouped ? begin_ : 0,
        .k_end = kKGrouped ? end_ : p_.depth,
        .out = row * p_.cols + j + output * p_.second_output.to_out,
        .row_scale = kKGrouped ? last_slot * p_.rows + i : static_cast<int>(row),
        .col_scale = kKGrouped ? last_slot * p_.cols + j : weight_row,
        .slot = slot,
        .rows = (kKGrouped ? p_.rows : end_ - begin_) - i,
        .cols = p_.cols - j,
        .shares_a = wide > 1 || flat,
        .shares_b = !flat && wide == 1,
        .exists = true,
        .whole = whole_,
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

  __device__ void enter_group(int group) {
    group_ = group;
    if constexpr (kKGrouped) {
      const Tokens tokens = tokens_of<kEnds>(p_.group_ends, group, p_.depth);
      begin_ = tokens.begin;
      end_ = tokens.end;
      whole_ = tokens.whole;
    } else {
      begin_ = group == p_.first_group ? end_before(group) : end_;
      if (group >= p_.groups) return;
      // Ends that break the contract cause no write outside the output.
      end_ = min(max(p_.group_ends[group], begin_), p_.rows) / kEnds * kEnds;
    }
    tiles_ = choose_tiles<kTile, kOutputs>(kKGrouped ? p_.rows : end_ - begin_, p_.cols);
  }

  __device__ int end_before(int group) const {
    return group ? min(max(p_.group_ends[group - 1], 0), p_.rows) / kEnds * kEnds : 0;
  }

  const Problem& p_;
  const LptSchedule& lpt_;
  int next_ = 0;  // pair of the group; K-grouped: in this cluster's schedule
  int group_ = 0, begin_ = 0, end_ = 0;
  TileChoice tiles_;  // of the group
  bool whole_ = true;
};

}  // namespace mxep::cuda::sm90
