// Quantization of blocks of a row and of a cache tile of a matrix: the parts of every quantizing op.
//
//   rows      blocks are contiguous. The factors of 16 blocks are expanded to one per value first, so that one long
//             loop runs over the values with the widest vectors.
//   columns   a tile of 32 x 32 values is copied out of x, whose rows are far apart and often in one cache set. Four
//             rows of codes make one 32-bit word per column, which is most of the transpose. 256 rows are written
//             together, so that a column receives whole cache lines.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu/mx_math.h"
#include "cpu/parallel.h"
#include "op.h"

namespace mxep {

inline constexpr int kTileCols = 32;
// A tile and its outputs fit a core's cache.
inline constexpr int64_t kCacheTileRows = 256, kCacheTileRowBytes = 1024;

template <typename T>
MXEP_INLINE uint8_t block_scale(const T* block, ScaleRule rule, int64_t length = kBlock) {
  decltype(magnitude(T{})) largest = 0;
  for (int64_t i = 0; i < length; ++i) largest = std::max(largest, magnitude(block[i]));
  return static_cast<uint8_t>(e8m0_from_amax(f32_bits(largest), rule));
}

// Quantizes `blocks` blocks of 32 contiguous values.
template <typename T>
MXEP_INLINE void quantize_blocks(const T* x, uint8_t* q, uint8_t* sf, int64_t blocks, ScaleRule rule) {
  constexpr int kGroup = 16;
  alignas(64) float inverse[kGroup * kBlock];
  for (int64_t first = 0; first < blocks; first += kGroup) {
    const int count = static_cast<int>(std::min<int64_t>(kGroup, blocks - first));
    const T* in = x + first * kBlock;
    uint8_t* out = q + first * kBlock;
    for (int b = 0; b < count; ++b) {
      sf[first + b] = block_scale(in + b * kBlock, rule);
      std::fill_n(inverse + b * kBlock, kBlock, inverse_scale(sf[first + b]));
    }
    for (int i = 0; i < count * kBlock; ++i) out[i] = static_cast<uint8_t>(e4m3_from_f32(to_f32(in[i]) * inverse[i]));
    for (int b = 0; b < count; ++b)
      if (sf[first + b] == kE8m0Nan) std::memset(out + b * kBlock, kE4m3Nan, kBlock);
  }
}

// The values of `blocks` blocks. The factors of 16 blocks are expanded to one per value first, so that one long loop
// runs over the values.
template <typename T>
MXEP_INLINE void dequantize_blocks(const uint8_t* q, const uint8_t* sf, T* out, int64_t blocks) {
  constexpr int kGroup = 16;
  const float nan = std::bit_cast<float>(0x7FC00000u);
  alignas(64) float factor[kGroup * kBlock];
  for (int64_t first = 0; first < blocks; first += kGroup, q += kGroup * kBlock, out += kGroup * kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kGroup, blocks - first));
    for (int b = 0; b < count; ++b)
      std::fill_n(factor + b * kBlock, kBlock, sf[first + b] == kE8m0Nan ? nan : scale(sf[first + b]));
    for (int i = 0; i < count * kBlock; ++i) {
      const uint32_t magnitude = q[i] & 0x7Fu;
      store(out + i, (magnitude == kE4m3Nan ? nan : f32_from_e4m3(q[i])) * factor[i]);
    }
  }
}

// A tile of one matrix, of at most kCacheTileRows rows, and the strides of x, q_t and sf_t.
struct CacheTile {
  int64_t rows, cols, x_stride, q_stride, sf_stride;
};

template <typename T>
MXEP_INLINE void transpose_quantize(const T* x, uint8_t* q, uint8_t* sf, CacheTile tile_shape, ScaleRule rule) {
  alignas(64) uint8_t out[kTileCols][kCacheTileRows];
  alignas(64) T tile[kBlock][kTileCols] = {};
  uint8_t bytes[kCacheTileRows / kBlock][kTileCols];
  for (int64_t col = 0; col < tile_shape.cols; col += kTileCols) {
    const int width = static_cast<int>(std::min<int64_t>(kTileCols, tile_shape.cols - col));
    for (int64_t row = 0; row < tile_shape.rows; row += kBlock) {
      decltype(magnitude(T{})) largest[kTileCols] = {};
      for (int r = 0; r < kBlock; ++r) {
        const T* from = x + (row + r) * tile_shape.x_stride + col;
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
      std::memcpy(q + (col + c) * tile_shape.q_stride, out[c], tile_shape.rows);
      for (int64_t b = 0; b < tile_shape.rows / kBlock; ++b) sf[(col + c) * tile_shape.sf_stride + b] = bytes[b][c];
    }
  }
}

template <typename T>
void quantize_columns(const T* x, uint8_t* q, uint8_t* sf, CacheTile tile_shape, ScaleRule rule) {
  vectorized([=]() MXEP_ALWAYS_INLINE { transpose_quantize(x, q, sf, tile_shape, rule); });
}

// row(x, qf, k) quantizes one row of k values and returns its scale.
template <typename Row>
void for_each_row(const Call& call, const Row& row) {
  const int64_t k = call.in[0].dim(-1);
  uint8_t *qf = call.out[0].as<uint8_t>(), *row_sf = call.out[1].as<uint8_t>();
  with_data(call.in[0], [&]<typename T>(const T* x) {
    parallel_ranges(rows_with_ends(call, 1, call.out[1].leading(0)), k * sizeof(T), [=](int64_t begin, int64_t end) {
      vectorized([=]() MXEP_ALWAYS_INLINE {
        for (int64_t m = begin; m < end; ++m) row_sf[m] = row(x + m * k, qf + m * k, k);
      });
    });
  });
}

// Splits every matrix of x into tiles and calls body(x, matrix, row, col, shape) on each, in parallel. body sets the
// output strides of the shape.
template <typename Body>
void for_each_cache_tile(const Array& x_array, const Body& body) {
  const int64_t batch = x_array.leading(2), m = x_array.dim(-2), k = x_array.dim(-1);
  with_data(x_array, [&]<typename T>(const T* x) {
    constexpr int64_t kCacheTileCols = kCacheTileRowBytes / sizeof(T);
    const int64_t down = (m + kCacheTileRows - 1) / kCacheTileRows, across = (k + kCacheTileCols - 1) / kCacheTileCols;
    parallel_ranges(batch * down * across, kCacheTileRows * kCacheTileRowBytes, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / across % down * kCacheTileRows, col = i % across * kCacheTileCols;
        body(x, i / (down * across), row, col,
             CacheTile{std::min(kCacheTileRows, m - row), std::min(kCacheTileCols, k - col), k, 0, 0});
      }
    });
  });
}

// The scale rule from the attrs of a quantizing op.
inline ScaleRule scale_rule(const Call& call) { return {call.attrs[0], call.attrs[1] != 0}; }

}  // namespace mxep
