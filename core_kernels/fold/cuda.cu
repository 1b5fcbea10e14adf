// Both folded operands of an activation from one read; of MXFP8 rows, the token operand alone.
//
//   x (M, K), group_ends (G,) --> qf (M, K)    row_sf (M,)       one scale per row
//                                 qf_t (K, M)  span_sf (S, K)    one per column and span of 256 rows of a group: the
//                                                                running maximum
//   q (M, K), sf (M, K/32), group_ends (G,) --> qf_t, span_sf
//
// A CTA keeps a tile of 256 rows, a span, by some columns in registers (register_tile.cuh) while it waits for two
// maxima: of the same columns in earlier spans, and of the same rows in the other tiles (look_back.cuh):
//
//   load --> scales of all blocks --> publish --poll earlier spans--> codes of columns --> qf_t
//                                       '---poll the row's tiles----> codes of rows --> qf
#include "cuda/driver.h"
#include "cuda/ops.h"
#include "fold/look_back.cuh"
#include "fold/tile_source.cuh"
#include "quantize/register_tile.cuh"

namespace mxep::cuda {
namespace {

template <typename T>
struct FoldShared {
  StagedCodes<T::kRows, T::kCols, T::kColumns> codes;
  alignas(4) uint8_t magnitudes[T::kDown][T::kCols];
  alignas(4) uint8_t scales[T::kCols];
};

template <typename T>
using ColumnBytes = std::conditional_t<T::kColumns == 4, uint32_t, uint16_t>;

// A lane's rows after `row_maxima`: kCount rows from lane % kBlockLanes * kCount on, one byte of a word per row.
template <typename T>
struct LaneRows {
  static constexpr int kWords = T::kWords / T::kBlockLanes, kStride = T::Pair::kRowsPerWord, kCount = kWords * kStride;
  static_assert(kCount == 4 || kCount == 2);

