#include "fold/cpu.h"

#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "permute/cpu.h"

namespace mxep {

void fold_rows(const Call& call) {
  const int64_t k = call.in[0].dim(-1), scales = call.in[1].dim(-1);
  const uint8_t *q = call.in[0].as<const uint8_t>(), *sf = call.in[1].as<const uint8_t>();
  uint8_t *qf = call.out[0].as<uint8_t>(), *row_sf = call.out[1].as<uint8_t>();
  const int headroom = static_cast<int>(call.attrs[0]);
  parallel_ranges(rows_with_ends(call, 2, call.out[1].leading(0)), k, [=](int64_t begin, int64_t end) {
    vectorized([=]() MXEP_ALWAYS_INLINE {
      for (int64_t m = begin; m < end; ++m) {
        const int first = row_scale(sf + m * scales, std::min(scales, kSpanBlocks));
        const int least = least_scale(first, headroom), row = std::max(row_scale(sf + m * scales, scales), least);
        fold_blocks_twice(q + m * k, sf + m * scales, least, row, qf + m * k, scales);
        row_sf[m] = row_scale_byte(row);
      }
    });
  });
}

void permute_mx_fold(const Call& call) {
  const Array& packed = call.in[0];
  const int64_t width = packed.dim(1), k = call.out[0].dim(1);
  const auto map = checked_map("permute_mx_fold", call.in[1], packed.dim(0));
  const uint8_t* rows = packed.as<const uint8_t>();
  uint8_t *qf = call.out[0].as<uint8_t>(), *row_sf = call.out[1].as<uint8_t>();
  parallel_ranges(rows_with_ends(call, 2, call.out[1].dim(0)), width, [=](int64_t begin, int64_t end) {
    vectorized([=]() MXEP_ALWAYS_INLINE {
      for (int64_t i = begin; i < end; ++i) {
        if (map[i] < 0) {
          std::memset(qf + i * k, 0, k);
          row_sf[i] = 0;
          continue;
        }
        const uint8_t *q = rows + map[i] * width, *sf = q + k;
        const int row = row_scale(sf, k / kBlock);
        fold_blocks(q, sf, row, qf + i * k, k / kBlock);
        row_sf[i] = row_scale_byte(row);
      }
    });
  });
}

void quantize_row_fold(const Call& call) {
  const ScaleRule rule = scale_rule(call);
  const int headroom = static_cast<int>(call.attrs[2]);
  for_each_row(call, [=]<typename T>(const T* x, uint8_t* qf, int64_t k)
                         MXEP_ALWAYS_INLINE { return quantize_folded_row(x, qf, k / kBlock, rule, headroom); });
}

void fold_groups(const Call& call) {
  const int64_t rows = call.in[0].dim(0), m = call.in[0].dim(1), scales = call.in[1].dim(1);
  const uint8_t *q = call.in[0].as<const uint8_t>(), *sf = call.in[1].as<const uint8_t>();
  const std::span<const int32_t> ends = block_ends("fold_groups", call.in[2], m);
  uint8_t *qf = call.out[0].as<uint8_t>(), *span_sf = call.out[1].as<uint8_t>();
  parallel_ranges(rows, m, [=](int64_t begin, int64_t end) {
    vectorized([=]() MXEP_ALWAYS_INLINE {
      for (int64_t r = begin; r < end; ++r) {
        for (size_t g = 0; g <= ends.size(); ++g) {
          const SpannedGroup group = SpannedGroup::of(ends, g, m);
          int64_t slot = group.slot;
          if (g < ends.size()) {
            int largest = 0;
            for (int64_t token = group.begin; token < group.end; token += kSpan, ++slot) {
              const int64_t blocks = std::min<int64_t>(kSpan, group.end - token) / kBlock, from = r * m + token;
              const uint8_t* scale = sf + r * scales + token / kBlock;
              largest = max_span(largest, token == group.begin, scale, blocks);
              span_sf[slot * rows + r] = span_scale_byte(largest);
              fold_blocks(q + from, scale, span_scale_byte(largest), qf + from, blocks);
            }
          }
          for (; slot < group.end_slot; ++slot) span_sf[slot * rows + r] = 0;
        }
      }
    });
  });
}

}  // namespace mxep
