// Both folded operands of an activation: rows with one scale each, and columns with one scale per span of tokens; see
// plan.py, and plan_blockwise.py for rows with blockwise scales. Of MXFP8 rows the columns alone; see
// plan_requantize.py, and plan_permute.py for packed rows through a row map. The columns are processed group by group
// in strips, so that the running maxima of a strip stay in the cache:
//
//   strip      0       1       2
//            .-------.-------.---.
//   group 0  | span  | span  |   |   a span's columns are quantized, and folded while they are in the cache
//            | span  | ...   |   |
//   group 1  | span  |       |   |   the running maxima restart with every group
//            '-------'-------'---'
#include "fold/cpu.h"

#include <array>

#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "permute/cpu.h"
#include "quantize/cpu.h"

namespace mxep {
namespace {

constexpr int64_t kStripCols = 128;
static_assert(kSpan <= kCacheTileRows);

// Columns of one group: all its tokens and all slots of their scales.
struct Strip {
  SpannedGroup group;
  int64_t m, k, cols;
};

// The values of a strip's columns. span(row, rows): the first of `rows` rows of them, `pitch` values apart.
template <typename T>
struct FloatColumns {
  const T* x;  // the strip's first column
  int64_t pitch;

  const T* span(int64_t row, int64_t) const { return x + row * pitch; }
};

struct MxColumns {
  static constexpr int64_t pitch = kStripCols;
  const uint8_t *q, *sf;  // the strip's first column
  int64_t k, cols;
  bf16 values[kSpan * kStripCols];

  const bf16* span(int64_t row, int64_t rows) {
    vectorized([&]() MXEP_ALWAYS_INLINE {
      for (int64_t r = 0; r < rows; ++r)
        dequantize_blocks(q + (row + r) * k, sf + (row + r) * (k / kBlock), values + r * pitch, cols / kBlock);
    });
    return values;
  }
};

// Packed rows through a row map; padding is zeros.
struct PackedColumns {
  static constexpr int64_t pitch = kStripCols;
  const uint8_t *q, *sf;  // the strip's first column
  const int32_t* map;
  int64_t width, cols;
  bf16 values[kSpan * kStripCols];

  const bf16* span(int64_t row, int64_t rows) {
    vectorized([&]() MXEP_ALWAYS_INLINE {
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t from = map[row + r] * width;
        if (from < 0)
          std::memset(values + r * pitch, 0, cols * sizeof(bf16));
        else
          dequantize_blocks(q + from, sf + from, values + r * pitch, cols / kBlock);
      }
    });
    return values;
  }
};

// q_t and span_sf point to the strip's first column.
template <typename Columns>
void fold_strip(Columns& columns, uint8_t* q_t, uint8_t* span_sf, Strip strip, ScaleRule rule) {
  uint8_t sf[kStripCols * kSpanBlocks];
  int largest[kStripCols] = {};
  int64_t slot = strip.group.slot;
  for (int64_t row = strip.group.begin; row < strip.group.end; row += kSpan, ++slot) {
    const int64_t rows = std::min<int64_t>(kSpan, strip.group.end - row);
    const CacheTile tile_shape{rows, strip.cols, columns.pitch, strip.m, kSpanBlocks};
    quantize_columns(columns.span(row, rows), q_t + row, sf, tile_shape, rule);
    vectorized([&]() MXEP_ALWAYS_INLINE {
      for (int64_t c = 0; c < strip.cols; ++c) {
        uint8_t* codes = q_t + c * strip.m + row;
        const uint8_t* bytes = sf + c * kSpanBlocks;
        largest[c] = max_span(largest[c], row == strip.group.begin, bytes, tile_shape.rows / kBlock);
        span_sf[slot * strip.k + c] = span_scale_byte(largest[c]);
        fold_blocks(codes, bytes, span_scale_byte(largest[c]), codes, tile_shape.rows / kBlock);
      }
    });
  }
  for (; slot < strip.group.end_slot; ++slot) std::memset(span_sf + slot * strip.k, 0, strip.cols);
}

// The slots after the last group.
void clear_slots(uint8_t* span_sf, Strip strip) {
  const SpannedGroup rest = strip.group;
  for (int64_t s = rest.slot; s < rest.end_slot; ++s) std::memset(span_sf + s * strip.k, 0, strip.cols);
}

// columns(col, cols): the values of a strip of `cols` columns.
template <typename Columns>
void fold_columns(const char* op, const Array& group_ends, int64_t m, int64_t k, uint8_t* qf_t, uint8_t* span_sf,
                  ScaleRule rule, const Columns& columns) {
  const int64_t strips = (k + kStripCols - 1) / kStripCols;
  const std::span<const int32_t> ends = block_ends(op, group_ends, m);
  const int64_t parts = static_cast<int64_t>(ends.size()) + 1;  // the last one is the slots after the last group
  const int64_t bytes = m * std::min(k, kStripCols) * static_cast<int64_t>(sizeof(bf16)) / parts;
  parallel_ranges(strips * parts, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t col = i / parts * kStripCols;
      const size_t g = static_cast<size_t>(i % parts);
      const Strip strip{SpannedGroup::of(ends, g, m), m, k, std::min(kStripCols, k - col)};
      if (g < ends.size()) {
        auto values = columns(col, strip.cols);
        fold_strip(values, qf_t + col * m, span_sf + col, strip, rule);
      } else {
        clear_slots(span_sf + col, strip);
      }
    }
  });
}

}  // namespace

