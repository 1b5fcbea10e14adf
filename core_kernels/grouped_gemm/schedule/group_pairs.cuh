// The pairs of tiles of a cluster, one after another, each with its group.
//
// M-grouped, a warp looks at 32 groups at a time, one lane each. A walk over the groups takes 0.17 us per group and
// launch, which is most of the time of one token and 512 experts.
//
//   group             0    1    2    3   ..  31         then the next 32
//   end              10   10   10   12                  one load
//   rows             10    0    0    2                  from the largest end before (scan)
//   pairs             3    0    0    3                  tile_choice.h
//   pairs so far      3    3    3    6                  scan; of pair n it is the first group with more than n
//
// K-grouped, lpt_schedule.cuh has listed the pairs.
#pragma once

#include <cstdint>

#include "grouped_gemm/schedule/lpt_schedule.cuh"
#include "grouped_gemm/schedule/tile_choice.h"

namespace mxep::cuda::sm90 {

struct GroupPair {
  int group, begin, end;
  int pair;    // in the group
  bool whole;  // K-grouped: the group's ends keep the contract
};

// The lane's value, combined with the values of all lanes before it.
template <typename Combine>
__device__ __forceinline__ int scan_lanes(int value, Combine combine) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value = combine(value, other);
  }
  return value;
}

// Called by whole warps. Pairs first_pair, first_pair + step, .. of the groups first_group..groups - 1; ends count as
// multiples of kEnds.
template <TileShape kTile, Outputs kOutputs, int kEnds>
class MGroupedPairs {
 public:
  __device__ MGroupedPairs(const int32_t* group_ends, int first_group, int groups, int rows, int cols, int first_pair,
                           int step)
      : group_ends_(group_ends),
        groups_(groups),
        rows_(rows),
        cols_(cols),
        step_(step),
        first_(first_group - kLanes),
        next_(first_pair),
        end_(first_group ? end_of(first_group - 1, 0) : 0) {}

  __device__ bool next(GroupPair* found) {
    uint32_t lanes;
    while ((lanes = __ballot_sync(~0u, next_ < pairs_so_far_)) == 0) {
      next_ -= __shfl_sync(~0u, pairs_so_far_, kLanes - 1);
      first_ += kLanes;
      if (first_ >= groups_) return false;
      enter(__shfl_sync(~0u, end_, kLanes - 1));
    }
    const int lane = __ffs(lanes) - 1;
    const int begin = __shfl_sync(~0u, begin_, lane), end = __shfl_sync(~0u, end_, lane);
    const int before = __shfl_sync(~0u, pairs_so_far_, lane) - pairs_of(end - begin);
    *found = {first_ + lane, begin, end, next_ - before, true};
    next_ += step_;
    return true;
  }

 private:
  static constexpr int kLanes = 32;

  __device__ int pairs_of(int rows) const { return choose_tiles<kTile, kOutputs>(rows, cols_).pairs; }

  // Ends that break the contract cause no write outside the output.
  __device__ int end_of(int group, int begin) const {
    return min(max(group_ends_[group], begin), rows_) / kEnds * kEnds;
  }

  // begin: where the group first_ begins.
  __device__ void enter(int begin) {
    const int lane = threadIdx.x % kLanes, group = first_ + lane;
    end_ = scan_lanes(group < groups_ ? end_of(group, begin) : begin, [](int a, int b) { return max(a, b); });
    begin_ = __shfl_up_sync(~0u, end_, 1);
    if (lane == 0) begin_ = begin;
    pairs_so_far_ = scan_lanes(pairs_of(end_ - begin_), [](int a, int b) { return a + b; });
  }

  const int32_t* group_ends_;
  int groups_, rows_, cols_, step_;
  int first_;             // the group of lane 0
  int next_;              // the next pair, counted from the first one of that group
  int begin_, end_;       // of the lane's group
  int pairs_so_far_ = 0;  // of the groups from first_ to the lane's
};

// `pairs`: of every group.
template <int kEnds>
class KGroupedPairs {
 public:
  __device__ KGroupedPairs(const LptSchedule& lpt, const int32_t* group_ends, int tokens, int pairs)
      : lpt_(lpt), group_ends_(group_ends), tokens_(tokens), pairs_(pairs) {
    enter(0);
  }

  __device__ bool next(GroupPair* found) {
    if (next_ == lpt_.count) return false;
    const int number = lpt_.number(next_++), i = number / pairs_;
    const int group = lpt_.group(i);
    if (group != group_) enter(group);
    *found = {group, its_.begin, its_.end, number - i * pairs_, its_.whole};
    return true;
  }

 private:
  __device__ void enter(int group) {
    group_ = group;
    its_ = tokens_of<kEnds>(group_ends_, group, tokens_);
  }

  const LptSchedule& lpt_;
  const int32_t* group_ends_;
  int tokens_, pairs_;
  int next_ = 0;  // in this cluster's list
  int group_;
  Tokens its_;
};

}  // namespace mxep::cuda::sm90
