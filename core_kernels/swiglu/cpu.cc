// SwiGLU and its gradient, quantized while the results are in the cache.
//
//   gate, up, dh --512 values of a row--> bf16 results --quantize_blocks--> q, sf
//                                              '--128 such rows--transpose_quantize--> q_t, sf_t
//
// oracle.py is the definition: every operation rounds, except for the explicit fma. A row without a probability has
// probability 1, which changes no bit.
#include "quantize/cpu.h"

#include <array>
#include <cmath>
#include <memory>

#include "cpu/mx_math.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "swiglu/activation.h"

namespace mxep {
namespace {

constexpr int64_t kChunk = 512, kStripRows = 128;
constexpr int64_t kStride = kChunk + kBlock;  // two rows of the scratch memory do not share a cache set
constexpr int64_t kScratch = kStripRows * kStride;
constexpr int kLanes = 16;  // partial sums of dprob

// The values that h and the gradients share. free_gate, free_up: within the limit; a NaN is.
struct Gated {
  float sig, silu, up;
  bool free_gate, free_up;
};

MXEP_INLINE Gated gated(float g, float u, PlainSwiGLU) {
  const float sig = sigmoid(g);
  return {sig, g * sig, u, true, true};
}

MXEP_INLINE Gated gated(float g, float u, const SwiGLU& by) {
  const bool above = g > by.limit, up_above = u > by.limit, up_below = u < -by.limit;
  g = above ? by.limit : g;
  u = up_above ? by.limit : up_below ? -by.limit : u;
  const float sig = sigmoid(g * by.alpha);
  return {sig, g * sig, u + by.offset, !above, !(up_above | up_below)};
}

template <typename By>
MXEP_INLINE void forward_values(const bf16* gate, const bf16* up, float prob, int64_t n, bf16* h, const By& by) {
  for (int64_t i = 0; i < n; ++i) {
    const Gated of = gated(to_f32(gate[i]), to_f32(up[i]), by);
    h[i] = bf16_from_f32((of.silu * of.up) * prob);
  }
}

// Returns the contribution of these n <= kChunk values to dprob.
template <typename By>
MXEP_INLINE float backward_values(const bf16* dh, const bf16* gate, const bf16* up, float prob, int64_t n, bf16* dgate,
                                  bf16* dup, const By& by) {
  alignas(64) float term[kChunk];
  for (int64_t i = 0; i < n; ++i) {
    const Gated of = gated(to_f32(gate[i]), to_f32(up[i]), by);
    const float dy = to_f32(dh[i]), d = dy * prob;
    term[i] = dy * (of.silu * of.up);
    const float of_gate = (d * of.up) * (of.sig + (of.silu * by.alpha) * (1.0f - of.sig)), of_up = d * of.silu;
    dgate[i] = bf16_from_f32(of.free_gate ? of_gate : 0.0f);
    dup[i] = bf16_from_f32(of.free_up ? of_up : 0.0f);
  }
  const int64_t whole = (n + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = n; i < whole; ++i) term[i] = 0;
  float lane[kLanes] = {};
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int j = 0; j < kLanes; ++j) lane[j] += term[i + j];
  float sum = 0;
  for (int j = 0; j < kLanes; ++j) sum += lane[j];
  return sum;
}

// The destination of an (M, F) result: x in bf16, or codes and scales along rows, columns or both.
struct Result {
  bf16* x = nullptr;
  uint8_t *q = nullptr, *sf = nullptr, *q_t = nullptr, *sf_t = nullptr;
};

enum Along { kNone, kRows, kCols, kBoth };

Result result_arrays(std::span<const Array> out, Along along) {
  if (along == kNone) return {out[0].as<bf16>()};
  const auto bytes = [&](int i) { return out[i].as<uint8_t>(); };
  if (along == kRows) return {nullptr, bytes(0), bytes(1)};
  if (along == kCols) return {nullptr, nullptr, nullptr, bytes(0), bytes(1)};
  return {nullptr, bytes(0), bytes(1), bytes(2), bytes(3)};
}

// Computes rows [top, top + rows) of N results. compute(row, at, n, out) fills out[i][0..n) with the n values at offset
// `at`.
template <int N, typename Compute>
MXEP_INLINE void compute_strip(const Result (&results)[N], bf16* scratch, int64_t top, int64_t rows, int64_t m,
                               int64_t f, ScaleRule rule, const Compute& compute) {
  for (int64_t col = 0; col < f; col += kChunk) {
    const int64_t n = std::min(kChunk, f - col);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = (top + r) * f + col;
      bf16* out[N];
      for (int i = 0; i < N; ++i)
        out[i] = results[i].x ? results[i].x + at : scratch + i * kScratch + (results[i].q_t ? r * kStride : 0);
      compute(top + r, at, n, out);
      for (int i = 0; i < N; ++i)
        if (results[i].q) quantize_blocks(out[i], results[i].q + at, results[i].sf + at / kBlock, n / kBlock, rule);
    }
    for (int i = 0; i < N; ++i)
      if (results[i].q_t)
        transpose_quantize(scratch + i * kScratch, results[i].q_t + col * m + top,
                           results[i].sf_t + (col * m + top) / kBlock, {rows, n, kStride, m, m / kBlock}, rule);
  }
}

