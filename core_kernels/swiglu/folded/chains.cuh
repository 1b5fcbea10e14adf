// The chains of cuda_bwd_both.cu: the spans of a group's tokens, in order, in one tile of columns.
//
//   group               0          1
//   tile 0   spans   0  1  2  3  4 | 5        a CTA takes every n-th chain; chains of the longest group are first
//   tile 1           0  1  2  3  4 | 5
//
// A slot of span_sf without tokens belongs to the chain before it (plan.py of fold), and after the last group to none.
// Ends that break the contract give other chains, whose tokens and slots exist too.
#pragma once

#include "fold/spans.cuh"
#include "formats.h"

namespace mxep::cuda {

inline constexpr int kMaxGroups = 1024;  // of which a CTA knows the order

// Groups, the longest first; the slot of each group's first span, and the slot after the last group.
struct GroupOrder {
  int order[kMaxGroups], slots[kMaxGroups + 1];
};

struct alignas(16) Chain {
  int32_t begin, end;  // tokens; no more chains where they are equal
  int32_t slot;        // of the first span
  uint32_t tile;       // of the columns
  uint32_t broken;     // ~0 in a group whose ends break the contract
  uint32_t first;      // whether the group begins here

  __device__ int spans() const { return (end - begin + kSpan - 1) / kSpan; }
};

struct Chains : TokenGroups {
  int64_t slots;
  uint32_t tiles_across, chains;

  // Called by all threads. `ends`: memory for an end per group.
  template <int kThreads>
  __device__ void order_groups(GroupOrder& of, int* ends) const {
    for (int g = threadIdx.x; g < groups; g += kThreads) ends[g] = end_of(g);
    __syncthreads();
    for (int g = threadIdx.x; g <= groups; g += kThreads) {
      const int own = g < groups ? max(ends[g] - (g ? ends[g - 1] : 0), 0) : 0;
      int longer = 0, slot = 0;  // a group has the slots after all of those before it
      for (int other = 0, start = 0; other < groups; ++other) {
        const int end = ends[other], length = max(end - start, 0);
        longer += length > own || (length == own && other < g);
        if (other < g) slot = max(slot, end / kSpan + other + 1);
        start = end;
      }
      if (g < groups) of.order[longer] = g;
      of.slots[g] = slot;
    }
  }

  // The next chain with tokens from number `at` on. Calls without_tokens(chain, slot) of slots that it finds on the
  // way.
  __device__ Chain take(const GroupOrder& of, uint32_t& at, auto without_tokens) const {
    for (; at < chains; at += gridDim.x) {
      const int group = of.order[at / tiles_across];
      const int start = group ? end_of(group - 1) : 0, end = end_of(group);
      const int first = start / kSpan + group, slot = of.slots[group], slots_end = end / kSpan + group + 1;
      Chain chain{start + (slot - first) * kSpan, 0, slot, at % tiles_across};
      chain.end = max(end, chain.begin);
      chain.broken = unless_broken(group, 0);
      chain.first = slot == first;
      for (int empty = slot + chain.spans(); empty < slots_end; ++empty) without_tokens(chain, empty);
      if (chain.spans()) {
        at += gridDim.x;
        return chain;
      }
    }
    return {};
  }
};

}  // namespace mxep::cuda
