// Quantize along rows, with a scale per block or per row, along columns, or both. "Both" is cols, then rows, of a
// piece of x that cols, which prefetches, has brought into the cache.
#include "quantize/cpu.h"

#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace mxep {
namespace {

// One block of any length: read for its scale, and once more out of the cache.
template <typename T>
MXEP_INLINE uint8_t long_block_of(const T* x, uint8_t* qf, int64_t length, ScaleRule rule) {
  const uint8_t sf = scale_of(x, rule, length);
  const float inverse = inverse_scale(sf);
  for (int64_t i = 0; i < length; ++i) qf[i] = static_cast<uint8_t>(e4m3_from_f32(to_f32(x[i]) * inverse));
  if (sf == kE8m0Nan) std::memset(qf, kE4m3Nan, length);
  return sf;
}

template <typename T>
void quantize_rows(const T* x, uint8_t* q, uint8_t* sf, int64_t blocks, ScaleRule rule) {
  vectorized([=]() MXEP_ALWAYS_INLINE { rows_of(x, q, sf, blocks, rule); });
}

// Along the columns, and along the rows if `q` is given.
void by_columns(const Array& x_array, uint8_t* q, uint8_t* sf, uint8_t* q_t, uint8_t* sf_t, ScaleRule rule) {
  const int64_t m = x_array.dim(-2), k = x_array.dim(-1);
  by_pieces(x_array, [=]<typename T>(const T* x, int64_t matrix, int64_t row, int64_t col, Piece piece) {
    const int64_t top = matrix * m + row, left = matrix * k + col;
    piece.q_stride = m;
    piece.sf_stride = m / kBlock;
    quantize_cols(x + top * k + col, q_t + left * m + row, sf_t + (left * m + row) / kBlock, piece, rule);
    for (int64_t r = top; q && r < top + piece.rows; ++r)
      quantize_rows(x + r * k + col, q + r * k + col, sf + (r * k + col) / kBlock, piece.cols / kBlock, rule);
  });
}

}  // namespace

void quantize_row(const Call& call) {
  uint8_t *q = call.out[0].as<uint8_t>(), *sf = call.out[1].as<uint8_t>();
  const ScaleRule rule = rule_of(call);
  with_data(call.in[0], [&]<typename T>(const T* x) {
    parallel_ranges(call.out[1].leading(0), kBlock * sizeof(T), [=](int64_t begin, int64_t end) {
      quantize_rows(x + begin * kBlock, q + begin * kBlock, sf + begin, end - begin, rule);
    });
  });
}

void quantize_row_packed(const Call& call) {
  const int64_t m = call.in[0].dim(0), k = call.in[0].dim(1), width = call.out[0].dim(1);
  uint8_t* packed = call.out[0].as<uint8_t>();
  const ScaleRule rule = rule_of(call);
  with_data(call.in[0], [&]<typename T>(const T* x) {
    parallel_ranges(m, k * sizeof(T), [=](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        quantize_rows(x + row * k, packed + row * width, packed + row * width + k, k / kBlock, rule);
    });
  });
}

void quantize_rowwise(const Call& call) {
  const ScaleRule rule = rule_of(call);
  by_rows(call, [rule]<typename T>(const T* x, uint8_t* qf, int64_t k)
                    MXEP_ALWAYS_INLINE { return long_block_of(x, qf, k, rule); });
}

void quantize_col(const Call& call) {
  by_columns(call.in[0], nullptr, nullptr, call.out[0].as<uint8_t>(), call.out[1].as<uint8_t>(), rule_of(call));
}

void quantize_both(const Call& call) {
  by_columns(call.in[0], call.out[0].as<uint8_t>(), call.out[1].as<uint8_t>(), call.out[2].as<uint8_t>(),
             call.out[3].as<uint8_t>(), rule_of(call));
}

}  // namespace mxep
