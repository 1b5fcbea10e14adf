// Quantize along rows, along columns, or both.
//
//   rows   blocks are contiguous: the factors of 16 of them are spread out first, so that their values
//          are one long loop, which fills the widest vectors
//   cols   a tile of 32 x 32 values is copied out of x, whose rows lie far apart and often in one cache
//          set. Four rows of codes make one 32-bit word per column, which is most of the transpose.
//          256 rows go out together, so that a column receives whole cache lines.
//   both   cols, then rows, of a piece of x that cols, which prefetches, has brought into the cache
#include <algorithm>
#include <cstring>

#include "fold.h"
#include "mx_math.h"
#include "ops.h"
#include "parallel.h"

namespace mxep {
namespace {

constexpr int kTileCols = 32;
constexpr int64_t kPieceRows = 256, kPieceRowBytes = 1024;  // with its outputs well inside a core's cache

template <typename T>
MXEP_INLINE uint8_t scale_of(const T* block, ScaleRule rule) {
  decltype(magnitude(T{})) largest = 0;
  for (int i = 0; i < kBlock; ++i) largest = std::max(largest, magnitude(block[i]));
  return static_cast<uint8_t>(e8m0_from_amax(f32_bits(largest), rule));
}

// `blocks` blocks of 32 contiguous values.
template <typename T>
MXEP_INLINE void rows_of(const T* x, uint8_t* q, uint8_t* sf, int64_t blocks, ScaleRule rule) {
  constexpr int kGroup = 16;
  alignas(64) float inverse[kGroup * kBlock];
  for (int64_t first = 0; first < blocks; first += kGroup) {
    const int count = static_cast<int>(std::min<int64_t>(kGroup, blocks - first));
    const T* in = x + first * kBlock;
    uint8_t* out = q + first * kBlock;
    for (int b = 0; b < count; ++b) {
      sf[first + b] = scale_of(in + b * kBlock, rule);
      std::fill_n(inverse + b * kBlock, kBlock, inverse_scale(sf[first + b]));
    }
    for (int i = 0; i < count * kBlock; ++i) out[i] = static_cast<uint8_t>(e4m3_from_f32(to_f32(in[i]) * inverse[i]));
    for (int b = 0; b < count; ++b)
      if (sf[first + b] == kE8m0Nan) std::memset(out + b * kBlock, kE4m3Nan, kBlock);
  }
}

// The row's scale first, while its values enter the cache; then 16 blocks at a time are quantized and folded.
template <typename T>
MXEP_INLINE uint8_t folded_row_of(const T* x, uint8_t* qf, int64_t blocks, ScaleRule rule) {
  constexpr int kGroup = 16;
  uint8_t sf[kGroup];
  int row = -1;
  for (int64_t b = 0; b < blocks; ++b) row = larger_scale(row, scale_of(x + b * kBlock, rule));
  for (int64_t first = 0; first < blocks; first += kGroup) {
    const int64_t count = std::min<int64_t>(kGroup, blocks - first);
    rows_of(x + first * kBlock, qf + first * kBlock, sf, count, rule);
    fold_blocks(qf + first * kBlock, sf, row, qf + first * kBlock, count);
  }
  return row_scale_byte(row);
}

// A piece of one matrix: at most kPieceRows rows, and the strides of x, q_t and sf_t around it.
struct Piece {
  int64_t rows, cols, x_stride, q_stride, sf_stride;
};

template <typename T>
MXEP_INLINE void cols_of(const T* x, uint8_t* q, uint8_t* sf, Piece piece, ScaleRule rule) {
  alignas(64) uint8_t out[kTileCols][kPieceRows];
  alignas(64) T tile[kBlock][kTileCols] = {};
  uint8_t bytes[kPieceRows / kBlock][kTileCols];
  for (int64_t col = 0; col < piece.cols; col += kTileCols) {
    const int width = static_cast<int>(std::min<int64_t>(kTileCols, piece.cols - col));
    for (int64_t row = 0; row < piece.rows; row += kBlock) {
      decltype(magnitude(T{})) largest[kTileCols] = {};
      for (int r = 0; r < kBlock; ++r) {
        const T* from = x + (row + r) * piece.x_stride + col;
        std::memcpy(tile[r], from, width == kTileCols ? sizeof tile[r] : width * sizeof(T));
        __builtin_prefetch(from + kTileCols);
        for (int c = 0; c < kTileCols; ++c) largest[c] = std::max(largest[c], magnitude(tile[r][c]));
      }
      uint8_t* byte = bytes[row / kBlock];
      float inverse[kTileCols];
      for (int c = 0; c < kTileCols; ++c) {
        const uint32_t e = e8m0_from_amax(f32_bits(largest[c]), rule);
        byte[c] = static_cast<uint8_t>(e);
        inverse[c] = inverse_scale(e);
      }
      for (int r = 0; r < kBlock; r += 4) {
        uint32_t word[kTileCols];
        for (int c = 0; c < kTileCols; ++c) {
          const uint32_t c0 = e4m3_from_f32(to_f32(tile[r][c]) * inverse[c]);
          const uint32_t c1 = e4m3_from_f32(to_f32(tile[r + 1][c]) * inverse[c]);
          const uint32_t c2 = e4m3_from_f32(to_f32(tile[r + 2][c]) * inverse[c]);
          const uint32_t c3 = e4m3_from_f32(to_f32(tile[r + 3][c]) * inverse[c]);
          word[c] = little_endian(c0 | c1 << 8 | c2 << 16 | c3 << 24);
        }
        for (int c = 0; c < kTileCols; ++c) std::memcpy(out[c] + row + r, &word[c], 4);
      }
      for (int c = 0; c < kTileCols; ++c)
        if (byte[c] == kE8m0Nan) std::memset(out[c] + row, kE4m3Nan, kBlock);
    }
    for (int c = 0; c < width; ++c) {
      std::memcpy(q + (col + c) * piece.q_stride, out[c], piece.rows);
      for (int64_t b = 0; b < piece.rows / kBlock; ++b) sf[(col + c) * piece.sf_stride + b] = bytes[b][c];
    }
  }
}

template <typename T>
void quantize_rows(const T* x, uint8_t* q, uint8_t* sf, int64_t blocks, ScaleRule rule) {
  vectorized([=]() MXEP_ALWAYS_INLINE { rows_of(x, q, sf, blocks, rule); });
}

template <typename T>
void quantize_cols(const T* x, uint8_t* q, uint8_t* sf, Piece piece, ScaleRule rule) {
  vectorized([=]() MXEP_ALWAYS_INLINE { cols_of(x, q, sf, piece, rule); });
}

ScaleRule rule_of(const Call& call) { return {call.attrs[0], call.attrs[1] != 0}; }

template <typename Body>
void with_data(const Array& x, const Body& body) {
  if (x.dtype == DType::bf16)
    body(x.as<const bf16>());
  else
    body(x.as<const float>());
}

// Cuts every matrix of x into pieces and quantizes each along the columns, and along the rows if `q` is given.
void by_pieces(const Array& x_array, uint8_t* q, uint8_t* sf, uint8_t* q_t, uint8_t* sf_t, ScaleRule rule) {
  const int64_t batch = x_array.leading(2), m = x_array.dim(-2), k = x_array.dim(-1);
  with_data(x_array, [&]<typename T>(const T* x) {
    constexpr int64_t kPieceCols = kPieceRowBytes / sizeof(T);
    const int64_t down = (m + kPieceRows - 1) / kPieceRows, across = (k + kPieceCols - 1) / kPieceCols;
    parallel_ranges(batch * down * across, kPieceRows * kPieceRowBytes, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t matrix = i / (down * across), row = i / across % down * kPieceRows, col = i % across * kPieceCols;
        const Piece piece{std::min(kPieceRows, m - row), std::min(kPieceCols, k - col), k, m, m / kBlock};
        const int64_t top = matrix * m + row, left = matrix * k + col;
        quantize_cols(x + top * k + col, q_t + left * m + row, sf_t + (left * m + row) / kBlock, piece, rule);
        for (int64_t r = top; q && r < top + piece.rows; ++r)
          quantize_rows(x + r * k + col, q + r * k + col, sf + (r * k + col) / kBlock, piece.cols / kBlock, rule);
      }
    });
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

void quantize_row_fold(const Call& call) {
  const int64_t k = call.in[0].dim(-1);
  uint8_t *qf = call.out[0].as<uint8_t>(), *row_sf = call.out[1].as<uint8_t>();
  const ScaleRule rule = rule_of(call);
  with_data(call.in[0], [&]<typename T>(const T* x) {
    parallel_ranges(call.out[1].leading(0), k * sizeof(T), [=](int64_t begin, int64_t end) {
      vectorized([=]() MXEP_ALWAYS_INLINE {
        for (int64_t m = begin; m < end; ++m) row_sf[m] = folded_row_of(x + m * k, qf + m * k, k / kBlock, rule);
      });
    });
  });
}

void quantize_col(const Call& call) {
  by_pieces(call.in[0], nullptr, nullptr, call.out[0].as<uint8_t>(), call.out[1].as<uint8_t>(), rule_of(call));
}

void quantize_both(const Call& call) {
  by_pieces(call.in[0], call.out[0].as<uint8_t>(), call.out[1].as<uint8_t>(), call.out[2].as<uint8_t>(),
            call.out[3].as<uint8_t>(), rule_of(call));
}

}  // namespace mxep
