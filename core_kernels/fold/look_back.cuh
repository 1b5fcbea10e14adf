// What the CTAs of cuda.cu tell each other, and where in the groups they are.
//
//        across -->                       A tile says what its rows and columns hold as soon as it has looked. Columns
//        .----.----.----.----.  span 0    ask the tiles above for the largest so far, four at a time, until one knows
//        |  0 |  1 |  2 |  3 |            (Merrill and Garland, "Single-pass Parallel Prefix Scan with Decoupled
//        |----|----|----|----|  span 1    Look-back", 2016). Rows ask all tiles beside them.
//        |  4 |  5 |  6 |  7 |
//        '----'----'----'----'            A byte that has not been said yet is 0: no other flags, no fences.
//
// As a rule CTAs start in the order of their numbers and the device holds more of them than a row has tiles: an answer
// is microseconds away. Nothing hangs on it. Other kernels, priorities of streams, a green context or a share of MPS
// may keep a neighbour from starting until this CTA has left. So who has asked `polls` times in vain asks no more: it
// looks at x itself, where the answer comes from, and says it in its neighbour's place (look_beyond.cuh). Both say the
// same.
#pragma once

#include "cuda/launch.h"
#include "cuda/mx_math.cuh"
#include "cuda/tokens.cuh"
#include "fold/look_beyond.cuh"
#include "spans.h"

namespace mxep::cuda {

// Bytes come four in a word. A magnitude is a scale byte + 1; 0 where there are NaN blocks alone. What is said is one
// more: of finite values it is at most 251, so that only 255 stands for itself.
__device__ inline uint32_t said(uint32_t magnitudes) { return __vaddus4(magnitudes, kOnes); }
__device__ inline uint32_t heard(uint32_t words) { return __vsub4(words, kOnes & ~__vcmpeq4(words, ~0u)); }
__device__ inline bool all_said(uint32_t words) { return !__vcmpeq4(words, 0); }

// Shared by CTAs that run: past L1.
__device__ inline uint32_t listen(const uint32_t* from) {
  uint32_t words;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(words) : "l"(from));
  return words;
}
__device__ inline void say(uint32_t* to, uint32_t words) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(words));
}

struct BothFold {
  const int32_t* ends;
  int groups;
  int64_t rows, cols, slots;
  uint32_t across;
  int64_t ahead;  // rows
  int polls;      // in vain, of a warp for its columns and for its rows; then it looks itself
  uint8_t *qf, *row_sf, *qf_t, *span_sf;
  // Of a tile's columns in slot s at s * cols: what its rows hold, and what they and all before do. Of 32 rows r of a
  // tile t across: 32 bytes at r * across + t.
  uint32_t *own, *largest, *beside;

  __device__ int end_of(int group) const { return cuda::end_of<kBlock>(ends, group, rows); }
  // What stands in the place of `scales` of a group's spans, and of its slot without a span.
  __device__ uint32_t unless_broken(int group, uint32_t scales) const {
    return group == groups || is_whole<kBlock>(ends, group, rows) ? scales : ~0u;
  }
};

// The rows of a slot.
struct Span {
  int group;           // the number of groups for rows past the last end
  int64_t first;       // slot of the group
  int64_t begin, end;  // at most kSpan rows; a slot that no span has: none

  // Asked for by whole warps.
  static __device__ Span of(const BothFold& p, int64_t slot) {
    const int lane = threadIdx.x % 32;
    Span span{p.groups, 0, 0, p.rows};
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

// What four columns' scales are from this span on. `magnitudes`: of its rows.
template <typename Value>
__device__ uint32_t running_scales(const Value* x, const BothFold& p, ScaleRule rule, const Span& span, int64_t slot,
                                   int64_t col, uint32_t magnitudes) {
  const auto with_headroom = [](uint32_t of_first) {
    return __vaddus4(of_first, __vcmpne4(of_first, 0) & kOnes * kHeadroom);
  };
  const int64_t at = (slot * p.cols + col) / 4, pitch = p.cols / 4, above = slot - span.first;
  uint32_t words = said(above == 0 ? with_headroom(magnitudes) : magnitudes);
  say(p.own + at, words);
  constexpr int kAtOnce = 4;  // while those above wait too, one answer after the other would take as long as a tile
  int polls = p.polls;
  bool all = false;
  for (int64_t back = 1; back <= above && !all;) {
    uint32_t largest[kAtOnce], own[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t from = at - min(back + i, above) * pitch;
      largest[i] = listen(p.largest + from);
      own[i] = listen(p.own + from);
    }
    bool next = true;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      next = next && !all && (all_said(largest[i]) || all_said(own[i]));
      if (!next) continue;
      all = all_said(largest[i]);
      words = __vmaxu4(words, all ? largest[i] : own[i]);
      ++back;
    }
    if (next || all || --polls >= 0) continue;
    magnitudes = look_down(x + (span.begin - back * kSpan) * p.cols + col, p.cols, rule);
    const uint32_t found = said(back == above ? with_headroom(magnitudes) : magnitudes);
    say(p.own + at - back * pitch, found);
    words = __vmaxu4(words, found);
    ++back;
  }
  say(p.largest + at, words);
  return __vsubus4(heard(words), kOnes);
}

// The largest magnitudes in all tiles across of a warp's 32 rows, `row` and on; a lane's are of rows lane % 8 * 4 to
// + 3.
template <typename T, typename Value>
__device__ uint32_t row_magnitudes(const Value* x, const BothFold& p, ScaleRule rule, int64_t row) {
  constexpr int kAtOnce = 8;
  uint32_t* beside = p.beside + row / kBlock * p.across * (kBlock / 4);
  const uint32_t lane = threadIdx.x % 32, end = p.across * (kBlock / 4);
  int polls = p.polls;
  uint32_t largest = kOnes;
  for (uint32_t first = lane; first - lane < end && polls >= 0; first += 32 * kAtOnce) {
    uint32_t words[kAtOnce];
    bool missing;
    do {
      missing = false;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) words[i] = first + i * 32 < end ? listen(beside + first + i * 32) : kOnes;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) missing |= !all_said(words[i]);
    } while (__any_sync(~0u, missing) && --polls >= 0);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) largest = __vmaxu4(largest, words[i]);
  }
  largest = __vmaxu4(largest, __shfl_xor_sync(~0u, largest, 8));
  largest = __vmaxu4(largest, __shfl_xor_sync(~0u, largest, 16));
#pragma unroll 1
  for (uint32_t tile = 0; polls < 0 && tile < p.across; ++tile, beside += kBlock / 4) {
    uint32_t words = listen(beside + lane % 8);
    if (!__all_sync(~0u, all_said(words))) {
      words = said(look_across<T>(x, p.cols, rule, row, int64_t{tile} * T::kCols));
      if (lane < kBlock / 4) say(beside + lane, words);
    }
    largest = __vmaxu4(largest, words);
  }
  return heard(largest);
}

}  // namespace mxep::cuda
