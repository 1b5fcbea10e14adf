// Tile scheduler: every cluster computes its tiles from the group ends. M-grouped pairs of tiles are assigned in turns,
// K-grouped ones by the time that they take (lpt_schedule.cuh).
//
//   a pair, two tiles of 256 x 128        side by side             or stacked, if that takes fewer pairs
//                                         rank 0  rank 1           rank 0  [      ]
//                                         [      ][      ]         rank 1  [      ]
//
// With equal numbers of pairs the squarer pair is better: per k-step a pair of 256 x 256 loads 512 rows, a pair of 512
// x 128 loads 640, and the GPU is power-limited. Tiles of 128 x 256 are therefore stacked if the numbers are equal.
//
// A group's rows past its whole tiles, up to 128, are in flat tiles of 128 x 256, side by side. A tile of
// 256 x 128 costs as much, and at least half of it would be other rows.
//
//   rank 0                rank 1
//   [                    ][                    ]
//
// Two products with one common operand and an output each (kTwin): M-grouped, a pair has the same tile of both outputs,
// rank 0 of the first and rank 1 of the second, and shares the rows of A. K-grouped, where that would load 640 rows, a
// pair belongs to one output, and those of both outputs alternate.
//
//   pairs of a group, in                  0  4  8      those that run at the same time form a block of the output
//   panels of a few rows of them:         1  5  9      that is about as high as wide: their parts of both operands
//                                         2  6 10      are small and stay in L2
//                                         3  7 11
#pragma once

#include <cstdint>

#include "formats.h"
#include "grouped_gemm/lpt_schedule.cuh"

namespace mxep::cuda::sm90 {

constexpr int kCluster = 2;  // CTAs of a cluster, tiles of a pair

// M-grouped: out (rows, cols), M x N, groups of rows; depth is K.
//  K-grouped: out (groups, rows, cols), groups of the contraction dim; depth is the number of tokens.
struct Problem {
  const int32_t* group_ends;
  const uint8_t *row_scale, *col_scale;  // E8M0; (M,) and (G, N), or (S, rows) and (S, cols), S slots of spans
  void* out;
  int groups, rows, cols, depth;
  int clusters;
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
  int rows, cols;            // of the output from the tile's first on; at most 0 for a tile outside
  bool shares_a, shares_b;   // whether the other CTA of the cluster loads one half of its rows of A or B
  bool exists;
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
    const int pairs = min(pairs_stacked(p.rows, p.cols), pairs_side_by_side(p.rows, p.cols));
    lpt_schedule<kThreads>(p.group_ends, p.groups, p.depth, pairs * (kAlternate ? 2 : 1), p.clusters,
                           blockIdx.x / kCluster, lpt);
  }

  // M-grouped: `lpt` is unused.
  __device__ Schedule(const Problem& p, const LptSchedule& lpt) : p_(p), lpt_(lpt) {
    if constexpr (!kAlongK) next_ = blockIdx.x / kCluster;
    enter_group(0);
  }

  __device__ bool next(Tile* tile) {
    int pair;  // in the group
    if constexpr (kAlongK) {
      if (next_ == lpt_.count) return false;
      const int number = lpt_.number(next_++), i = number / pairs_;
      const int group = lpt_.group(i);
      if (group != group_) enter_group(group);
      pair = number - i * pairs_;
    } else {
      while (group_ < p_.groups && next_ >= pairs_) {
        next_ -= pairs_;
        enter_group(group_ + 1);
      }
      if (group_ >= p_.groups) return false;
      pair = next_;
      next_ += p_.clusters;
    }
    const int high = high_of_pair(), wide = wide_of_pair();
    const int place = blockIdx.x % kCluster;  // of the tile in the pair
    const int whole = pairs_m_ * pairs_n_;    // pairs of tiles of kM x kN
    const bool flat = kFlat && pair >= whole;
    int i, j, twin = kOfBoth ? place : 0;  // the tile's first row and its column of tiles
    if (flat) {
      i = (end_ - begin_) / kM * kM;
      j = (pair - whole) * kCluster + place;
    } else {
      const int height = high == 1 ? 2 * kPanel : kPanel;
      const int panel = pair / (height * pairs_n_), in_panel = pair % (height * pairs_n_);
      const int in_column = min(height, pairs_m_ - panel * height);
      int pair_m = panel * height + in_panel % in_column;
      if constexpr (kAlternate) twin = pair_m % 2, pair_m /= 2;
      i = (pair_m * high + place / wide) * kM;
      j = in_panel / in_column * wide + place % wide;
    }
    j = (kOfBoth ? j / 2 : j) * (flat ? 2 * kN : kN);
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
        .shares_a = wide > 1 || flat,
        .shares_b = !flat && wide == 1,
        .exists = true,
        .whole = whole_,
        .flat = flat,
        .twin = static_cast<uint8_t>(twin),
    };
    return true;
  }

 private:
  static constexpr bool kOfBoth = kTwin && !kAlongK, kAlternate = kTwin && kAlongK;  // a pair of twins
  static constexpr int kPanel = 1024 / kM;  // 2 to 16 panels of 256 measured within half a percent of each other

  static __device__ int tiles(int size, int tile) { return (size + tile - 1) / tile; }

  static __device__ int pairs_stacked(int rows, int cols) { return tiles(rows, 2 * kM) * tiles(cols, kN); }
  static __device__ int pairs_side_by_side(int rows, int cols) { return tiles(rows, kM) * tiles(cols, 2 * kN); }

  __device__ int wide_of_pair() const { return kOfBoth ? kCluster : wide_; }
  __device__ int high_of_pair() const { return kCluster / wide_of_pair(); }

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
    const int cols = kOfBoth ? 2 * p_.cols : p_.cols;  // of all outputs
    int flat_pairs = 0;
    if constexpr (kFlat) {
      const int rest = rows % kM;
      if (rest != 0 && rest <= kM / 2) {
        rows -= rest;
        flat_pairs = tiles(cols, kCluster * 2 * kN);
      }
    }
    const int stacked = pairs_stacked(rows, cols), side_by_side = pairs_side_by_side(rows, cols);
    wide_ = (kM > kN ? side_by_side <= stacked : side_by_side < stacked) ? 2 : 1;
    pairs_m_ = tiles(rows, high_of_pair() * kM) * (kAlternate ? 2 : 1);
    pairs_n_ = tiles(cols, wide_of_pair() * kN);
    pairs_ = pairs_m_ * pairs_n_ + flat_pairs;
  }

  const Problem& p_;
  const LptSchedule& lpt_;
  int next_ = 0;  // pair of the group; K-grouped: in this cluster's schedule
  int group_ = 0, begin_ = 0, end_ = 0;
  int wide_ = 2;  // tiles of a pair side by side
  int pairs_m_ = 0, pairs_n_ = 0;
  int pairs_ = 0;  // of the group, with pairs of flat tiles at the end
  bool whole_ = true;
};

}  // namespace mxep::cuda::sm90
