// Tile scheduler: every cluster computes its pairs of tiles from the group ends. M-grouped pairs are assigned
// round-robin, K-grouped pairs by the time that they take (lpt_schedule.cuh).
//
//   a pair, two tiles of 256 x 128        side by side             or stacked, if that takes fewer pairs
//                                         rank 0  rank 1           rank 0  [      ]
//                                         [      ][      ]         rank 1  [      ]
//
// With equal numbers of pairs the squarer pair is better: per k-step a pair of 256 x 256 loads 512 rows, a pair of 512
// x 128 loads 640, and the GPU is power-limited. Tiles of 128 x 256 are therefore stacked if the numbers are equal.
//
// A group's rows past its whole tiles, up to 128, are in flat tiles of 128 x 256, side by side. A tile of 256 x 128
// costs as much, and at least half of it would be other rows.
//
//   rank 0                rank 1
//   [                    ][                    ]
//
// Two products with one common operand and an output each (kTwin): M-grouped, a pair has the same tile of both outputs,
// rank 0 of the first and rank 1 of the second, and shares the rows of A. K-grouped, where that would load 640 rows, a
// pair belongs to one output, and pairs of both outputs alternate.
//
//   pairs of a group, in panels           0  4  8      pairs that run at the same time form a block of the output
//   of a few rows of pairs:               1  5  9      that is about as high as wide: their parts of both operands
//                                         2  6 10      are small and stay in L2
//                                         3  7 11
#pragma once

#include <cstdint>

#include "formats.h"
#include "grouped_gemm/lpt_schedule.cuh"

namespace mxep::cuda::sm90 {

constexpr int kCluster = 2;

// M-grouped: out (rows, cols), M x N, groups of rows; depth is K.
//  K-grouped: out (groups, rows, cols), groups of the contraction dim; depth is the number of tokens.
struct Problem {
  const int32_t* group_ends;
  const uint8_t *row_scale, *col_scale;  // E8M0; (M,) and (G, N), or (S, rows) and (S, cols), S slots of spans
  void* out;
  int groups, rows, cols, depth;
  // Of cuda_folded_sm90.cu, M-grouped:
  const float* bias;  // (G, N) or null
  struct {
    const uint8_t *row_scale, *col_scale;  // (M,) and (G, N)
    int depth;
  } second;  // the product to add
  struct {
    const float *row, *square;  // (M, K / 128) and (G, N / 128, K / 128), both rounded up
  } block_scale;
  // Of twins: how far the second one's values are from the first one's.
  struct {
    int64_t to_scales, to_out;
  } twin;
};

// One CTA's tile of the output and its operands.
struct Tile {
  int a_row, b_row, k_begin, k_end;
  int64_t out;               // index of its first value
  int row_scale, col_scale;  // of its first row and column; K-grouped: those of the group's last span
  int slot;                  // K-grouped: of the group's first span; the other spans follow
  int rows, cols;  // of the output from the tile's first on; at most 0 for a tile outside, whose pair has one inside
  bool side_by_side, exists;
  bool whole;    // K-grouped: the group's ends keep the contract; otherwise the sums are NaN
  bool flat;     // half as many rows and twice as many columns
  uint8_t twin;  // 0 or 1: the product that the tile belongs to
};

// Tiles of kM x kN; group ends are multiples of kEnds. kFlat: M-grouped, up to kM / 2 last rows are in flat tiles.
template <bool kAlongK, int kM, int kN, int kEnds = 1, bool kTwin = false, bool kFlat = false>
class Schedule {
 public:
  // K-grouped: called by all threads of a CTA, before the first barrier of the cluster.
  template <int kThreads>
  static __device__ void assign(const Problem& p, LptSchedule& lpt) {
    const int pairs = min(pairs_stacked(p.rows, p.cols), pairs_side_by_side(p.rows, p.cols)) * (kAlternate ? 2 : 1);
    lpt_schedule<kThreads>(p.group_ends, p.groups, p.depth, pairs, blockIdx.x / kCluster, gridDim.x / kCluster, lpt);
  }

  // M-grouped: `lpt` is unused.
  __device__ Schedule(const Problem& p, const LptSchedule& lpt)
      : p_(p), lpt_(lpt), next_(kAlongK ? 0 : blockIdx.x / kCluster) {
    enter_group(0);
  }

