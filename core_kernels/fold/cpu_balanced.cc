// Rows folded to one scale, each block moved by half of the difference of two levels (plan_balanced.py).
#include <algorithm>
#include <vector>

#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "fold/cpu.h"

namespace mxep {
namespace {

constexpr uint8_t kNoLevel = 255;

}  // namespace

void span_levels(const Call& call) {
  const int64_t m = call.in[0].dim(0), blocks = call.in[0].dim(1);
  const auto ends = checked_ends("span_levels", call.in[1], m, 1);
  const uint8_t* sf = call.in[0].as<const uint8_t>();
  uint8_t* levels = call.out[0].as<uint8_t>();
  std::fill_n(levels, call.out[0].dim(0) * blocks, kNoLevel);
  parallel_ranges(static_cast<int64_t>(ends.size()), kSpan * blocks, [=](int64_t first, int64_t last) {
    for (int64_t g = first; g < last; ++g) {
      const SpannedGroup group = SpannedGroup::of(ends, static_cast<size_t>(g), m);
      for (int64_t row = group.begin; row < group.end; ++row) {
        const uint8_t* byte = sf + row * blocks;
        uint8_t* level = levels + (group.slot + (row - group.begin) / kSpan) * blocks;
        int largest = 0;
        for (int64_t b = 0; b < blocks; ++b)
          if (is_plain(byte[b])) largest = std::max<int>(largest, byte[b]);
        for (int64_t b = 0; b < blocks; ++b)
          if (is_plain(byte[b])) level[b] = static_cast<uint8_t>(std::min<int>(level[b], largest - byte[b]));
      }
    }
  });
}

void group_levels(const Call& call) {
  const int64_t slots = call.in[0].dim(0), blocks = call.in[0].dim(1), groups = call.in[1].dim(0);
  const auto ends = checked_ends("group_levels", call.in[1], (slots - groups + 1) * kSpan - 1, 1);
  const uint8_t* levels = call.in[0].as<const uint8_t>();
  uint8_t* out = call.out[0].as<uint8_t>();
  for (size_t g = 0; g < ends.size(); ++g, out += blocks) {
    const SpannedGroup group = SpannedGroup::of(ends, g, 0);
    const int64_t used = group.slot + (group.end - group.begin + kSpan - 1) / kSpan;
    std::fill_n(out, blocks, kNoLevel);
    for (int64_t slot = group.slot; slot < used; ++slot)
      for (int64_t b = 0; b < blocks; ++b) out[b] = std::min(out[b], levels[slot * blocks + b]);
    std::replace(out, out + blocks, kNoLevel, uint8_t{0});
  }
}

void fold_rows_balanced(const Call& call) {
  const int64_t m = call.in[0].dim(0), k = call.in[0].dim(1), blocks = k / kBlock;
  const auto ends = checked_ends("fold_rows_balanced", call.in[4], m, 1);
  const uint8_t *q = call.in[0].as<const uint8_t>(), *sf = call.in[1].as<const uint8_t>();
  const uint8_t *own = call.in[2].as<const uint8_t>(), *other = call.in[3].as<const uint8_t>();
  uint8_t *qf = call.out[0].as<uint8_t>(), *row_sf = call.out[1].as<uint8_t>();
  parallel_ranges(m, k, [=](int64_t begin, int64_t end) {
    std::vector<int16_t> exponents(static_cast<size_t>(blocks));
    int16_t* exponent = exponents.data();
    for (int64_t row = begin; row < end; ++row) {
      const int64_t group = std::upper_bound(ends.begin(), ends.end(), row) - ends.begin();
      const bool grouped = group < static_cast<int64_t>(ends.size());
      const uint8_t* byte = sf + row * blocks;
      int scale = 0;
      bool nan = true;
      for (int64_t b = 0; b < blocks; ++b) {
        const int moved = grouped ? (own[group * blocks + b] - other[group * blocks + b]) / 2 : 0;
        exponent[b] = static_cast<int16_t>(is_plain(byte[b]) ? std::min<int>(byte[b] + moved, kE8m0Nan - 1) : byte[b]);
        if (byte[b] == kE8m0Nan) continue;
        nan = false;
        scale = std::max<int>(scale, exponent[b]);
      }
      row_sf[row] = nan ? kE8m0Nan : static_cast<uint8_t>(scale);
      vectorized([=]() MXEP_ALWAYS_INLINE { fold_blocks(q + row * k, exponent, scale, qf + row * k, blocks); });
    }
  });
}

}  // namespace mxep
