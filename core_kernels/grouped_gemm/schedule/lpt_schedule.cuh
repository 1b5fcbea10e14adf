// Longest-processing-time list scheduling of the pairs of tiles of a K-grouped product: all clusters end at about the
// same time, though some groups have many more tokens than others.
//
// Every group has the same number of pairs, and the time of a pair is proportional to its group's tokens. The next free
// cluster takes the next pair, pairs of the longest group first. Three clusters, groups A, B and C of four pairs each,
// A three times as long:
//
//   cluster 0   [       A0       ][       A3       ][ C2 ]
//   cluster 1   [       A1       ][ B0 ][ B2 ][ C0 ][ C3 ]
//   cluster 2   [       A2       ][ B1 ][ B3 ][ C1 ]
//
// The group ends determine all times, so that no communication is needed: every CTA computes the schedule of all
// clusters before it begins and keeps its own pairs. Pairs that run at the same time have neighbouring numbers.
//
// Groups of about the same length are scheduled as one group with all their pairs: if all groups are alike, the pairs
// are assigned round robin. So they are if there are more groups, or more pairs per cluster, than fit in shared memory.
#pragma once

#include <climits>
#include <cstdint>

#include "cuda/tokens.cuh"

namespace mxep::cuda::sm90 {

constexpr int kMaxGroups = 64, kMaxClusters = 96, kMaxPairs = 384;

// The schedule of one cluster. Pairs are numbered group by group, in the order of the groups' lengths.
struct LptSchedule {
  int count;              // of pairs
  bool sorted;            // groups by length, else in their own order
  bool listed;            // else round robin
  int cluster, clusters;  // this one's number, and how many there are
  int numbers[kMaxPairs];
  int order[kMaxGroups];  // groups, the longest first

  // State of the computation. A cluster's number is part of the time when it becomes free: no two times are equal.
  int length[kMaxGroups], time[kMaxGroups];
  alignas(16) int free_at[2][kMaxClusters];

  __device__ int number(int i) const { return listed ? numbers[i] : cluster + i * clusters; }
  __device__ int group(int i) const { return sorted ? order[i] : i; }
};

// Called by all threads of a CTA of `cluster`, one of `clusters`; the result is visible after the next barrier. Every
// group has `pairs` pairs.
template <int kThreads>
__device__ void lpt_schedule(const int32_t* group_ends, int groups, int tokens, int pairs, int clusters, int cluster,
                             LptSchedule& s) {
  constexpr int kLanes = kThreads / kMaxClusters;  // threads that count for a cluster
  static_assert(kLanes == 4 && kThreads == kLanes * kMaxClusters && kMaxGroups <= kThreads);
  const int thread = threadIdx.x;
  if (thread == 0) {
    s.cluster = cluster;
    s.clusters = clusters;
    s.count = (groups * pairs + clusters - 1 - cluster) / clusters;
    s.sorted = s.listed = false;
  }
  if (groups > kMaxGroups || clusters > kMaxClusters || groups * pairs > kMaxPairs * clusters) return;

  // The fixed time of a pair, with bf16 operands mostly its stores, expressed in tokens. `unit` keeps times far below
  // 2^31.
  constexpr int kTokensOfAnEnd = 256;
  const int unit = tokens / 16384 + 32;
  int length = 0;
  if (thread < groups) {
    const Tokens t = tokens_of<1>(group_ends, thread, tokens);
    s.length[thread] = length = 1 + (t.end - t.begin + kTokensOfAnEnd) / unit;
  }
  if (thread < kMaxClusters) s.free_at[0][thread] = s.free_at[1][thread] = thread < clusters ? thread : INT_MAX;
  __syncthreads();
  if (thread < groups) {
    int before = 0;
    for (int g = 0; g < groups; ++g) {
      const int other = s.length[g];
      before += other > length || (other == length && g < thread);
    }
    s.order[before] = thread;
    s.time[before] = length * kMaxClusters;
  }
  __syncthreads();

  const int c = thread / kLanes, lane = thread % kLanes;
  const uint32_t lanes = 0xFu << thread % 32 / kLanes * kLanes;
  int taken = 0;
  for (int buffer = 0, i = 0, last; i < groups; buffer ^= 1, i = last) {
    for (last = i + 1; last < groups && s.time[last] > s.time[i] / 16 * 15;) ++last;
    const int first = i * pairs, count = (last - i) * pairs, time = s.time[(i + last) / 2];
    const int* free_at = s.free_at[buffer];
    const auto free_before = [&](int at) {
      int n = 0;
      for (int j = lane * 4; j < clusters; j += kLanes * 4) {
        const int4 other = *reinterpret_cast<const int4*>(free_at + j);
        n += (other.x < at) + (other.y < at) + (other.z < at) + (other.w < at);
      }
      n += __shfl_xor_sync(lanes, n, 1);
      return n + __shfl_xor_sync(lanes, n, 2);
    };
    if (c < clusters) {
      const int begin = free_at[c], before_round = taken;
      // Within the time of one pair, each cluster that was free at the beginning takes one.
      int number = 0;
      for (int at = begin, n = 1; n > 0 && number < count; at -= time) number += n = free_before(at);
      for (int at = begin, n = 0; number < count; number += n, ++taken) {
        if (c == cluster && lane == 0 && taken < kMaxPairs) s.numbers[taken] = first + number;
        if (n < clusters) n = free_before(at += time);
      }
      // Minus the time of an even share: on average that leaves less than one pair per group, and no sum exceeds 2^31.
      s.free_at[buffer ^ 1][c] = begin + (taken - before_round - count / clusters) * time;
    }
    __syncthreads();
  }
  const bool fits = !__syncthreads_or(taken > kMaxPairs);
  if (thread == 0) s.sorted = fits;
  if (c == cluster && lane == 0 && fits) {
    s.count = taken;
    s.listed = true;
  }
}

}  // namespace mxep::cuda::sm90