  __device__ bool next(Tile* tile) {
    int pair;  // in the group
    if constexpr (kAlongK) {
      if (next_ == lpt_.count) return false;
      const int number = lpt_.number(next_), pairs = pairs_m_ * pairs_n_, i = number / pairs;
      const int group = lpt_.listed ? lpt_.order[i] : i;
      if (group != group_) enter_group(group);
      pair = number - i * pairs;
    } else {
      while (group_ < p_.groups && next_ >= pairs_m_ * pairs_n_ + flat_pairs_) {
        next_ -= pairs_m_ * pairs_n_ + flat_pairs_;
        enter_group(group_ + 1);
      }
      if (group_ >= p_.groups) return false;
      pair = next_;
    }
    const int whole = pairs_m_ * pairs_n_, rank = blockIdx.x % kCluster;  // whole: pairs of tiles of kM x kN
    const bool flat = kFlat && pair >= whole;
    int i, j, twin = kOfBoth ? rank : 0;
    if (flat) {
      i = (end_ - begin_) / kM * kM;
      j = (kOfBoth ? pair - whole : (pair - whole) * kCluster + rank) * 2 * kN;
    } else {
      const int height = side_by_side_ ? 2 * kPanel : kPanel, columns = pairs_n_;
      const int panel = pair / (height * columns), in_panel = pair % (height * columns);
      const int in_column = min(height, pairs_m_ - panel * height);
      int pair_m = panel * height + in_panel % in_column;
      const int pair_n = in_panel / in_column;
      if constexpr (kAlternate) twin = pair_m % 2, pair_m /= 2;
      i = (side_by_side_ ? pair_m : pair_m * kCluster + rank) * kM;
      j = (side_by_side_ && !kOfBoth ? pair_n * kCluster + rank : pair_n) * kN;
    }
    const int64_t row = kAlongK ? static_cast<int64_t>(group_) * p_.rows + i : begin_ + i;  // of out
    const int weight_row = group_ * p_.cols + j;
    const int slot = begin_ / kSpan + group_, last_slot = slot + (end_ - begin_ - 1) / kSpan;
    *tile = {
        .a_row = kAlongK ? i : static_cast<int>(row),
        .b_row = kAlongK ? j : weight_row,
        .k_begin = kAlongK ? begin_ : 0,
        .k_end = kAlongK ? end_ : p_.depth,
        .out = row * p_.cols + j + twin * p_.twin.to_out,
        .row_scale = kAlongK ? last_slot * p_.rows + i : static_cast<int>(row),
        .col_scale = kAlongK ? last_slot * p_.cols + j : weight_row,
        .slot = slot,
        .rows = (kAlongK ? p_.rows : end_ - begin_) - i,
        .cols = p_.cols - j,
        .side_by_side = side_by_side_ || flat,
        .exists = true,
        .whole = whole_,
        .flat = flat,
        .twin = static_cast<uint8_t>(twin),
    };
    next_ += kAlongK ? 1 : gridDim.x / kCluster;
    return true;
  }

 private:
  static constexpr bool kOfBoth = kTwin && !kAlongK, kAlternate = kTwin && kAlongK;  // a pair of twins
  static constexpr int kPanel = 1024 / kM;  // 2 to 16 panels of 256 measured within half a percent of each other

  static __device__ int tiles(int size, int tile) { return (size + tile - 1) / tile; }

  static __device__ int pairs_stacked(int rows, int cols) { return tiles(rows, 2 * kM) * tiles(cols, kN); }
  static __device__ int pairs_side_by_side(int rows, int cols) { return tiles(rows, kM) * tiles(cols, 2 * kN); }

  __device__ void enter_group(int group) {
    group_ = group;
    if constexpr (kAlongK) {
      const Tokens tokens = tokens_of<kEnds>(p_.group_ends, group, p_.depth);
      begin_ = tokens.begin;
      end_ = tokens.end;
      whole_ = tokens.whole;
    } else {
      begin_ = group ? end_ : 0;
      if (group >= p_.groups) return;
      // Ends that break the contract cause no write outside the output.
      end_ = min(max(p_.group_ends[group], begin_), p_.rows) / kEnds * kEnds;
    }
    int rows = kAlongK ? p_.rows : end_ - begin_;
    if constexpr (kFlat) {
      const int rest = rows % kM;
      const bool flat = rest != 0 && rest <= kM / 2;
      if (flat) rows -= rest;
      flat_pairs_ = flat ? tiles(p_.cols, (kOfBoth ? 1 : kCluster) * 2 * kN) : 0;
    }
    if constexpr (kOfBoth) {
      side_by_side_ = true;
      pairs_m_ = tiles(rows, kM);
      pairs_n_ = tiles(p_.cols, kN);
      return;
    }
    const int stacked = pairs_stacked(rows, p_.cols), side_by_side = pairs_side_by_side(rows, p_.cols);
    side_by_side_ = kM > kN ? side_by_side <= stacked : side_by_side < stacked;
    pairs_m_ = tiles(rows, side_by_side_ ? kM : 2 * kM) * (kAlternate ? 2 : 1);
    pairs_n_ = tiles(p_.cols, side_by_side_ ? 2 * kN : kN);
  }

  const Problem& p_;
  const LptSchedule& lpt_;
  int next_;  // in the group; K-grouped: in this cluster's schedule
  int group_ = 0, begin_ = 0, end_ = 0;
  int pairs_m_ = 0, pairs_n_ = 0;
  int flat_pairs_ = 0;  // of the group
  bool side_by_side_ = false, whole_ = true;
};

}  // namespace mxep::cuda::sm90