void quantize_both_fold(const Call& call) {
  const int64_t m = call.in[0].dim(0), k = call.in[0].dim(1);
  const ScaleRule rule = scale_rule(call);
  with_data(call.in[0], [&]<typename T>(const T* x) {
    fold_columns("quantize_both_fold", call.in[1], m, k, call.out[2].as<uint8_t>(), call.out[3].as<uint8_t>(), rule,
                 [=](int64_t col, int64_t) { return FloatColumns<T>{x + col, k}; });
  });
  const std::array<int64_t, 3> of_rows{call.attrs[0], call.attrs[1], 0};  // no headroom
  quantize_row_fold({call.in, call.out.first(2), of_rows});
}

void quantize_blockwise_fold(const Call& call) {
  const int64_t m = call.in[0].dim(0), k = call.in[0].dim(1);
  with_data(call.in[0], [&]<typename T>(const T* x) {
    fold_columns("quantize_blockwise_fold", call.in[1], m, k, call.out[2].as<uint8_t>(), call.out[3].as<uint8_t>(),
                 {kRceil, false}, [=](int64_t col, int64_t) { return FloatColumns<T>{x + col, k}; });
  });
  quantize_blockwise({call.in, call.out.first(2), call.attrs});
}

void requantize_col_fold(const Call& call) {
  const int64_t m = call.in[0].dim(0), k = call.in[0].dim(1);
  const uint8_t *q = call.in[0].as<uint8_t>(), *sf = call.in[1].as<uint8_t>();
  fold_columns("requantize_col_fold", call.in[2], m, k, call.out[0].as<uint8_t>(), call.out[1].as<uint8_t>(),
               scale_rule(call),
               [=](int64_t col, int64_t cols) { return MxColumns{q + col, sf + col / kBlock, k, cols, {}}; });
}

void permute_mx_col_fold(const Call& call) {
  const char* op = "permute_mx_col_fold";
  const int64_t width = call.in[0].dim(1), k = call.out[0].dim(0);
  const auto map = checked_map(op, call.in[1], call.in[0].dim(0));
  const uint8_t* packed = call.in[0].as<uint8_t>();
  fold_columns(op, call.in[2], call.in[1].dim(0), k, call.out[0].as<uint8_t>(), call.out[1].as<uint8_t>(),
               scale_rule(call), [=](int64_t col, int64_t cols) {
                 return PackedColumns{packed + col, packed + k + col / kBlock, map.data(), width, cols, {}};
               });
}

}  // namespace mxep
