// Rows folded to one scale, and blocks far from it to one of their own.
#include <algorithm>
#include <vector>

#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "fold/cpu.h"

namespace mxep {
namespace {

// The largest scale of a row that is at most kStepAbove octaves above the lower median, or kStepMost below the largest,
// zero and NaN blocks left out; 0 if there are no others. `plain` has room for a row.
int row_scale(const uint8_t* sf, int64_t blocks, uint8_t* plain) {
  uint8_t* const end = std::copy_if(sf, sf + blocks, plain, is_plain);
  if (end == plain) return 0;
  uint8_t* const median = plain + (end - plain - 1) / 2;
  std::nth_element(plain, median, end);
  const int most = *median + kStepAbove;
  int scale = 0, top = 0;
  for (const uint8_t* byte = median; byte < end; ++byte) {
    if (*byte <= most) scale = std::max<int>(scale, *byte);
    top = std::max<int>(top, *byte);
  }
  return std::max(scale, top - kStepMost);
}

int step_scale(uint8_t byte, int row) {
  const bool shared = !is_plain(byte) || (byte <= row && byte >= row - kStepBelow);
  return shared ? row : std::max<int>(byte, row - kStepMost);
}

}  // namespace

void fold_rows_stepped(const Call& call) {
  const int64_t m = call.in[0].dim(-2), k = call.in[0].dim(-1), blocks = k / kBlock;
  const int64_t lines = (m + kBlock - 1) / kBlock, words = call.out[3].dim(-1), matrices = call.in[0].leading(2);
  const uint8_t *q = call.in[0].as<const uint8_t>(), *sf = call.in[1].as<const uint8_t>();
  uint8_t *qf = call.out[0].as<uint8_t>(), *row_sf = call.out[1].as<uint8_t>(), *step_sf = call.out[2].as<uint8_t>();
  int32_t* apart = call.out[3].as<int32_t>();
  parallel_ranges(matrices * lines, kBlock * k, [=](int64_t begin, int64_t end) {
    std::vector<int16_t> shifts(static_cast<size_t>(blocks));
    std::vector<uint8_t> plain(static_cast<size_t>(blocks));
    int16_t* shift = shifts.data();
    for (int64_t line = begin; line < end; ++line) {
      const int64_t matrix = line / lines, first = line % lines * kBlock;
      int32_t* bits = apart + line * words;
      std::fill_n(bits, words, 0);
      for (int64_t row = first; row < std::min<int64_t>(first + kBlock, m); ++row) {
        const int64_t at = matrix * m + row;
        const uint8_t* byte = sf + at * blocks;
        row_sf[at] = static_cast<uint8_t>(row_scale(byte, blocks, plain.data()));
        for (int64_t b = 0; b < blocks; ++b) {
          const int scale = step_scale(byte[b], row_sf[at]);
          const uint32_t bit = scale != row_sf[at];
          int32_t& word = bits[b / kBlocksOfWord];
          word = static_cast<int32_t>(static_cast<uint32_t>(word) | bit << b % kBlocksOfWord);
          step_sf[(matrix * blocks + b) * m + row] = static_cast<uint8_t>(scale);
          shift[b] = static_cast<int16_t>(byte[b] == kE8m0Nan ? kE8m0Nan : byte[b] - scale);
        }
        // Under the scale 0; a NaN block keeps its byte, and no other shift is 255.
        vectorized([=]() MXEP_ALWAYS_INLINE { fold_blocks(q + at * k, shift, 0, qf + at * k, blocks); });
      }
    }
  });
}

}  // namespace mxep
