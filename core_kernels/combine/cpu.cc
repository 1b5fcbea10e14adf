// The weighted sum of each token's K rows, and its gradient.
//
//   forward    256 columns of a token at a time: the sum stays in the cache while K rows pass
//   backward   a token's gradient is read once per row; then the padding rows are zeroed
//
// Every product and every sum rounds: no fma. A dot product runs in 16 lanes, whatever the vectors' width,
// so that it rounds alike on every machine.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu/mx_math.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace mxep {
namespace {

constexpr int64_t kPiece = 256, kLanes = 16;

MXEP_INLINE void store(float* out, float x) { *out = x; }
MXEP_INLINE void store(bf16* out, float x) { *out = bf16_from_f32(x); }

[[noreturn]] void refuse(const char* op, const char* argument, int64_t got, int64_t index, const std::string& allowed) {
  throw std::invalid_argument(std::string(op) + ": " + argument + ": got " + std::to_string(got) + " at index " +
                              std::to_string(index) + "; allowed: " + allowed);
}

// Where rows lie, for each of `tokens` * `k` slots; `probs` is null for an unweighted sum.
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
        refuse(op, "slots", row[i], i, "-1 (no row) or a row below " + std::to_string(rows));
  }

  // A slot's row must name that slot, and no other row a slot: then every row is written, and once.
  void check_order(const char* op, const int32_t* order, int64_t rows) const {
    for (int64_t r = 0; r < rows; ++r) {
      if (order[r] < -1 || order[r] >= tokens * k)
        refuse(op, "order", order[r], r, "-1 (padding) or a slot below " + std::to_string(tokens * k));
      if (order[r] >= 0 && row[order[r]] != r) refuse(op, "order", order[r], r, "the slot that slots gives this row");
    }
    for (int64_t i = 0; i < tokens * k; ++i)
      if (row[i] >= 0 && order[row[i]] != i) refuse(op, "slots", row[i], i, "the row that order gives this slot");
  }
};

template <typename In, typename Out>
MXEP_INLINE void sum_of_rows(const In* rows, const Slots& s, int64_t t, int64_t d, Out* y) {
  alignas(64) float acc[kPiece];
  for (int64_t first = 0; first < d; first += kPiece) {
    const int64_t n = std::min(kPiece, d - first);
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

template <typename G, typename X>
MXEP_INLINE void gradients_of(const G* dy, const X* rows, const Slots& s, int64_t t, int64_t d, X* drows,
                              float* dprobs) {
  const G* g = dy + t * d;
  for (int64_t i = t * s.k; i < (t + 1) * s.k; ++i) {
    if (s.row[i] < 0) {
      if (s.probs) dprobs[i] = 0.0f;
      continue;
    }
    X* out = drows + s.row[i] * d;
    if (s.probs) {
      const float p = s.probs[i];
      for (int64_t c = 0; c < d; ++c) store(out + c, p * to_f32(g[c]));
      dprobs[i] = dot(g, rows + s.row[i] * d, d);
    } else {
      for (int64_t c = 0; c < d; ++c) store(out + c, to_f32(g[c]));
    }
  }
}

template <typename Body>
void with_data(const Array& x, const Body& body) {
  if (x.dtype == DType::bf16)
    body(x.as<bf16>());
  else
    body(x.as<float>());
}

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
  const Array &dy = call.in[0], &rows = call.in[1];
  const int32_t* order = call.in[3].as<const int32_t>();
  const Slots slots(call.in[2], call.in[4]);
  slots.check("combine_bwd", rows.dim(0));
  slots.check_order("combine_bwd", order, rows.dim(0));
  const int64_t d = rows.dim(1), row_bytes = d * itemsize(rows.dtype);
  float* dprobs = call.out[1].as<float>();
  with_data(dy, [&]<typename G>(const G* g) {
    with_data(rows, [&]<typename X>(const X* x) {
      X* drows = call.out[0].as<X>();
      parallel_ranges(slots.tokens, slots.k * row_bytes, [=](int64_t begin, int64_t end) {
        vectorized([=]() MXEP_ALWAYS_INLINE {
          for (int64_t t = begin; t < end; ++t) gradients_of(g, x, slots, t, d, drows, dprobs);
        });
      });
    });
  });
  uint8_t* drows = call.out[0].as<uint8_t>();
  parallel_ranges(rows.dim(0), row_bytes, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      if (order[r] < 0) std::memset(drows + r * row_bytes, 0, row_bytes);
  });
}

}  // namespace mxep
