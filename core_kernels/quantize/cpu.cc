// Quantizes along rows (a scale per block or per row), along columns, or along both. For both, a tile is quantized
// along its columns first, which prefetches it, and then along its rows out of the cache.
#include "quantize/cpu.h"

#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace mxep {
namespace {

// One block of any length. The second read hits the cache.
template <typename T>
MXEP_INLINE uint8_t quantize_long_block(const T* x, uint8_t* qf, int64_t length, ScaleRule rule) {
  const uint8_t sf = block_scale(x, rule, length);
  const float inverse = inverse_scale(sf);
  for (int64_t i = 0; i < length; ++i) qf[i] = static_cast<uint8_t>(e4m3_from_f32(to_f32(x[i]) * inverse));
  if (sf == kE8m0Nan) std::memset(qf, kE4m3Nan, length);
  return sf;
}

template <typename T>
void quantize_rows(const T* x, uint8_t* q, uint8_t* sf, int64_t blocks, ScaleRule rule) {
  vectorized([=]() MXEP_ALWAYS_INLINE { quantize_blocks(x, q, sf, blocks, rule); });
}

// Along the columns, and along the rows if `q` is not null.
void quantize_matrix(const Array& x_array, uint8_t* q, uint8_t* sf, uint8_t* q_t, uint8_t* sf_t, ScaleRule rule) {
  const int64_t m = x_array.dim(-2), k = x_array.dim(-1);
  for_each_cache_tile(
      x_array, [=]<typename T>(const T* x, int64_t matrix, int64_t row, int64_t col, CacheTile tile_shape) {
        const int64_t top = matrix * m + row, left = matrix * k + col;
        tile_shape.q_stride = m;
        tile_shape.sf_stride = m / kBlock;
        quantize_columns(x + top * k + col, q_t + left * m + row, sf_t + (left * m + row) / kBlock, tile_shape, rule);
        for (int64_t r = top; q && r < top + tile_shape.rows; ++r)
          quantize_rows(x + r * k + col, q + r * k + col, sf + (r * k + col) / kBlock, tile_shape.cols / kBlock, rule);
      });
}

}  // namespace

void quantize_row(const Call& call) {
  uint8_t *q = call.out[0].as<uint8_t>(), *sf = call.out[1].as<uint8_t>();
  const ScaleRule rule = scale_rule(call);
  with_data(call.in[0], [&]<typename T>(const T* x) {
    parallel_ranges(call.out[1].leading(0), kBlock * sizeof(T), [=](int64_t begin, int64_t end) {
      quantize_rows(x + begin * kBlock, q + begin * kBlock, sf + begin, end - begin, rule);
    });
  });
}

void quantize_row_packed(const Call& call) {
  const int64_t m = call.in[0].dim(0), k = call.in[0].dim(1), width = call.out[0].dim(1);
  uint8_t* packed = call.out[0].as<uint8_t>();
  const ScaleRule rule = scale_rule(call);
  with_data(call.in[0], [&]<typename T>(const T* x) {
    parallel_ranges(m, k * sizeof(T), [=](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        quantize_rows(x + row * k, packed + row * width, packed + row * width + k, k / kBlock, rule);
    });
  });
}

void quantize_rowwise(const Call& call) {
  const ScaleRule rule = scale_rule(call);
  for_each_row(call, [rule]<typename T>(const T* x, uint8_t* qf, int64_t k)
                         MXEP_ALWAYS_INLINE { return quantize_long_block(x, qf, k, rule); });
}

void quantize_col(const Call& call) {
  quantize_matrix(call.in[0], nullptr, nullptr, call.out[0].as<uint8_t>(), call.out[1].as<uint8_t>(), scale_rule(call));
}

void quantize_both(const Call& call) {
  quantize_matrix(call.in[0], call.out[0].as<uint8_t>(), call.out[1].as<uint8_t>(), call.out[2].as<uint8_t>(),
                  call.out[3].as<uint8_t>(), scale_rule(call));
}

}  // namespace mxep
