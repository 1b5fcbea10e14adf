#include "fold.h"

#include "ops.h"
#include "parallel.h"

namespace mxep {

void fold_rows(const Call& call) {
  const int64_t k = call.in[0].dim(-1), scales = call.in[1].dim(-1);
  const uint8_t *q = call.in[0].as<const uint8_t>(), *sf = call.in[1].as<const uint8_t>();
  uint8_t *qf = call.out[0].as<uint8_t>(), *row_sf = call.out[1].as<uint8_t>();
  parallel_ranges(call.out[1].leading(0), k, [=](int64_t begin, int64_t end) {
    vectorized([=]() MXEP_ALWAYS_INLINE {
      for (int64_t m = begin; m < end; ++m) {
        const int row = row_scale(sf + m * scales, scales);
        fold_blocks(q + m * k, sf + m * scales, row, qf + m * k, scales);
        row_sf[m] = row_scale_byte(row);
      }
    });
  });
}

void fold_groups(const Call& call) {
  const int64_t rows = call.in[0].dim(0), m = call.in[0].dim(1), scales = call.in[1].dim(1);
  const uint8_t *q = call.in[0].as<const uint8_t>(), *sf = call.in[1].as<const uint8_t>();
  const std::span<const int32_t> ends = block_ends("fold_groups", call.in[2], m);
  uint8_t *qf = call.out[0].as<uint8_t>(), *group_sf = call.out[1].as<uint8_t>();
  parallel_ranges(rows, m, [=](int64_t begin, int64_t end) {
    vectorized([=]() MXEP_ALWAYS_INLINE {
      for (int64_t r = begin; r < end; ++r) {
        int64_t first = 0;  // of the group's blocks
        for (size_t g = 0; g < ends.size(); ++g) {
          const int64_t blocks = ends[g] / kBlock - first, from = r * m + first * kBlock;
          const uint8_t* scale = sf + r * scales + first;
          const int row = row_scale(scale, blocks);
          fold_blocks(q + from, scale, row, qf + from, blocks);
          group_sf[g * rows + r] = blocks ? row_scale_byte(row) : 0;
          first += blocks;
        }
        std::memset(qf + r * m + first * kBlock, 0, m - first * kBlock);
      }
    });
  });
}

}  // namespace mxep
