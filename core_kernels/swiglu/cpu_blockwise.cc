// SwiGLU's h in blockwise FP8; see plan_blockwise.py. h is stored in between.
#include <array>
#include <vector>

#include "cpu/ops.h"

namespace mxep {

void swiglu_blockwise(const Call& call) {
  const int64_t rows = call.in[0].dim(0), cols = call.in[0].dim(1);
  const std::array<int64_t, 2> shape{rows, cols};
  std::vector<uint16_t> values(static_cast<size_t>(rows * cols));
  const std::array hidden{Array{values.data(), shape, DType::bf16}};
  const std::array given{hidden[0], call.in[3]};
  swiglu({call.in, hidden, call.attrs});
  quantize_blockwise({given, call.out, call.attrs.first(1)});
}

}  // namespace mxep
