// Counts per row the values that a fold rounds or flushes to zero; see plan_loss.py for the target.
#include <algorithm>

#include "cpu/mx_math.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace mxep {
namespace {

struct Counts {
  int32_t nonzero = 0, rounded = 0, flushed = 0;
};

MXEP_INLINE Counts count_row(const uint8_t* q, const uint8_t* sf, const uint8_t* target, int64_t blocks) {
  Counts row;
  for (int64_t b = 0; b < blocks; ++b, q += kBlock) {
    if (sf[b] == kE8m0Nan || target[b] == kE8m0Nan) continue;
    // 448 * 2^-32 rounds to zero. The factor is exact, and so is its product with a value.
    const float factor = scale(static_cast<uint32_t>(127 + std::clamp(sf[b] - target[b], -32, 0)));
    for (int i = 0; i < kBlock; ++i) {
      const uint32_t code = q[i] & 0x7Fu;
      const int32_t number = static_cast<int32_t>(code != 0) & static_cast<int32_t>(code != kE4m3Nan);
      const float value = f32_from_e4m3(code) * factor;
      const uint32_t folded = e4m3_from_f32(value);
      const int32_t flushed = static_cast<int32_t>(folded == 0);
      const int32_t changed = static_cast<int32_t>(f32_from_e4m3(folded) != value);
      row.nonzero += number;
      row.rounded += number & changed & ~flushed;
      row.flushed += number & flushed;
    }
  }
  return row;
}

}  // namespace

void count_fold_loss(const Call& call) {
  const int64_t k = call.in[0].dim(-1), scales = call.in[1].dim(-1);
  const uint8_t *q = call.in[0].as<const uint8_t>(), *sf = call.in[1].as<const uint8_t>();
  const uint8_t* target = call.in[2].as<const uint8_t>();
  int32_t *nonzero = call.out[0].as<int32_t>(), *rounded = call.out[1].as<int32_t>();
  int32_t* flushed = call.out[2].as<int32_t>();
  parallel_ranges(call.out[0].leading(0), k, [=](int64_t begin, int64_t end) {
    vectorized([=]() MXEP_ALWAYS_INLINE {
      for (int64_t m = begin; m < end; ++m) {
        const Counts row = count_row(q + m * k, sf + m * scales, target + m * scales, scales);
        nonzero[m] = row.nonzero;
        rounded[m] = row.rounded;
        flushed[m] = row.flushed;
      }
    });
  });
}

}  // namespace mxep
