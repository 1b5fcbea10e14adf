// Which cluster takes which pairs of tiles of a K-grouped product: all are to end at the same time, though some groups
// have many more tokens than others.
//
// Every group has equally many pairs, and a pair takes as long as its group has tokens. Whoever is free takes the next
// one, the longest group's first. Three clusters, groups A, B and C of four pairs each, A three times as long:
//
//   cluster 0   [       A0       ][       A3       ][ C2 ]
//   cluster 1   [       A1       ][ B0 ][ B2 ][ C0 ][ C3 ]
//   cluster 2   [       A2       ][ B1 ][ B3 ][ C1 ]
//
// Times are known from the group ends, so that nobody has to ask who is free: every CTA plays the same game for all
// clusters before it begins, and notes what its own takes. Pairs that run at the same time have neighbouring numbers.
//
// Groups of about the same length are played as one group that has all their pairs: where all are alike, the pairs just
// go round. So they do where there are more groups, or more pairs of a cluster, than there is shared memory to note.
#pragma once

#include <climits>
#include <cstdint>

#include "cuda/tokens.cuh"

namespace mxep::cuda::sm90 {

constexpr int kMostGroups = 64, kMostClusters = 96, kMostNoted = 384;

// Of one cluster. Pairs are numbered group by group, in the order in which groups are taken.
struct Shares {
  int count;
  bool noted;  // else groups come as they are, and numbers as `first` and `stride` say
  int first, stride;
  int numbers[kMostNoted];
  int order[kMostGroups];  // groups, the longest first

  // For the game. A cluster's number is part of the time when it is free: no two are equal.
  int length[kMostGroups], time[kMostGroups];
  alignas(16) int free_at[2][kMostClusters];

  __device__ int number(int i) const { return noted ? numbers[i] : first + i * stride; }
};

// For all threads of a CTA of `cluster`, one of `clusters`; they see the result after the next barrier.
template <int kThreads>
__device__ void share_out(const int32_t* group_ends, int groups, int tokens, int pairs, int cluster, int clusters,
                          Shares& s) {
  constexpr int kLanes = kThreads / kMostClusters;  // that count for a cluster
  static_assert(kLanes == 4 && kThreads == kLanes * kMostClusters && kMostGroups <= kThreads);
  const int thread = threadIdx.x;
  if (thread == 0) {
    s.count = (groups * pairs - cluster + clusters - 1) / clusters;
    s.noted = false;
    s.first = cluster;
    s.stride = clusters;
  }
  if (groups > kMostGroups || clusters > kMostClusters || groups * pairs > kMostNoted * clusters) return;

  // What a pair takes whatever its length, its stores above all, counts as so many tokens. The unit keeps times far
  // below 2^31.
  constexpr int kTokensOfAnEnd = 256;
  const int unit = tokens / 16384 + 32;
  int length = 0;
  if (thread < groups) {
    const Tokens t = tokens_of<1>(group_ends, thread, tokens);
    s.length[thread] = length = 1 + (t.end - t.begin + kTokensOfAnEnd) / unit;
  }
  if (thread < kMostClusters) s.free_at[0][thread] = s.free_at[1][thread] = thread < clusters ? thread : INT_MAX;
  __syncthreads();
  if (thread < groups) {
    int before = 0;
    for (int g = 0; g < groups; ++g) {
      const int other = s.length[g];
      before += other > length || (other == length && g < thread);
    }
    s.order[before] = thread;
    s.time[before] = length * kMostClusters;
  }
  __syncthreads();

  const int c = thread / kLanes, lane = thread % kLanes;
  const uint32_t lanes = 0xFu << thread % 32 / kLanes * kLanes;
  int taken = 0;
  for (int turn = 0, i = 0, last; i < groups; turn ^= 1, i = last) {
    for (last = i + 1; last < groups && s.time[last] > s.time[i] / 16 * 15;) ++last;
    const int count = (last - i) * pairs, time = s.time[(i + last) / 2];
    const int* free_at = s.free_at[turn];
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
      const int begin = free_at[c], taken_before = taken;
      // In a time of one pair, everyone who was free when it began takes one.
      int number = 0;
      for (int at = begin, n = 1; n > 0 && number < count; at -= time) number += n = free_before(at);
      for (int at = begin, n = 0; number < count; number += n, ++taken) {
        if (c == cluster && lane == 0 && taken < kMostNoted) s.numbers[taken] = i * pairs + number;
        if (n < clusters) n = free_before(at += time);
      }
      // Less what each takes in an even share: on average that leaves less than one pair a group, and no sum grows
      // beyond 2^31.
      s.free_at[turn ^ 1][c] = begin + (taken - taken_before - count / clusters) * time;
    }
    __syncthreads();
  }
  const bool fits = !__syncthreads_or(taken > kMostNoted);
  if (c == cluster && lane == 0 && fits) {
    s.count = taken;
    s.noted = true;
  }
}

}  // namespace mxep::cuda::sm90
