// The weighted sum of each token's K rows, and its gradient.
//
//   forward    256 columns of a token at a time: the sum stays in the cache while the K rows are read
//   backward   one read of a token's gradient per row, which is written or quantized; then zeros in the padding rows
//
// Every product and every sum rounds: no fma. A dot product has 16 partial sums on every machine, so that its rounding
// does not depend on the vector width.
#include "quantize/cpu.h"

#include <algorithm>
#include <string>

#include "cpu/errors.h"
#include "cpu/floats.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace mxep {
namespace {

constexpr int64_t kColumnChunk = 256, kLanes = 16;

// The row of each of `tokens` * `k` slots; `probs` is null for an unweighted sum.
struct Slots {
  const int32_t* row;
  const float* probs;
  int64_t tokens, k;

  Slots(const Array& slots, const Array& p)
      : row(slots.as<const int32_t>()),
        probs(p.shape.size() == 2 ? p.as<const float>() : nullptr),
        tokens(slots.dim(0)),
        k(slots.dim(1)) {}

  void check(const char* op, int64_t rows) const {
    for (int64_t i = 0; i < tokens * k; ++i)
      if (row[i] < -1 || row[i] >= rows)
        bad_value(op, "slots", row[i], i, "-1 (no row) or a row below " + std::to_string(rows));
  }

