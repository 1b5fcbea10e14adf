#include <iterator>

#include "ops.h"

namespace mxep {

std::span<const Op> cpu_ops() {
  static constexpr Op kOps[] = {
      // name, inputs, outputs, attrs, run
      {"quantize_row", 1, 2, 2, quantize_row}, {"quantize_row_packed", 1, 1, 2, quantize_row_packed},
      {"quantize_col", 1, 2, 2, quantize_col}, {"quantize_both", 1, 4, 2, quantize_both},
      {"dequantize", 2, 1, 0, dequantize},     {"permute_rows", 2, 1, 0, permute_rows},
      {"permute_mx", 2, 2, 0, permute_mx},     {"sort_by_expert", 1, 3, 1, sort_by_expert},
      {"row_map", 1, 4, 3, row_map},
  };
  static_assert(std::size(kOps) == kNumCpuOps);
  return kOps;
}

}  // namespace mxep
