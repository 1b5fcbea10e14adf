// The tokens of a group, from its ends.
//
// The host does not read group ends, so that kernels accept any: an end counts as the multiple of kEnds below it,
// clamped to the number of tokens. Every read is then inside the operand and aligned. The sums of a group whose ends
// were changed this way are NaN, and so are the scales of its spans: a wrong number would stay unnoticed.
#pragma once

#include <cstdint>

namespace mxep::cuda {

// The rows up to the last group end; of `groups` = 0 ends all rows. An op's group ends may be left out.
struct EndedRows {
  const int32_t* ends;
  int groups;
  int64_t rows;

  __device__ int64_t count() const { return groups ? min(int64_t{max(__ldg(ends + groups - 1), 0)}, rows) : rows; }
};

struct Tokens {
  int begin, end;
  bool whole;  // the ends are multiples of kEnds, in order, and at most the number of tokens
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
