#include <algorithm>
#include <string>
#include <vector>

#include "cpu/errors.h"
#include "cpu/ops.h"

namespace mxep {
// Stable counting sort: one pass counts, one pass writes positions.
void sort_by_expert(const Call& call) {
  const int64_t t = call.in[0].dim(0), experts = call.attrs[0];
  const int32_t* ids = call.in[0].as<const int32_t>();
  int32_t *order = call.out[0].as<int32_t>(), *inverse = call.out[1].as<int32_t>(), *counts = call.out[2].as<int32_t>();
  for (int64_t i = 0; i < t; ++i)
    if (ids[i] < 0 || ids[i] >= experts)
      bad_value("sort_by_expert", "expert_ids", ids[i], i, "0 <= id < num_experts = " + std::to_string(experts));
  std::fill_n(counts, experts, 0);
  for (int64_t i = 0; i < t; ++i) ++counts[ids[i]];
  std::vector<int32_t> next(experts);
  for (int64_t e = 1; e < experts; ++e) next[e] = next[e - 1] + counts[e - 1];
  for (int64_t i = 0; i < t; ++i) {
    const int32_t slot = next[ids[i]]++;
    order[slot] = static_cast<int32_t>(i);
    inverse[i] = slot;
  }
}

//  received   | rank 0: e0 e0 e1 | rank 1: e0 e1 e1 |      counts = [2, 1, 1, 2], 2 local experts
//  row_map    | 0  1  3  -1 ...  | 2  4  5  -1 ...  |      expert-major, each group padded
void row_map(const Call& call) {
  const int64_t experts = call.attrs[0], alignment = call.attrs[1], rank_rows = call.attrs[2];
  const int64_t ranks = call.in[0].dim(0) / experts, num_rows = call.out[1].dim(0);
  const int32_t* counts = call.in[0].as<const int32_t>();
  int32_t *map = call.out[0].as<int32_t>(), *inverse = call.out[1].as<int32_t>();
  int32_t *padded_counts = call.out[2].as<int32_t>(), *group_ends = call.out[3].as<int32_t>();

  // The first received row of each (rank, expert) run.
  std::vector<int64_t> starts(ranks * experts);
  int64_t start = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    if (rank_rows) start = rank * rank_rows;
    const int64_t limit = rank_rows ? start + rank_rows : num_rows;
    for (int64_t i = rank * experts; i < (rank + 1) * experts; ++i) {
      if (counts[i] < 0) bad_value("row_map", "counts", counts[i], i, "at least 0");
      starts[i] = start;
      start += counts[i];
      if (start > limit)
        bad_value("row_map", "counts", counts[i], i,
                  rank_rows ? "counts of rank " + std::to_string(rank) +
                                  " that sum to at most rank_rows = " + std::to_string(rank_rows)
                            : "counts that sum to at most num_rows = " + std::to_string(num_rows));
    }
  }

  std::fill_n(map, call.out[0].dim(0), -1);
  std::fill_n(inverse, num_rows, -1);
  int64_t group = 0;
  for (int64_t expert = 0; expert < experts; ++expert) {
    int64_t row = group;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const int64_t i = rank * experts + expert;
      for (int64_t source = starts[i]; source < starts[i] + counts[i]; ++source, ++row) {
        map[row] = static_cast<int32_t>(source);
        inverse[source] = static_cast<int32_t>(row);
      }
    }
    const int64_t padded = std::max(alignment, (row - group + alignment - 1) / alignment * alignment);
    group += padded;
    padded_counts[expert] = static_cast<int32_t>(padded);
    group_ends[expert] = static_cast<int32_t>(group);
  }
}

// Groups of `order` by expert, each padded, as in row_map.
void slot_map(const Call& call) {
  const int64_t experts = call.in[0].dim(0), num_slots = call.in[1].dim(0), padded = call.out[0].dim(0);
  const int64_t top_k = call.attrs[0], alignment = call.attrs[1];
  const int32_t *counts = call.in[0].as<const int32_t>(), *order = call.in[1].as<const int32_t>();
  int32_t *slots = call.out[0].as<int32_t>(), *tokens = call.out[1].as<int32_t>(), *inverse = call.out[2].as<int32_t>();
  int32_t *padded_counts = call.out[3].as<int32_t>(), *group_ends = call.out[4].as<int32_t>();
  const float* weights = call.in[2].as<const float>();
  float* row_weights = call.out[5].dim(0) ? call.out[5].as<float>() : nullptr;

  int64_t total = 0;
  for (int64_t e = 0; e < experts; ++e) {
    if (counts[e] < 0) bad_value("slot_map", "counts", counts[e], e, "at least 0");
    total += counts[e];
    if (total > num_slots || (e == experts - 1 && total < num_slots))
      bad_value("slot_map", "counts", counts[e], e, "counts that sum to the slots, " + std::to_string(num_slots));
  }
  std::fill_n(slots, padded, -1);
  std::fill_n(tokens, padded, -1);
  if (row_weights) std::fill_n(row_weights, padded, 0.0f);
  std::fill_n(inverse, num_slots, -1);
  int64_t source = 0, group = 0;
  for (int64_t e = 0; e < experts; ++e) {
    for (int64_t row = group; row < group + counts[e]; ++row, ++source) {
      const int32_t slot = order[source];
      if (slot < 0 || slot >= num_slots || inverse[slot] >= 0)
        bad_value("slot_map", "order", slot, source, "every slot below " + std::to_string(num_slots) + " once");
      slots[row] = slot;
      tokens[row] = static_cast<int32_t>(slot / top_k);
      inverse[slot] = static_cast<int32_t>(row);
      if (row_weights) row_weights[row] = weights[slot];
    }
    const int64_t size = std::max(alignment, (counts[e] + alignment - 1) / alignment * alignment);
    group += size;
    padded_counts[e] = static_cast<int32_t>(size);
    group_ends[e] = static_cast<int32_t>(group);
  }
}

}  // namespace mxep
