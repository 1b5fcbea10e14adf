// Decoupled look-back between the CTAs of cuda.cu: published maxima of rows and columns.
//
//        across -->                       A CTA publishes the maxima of its tile's rows and columns once it has them.
//        .----.----.----.----.  span 0    For columns, a CTA polls the tiles above for their running maxima, four at a
//        |  0 |  1 |  2 |  3 |            time, until a tile has published one (Merrill and Garland, "Single-pass
//        |----|----|----|----|  span 1    Parallel Prefix Scan with Decoupled Look-back", 2016). For rows, a CTA polls
//        |  4 |  5 |  6 |  7 |            all tiles of the same rows.
//        '----'----'----'----'            A byte of 0 is not yet published: there are no other flags and no fences.
//
// CTAs usually start in the order of their numbers, and the device holds more of them than a row has tiles, so that a
// value is published within microseconds. Correctness does not depend on it. Other kernels, stream priorities, a green
// context or an MPS share may keep a neighbour from starting until this CTA has finished. After `polls` polls without a
// value a warp therefore computes the value from x and publishes it for its neighbour (look_beyond.cuh). Both compute
// the same value.
#pragma once

#include "cuda/launch.h"
#include "cuda/mx_math.cuh"
#include "fold/both/look_beyond.cuh"
#include "fold/magnitudes.cuh"
#include "fold/spans.cuh"
#include "formats.h"

namespace mxep::cuda {

// Four bytes per word. A magnitude is a scale byte + 1, or 0 if all blocks are NaN. A published byte is a magnitude +
// 1, saturating. Magnitudes of finite values publish at most 251, so that 255 decodes to itself.
__device__ inline uint32_t encode(uint32_t magnitudes) { return __vaddus4(magnitudes, kOnes); }
__device__ inline uint32_t decode(uint32_t words) { return __vsub4(words, kOnes & ~__vcmpeq4(words, ~0u)); }
__device__ inline bool all_published(uint32_t words) { return !__vcmpeq4(words, 0); }

struct BothFold : TokenGroups {  // a token is a row
  int64_t cols, slots;
  uint32_t across;
  int64_t ahead;  // in rows
  int polls;      // that a warp spends on its columns, and on its rows, before it computes the value
  uint8_t *qf, *row_sf, *qf_t, *span_sf;
  // Published words. Columns of slot s begin at s * cols: the maxima of the span, and the running maxima up to it. Rows
  // r to r + 31 of tile t across: 32 bytes at r * across + t.
  uint32_t *span_maxima, *running_maxima, *row_peers;
};

// The scales of four columns from this span on. `magnitudes`: of the span's rows.
template <typename Source>
__device__ uint32_t running_scales(const Source& x, const BothFold& p, ScaleRule rule, const SpanTokens& span,
                                   int64_t slot, int64_t col, uint32_t magnitudes) {
  const auto with_headroom = [](uint32_t of_first) {
    return __vaddus4(of_first, __vcmpne4(of_first, 0) & kOnes * kHeadroom);
  };
  const int64_t at = (slot * p.cols + col) / 4, pitch = p.cols / 4, predecessors = slot - span.first;
  uint32_t words = encode(predecessors == 0 ? with_headroom(magnitudes) : magnitudes);
  publish(p.span_maxima + at, words);
  constexpr int kAtOnce = 4;  // predecessors wait too; polls one after the other would take as long as a tile
  int polls = p.polls;
  bool all = false;
  for (int64_t back = 1; back <= predecessors && !all;) {
    uint32_t largest[kAtOnce], own[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t from = at - min(back + i, predecessors) * pitch;
      largest[i] = poll(p.running_maxima + from);
      own[i] = poll(p.span_maxima + from);
    }
    bool next = true;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      next = next && !all && (all_published(largest[i]) || all_published(own[i]));
      if (!next) continue;
      all = all_published(largest[i]);
      words = __vmaxu4(words, all ? largest[i] : own[i]);
      ++back;
    }
    if (next || all || --polls >= 0) continue;
    magnitudes = column_maxima(x, span.begin - back * kSpan, col, rule);
    const uint32_t published = encode(back == predecessors ? with_headroom(magnitudes) : magnitudes);
    publish(p.span_maxima + at - back * pitch, published);
    words = __vmaxu4(words, published);
    ++back;
  }
  publish(p.running_maxima + at, words);
  return __vsubus4(decode(words), kOnes);
}

// The largest magnitudes of a warp's 32 rows, `row` and on, in all tiles across. A lane's result is of rows lane % 8 *
// 4 to lane % 8 * 4 + 3.
template <typename T, typename Value>
__device__ uint32_t row_magnitudes(const Value* x, const BothFold& p, ScaleRule rule, int64_t row) {
  constexpr int kAtOnce = 8;
  uint32_t* row_peers = p.row_peers + row / kBlock * p.across * (kBlock / 4);
  const uint32_t lane = threadIdx.x % 32, end = p.across * (kBlock / 4);
  int polls = p.polls;
  uint32_t largest = kOnes;
  for (uint32_t first = lane; first - lane < end && polls >= 0; first += 32 * kAtOnce) {
    uint32_t words[kAtOnce];
    bool missing;
    do {
      missing = false;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) words[i] = first + i * 32 < end ? poll(row_peers + first + i * 32) : kOnes;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) missing |= !all_published(words[i]);
    } while (__any_sync(~0u, missing) && --polls >= 0);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) largest = __vmaxu4(largest, words[i]);
  }
  largest = __vmaxu4(largest, __shfl_xor_sync(~0u, largest, 8));
  largest = __vmaxu4(largest, __shfl_xor_sync(~0u, largest, 16));
#pragma unroll 1
  for (uint32_t tile = 0; polls < 0 && tile < p.across; ++tile, row_peers += kBlock / 4) {
    uint32_t words = poll(row_peers + lane % 8);
    if (!__all_sync(~0u, all_published(words))) {
      words = encode(tile_row_maxima<T>(x, p.cols, rule, row, int64_t{tile} * T::kCols));
      if (lane < kBlock / 4) publish(row_peers + lane, words);
    }
    largest = __vmaxu4(largest, words);
  }
  return decode(largest);
}

}  // namespace mxep::cuda
