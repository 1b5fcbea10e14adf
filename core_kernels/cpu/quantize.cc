#include <algorithm>
#include <cstring>

#include "mx_math.h"
#include "ops.h"
#include "parallel.h"

namespace mxep {
namespace {

struct Options {
  int64_t rounding;
  bool satfinite;
  explicit Options(const Call& call) : rounding(call.attrs[0]), satfinite(call.attrs[1] != 0) {}
};

// 32 values `stride` apart -> 32 contiguous bytes; returns the scale byte.
template <typename T>
uint8_t quantize_block(const T* x, int64_t stride, uint8_t* q, Options options) {
  uint32_t amax = 0;
  for (int i = 0; i < kBlock; ++i) amax = std::max(amax, abs_bits(to_f32(x[i * stride])));
  const uint8_t byte = e8m0_byte(amax, options.rounding, options.satfinite);
  if (byte == kE8m0Nan) {
    std::memset(q, kE4m3Nan, kBlock);
    return byte;
  }
  const float inverse = inverse_scale(byte);
  for (int i = 0; i < kBlock; ++i) q[i] = e4m3_from_f32(to_f32(x[i * stride]) * inverse);
  return byte;
}

template <typename T>
void rows(const T* x, uint8_t* q, int64_t q_stride, uint8_t* sf, int64_t sf_stride, int64_t m, int64_t k,
          Options options) {
  parallel_ranges(m, k * sizeof(T), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      for (int64_t block = 0; block < k / kBlock; ++block)
        sf[row * sf_stride + block] =
            quantize_block(x + row * k + block * kBlock, 1, q + row * q_stride + block * kBlock, options);
  });
}

template <typename T>
void cols(const T* x, uint8_t* q, uint8_t* sf, int64_t batch, int64_t m, int64_t k, Options options) {
  parallel_ranges(batch * k, m * sizeof(T), [=](int64_t begin, int64_t end) {
    for (int64_t col = begin; col < end; ++col)
      for (int64_t block = 0; block < m / kBlock; ++block)
        sf[col * (m / kBlock) + block] =
            quantize_block(x + (col / k * m + block * kBlock) * k + col % k, k, q + col * m + block * kBlock, options);
  });
}

void rows(const Array& x, uint8_t* q, int64_t q_stride, uint8_t* sf, int64_t sf_stride, Options options) {
  const int64_t m = x.leading(1), k = x.dim(-1);
  if (x.dtype == DType::bf16)
    rows(x.as<const bf16>(), q, q_stride, sf, sf_stride, m, k, options);
  else
    rows(x.as<const float>(), q, q_stride, sf, sf_stride, m, k, options);
}

void cols(const Array& x, uint8_t* q, uint8_t* sf, Options options) {
  const int64_t batch = x.leading(2), m = x.dim(-2), k = x.dim(-1);
  if (x.dtype == DType::bf16)
    cols(x.as<const bf16>(), q, sf, batch, m, k, options);
  else
    cols(x.as<const float>(), q, sf, batch, m, k, options);
}

}  // namespace

void quantize_row(const Call& call) {
  const int64_t k = call.in[0].dim(-1);
  rows(call.in[0], call.out[0].as<uint8_t>(), k, call.out[1].as<uint8_t>(), k / kBlock, Options(call));
}

void quantize_row_packed(const Call& call) {
  const int64_t k = call.in[0].dim(-1), width = call.out[0].dim(-1);
  uint8_t* packed = call.out[0].as<uint8_t>();
  rows(call.in[0], packed, width, packed + k, width, Options(call));
}

void quantize_col(const Call& call) {
  cols(call.in[0], call.out[0].as<uint8_t>(), call.out[1].as<uint8_t>(), Options(call));
}

void quantize_both(const Call& call) {
  quantize_row(call);
  cols(call.in[0], call.out[2].as<uint8_t>(), call.out[3].as<uint8_t>(), Options(call));
}

}  // namespace mxep
