// The row map of a gather; plan.py defines it.
#pragma once

#include <span>
#include <string>

#include "cpu/errors.h"
#include "op.h"

namespace mxep {

// Throws std::invalid_argument for an entry that is neither -1 nor one of `rows` rows.
inline std::span<const int32_t> checked_map(const char* op, const Array& row_map, int64_t rows) {
  const std::span<const int32_t> map(row_map.as<const int32_t>(), static_cast<size_t>(row_map.dim(0)));
  for (size_t i = 0; i < map.size(); ++i)
    if (map[i] < -1 || map[i] >= rows)
      bad_value(op, "row_map", map[i], static_cast<int64_t>(i), "-1 (padding) or a row below " + std::to_string(rows));
  return map;
}

}  // namespace mxep
