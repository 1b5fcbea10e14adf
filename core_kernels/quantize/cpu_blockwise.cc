// Blockwise FP8: one fp32 scale per 128 values of a row, or per square of 128 x 128 values.
#include <algorithm>

#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "quantize/cpu.h"

namespace mxep {
namespace {

// The scale of a block from the fp32 bits of its largest magnitude; NaN unless it is finite.
MXEP_INLINE float block_scale(uint32_t amax, bool power_of_two) {
  if (amax >= kInf) return std::bit_cast<float>(kNan);
  const float quotient = power_of_two ? scale(e8m0_from_amax(amax, {kRceil, false})) : std::bit_cast<float>(amax) / 448;
  return std::max(quotient, std::bit_cast<float>(kSmallestScale));
}

// A block of `rows` rows, `stride` values apart.
template <typename T>
MXEP_INLINE float quantize_block(const T* x, uint8_t* q, int64_t rows, int64_t cols, int64_t stride,
                                 bool power_of_two) {
  decltype(magnitude(T{})) largest = 0;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) largest = std::max(largest, magnitude(x[r * stride + c]));
  const uint32_t amax = f32_bits(largest);
  const float scale = block_scale(amax, power_of_two), inverse = 1 / scale;
  for (int64_t r = 0; r < rows; ++r) {
    uint8_t* out = q + r * stride;
    for (int64_t c = 0; c < cols; ++c)
      out[c] = static_cast<uint8_t>(e4m3_from_f32(to_f32(x[r * stride + c]) * inverse));
    if (amax >= kInf) std::memset(out, kE4m3Nan, cols);
  }
  return scale;
}

// Blocks of `height` rows of each matrix (m, k).
void quantize(const Call& call, int64_t matrices, int64_t m, int64_t height) {
  const int64_t k = call.in[0].dim(-1), across = (k + kSquare - 1) / kSquare, down = (m + height - 1) / height;
  const bool power_of_two = call.attrs[0] != 0;
  uint8_t* q = call.out[0].as<uint8_t>();
  float* sf = call.out[1].as<float>();
  with_data(call.in[0], [&]<typename T>(const T* x) {
    parallel_ranges(matrices * down, height * k * sizeof(T), [=](int64_t begin, int64_t end) {
      vectorized([=]() MXEP_ALWAYS_INLINE {
        for (int64_t strip = begin; strip < end; ++strip) {
          const int64_t row = strip % down * height, rows = std::min(height, m - row);
          for (int64_t col = 0; col < k; col += kSquare) {
            const int64_t at = (strip / down * m + row) * k + col, cols = std::min<int64_t>(kSquare, k - col);
            sf[strip * across + col / kSquare] = quantize_block(x + at, q + at, rows, cols, k, power_of_two);
          }
        }
      });
    });
  });
}

// x (matrices, m, k) -> out (matrices, k, m), by tiles whose rows and columns fit the cache.
template <typename T>
void transpose(const T* x, T* out, int64_t matrices, int64_t m, int64_t k) {
  constexpr int64_t kSide = 64;
  const int64_t down = (m + kSide - 1) / kSide;
  parallel_ranges(matrices * down, kSide * k * sizeof(T), [=](int64_t begin, int64_t end) {
    for (int64_t strip = begin; strip < end; ++strip) {
      const int64_t top = strip % down * kSide, bottom = std::min(m, top + kSide), matrix = strip / down * m * k;
      for (int64_t left = 0; left < k; left += kSide)
        for (int64_t c = left; c < std::min(k, left + kSide); ++c)
          for (int64_t r = top; r < bottom; ++r) out[matrix + c * m + r] = x[matrix + r * k + c];
    }
  });
}

}  // namespace

void quantize_blockwise(const Call& call) { quantize(call, 1, rows_with_ends(call, 1, call.in[0].leading(1)), 1); }

void quantize_squares(const Call& call) { quantize(call, call.in[0].leading(2), call.in[0].dim(-2), kSquare); }

void quantize_squares_both(const Call& call) {
  quantize_squares(call);
  const int64_t matrices = call.in[0].leading(2), n = call.in[0].dim(-2), k = call.in[0].dim(-1);
  transpose(call.out[0].as<uint8_t>(), call.out[2].as<uint8_t>(), matrices, n, k);
  transpose(call.out[1].as<float>(), call.out[3].as<float>(), matrices, call.out[1].dim(-2), call.out[1].dim(-1));
}

}  // namespace mxep
