// What the CTAs of both_fold.cu tell each other, and where in the groups they are.
//
//        across -->                       A tile says what its rows and columns hold as soon as it has looked. Columns
//        .----.----.----.----.  span 0    ask the tiles above for the largest so far, four at a time, until one knows
//        |  0 |  1 |  2 |  3 |            (Merrill and Garland, "Single-pass Parallel Prefix Scan with Decoupled
//        |----|----|----|----|  span 1    Look-back", 2016). Rows ask all tiles beside them.
//        |  4 |  5 |  6 |  7 |
//        '----'----'----'----'            A byte that has not been said yet is 0: no other flags, no fences.
//
// CTAs start in the order of their numbers, so those above have started. Those beside start as long as the device holds
// as many CTAs as a row has tiles; plan and launch see to that. Group ends that break the contract give wrong bytes,
// but every slot's CTA says something: nobody waits for ever.
#pragma once

#include "../spans.h"
#include "launch.h"
#include "mx_math.cuh"

namespace mxep::cuda {

inline constexpr uint32_t kOnes = 0x01010101u;

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
  uint8_t *qf, *row_sf, *qf_t, *span_sf;
  // Of a tile's columns in slot s at s * cols: what its rows hold, and what they and all before do. Of 32 rows r of a
  // tile t across: 32 bytes at r * across + t.
  uint32_t *own, *largest, *beside;

  __device__ int end_of(int group) const {
    return static_cast<int>(min(max(int64_t{__ldg(ends + group)}, int64_t{0}), rows) / kBlock * kBlock);
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
__device__ inline uint32_t running_scales(const BothFold& p, const Span& span, int64_t slot, int64_t col,
                                          uint32_t magnitudes) {
  if (slot == span.first) magnitudes = __vaddus4(magnitudes, __vcmpne4(magnitudes, 0) & kOnes * kHeadroom);
  const int64_t at = (slot * p.cols + col) / 4, pitch = p.cols / 4;
  uint32_t words = said(magnitudes);
  say(p.own + at, words);
  constexpr int kAtOnce = 4;  // while those above wait too, one answer after the other would take as long as a tile
  const int64_t above = slot - span.first;
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
  }
  say(p.largest + at, words);
  return __vsubus4(heard(words), kOnes);
}

// The largest magnitudes of a warp's 32 rows in all tiles across; a lane's are of rows lane % 8 * 4 to + 3.
__device__ inline uint32_t row_magnitudes(const uint32_t* beside, uint32_t across) {
  constexpr int kAtOnce = 8;
  const uint32_t lane = threadIdx.x % 32, end = across * (kBlock / 4);
  uint32_t largest = kOnes;
  for (uint32_t first = lane; first - lane < end; first += 32 * kAtOnce) {
    uint32_t words[kAtOnce];
    bool missing;
    do {
      missing = false;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) words[i] = first + i * 32 < end ? listen(beside + first + i * 32) : kOnes;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) missing |= !all_said(words[i]);
    } while (__any_sync(~0u, missing));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) largest = __vmaxu4(largest, words[i]);
  }
  largest = __vmaxu4(largest, __shfl_xor_sync(~0u, largest, 8));
  largest = __vmaxu4(largest, __shfl_xor_sync(~0u, largest, 16));
  return heard(largest);
}

}  // namespace mxep::cuda
