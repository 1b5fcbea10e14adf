// SwiGLU's h, folded; see plan_fold.py. The quantized codes are folded in place.
#include <array>
#include <vector>

#include "cpu/ops.h"
#include "formats.h"

namespace mxep {

void swiglu_row_fold(const Call& call) {
  const Array &qf = call.out[0], &row_sf = call.out[1];
  const std::array shape{qf.dim(0), qf.dim(1) / kBlock};
  std::vector<uint8_t> bytes(static_cast<size_t>(shape[0] * shape[1]));
  const std::array blocks{qf, Array{bytes.data(), shape, DType::u8}}, folded{qf, row_sf};
  swiglu_row({call.in, blocks, call.attrs});
  fold_rows({blocks, folded, {}});
}

}  // namespace mxep
