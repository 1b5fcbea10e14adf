// Folded rows and the scales of the columns from one read of x; folded columns under the scales of their groups from
// another. core_kernels/col_fold.py draws both.
#include "fold.h"
#include "ops.h"
#include "parallel.h"
#include "quantize.h"

namespace mxep {
namespace {

constexpr int64_t kScaleCols = 256;

// The scales of 32 rows of k columns.
template <typename T>
MXEP_INLINE void col_scales_of(const T* x, uint8_t* sf, int64_t k, ScaleRule rule) {
  for (int64_t first = 0; first < k; first += kScaleCols) {
    const int64_t cols = std::min(kScaleCols, k - first);
    decltype(magnitude(T{})) largest[kScaleCols] = {};
    for (int r = 0; r < kBlock; ++r)
      for (int64_t c = 0; c < cols; ++c) largest[c] = std::max(largest[c], magnitude(x[r * k + first + c]));
    for (int64_t c = 0; c < cols; ++c) sf[first + c] = static_cast<uint8_t>(e8m0_from_amax(f32_bits(largest[c]), rule));
  }
}

// Blocks [first, end) of each column of a piece, which all belong to one group, under the scales of that.
MXEP_INLINE void fold_cols(uint8_t* q, const uint8_t* sf, const uint8_t* scale, Piece piece, int64_t first,
                           int64_t end) {
  for (int64_t c = 0; c < piece.cols; ++c) {
    uint8_t* at = q + c * piece.q_stride + first * kBlock;
    fold_blocks(at, sf + c * piece.sf_stride + first, scale[c], at, end - first);
  }
}

}  // namespace

void quantize_row_fold_col_scales(const Call& call) {
  const int64_t m = call.in[0].dim(0), k = call.in[0].dim(1);
  uint8_t *qf = call.out[0].as<uint8_t>(), *row_sf = call.out[1].as<uint8_t>(), *col_sf = call.out[2].as<uint8_t>();
  const ScaleRule rule = rule_of(call);
  with_data(call.in[0], [&]<typename T>(const T* x) {
    parallel_ranges(m / kBlock, kBlock * k * sizeof(T), [=](int64_t begin, int64_t end) {
      vectorized([=]() MXEP_ALWAYS_INLINE {
        for (int64_t b = begin; b < end; ++b) {
          for (int64_t r = b * kBlock; r < (b + 1) * kBlock; ++r)
            row_sf[r] = folded_row_of(x + r * k, qf + r * k, k / kBlock, rule);
          col_scales_of(x + b * kBlock * k, col_sf + b * k, k, rule);
        }
      });
    });
  });
}

void group_scales(const Call& call) {
  const int64_t blocks = call.in[0].dim(0), k = call.in[0].dim(1);
  const std::span<const int32_t> ends = block_ends("group_scales", call.in[1], blocks * kBlock);
  const uint8_t* col_sf = call.in[0].as<const uint8_t>();
  uint8_t* group_sf = call.out[0].as<uint8_t>();
  parallel_ranges(k, blocks, [=](int64_t begin, int64_t end) {
    vectorized([=]() MXEP_ALWAYS_INLINE {
      int64_t b = 0;
      for (size_t g = 0; g < ends.size(); ++g) {
        uint8_t* largest = group_sf + g * k;
        const bool empty = b == ends[g] / kBlock;
        std::fill(largest + begin, largest + end, uint8_t{0});
        // One more than the byte: a NaN block counts as 0 then, below all others.
        for (; b < ends[g] / kBlock; ++b)
          for (int64_t c = begin; c < end; ++c)
            largest[c] = std::max(largest[c], static_cast<uint8_t>(col_sf[b * k + c] + 1));
        for (int64_t c = begin; c < end; ++c) largest[c] = static_cast<uint8_t>(largest[c] - (empty ? 0 : 1));
      }
    });
  });
}

void quantize_col_fold(const Call& call) {
  const int64_t m = call.in[0].dim(0), k = call.in[0].dim(1);
  const uint8_t* group_sf = call.in[1].as<const uint8_t>();
  const std::span<const int32_t> ends = block_ends("quantize_col_fold", call.in[2], m);
  uint8_t* qf_t = call.out[0].as<uint8_t>();
  const ScaleRule rule = rule_of(call);
  by_pieces(call.in[0], [=]<typename T>(const T* x, int64_t, int64_t row, int64_t col, Piece piece) {
    constexpr int64_t kBlocks = kPieceRows / kBlock;
    uint8_t sf[kPieceRowBytes / sizeof(T) * kBlocks], *q = qf_t + col * m + row;
    piece.q_stride = m;
    piece.sf_stride = kBlocks;
    quantize_cols(x + row * k + col, q, sf, piece, rule);
    vectorized([&]() MXEP_ALWAYS_INLINE {
      int64_t first = 0;
      for (size_t g = 0; g < ends.size(); ++g) {
        const int64_t end = (std::clamp<int64_t>(ends[g], row, row + piece.rows) - row) / kBlock;
        if (first < end) fold_cols(q, sf, group_sf + g * k + col, piece, first, end);
        first = end;
      }
      for (int64_t c = 0; c < piece.cols; ++c) std::memset(q + c * m + first * kBlock, 0, piece.rows - first * kBlock);
    });
  });
}

}  // namespace mxep