  // Conversions for the 32 rows of a warp: from a lane's own rows to the word of rows lane % 8 * 4 to lane % 8 * 4 + 3,
  // and back.
  static __device__ uint32_t by_fours(uint32_t own) {
    if constexpr (kCount == 4) return own;
    const int lane = threadIdx.x % 8 * 2;
    return __shfl_sync(~0u, own, lane) & 0xFFFF | __shfl_sync(~0u, own, lane + 1) << 16;
  }
  static __device__ uint32_t of_fours(uint32_t word) {
    if constexpr (kCount == 4) return word;
    return __shfl_sync(~0u, word, threadIdx.x % 16 / 2) >> threadIdx.x % 2 * 16;
  }
};

// Scale bytes of the blocks of a lane's columns.
template <typename T>
__device__ uint32_t column_bytes(const T& tile, ScaleRule rule) {
  uint32_t bytes = 0;
  for_column_pairs(tile, [&](const typename T::Pair* values, int, int col) {
    const auto two = TwoScales::of(values, rule);
    bytes |= (two.low | two.high << 8) << col % T::kColumns * 8;
  });
  return bytes;
}

// Scale bytes of the blocks of a lane's rows.
template <typename T>
__device__ uint32_t row_bytes(const T& tile, ScaleRule rule) {
  uint32_t words[T::kWords], bytes = 0;
  row_maxima(tile, words);
#pragma unroll
  for (int i = 0; i < LaneRows<T>::kCount; ++i) {
    constexpr int kStride = LaneRows<T>::kStride;
    bytes |= e8m0_from_amax(T::Pair::word_bits(words[i / kStride], i % kStride), rule) << i * 8;
  }
  return bytes;
}

// Writes the codes of a tile's rows. `bytes`: the blocks' scales, `magnitudes`: the rows' scales + 1, both of the
// lane's rows.
template <typename T>
__device__ void fold_rows(const T& tile, uint32_t bytes, uint32_t magnitudes, uint8_t* qf, uint32_t pitch,
                          bool exists) {
  using Pair = typename T::Pair;
  using Lane = LaneRows<T>;
  constexpr int kStride = Lane::kStride;
  uint32_t factors[Lane::kWords], powers[Lane::kWords];
#pragma unroll
  for (int w = 0; w < Lane::kWords; ++w) {
    uint32_t factor[kStride], power[kStride];
#pragma unroll
    for (int i = 0; i < kStride; ++i) {
      const int shift = (w * kStride + i) * 8;
      const uint32_t byte = bytes >> shift & 0xFF, scale = (magnitudes >> shift & 0xFF) - 1;
      factor[i] = inverse_scale(byte);
      power[i] = f16x2_power(max(static_cast<int>(byte - scale), -32));
    }
    factors[w] = Pair::pack_word(factor);
    powers[w] = kStride == 2 ? __byte_perm(power[0], power[kStride - 1], 0x5410) : power[0];
  }
#pragma unroll
  for (int w = 0; w < T::kWords; ++w) {
    const uint32_t factor = __shfl_sync(~0u, factors[w % Lane::kWords], w / Lane::kWords, T::kBlockLanes);
    const uint32_t power = __shfl_sync(~0u, powers[w % Lane::kWords], w / Lane::kWords, T::kBlockLanes);
#pragma unroll
    for (int i = 0; i < kStride; ++i) {
      const int r = w * kStride + i;
      const auto& row = tile.rows[r];
      const Pair by = Pair::of_row(factor, i), x = row.at[0] * by, y = row.at[T::kPairs - 1] * by;
      const uint32_t codes =
          folded(e4m3x4(x.low(), x.high(), y.low(), y.high()), __byte_perm(power, 0, i ? 0x3232 : 0x1010));
      if (exists) *reinterpret_cast<ColumnBytes<T>*>(at_row(qf, pitch, r)) = static_cast<ColumnBytes<T>>(codes);
    }
  }
}

template <typename T, typename Source>
__global__ void __launch_bounds__(T::kThreads, 512 / T::kThreads)
    fold_tiles(const Source x, const __grid_constant__ BothFold p, ScaleRule rule) {
  extern __shared__ uint4 memory[];
  auto& s = *reinterpret_cast<FoldShared<T>*>(memory);
  constexpr int kWordsAcross = T::kCols / 4;
  const uint32_t across = blockIdx.x % p.across, lane = threadIdx.x % 32;
  const int64_t slot = blockIdx.x / p.across, left = int64_t{across} * T::kCols, right = left + threadIdx.x * 4;
  const SpanRows span = SpanRows::of(p, slot);
  const bool has_columns =
      threadIdx.x < kWordsAcross && right < p.cols && slot < p.slots;  // this thread has four columns
  if (has_columns && (span.group == p.groups || span.begin >= span.end)) {
    *reinterpret_cast<uint32_t*>(p.span_sf + slot * p.cols + right) = p.unless_broken(span.group, 0);
    publish(p.running_maxima + (slot * p.cols + right) / 4, encode(0));
  }
  if (span.begin >= span.end) return;

  const ThreadCoord<T> thread;
  const int64_t row = span.begin + thread.row, col = left + thread.col;
  const bool exists = row < span.end && col < p.cols;
  const T tile = x.template tile<T>(row, col, exists);

  const uint32_t columns = column_bytes(tile, rule);
  uint32_t rows = 0;
  if constexpr (Source::kRowsToo) rows = row_bytes(tile, rule);
  x.template prefetch<T>(row + p.ahead, left);
  *reinterpret_cast<ColumnBytes<T>*>(&s.magnitudes[thread.row / kBlock][thread.col]) =
      static_cast<ColumnBytes<T>>(exists ? __vadd4(columns, kOnes) : 0);
  if constexpr (Source::kRowsToo) {
    uint32_t* row_peers = p.row_peers + row / kBlock * p.across * (kBlock / 4);
    uint32_t largest = exists ? __vadd4(rows, kOnes) : 0;
#pragma unroll
    for (int step = T::kBlockLanes; step < 32; step *= 2)
      largest = __vmaxu4(largest, __shfl_xor_sync(~0u, largest, step));
    largest = LaneRows<T>::by_fours(largest);
    if (row < span.end && lane < kBlock / 4) publish(row_peers + across * (kBlock / 4) + lane, encode(largest));
  }
  __syncthreads();

  if (span.group < p.groups) {
    if (has_columns) {
      uint32_t magnitudes = 0;
#pragma unroll
      for (int i = 0; i < T::kDown; ++i)
        magnitudes = __vmaxu4(magnitudes, reinterpret_cast<const uint32_t*>(s.magnitudes[i])[threadIdx.x]);
      const uint32_t scales = running_scales(x, p, rule, span, slot, right, magnitudes);
      reinterpret_cast<uint32_t*>(s.scales)[threadIdx.x] = scales;
      *reinterpret_cast<uint32_t*>(p.span_sf + slot * p.cols + right) = p.unless_broken(span.group, scales);
    }
    __syncthreads();
    for_column_pairs(tile, [&](const typename T::Pair* values, int block, int col) {
      const uint32_t low = columns >> col % T::kColumns * 8 & 0xFF,
                     high = columns >> (col % T::kColumns * 8 + 8) & 0xFF;
      // 448 * 2^-32 rounds to zero, and so does everything smaller.
      const uint32_t powers[] = {f16x2_power(max(static_cast<int>(low - s.scales[col]), -32)),
                                 f16x2_power(max(static_cast<int>(high - s.scales[col + 1]), -32))};
      s.codes.put(values, TwoScales{low, high}.template factor<typename T::Pair>(), block, col,
                  [&](uint4 codes, int i) { return folded(codes, powers[i]); });
    });
  } else {
    s.codes.clear(thread.row / kBlock, thread.col);
  }
  __syncthreads();
  write_lines<T::kThreads>(s.codes.codes, s.codes.swizzled,
                           reinterpret_cast<uint4*>(p.qf_t + left * p.rows + span.begin), p.rows / 16, p.cols - left,
                           (span.end - span.begin) / 16);

  if constexpr (Source::kRowsToo) {
    if (row >= span.end) return;  // the same for a whole warp
    const uint32_t fours = row_magnitudes<T>(x.x, p, rule, row);
    if (across == 0 && lane < kBlock / 4) reinterpret_cast<uint32_t*>(p.row_sf + row)[lane] = __vsub4(fours, kOnes);
    fold_rows(tile, rows, LaneRows<T>::of_fours(fours), p.qf + row * p.cols + col, static_cast<uint32_t>(p.cols),
              exists);
  }
}

// out: qf and row_sf where the source has them, qf_t, span_sf, scratch. attrs: rounding, satfinite, polls.
template <typename T, typename Source>
void launch(const char* op, const Source& x, const Array& ends, std::span<const Array> out,
            std::span<const int64_t> attrs, cudaStream_t stream) {
  BothFold p{};
  p.ends = ends.as<const int32_t>();
  p.groups = static_cast<int>(ends.dim(0));
  p.rows = x.rows;
  p.cols = x.cols;
  p.slots = p.rows / kSpan + p.groups;
  p.across = static_cast<uint32_t>(ceil_div(p.cols, T::kCols));
  // About 100 of the 264 CTAs that an H200 runs at a time. From 130 on, L2 evicts some lines before they are read.
  p.ahead = ceil_div(100, p.across) * kSpan;
  p.polls = static_cast<int>(attrs[2]);
  if (Source::kRowsToo) {
    p.qf = out[0].as<uint8_t>();
    p.row_sf = out[1].as<uint8_t>();
    out = out.subspan(2);
  }
  p.qf_t = out[0].as<uint8_t>();
  p.span_sf = out[1].as<uint8_t>();
  p.span_maxima = out[2].as<uint32_t>();
  p.running_maxima = p.span_maxima + p.slots * p.cols / 4;
  p.row_peers = p.running_maxima + p.slots * p.cols / 4;
  check(op, cudaMemsetAsync(p.span_maxima, 0, out[2].nbytes(), stream));
  constexpr auto kKernel = fold_tiles<T, Source>;
  constexpr int kBytes = sizeof(FoldShared<T>);
  allow_shared_memory<kKernel>(op, stream, kBytes);
  // One slot more than `slots`: a span may begin where the rows past the last end begin.
  launch_kernel(op, kKernel, grid_x(op, (p.slots + 1) * p.across), T::kThreads, kBytes, stream, x, p,
                ScaleRule(attrs[0], attrs[1]));
}

template <typename P>
using FoldTile = RegisterTile<P, 16 / sizeof(P), kSpan / kBlock, 1>;

template <typename Value>
void launch_floats(const char* op, const Call& call, cudaStream_t stream) {
  const Floats<Value> x{call.in[0].as<const Value>(), call.in[0].dim(0), call.in[0].dim(1)};
  launch<FoldTile<typename Floats<Value>::Pair>>(op, x, call.in[1], call.out, call.attrs, stream);
}

}  // namespace

void quantize_both_fold(const Call& call, cudaStream_t stream) {
  const char* op = "quantize_both_fold";
  call.in[0].dtype == DType::bf16 ? launch_floats<bf16>(op, call, stream) : launch_floats<float>(op, call, stream);
}

void requantize_col_fold(const Call& call, cudaStream_t stream) {
  const MxRows x{call.in[0].as<const uint8_t>(), call.in[1].as<const uint8_t>(), call.in[0].dim(0), call.in[0].dim(1)};
  launch<FoldTile<Bf16x2>>("requantize_col_fold", x, call.in[2], call.out, call.attrs, stream);
}

}  // namespace mxep::cuda
