// The choice of experts from the router's logits, and its gradient; oracle.py is the definition.
#include <algorithm>
#include <limits>
#include <string>

#include "cpu/errors.h"
#include "cpu/mx_math.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace mxep {
namespace {

constexpr int64_t kMostExperts = 512, kChunk = 8;
constexpr float kTiny = 0x1p-126f, kUnits = 0x1p40f;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(), kLowest = -std::numeric_limits<float>::infinity();
enum Scores : int64_t { kSoftmax, kSigmoid, kSoftmaxOfChosen };
enum GroupScore : int64_t { kTop2, kMax };

using Row = float[kMostExperts];

MXEP_INLINE float canonical(float x) { return x == x ? x : kNaN; }
MXEP_INLINE float at_least_tiny(float x) { return x < kTiny ? kTiny : x; }

// The sum in units of 2^-40 of the largest value's power of two, exact in any order, then rounded once.
MXEP_INLINE float row_sum(const float* x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, magnitude(x[i]));
  if (largest >= kInf) return kNaN;
  const uint32_t byte = largest >> 23;
  const float inverse = inverse_scale(byte);
  int64_t total = 0;
  for (int64_t i = 0; i < n; ++i) total += static_cast<int64_t>(x[i] * inverse * kUnits);
  return static_cast<float>(total) * (1.0f / kUnits) * scale(byte);
}

