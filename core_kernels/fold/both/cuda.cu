// Both operands of an activation from one read, folded, or with blockwise rows; of MXFP8 rows, the token operand alone.
//
//   x (M, K), group_ends (G,) --> qf (M, K)    row_sf (M,)       one scale per row
//                                 qf_t (K, M)  span_sf (S, K)    one per column and span of 256 rows of a group: the
//                                                                running maximum
//   x (M, K), group_ends (G,) --> q (M, K), sf (M, K/128) blockwise, qf_t, span_sf
//   q (M, K), sf (M, K/32), group_ends (G,) --> qf_t, span_sf
//   packed (R, K + K/32), row_map (M,), group_ends (G,) --> qf_t, span_sf of the rows of the map
//
// A CTA keeps a tile of 256 rows, a span, by some columns in registers (register_tile.cuh, of MXFP8 rows code_tile.cuh)
// while it waits for two maxima: of the same columns in earlier spans, and of the same rows in the other tiles
// (look_back.cuh):
//
//   load --> scales of all blocks --> publish --poll earlier spans--> codes of columns --> qf_t
//                                       '---poll the row's tiles----> codes of rows --> qf     (blockwise: no poll)
#include "cuda/driver.h"
#include "cuda/ops.h"
#include "fold/both/blockwise_rows.cuh"
#include "fold/both/look_back.cuh"
#include "fold/both/tile_source.cuh"
#include "fold/folded_tile.cuh"
#include "quantize/register_tile.cuh"

