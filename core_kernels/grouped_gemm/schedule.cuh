// Which tile of the output comes when: every cluster walks its share of pairs of tiles, by the group ends it reads.
// M-grouped the pairs of all groups go round, K-grouped they are shared out by the time they take (lpt_schedule.cuh).
//
//   a pair, two tiles of 256 x 128        side by side             or stacked, where that takes fewer pairs
//                                         rank 0  rank 1           rank 0  [      ]
//                                         [      ][      ]         rank 1  [      ]
//
// Of as many pairs the squarer ones: for one step of the sums of 256 x 256 the two CTAs fetch 512 rows, of 512 x 128
// 640, and the card runs at its power limit. Tiles of 128 x 256 are therefore rather stacked.
//
//   pairs of a group, in panels           0  4  8      pairs that run at the same time form a block of the output
//   of a few rows of pairs:               1  5  9      that is about as high as wide: what they read of both
//                                         2  6 10      operands is small and stays in L2
//                                         3  7 11
#pragma once

#include <cstdint>

#include "grouped_gemm/lpt_schedule.cuh"
#include "spans.h"

namespace mxep::cuda::sm90 {

constexpr int kCluster = 2;

// M-grouped: out (rows, cols), M x N, groups of rows; depth is K.
// K-grouped: out (groups, rows, cols), groups of the contraction dim; depth is all tokens.
struct Problem {
  const int32_t* group_ends;
  const uint8_t *row_scale, *col_scale;  // E8M0; (M,) and (G, N), or (S, rows) and (S, cols), S slots of spans
  void* out;
  int groups, rows, cols, depth;
  const float* bias;  // of cuda_folded_sm90.cu: (G, N) or none
};

// One CTA's part of the output, and what of the operands it takes.
struct Tile {
  int a_row, b_row, k_begin, k_end;
  int64_t out;               // of its first value
  int row_scale, col_scale;  // of its first row and column; K-grouped: those of the group's last span
  int slot;                  // K-grouped: of the group's first span; the others' follow
  int rows, cols;            // that belong to it; at most 0: none, the other tile of its pair has some
  bool side_by_side, exists;
  bool whole;  // K-grouped: the group; the sums of others are NaN
};

// Tiles of kM x kN, group ends that are multiples of kEnds.
template <bool kAlongK, int kM, int kN, int kEnds = 1>
class Schedule {
 public:
  // K-grouped: for all threads of a CTA, before the first barrier of the cluster.
  template <int kThreads>
  static __device__ void share_out(const Problem& p, Shares& shares) {
    const int pairs = min(pairs_stacked(p.rows, p.cols), pairs_beside(p.rows, p.cols));
    sm90::share_out<kThreads>(p.group_ends, p.groups, p.depth, pairs, blockIdx.x / kCluster, gridDim.x / kCluster,
                              shares);
  }

  // M-grouped, nobody reads `shares`.
  __device__ Schedule(const Problem& p, const Shares& shares)
      : p_(p), shares_(shares), next_(kAlongK ? 0 : blockIdx.x / kCluster) {
    enter(0);
  }

  __device__ bool next(Tile* tile) {
    int pair;  // of the group
    if constexpr (kAlongK) {
      if (next_ == shares_.count) return false;
      const int number = shares_.number(next_), pairs = pairs_m_ * pairs_n_, i = number / pairs;
      const int group = shares_.noted ? shares_.order[i] : i;
      if (group != group_) enter(group);
      pair = number - i * pairs;
    } else {
      while (group_ < p_.groups && next_ >= pairs_m_ * pairs_n_) {
        next_ -= pairs_m_ * pairs_n_;
        enter(group_ + 1);
      }
      if (group_ >= p_.groups) return false;
      pair = next_;
    }
    const int height = side_by_side_ ? 2 * kPanel : kPanel, columns = pairs_n_;
    const int panel = pair / (height * columns), in_panel = pair % (height * columns);
    const int in_column = min(height, pairs_m_ - panel * height);
    const int pair_m = panel * height + in_panel % in_column, pair_n = in_panel / in_column;
    const int rank = blockIdx.x % kCluster;
    const int i = (side_by_side_ ? pair_m : pair_m * kCluster + rank) * kM;
    const int j = (side_by_side_ ? pair_n * kCluster + rank : pair_n) * kN;
    const int64_t row = kAlongK ? static_cast<int64_t>(group_) * p_.rows + i : begin_ + i;  // of out
    const int weight_row = group_ * p_.cols + j;
    const int slot = begin_ / kSpan + group_, last_slot = slot + (end_ - begin_ - 1) / kSpan;
    *tile = {
        .a_row = kAlongK ? i : static_cast<int>(row),
        .b_row = kAlongK ? j : weight_row,
        .k_begin = kAlongK ? begin_ : 0,
        .k_end = kAlongK ? end_ : p_.depth,
        .out = row * p_.cols + j,
        .row_scale = kAlongK ? last_slot * p_.rows + i : static_cast<int>(row),
        .col_scale = kAlongK ? last_slot * p_.cols + j : weight_row,
        .slot = slot,
        .rows = (kAlongK ? p_.rows : end_ - begin_) - i,
        .cols = p_.cols - j,
        .side_by_side = side_by_side_,
        .exists = true,
        .whole = whole_,
    };
    next_ += kAlongK ? 1 : gridDim.x / kCluster;
    return true;
  }

 private:
  static constexpr int kPanel = 1024 / kM;  // 2 to 16 of 256 measured within half a percent of each other

  static __device__ int tiles(int size, int tile) { return (size + tile - 1) / tile; }

  static __device__ int pairs_stacked(int rows, int cols) { return tiles(rows, 2 * kM) * tiles(cols, kN); }
  static __device__ int pairs_beside(int rows, int cols) { return tiles(rows, kM) * tiles(cols, 2 * kN); }

  __device__ void enter(int group) {
    group_ = group;
    if constexpr (kAlongK) {
      const Tokens tokens = tokens_of<kEnds>(p_.group_ends, group, p_.depth);
      begin_ = tokens.begin;
      end_ = tokens.end;
      whole_ = tokens.whole;
    } else {
      begin_ = group ? end_ : 0;
      if (group >= p_.groups) return;
      // Ends that break the contract make nobody write outside the output.
      end_ = min(max(p_.group_ends[group], begin_), p_.rows) / kEnds * kEnds;
    }
    const int rows = kAlongK ? p_.rows : end_ - begin_;
    const int stacked = pairs_stacked(rows, p_.cols), beside = pairs_beside(rows, p_.cols);
    side_by_side_ = kM > kN ? beside <= stacked : beside < stacked;
    pairs_m_ = tiles(rows, side_by_side_ ? kM : 2 * kM);
    pairs_n_ = tiles(p_.cols, side_by_side_ ? 2 * kN : kN);
  }

  const Problem& p_;
  const Shares& shares_;
  int next_;  // counted in the group; K-grouped, in this cluster's share
  int group_ = 0, begin_ = 0, end_ = 0;
  int pairs_m_ = 0, pairs_n_ = 0;
  bool side_by_side_ = false, whole_ = true;
};

}  // namespace mxep::cuda::sm90
