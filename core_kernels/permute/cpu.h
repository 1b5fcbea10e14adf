// The row map of a gather and its check.
#pragma once

#include <span>
#include <stdexcept>
#include <string>

#include "op.h"

namespace mxep {

inline void check_map(const char* op, std::span<const int32_t> map, int64_t rows) {
  for (size_t i = 0; i < map.size(); ++i)
    if (map[i] < -1 || map[i] >= rows)
      throw std::invalid_argument(std::string(op) + ": row_map: got " + std::to_string(map[i]) + " at index " +
                                  std::to_string(i) + "; allowed: -1 (padding) or a row below " + std::to_string(rows));
}

inline std::span<const int32_t> map_of(const Call& call) {
  return {call.in[1].as<const int32_t>(), static_cast<size_t>(call.in[1].dim(0))};
}

}  // namespace mxep
