// The tokens of each slot of span_sf (plan.py), inside kernels.
#pragma once

#include <cstdint>

#include "cuda/tokens.cuh"
#include "formats.h"

namespace mxep::cuda {

struct TokenGroups {
  const int32_t* ends;
  int groups;
  int64_t tokens;

  __device__ int end_of(int group) const { return cuda::end_of<kBlock>(ends, group, tokens); }
  // `scales`, or NaN bytes for the spans, and the slot without a span, of a group whose ends break the contract.
  __device__ uint32_t unless_broken(int group, uint32_t scales) const {
    return group == groups || is_whole<kBlock>(ends, group, tokens) ? scales : ~0u;
  }
};

struct SpanTokens {
  int group;           // the number of groups for tokens past the last end
  int64_t first;       // slot of the group's first span
  int64_t begin, end;  // at most kSpan tokens; none for a slot without a span

  // Called by whole warps.
  static __device__ SpanTokens of(const TokenGroups& p, int64_t slot) {
    const int lane = threadIdx.x % 32;
    SpanTokens span{p.groups, 0, 0, p.tokens};
    for (int g = 0; g < p.groups; g += 32) {
      const bool mine = g + lane < p.groups;
      const int end = mine ? p.end_of(g + lane) : 0;
      const uint32_t behind = __ballot_sync(~0u, mine && end / kSpan + g + lane >= slot);
      if (!behind) continue;
      const int at = __ffs(behind) - 1;
      span.group = g + at;
      span.end = __shfl_sync(~0u, end, at);
      break;
    }
    const int64_t start = span.group ? p.end_of(span.group - 1) : 0;
    span.first = start / kSpan + span.group;
    span.begin = start + (slot - span.first) * kSpan;
    span.end = min(span.end, span.begin + kSpan);
    return span;
  }
};

}  // namespace mxep::cuda