template <int N, typename Compute>
void for_each_strip(const Result (&results)[N], const Array& gate, int64_t end_row, ScaleRule rule,
                    const Compute& compute) {
  const int64_t m = gate.dim(0), f = gate.dim(1), height = results[0].q_t ? kStripRows : 8;
  const int64_t strips = (end_row + height - 1) / height;
  parallel_ranges(strips, height * f * 2 * static_cast<int64_t>(sizeof(bf16)), [=](int64_t begin, int64_t end) {
    struct alignas(64) Scratch {
      bf16 values[N * kScratch];
    };
    const auto buffer = std::make_unique_for_overwrite<Scratch>();
    bf16* scratch = buffer->values;
    for (int64_t s = begin; s < end; ++s) {
      const int64_t top = s * height, rows = std::min(height, end_row - top);
      vectorized([&]() MXEP_ALWAYS_INLINE { compute_strip(results, scratch, top, rows, m, f, rule, compute); });
    }
  });
}

template <typename By>
void forward(const Call& call, Along along, const By& by) {
  const bf16 *gate = call.in[0].as<const bf16>(), *up = call.in[1].as<const bf16>();
  const float* prob = call.in[2].dim(0) ? call.in[2].as<const float>() : nullptr;
  const auto compute = [=](int64_t row, int64_t at, int64_t n, bf16* const* out) MXEP_ALWAYS_INLINE {
    forward_values(gate + at, up + at, prob ? prob[row] : 1.0f, n, out[0], by);
  };
  const ScaleRule rule = along ? scale_rule(call) : ScaleRule{};
  for_each_strip({result_arrays(call.out, along)}, call.in[0], rows_with_ends(call, 3, call.in[0].dim(0)), rule,
                 compute);
}

template <typename By>
void backward(const Call& call, Along along, const By& by) {
  const bf16 *dh = call.in[0].as<const bf16>(), *gate = call.in[1].as<const bf16>(), *up = call.in[2].as<const bf16>();
  const float* prob = call.in[3].dim(0) ? call.in[3].as<const float>() : nullptr;
  const auto half = call.out.size() / 2;
  float* dprob = call.out.back().as<float>();
  const int64_t rows = rows_with_ends(call, 4, call.in[1].dim(0));
  if (prob) std::fill_n(dprob, call.in[3].dim(0), 0.0f);
  const auto compute = [=](int64_t row, int64_t at, int64_t n, bf16* const* out) MXEP_ALWAYS_INLINE {
    const float sum = backward_values(dh + at, gate + at, up + at, prob ? prob[row] : 1.0f, n, out[0], out[1], by);
    if (prob) dprob[row] += sum;
  };
  const Result results[] = {result_arrays(call.out.first(half), along),
                            result_arrays(call.out.subspan(half, half), along)};
  for_each_strip(results, call.in[1], rows, along ? scale_rule(call) : ScaleRule{}, compute);
}

void forward(const Call& call, Along along) {
  with_swiglu(call, [&](const auto& by) { forward(call, along, by); });
}

void backward(const Call& call, Along along) {
  with_swiglu(call, [&](const auto& by) { backward(call, along, by); });
}

}  // namespace

void swiglu(const Call& call) { forward(call, kNone); }
void swiglu_row(const Call& call) { forward(call, kRows); }
void swiglu_col(const Call& call) { forward(call, kCols); }
void swiglu_bwd(const Call& call) { backward(call, kNone); }
void swiglu_bwd_row(const Call& call) { backward(call, kRows); }
void swiglu_bwd_col(const Call& call) { backward(call, kCols); }
void swiglu_bwd_both(const Call& call) { backward(call, kBoth); }

void swiglu_bwd_all(const Call& call) {
  std::array<Array, 9> gradients;
  std::copy_n(call.out.begin(), 8, gradients.begin());
  gradients[8] = call.out.back();
  swiglu_bwd_both({call.in, gradients, call.attrs});
  swiglu_col({call.in.subspan(1), call.out.subspan(8, 2), call.attrs});
}

}  // namespace mxep