MXEP_INLINE void softmax(const float* x, int64_t n, float* s) {
  float largest = kLowest;
  for (int64_t i = 0; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
  for (int64_t i = 0; i < n; ++i) {
    const float d = largest - x[i];
    s[i] = d == d ? exp_minus(d) : kNaN;
  }
  const float total = row_sum(s, n);
  for (int64_t i = 0; i < n; ++i) s[i] = s[i] / total;
}

template <typename Logit>
MXEP_INLINE void scores_of(const Logit* logits, int64_t n, int64_t scores, float* x, float* s) {
  for (int64_t i = 0; i < n; ++i) x[i] = to_f32(logits[i]);
  if (scores == kSigmoid)
    for (int64_t i = 0; i < n; ++i) s[i] = x[i] == x[i] ? sigmoid(x[i]) : kNaN;
  else
    softmax(x, n, s);
}

// An int64 that orders by value, then by index, descending; NaN is the largest, -0 equals 0.
constexpr int64_t kNone = std::numeric_limits<int64_t>::min();
MXEP_INLINE int64_t candidate(float value, int64_t index) {
  const int32_t bits = value == 0 ? 0 : std::bit_cast<int32_t>(value);
  const int64_t key = value != value ? INT32_MAX : bits < 0 ? bits ^ INT32_MAX : bits;
  return key * 1024 + (1023 - index);
}
MXEP_INLINE int64_t index_of(int64_t candidate) { return 1023 - (candidate & 1023); }

MXEP_INLINE int64_t largest_of(const int64_t* candidates, int64_t n) {
  int64_t best = kNone;
  for (int64_t i = 0; i < n; ++i) best = std::max(best, candidates[i]);
  return best;
}

struct Choice {
  int64_t experts, top_k, scores;
  bool renormalize;
  float scale;
  int64_t num_groups, top_k_groups, group_score;
  bool force_balance;
};

// Sets the candidates outside of the best groups to kNone.
MXEP_INLINE void keep_top_groups(const Choice& c, const float* choice, int64_t* candidates) {
  const int64_t size = c.experts / c.num_groups;
  int64_t groups[kMostExperts];
  for (int64_t g = 0; g < c.num_groups; ++g) {
    int64_t* inside = candidates + g * size;
    const int64_t best = largest_of(inside, size);
    float score = choice[index_of(best)];
    if (c.group_score == kTop2) {
      int64_t second = kNone;
      for (int64_t i = 0; i < size; ++i) second = std::max(second, inside[i] == best ? kNone : inside[i]);
      score = score + choice[index_of(second)];
    }
    groups[g] = candidate(score, g);
  }
  for (int64_t i = 0; i < c.top_k_groups; ++i) groups[index_of(largest_of(groups, c.num_groups))] = kNone;
  for (int64_t g = 0; g < c.num_groups; ++g)
    if (groups[g] != kNone) std::fill_n(candidates + g * size, size, kNone);
}

MXEP_INLINE void choose(const Choice& c, int64_t token, const float* value, const float* bias, int32_t* ids) {
  Row choice;
  int64_t candidates[kMostExperts];
  const int64_t first = token % c.experts * c.top_k;
  for (int64_t e = 0; e < c.experts; ++e) {
    choice[e] = bias ? value[e] + bias[e] : value[e];
    if (c.force_balance) choice[e] = -static_cast<float>((e + c.experts - first % c.experts) % c.experts);
  }
  for (int64_t e = 0; e < c.experts; ++e) candidates[e] = candidate(choice[e], e);
  if (c.num_groups > 1) keep_top_groups(c, choice, candidates);
  for (int64_t i = 0; i < c.top_k; ++i) {
    const int64_t best = index_of(largest_of(candidates, c.experts));
    ids[i] = static_cast<int32_t>(best);
    candidates[best] = kNone;
  }
}

MXEP_INLINE void weigh(const Choice& c, const float* chosen, float* weights) {
  Row w;
  if (c.scores == kSoftmaxOfChosen) {
    softmax(chosen, c.top_k, w);
  } else {
    const float total = c.renormalize ? at_least_tiny(row_sum(chosen, c.top_k)) : 1.0f;
    for (int64_t i = 0; i < c.top_k; ++i) w[i] = chosen[i] / total;
  }
  for (int64_t i = 0; i < c.top_k; ++i) weights[i] = canonical(w[i] * c.scale);
}

struct Routed {
  int32_t* ids;
  float *weights, *share_sums;
};

// The tokens [begin, end) of one chunk.
template <typename Logit>
MXEP_INLINE void route_chunk(const Choice& c, const Logit* logits, const float* bias, int64_t begin, int64_t end,
                             const Routed& out) {
  const int64_t n = c.experts;
  Row x, s, chosen;
  int64_t total[kMostExperts] = {};
  uint8_t nan[kMostExperts] = {};
  for (int64_t t = begin; t < end; ++t) {
    scores_of(logits + t * n, n, c.scores, x, s);
    const float* value = c.scores == kSoftmaxOfChosen ? x : s;
    int32_t* ids = out.ids + t * c.top_k;
    choose(c, t, value, bias, ids);
    for (int64_t i = 0; i < c.top_k; ++i) chosen[i] = value[ids[i]];
    weigh(c, chosen, out.weights + t * c.top_k);

    const float divisor = c.scores == kSigmoid ? at_least_tiny(row_sum(s, n)) : 1.0f;
    for (int64_t e = 0; e < n; ++e) {
      const float share = s[e] / divisor;
      nan[e] |= share != share;
      total[e] += static_cast<int64_t>((share == share ? share : 0.0f) * kUnits);
    }
  }
  float* sums = out.share_sums + begin / kChunk * n;
  for (int64_t e = 0; e < n; ++e) sums[e] = nan[e] ? kNaN : static_cast<float>(total[e]) * (1.0f / kUnits);
}

struct Gradient {
  int64_t experts, top_k, scores;
  bool renormalize;
  float scale;
  const float *dweights, *dshares;  // of all tokens; null without dshares
  const int32_t* ids;
};

// The sum of w * g over the experts.
MXEP_INLINE float mean(const float* w, const float* g, int64_t n) {
  Row product;
  for (int64_t e = 0; e < n; ++e) product[e] = w[e] * g[e];
  return row_sum(product, n);
}

// The gradient of a token's logits.
template <typename Logit>
MXEP_INLINE void backward_row(const Gradient& c, const Logit* logits, int64_t token, float* dx) {
  const int64_t n = c.experts;
  Row x, s, w;
  Row d = {};
  bool chosen[kMostExperts] = {};
  scores_of(logits + token * n, n, c.scores, x, s);
  for (int64_t i = token * c.top_k; i < (token + 1) * c.top_k; ++i) {
    d[c.ids[i]] = c.dweights[i] * c.scale;
    chosen[c.ids[i]] = true;
  }

  if (c.scores == kSoftmaxOfChosen) {
    for (int64_t e = 0; e < n; ++e) w[e] = chosen[e] ? x[e] : kLowest;
    softmax(w, n, w);
    const float of_weights = mean(w, d, n), of_shares = c.dshares ? mean(s, c.dshares, n) : 0.0f;
    for (int64_t e = 0; e < n; ++e) {
      dx[e] = w[e] * (d[e] - of_weights);
      if (c.dshares) dx[e] = dx[e] + s[e] * (c.dshares[e] - of_shares);
    }
  } else {
    if (c.renormalize) {
      for (int64_t e = 0; e < n; ++e) w[e] = chosen[e] ? s[e] : 0.0f;
      const float total = row_sum(w, n), divisor = at_least_tiny(total);
      for (int64_t e = 0; e < n; ++e) w[e] = w[e] / divisor;
      const float of_weights = mean(w, d, n);
      for (int64_t e = 0; e < n; ++e) d[e] = chosen[e] && !(total < kTiny) ? (d[e] - of_weights) / divisor : 0.0f;
    }
    if (c.scores == kSoftmax) {
      for (int64_t e = 0; e < n; ++e) d[e] = c.dshares ? d[e] + c.dshares[e] : d[e];
      const float of_scores = mean(s, d, n);
      for (int64_t e = 0; e < n; ++e) dx[e] = s[e] * (d[e] - of_scores);
    } else {
      if (c.dshares) {
        const float total = row_sum(s, n), divisor = at_least_tiny(total);
        for (int64_t e = 0; e < n; ++e) w[e] = s[e] / divisor;
        const float of_shares = mean(w, c.dshares, n);
        for (int64_t e = 0; e < n; ++e) d[e] = d[e] + (total < kTiny ? 0.0f : (c.dshares[e] - of_shares) / divisor);
      }
      for (int64_t e = 0; e < n; ++e) dx[e] = d[e] * (s[e] * (1.0f - s[e]));
    }
  }
  for (int64_t e = 0; e < n; ++e) dx[e] = canonical(dx[e]);
}

// x rounded to bf16, and the remainder, 0 where the first is no number.
MXEP_INLINE void store_terms(const float* x, int64_t n, bf16* terms) {
  for (int64_t e = 0; e < n; ++e) {
    store(terms + e, x[e]);
    const float high = to_f32(terms[e]);
    store(terms + n + e, magnitude(high) < kInf ? x[e] - high : 0.0f);
  }
}

}  // namespace