  // Checks that `order` and `slots` are inverse to each other, so that every row is written exactly once.
  void check_order(const char* op, const int32_t* order, int64_t rows) const {
    for (int64_t r = 0; r < rows; ++r) {
      if (order[r] < -1 || order[r] >= tokens * k)
        bad_value(op, "order", order[r], r, "-1 (padding) or a slot below " + std::to_string(tokens * k));
      if (order[r] >= 0 && row[order[r]] != r)
        bad_value(op, "order", order[r], r, "the slot that slots gives this row");
    }
    for (int64_t i = 0; i < tokens * k; ++i)
      if (row[i] >= 0 && order[row[i]] != i) bad_value(op, "slots", row[i], i, "the row that order gives this slot");
  }
};

template <typename In, typename Out>
MXEP_INLINE void sum_of_rows(const In* rows, const Slots& s, int64_t t, int64_t d, Out* y) {
  alignas(64) float acc[kColumnChunk];
  for (int64_t first = 0; first < d; first += kColumnChunk) {
    const int64_t n = std::min(kColumnChunk, d - first);
    std::fill_n(acc, n, 0.0f);
    for (int64_t i = t * s.k; i < (t + 1) * s.k; ++i) {
      if (s.row[i] < 0) continue;
      const In* x = rows + s.row[i] * d + first;
      if (s.probs) {
        const float p = s.probs[i];
        for (int64_t c = 0; c < n; ++c) acc[c] += p * to_f32(x[c]);
      } else {
        for (int64_t c = 0; c < n; ++c) acc[c] += to_f32(x[c]);
      }
    }
    for (int64_t c = 0; c < n; ++c) store(y + first + c, acc[c]);
  }
}

template <typename A, typename B>
MXEP_INLINE float dot(const A* a, const B* b, int64_t n) {
  alignas(64) float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += to_f32(a[i + lane]) * to_f32(b[i + lane]);
  for (; i < n; ++i) lanes[i % kLanes] += to_f32(a[i]) * to_f32(b[i]);
  for (int64_t half = kLanes / 2; half; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

// write(row, value) takes the gradient of a row, value(c) in column c.
template <typename G, typename X, typename Write>
MXEP_INLINE void gradients_of(const G* dy, const X* rows, const Slots& s, int64_t t, int64_t d, float* dprobs,
                              const Write& write) {
  const G* g = dy + t * d;
  for (int64_t i = t * s.k; i < (t + 1) * s.k; ++i) {
    if (s.row[i] < 0) {
      if (s.probs) dprobs[i] = 0.0f;
      continue;
    }
    if (s.probs) {
      const float p = s.probs[i];
      write(s.row[i], [=](int64_t c) MXEP_ALWAYS_INLINE { return p * to_f32(g[c]); });
      dprobs[i] = dot(g, rows + s.row[i] * d, d);
    } else {
      write(s.row[i], [=](int64_t c) MXEP_ALWAYS_INLINE { return to_f32(g[c]); });
    }
  }
}

// The inputs of a gradient, checked.
struct Gradient {
  const Array& dy;
  const int32_t* order;
  Slots slots;
  int64_t rows, d, row_bytes;
  float* dprobs;

  Gradient(const char* op, const Call& call, const Array& dp)
      : dy(call.in[0]),
        order(call.in[3].as<const int32_t>()),
        slots(call.in[2], call.in[4]),
        rows(call.in[1].dim(0)),
        d(call.in[1].dim(1)),
        row_bytes(d * itemsize(call.in[1].dtype)),
        dprobs(dp.as<float>()) {
    slots.check(op, rows);
    slots.check_order(op, order, rows);
  }

  template <typename X, typename Write>
  void of_tokens(const X* x, const Write& write) const {
    with_data(dy, [&]<typename G>(const G* g) {
      parallel_ranges(slots.tokens, slots.k * row_bytes, [=, this](int64_t begin, int64_t end) {
        vectorized([=, this]() MXEP_ALWAYS_INLINE {
          for (int64_t t = begin; t < end; ++t) gradients_of(g, x, slots, t, d, dprobs, write);
        });
      });
    });
  }

  // Writes zeros to the padding rows of an output.
  void clear_padding(const Array& out) const {
    uint8_t* bytes = out.as<uint8_t>();
    const int64_t nbytes = out.dim(1) * itemsize(out.dtype);
    parallel_ranges(rows, nbytes, [=, this](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        if (order[r] < 0) std::fill_n(bytes + r * nbytes, nbytes, 0);
    });
  }
};

}  // namespace

void combine(const Call& call) {
  const Array &rows = call.in[0], &y = call.out[0];
  const Slots slots(call.in[1], call.in[2]);
  slots.check("combine", rows.dim(0));
  const int64_t d = rows.dim(1);
  with_data(rows, [&]<typename In>(const In* x) {
    with_data(y, [&]<typename Out>(Out* out) {
      parallel_ranges(slots.tokens, slots.k * d * sizeof(In), [=](int64_t begin, int64_t end) {
        vectorized([=]() MXEP_ALWAYS_INLINE {
          for (int64_t t = begin; t < end; ++t) sum_of_rows(x, slots, t, d, out + t * d);
        });
      });
    });
  });
}

void combine_bwd(const Call& call) {
  const Gradient gradient("combine_bwd", call, call.out[1]);
  const int64_t d = gradient.d;
  with_data(call.in[1], [&]<typename X>(const X* x) {
    X* drows = call.out[0].as<X>();
    gradient.of_tokens(x, [=](int64_t row, const auto& value) MXEP_ALWAYS_INLINE {
      for (int64_t c = 0; c < d; ++c) store(drows + row * d + c, value(c));
    });
  });
  gradient.clear_padding(call.out[0]);
}

void combine_bwd_row(const Call& call) {
  const Gradient gradient("combine_bwd_row", call, call.out[2]);
  const int64_t d = gradient.d;
  uint8_t *q = call.out[0].as<uint8_t>(), *sf = call.out[1].as<uint8_t>();
  const ScaleRule rule = scale_rule(call);
  with_data(call.in[1], [&]<typename X>(const X* x) {
    gradient.of_tokens(x, [=](int64_t row, const auto& value) MXEP_ALWAYS_INLINE {
      alignas(64) X chunk[kColumnChunk];
      for (int64_t first = 0; first < d; first += kColumnChunk) {
        const int64_t n = std::min(kColumnChunk, d - first), at = row * d + first;
        for (int64_t c = 0; c < n; ++c) store(chunk + c, value(first + c));
        quantize_blocks(chunk, q + at, sf + at / kBlock, n / kBlock, rule);
      }
    });
  });
  gradient.clear_padding(call.out[0]);
  gradient.clear_padding(call.out[1]);
}

}  // namespace mxep
