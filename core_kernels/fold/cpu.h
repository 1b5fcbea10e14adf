// Folding: q under its block's scale becomes RTNE(q * 2^(sf - target)) under one scale per row, or per row and span of
// tokens.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <string>

#include "cpu/errors.h"
#include "cpu/mx_math.h"
#include "formats.h"
#include "op.h"
#include "quantize/cpu.h"

namespace mxep {

inline constexpr int64_t kSpanBlocks = kSpan / kBlock;

// The larger scale byte; -1 means no scale so far. A NaN block is ignored.
MXEP_INLINE int max_scale(int row, uint8_t byte) { return byte == kE8m0Nan ? row : std::max<int>(row, byte); }
MXEP_INLINE int row_scale(const uint8_t* sf, int64_t blocks) {
  int row = -1;
  for (int64_t b = 0; b < blocks; ++b) row = max_scale(row, sf[b]);
  return row;
}
// The scale that a row's blocks have at least, if the largest of its first span is `first`; -1: none.
MXEP_INLINE int least_scale(int first, int headroom) {
  return first < 0 || headroom == 0 ? -1 : std::min<int>(first + headroom, kE8m0Nan - 1);
}
MXEP_INLINE uint8_t row_scale_byte(int row) { return static_cast<uint8_t>(row < 0 ? kE8m0Nan : row); }

// Group `g` of tokens and the slots of its spans' scales, as drawn in plan.py. g = ends.size() means the tokens
// past the last end and for the slots without a span.
struct SpannedGroup {
  int64_t begin, end, slot, end_slot;

  static SpannedGroup of(std::span<const int32_t> ends, size_t g, int64_t m) {
    const int64_t index = static_cast<int64_t>(g), begin = g ? ends[g - 1] : 0, slot = begin / kSpan + index;
    if (g == ends.size()) return {begin, m, slot, m / kSpan + index};
    return {begin, ends[g], slot, ends[g] / kSpan + index + 1};
  }
};

// Running maximum of a row's scale bytes plus 1 within a group; 0 before the first scale. The group's first span gets
// a scale that is 2^kHeadroom times larger, so that later spans seldom raise it.
MXEP_INLINE int max_span(int largest, bool first, const uint8_t* sf, int64_t blocks) {
  const int here = row_scale(sf, blocks) + 1;
  return std::max(largest, first && here > 0 ? std::min<int>(here + kHeadroom, kE8m0Nan) : here);
}
MXEP_INLINE uint8_t span_scale_byte(int largest) { return static_cast<uint8_t>(std::max(largest - 1, 0)); }

// The ends of groups among m tokens, multiples of 32. Throws std::invalid_argument for other ends.
inline std::span<const int32_t> block_ends(const char* op, const Array& group_ends, int64_t m) {
  const std::span<const int32_t> ends(group_ends.as<const int32_t>(), static_cast<size_t>(group_ends.dim(0)));
  for (size_t g = 0; g < ends.size(); ++g)
    if (ends[g] < (g ? ends[g - 1] : 0) || ends[g] > m || ends[g] % kBlock)
      bad_value(op, "group_ends", ends[g], static_cast<int64_t>(g),
                "non-decreasing multiples of 32 from 0 up to " + std::to_string(m));
  return ends;
}

// Folds blocks; `out` may be `q`. The factors of 16 blocks are expanded to one per value first, so that one long loop
// runs over the values. Blocks with a smaller scale than `least` have that one.
MXEP_INLINE void fold_blocks(const uint8_t* q, const uint8_t* sf, int row, uint8_t* out, int64_t blocks,
                             int least = 0) {
  constexpr int kGroup = 16;
  alignas(64) float factor[kGroup * kBlock];
  for (int64_t first = 0; first < blocks; first += kGroup, q += kGroup * kBlock, out += kGroup * kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kGroup, blocks - first));
    for (int b = 0; b < count; ++b) {
      // 448 * 2^-32 rounds to zero, and 2^-254 is not an fp32 number.
      const int shift = std::clamp(std::max<int>(sf[first + b], least) - row, -32, 0);
      std::fill_n(factor + b * kBlock, kBlock, scale(static_cast<uint32_t>(127 + shift)));
    }
    for (int i = 0; i < count * kBlock; ++i) {
      const uint32_t folded = e4m3_from_f32(f32_from_e4m3(q[i]) * factor[i]);
      out[i] = static_cast<uint8_t>((q[i] & 0x7Fu) == kE4m3Nan ? kE4m3Nan : folded);
    }
    for (int b = 0; b < count; ++b)
      if (sf[first + b] == kE8m0Nan) std::memset(out + b * kBlock, kE4m3Nan, kBlock);
  }
}

// Folds blocks to `least`, those with a larger scale excepted, and where `row` is larger then to that.
MXEP_INLINE void fold_blocks_twice(const uint8_t* q, const uint8_t* sf, int least, int row, uint8_t* out,
                                   int64_t blocks) {
  if (least < 0) return fold_blocks(q, sf, row, out, blocks);
  fold_blocks(q, sf, least, out, blocks);
  if (row > least) fold_blocks(out, sf, row, out, blocks, least);
}

// Computes the row's scale first, which loads the row into the cache; then quantizes and folds 16 blocks at a time.
template <typename T>
MXEP_INLINE uint8_t quantize_folded_row(const T* x, uint8_t* qf, int64_t blocks, ScaleRule rule, int headroom) {
  constexpr int kGroup = 16;
  uint8_t sf[kGroup];
  int first_span = -1, row = -1;
  for (int64_t b = 0; b < blocks; ++b) {
    row = max_scale(row, block_scale(x + b * kBlock, rule));
    if (b < kSpanBlocks) first_span = row;
  }
  const int least = least_scale(first_span, headroom);
  row = std::max(row, least);
  for (int64_t first = 0; first < blocks; first += kGroup) {
    const int64_t count = std::min<int64_t>(kGroup, blocks - first);
    quantize_blocks(x + first * kBlock, qf + first * kBlock, sf, count, rule);
    fold_blocks_twice(qf + first * kBlock, sf, least, row, qf + first * kBlock, count);
  }
  return row_scale_byte(row);
}

}  // namespace mxep
