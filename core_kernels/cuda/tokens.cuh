// Where the tokens of a group are.
//
// Nobody looks at group ends on the host, so kernels take any: each counts as the multiple of kEnds below it, within
// the tokens that there are. Nobody reads outside of an operand then, nor from an address that is not aligned. The sums
// of a group that is not whole are NaN, and so are the scales of its spans: a wrong number would show nowhere.
#pragma once

#include <cstdint>

namespace mxep::cuda {

struct Tokens {
  int begin, end;
  bool whole;  // both were multiples of kEnds, neither before the other nor beyond the tokens
};

template <int kEnds, typename Count>
__device__ inline int end_of(const int32_t* group_ends, int group, Count tokens) {
  return static_cast<int>(min(Count{max(__ldg(group_ends + group), 0)}, tokens)) / kEnds * kEnds;
}

template <int kEnds, typename Count>
__device__ inline bool is_whole(const int32_t* group_ends, int group, Count tokens) {
  const int begin = group ? __ldg(group_ends + group - 1) : 0, end = __ldg(group_ends + group);
  return 0 <= begin && begin <= end && end <= tokens && (begin | end) % kEnds == 0;
}

template <int kEnds, typename Count>
__device__ inline Tokens tokens_of(const int32_t* group_ends, int group, Count tokens) {
  const int begin = group ? end_of<kEnds>(group_ends, group - 1, tokens) : 0;
  return {begin, max(end_of<kEnds>(group_ends, group, tokens), begin), is_whole<kEnds>(group_ends, group, tokens)};
}

}  // namespace mxep::cuda