namespace mxep::cuda {
namespace {

template <typename T, typename Source>
struct FoldShared : Source::template Shared<T> {
  StagedCodes<T::kRows, T::kCols, T::kColumns> codes;
  alignas(4) uint8_t magnitudes[T::kDown][T::kCols];
  alignas(4) uint8_t scales[T::kCols];
};

template <typename T, typename Source>
__global__ void __launch_bounds__(T::kThreads, Source::kThreads / T::kThreads)
    fold_tiles(const Source x, const __grid_constant__ BothFold p, ScaleRule rule) {
  extern __shared__ uint4 memory[];
  auto& s = *reinterpret_cast<FoldShared<T, Source>*>(memory);
  constexpr int kWordsAcross = T::kCols / 4;
  const uint32_t across = blockIdx.x % p.across, lane = threadIdx.x % 32;
  const int64_t slot = blockIdx.x / p.across, left = int64_t{across} * T::kCols, right = left + threadIdx.x * 4;
  const SpanTokens span = SpanTokens::of(p, slot);
  const bool has_columns = threadIdx.x < kWordsAcross && right < p.cols;  // this thread has four columns
  const bool empty = span.group == p.groups || span.begin >= span.end;    // or past the last end
  if (has_columns && empty) {
    *reinterpret_cast<uint32_t*>(p.span_sf + slot * p.cols + right) = p.unless_broken(span.group, 0);
    publish(p.running_maxima + (slot * p.cols + right) / 4, encode(0));
  }
  if (empty) return;

  const ThreadCoord<T> thread;
  const int64_t row = span.begin + thread.row, col = left + thread.col;
  const bool exists = row < span.end && col < p.cols;
  const auto later = x.later(row + p.ahead);
  auto tile = x.template tile<T>(row, col, exists, s);

  const uint32_t columns = column_bytes(tile, rule);
  uint32_t rows = 0;
  if constexpr (Source::kRows == Rows::kFolded) rows = row_bytes(tile, rule);
  x.template prefetch<T>(later, left);
  *reinterpret_cast<ColumnBytes<T>*>(&s.magnitudes[thread.row / kBlock][thread.col]) =
      static_cast<ColumnBytes<T>>(exists ? __vadd4(columns, kOnes) : 0);
  if constexpr (Source::kRows == Rows::kFolded) {
    uint32_t* row_peers = p.row_peers + row / kBlock * p.across * (kBlock / 4);
    const uint32_t largest = LaneRows<T>::by_fours(max_over_blocks<T>(exists ? __vadd4(rows, kOnes) : 0));
    if (row < span.end && lane < kBlock / 4) publish(row_peers + across * (kBlock / 4) + lane, encode(largest));
  }
  __syncthreads();

  if (has_columns) {
    uint32_t magnitudes = 0;
#pragma unroll
    for (int i = 0; i < T::kDown; ++i)
      magnitudes = __vmaxu4(magnitudes, reinterpret_cast<const uint32_t*>(s.magnitudes[i])[threadIdx.x]);
    const uint32_t scales = running_scales(x, p, rule, span, slot, right, magnitudes);
    reinterpret_cast<uint32_t*>(s.scales)[threadIdx.x] = scales;
    *reinterpret_cast<uint32_t*>(p.span_sf + slot * p.cols + right) = p.unless_broken(span.group, scales);
  }
  // While the first warp polls.
  if constexpr (Source::kRows == Rows::kBlockwise)
    if (row < span.end)
      quantize_rows_blockwise(tile, rule, x.power_of_two, p.qf + row * p.cols + col, static_cast<uint32_t>(p.cols),
                              x.sf + row * p.across + across, p.across, exists);
  __syncthreads();
  stage_columns(tile, columns, rule, s.codes, [&](int col) { return s.scales[col]; });
  __syncthreads();
  uint8_t* qf_t = p.qf_t + left * p.tokens + span.begin;
  if constexpr (Source::kRows != Rows::kNone)
    write_lines<T::kThreads>(s.codes.codes, s.codes.swizzled, reinterpret_cast<uint4*>(qf_t), p.tokens / 16,
                             p.cols - left, (span.end - span.begin) / 16);
  else
    write_columns<T>(s.codes, qf_t, p.tokens, p.cols - left, (span.end - span.begin) / 16);

  if constexpr (Source::kRows == Rows::kFolded) {
    if (row >= span.end) return;  // the same for a whole warp
    const uint32_t fours = row_magnitudes<T>(x.x, p, rule, row);
    if (across == 0 && lane < kBlock / 4) reinterpret_cast<uint32_t*>(p.row_sf + row)[lane] = __vsub4(fours, kOnes);
    fold_rows(tile, rows, LaneRows<T>::of_fours(fours), p.qf + row * p.cols + col, static_cast<uint32_t>(p.cols),
              exists);
  }
}

// out: codes and scales of rows where the source has them, qf_t, span_sf, scratch. attrs: rounding, satfinite, polls.
template <typename T, typename Source>
void launch(const char* op, const Source& x, const Array& ends, std::span<const Array> out,
            std::span<const int64_t> attrs, cudaStream_t stream) {
  BothFold p{};
  p.ends = ends.as<const int32_t>();
  p.groups = static_cast<int>(ends.dim(0));
  p.tokens = x.rows;
  p.cols = x.cols;
  p.slots = p.tokens / kSpan + p.groups;
  if (p.slots == 0) return;
  p.across = static_cast<uint32_t>(ceil_div(p.cols, T::kCols));
  // About 100 of the 264 CTAs of values that an H200 runs at a time. From 130 on, L2 evicts some lines before they are
  // read.
  p.ahead = ceil_div(100, p.across) * kSpan;
  p.polls = static_cast<int>(attrs[2]);
  if (Source::kRows != Rows::kNone) {
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
  constexpr int kBytes = sizeof(FoldShared<T, Source>);
  allow_shared_memory<kKernel>(op, stream, kBytes);
  launch_kernel(op, kKernel, grid_x(op, p.slots * p.across), T::kThreads, kBytes, stream, x, p,
                ScaleRule(attrs[0], attrs[1]));
}

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

void quantize_blockwise_fold(const Call& call, cudaStream_t stream) {
  const Array& of = call.in[0];
  const BlockwiseRows x{{of.as<const bf16>(), of.dim(0), of.dim(1)}, call.out[1].as<float>(), call.attrs[0] != 0};
  const int64_t attrs[] = {kRceil, false, call.attrs[1]};
  launch<FoldTile<Bf16x2>>("quantize_blockwise_fold", x, call.in[1], call.out, attrs, stream);
}

void requantize_col_fold(const Call& call, cudaStream_t stream) {
  const MxRows x{
      {}, call.in[0].as<const uint8_t>(), call.in[1].as<const uint8_t>(), call.in[0].dim(0), call.in[0].dim(1)};
  launch<FoldTile<Bf16x2>>("requantize_col_fold", x, call.in[2], call.out, call.attrs, stream);
}

void permute_mx_col_fold(const Call& call, cudaStream_t stream) {
  const Array& packed = call.in[0];
  const PackedRows x{{},
                     packed.as<const uint8_t>(),
                     call.in[1].as<const int32_t>(),
                     packed.dim(0),
                     call.in[1].dim(0),
                     call.out[0].dim(0)};
  launch<FoldTile<Bf16x2>>("permute_mx_col_fold", x, call.in[2], call.out, call.attrs, stream);
}

}  // namespace mxep::cuda
