// Powers of two move from the weights to the rows of their group, block by block.
#include <vector>

#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "fold/cpu.h"

namespace mxep {

void balance_scales(const Call& call) {
  const int64_t n = call.in[0].dim(1), blocks = call.in[0].dim(2);
  const uint8_t* sf = call.in[0].as<const uint8_t>();
  uint8_t *balanced = call.out[0].as<uint8_t>(), *lift = call.out[1].as<uint8_t>();
  parallel_ranges(call.in[0].dim(0), n * blocks, [=](int64_t begin, int64_t end) {
    vectorized([=]() MXEP_ALWAYS_INLINE {
      for (int64_t g = begin; g < end; ++g) {
        const uint8_t* from = sf + g * n * blocks;
        uint8_t *to = balanced + g * n * blocks, *raise = lift + g * blocks;
        std::fill_n(raise, blocks, uint8_t{0});  // first the largest scale of each block
        for (int64_t i = 0; i < n; ++i)
          for (int64_t b = 0; b < blocks; ++b) {
            const uint8_t byte = from[i * blocks + b];
            raise[b] = std::max(raise[b], byte == kE8m0Nan ? uint8_t{0} : byte);
          }
        uint8_t top = 0;
        for (int64_t b = 0; b < blocks; ++b) top = std::max(top, raise[b]);
        for (int64_t b = 0; b < blocks; ++b) raise[b] = raise[b] ? top - raise[b] : 0;
        for (int64_t i = 0; i < n; ++i)
          for (int64_t b = 0; b < blocks; ++b) {
            const uint8_t byte = from[i * blocks + b];
            to[i * blocks + b] = byte == kE8m0Nan ? byte : static_cast<uint8_t>(byte + raise[b]);
          }
      }
    });
  });
}

void fold_rows_balanced(const Call& call) {
  const int64_t rows = call.in[0].dim(0), k = call.in[0].dim(1), blocks = call.in[1].dim(1);
  const uint8_t *q = call.in[0].as<const uint8_t>(), *sf = call.in[1].as<const uint8_t>();
  const uint8_t* lift = call.in[2].as<const uint8_t>();
  const std::span<const int32_t> ends(call.in[3].as<const int32_t>(), static_cast<size_t>(call.in[3].dim(0)));
  for (size_t g = 0; g < ends.size(); ++g)
    if (ends[g] < (g ? ends[g - 1] : 0) || ends[g] > rows)
      bad_value("fold_rows_balanced", "group_ends", ends[g], static_cast<int64_t>(g),
                "non-decreasing numbers from 0 up to " + std::to_string(rows));
  uint8_t *qf = call.out[0].as<uint8_t>(), *row_sf = call.out[1].as<uint8_t>();
  parallel_ranges(rows, k, [=](int64_t begin, int64_t end) {
    std::vector<int16_t> lowered(static_cast<size_t>(blocks));
    int16_t* scales = lowered.data();
    vectorized([=]() MXEP_ALWAYS_INLINE {
      for (int64_t m = begin; m < end; ++m) {
        const int64_t group = std::upper_bound(ends.begin(), ends.end(), m) - ends.begin();
        const uint8_t* down = group < std::ssize(ends) ? lift + group * blocks : nullptr;
        const uint8_t* byte = sf + m * blocks;
        int largest = 0, numbers = 0;
        for (int64_t b = 0; b < blocks; ++b) {
          const bool number = byte[b] != kE8m0Nan;
          scales[b] = static_cast<int16_t>(number && down ? byte[b] - down[b] : byte[b]);
          largest = std::max<int>(largest, number ? scales[b] : 0);
          numbers += number;
        }
        fold_blocks(q + m * k, scales, largest, qf + m * k, blocks);
        row_sf[m] = static_cast<uint8_t>(numbers ? largest : kE8m0Nan);
      }
    });
  });
}

}  // namespace mxep