void route(const Call& call) {
  const int64_t tokens = call.in[0].dim(0), experts = call.in[0].dim(1);
  const auto& a = call.attrs;
  const Choice c{experts, a[0], a[1], a[2] != 0, std::bit_cast<float>(static_cast<int32_t>(a[3])),
                 a[4],    a[5], a[6], a[7] != 0};
  const float* bias = call.in[1].dim(0) ? call.in[1].as<const float>() : nullptr;
  const Routed out{call.out[0].as<int32_t>(), call.out[1].as<float>(), call.out[2].as<float>()};
  with_data(call.in[0], [&](const auto* logits) {
    parallel_ranges((tokens + kChunk - 1) / kChunk, kChunk * experts * 16, [&](int64_t first, int64_t last) {
      for (int64_t chunk = first; chunk < last; ++chunk)
        vectorized([&]() MXEP_ALWAYS_INLINE {
          route_chunk(c, logits, bias, chunk * kChunk, std::min(tokens, (chunk + 1) * kChunk), out);
        });
    });
  });
}

void route_bwd(const Call& call) {
  const int64_t tokens = call.in[2].dim(0), experts = call.in[2].dim(1), top_k = call.in[3].dim(1);
  const int32_t* ids = call.in[3].as<const int32_t>();
  for (int64_t i = 0; i < tokens * top_k; ++i)
    if (ids[i] < 0 || ids[i] >= experts)
      bad_value("route_bwd", "expert_ids", ids[i], i, "0 <= id < E = " + std::to_string(experts));
  const Gradient c{experts,
                   top_k,
                   call.attrs[0],
                   call.attrs[1] != 0,
                   std::bit_cast<float>(static_cast<int32_t>(call.attrs[2])),
                   call.in[0].as<const float>(),
                   call.in[1].dim(0) ? call.in[1].as<const float>() : nullptr,
                   ids};
  const bool split = call.attrs[3] != 0;
  with_data(call.in[2], [&]<typename Logit>(const Logit* logits) {
    parallel_ranges(tokens, experts * 16, [&](int64_t begin, int64_t end) {
      vectorized([&]() MXEP_ALWAYS_INLINE {
        Row dx;
        for (int64_t t = begin; t < end; ++t) {
          backward_row(c, logits, t, dx);
          if (split)
            store_terms(dx, experts, call.out[0].as<bf16>() + t * 2 * experts);
          else
            for (int64_t e = 0; e < experts; ++e) store(call.out[0].as<Logit>() + t * experts + e, dx[e]);
        }
      });
    });
  });
}

}  // namespace mxep
