// Matrices quantized and folded along both dims, or along columns; see plan.py. The columns' codes are folded in place.
#include <array>
#include <vector>

#include "cpu/ops.h"
#include "formats.h"

namespace mxep {

void quantize_matrix_fold_t(const Call& call) {
  const std::array<int64_t, 1> headroom{kWeightHeadroom};
  const Array& qf_t = call.out[0];
  const std::array shape{qf_t.leading(1), qf_t.dim(-1) / kBlock};
  std::vector<uint8_t> bytes(static_cast<size_t>(shape[0] * shape[1]));
  const std::array columns{qf_t, Array{bytes.data(), shape, DType::u8}};
  quantize_col({call.in, columns, call.attrs});
  fold_rows({columns, call.out, headroom});
}

void quantize_matrix_fold(const Call& call) {
  const std::array<int64_t, 3> attrs{call.attrs[0], call.attrs[1], kWeightHeadroom};
  quantize_row_fold({call.in, call.out.first(2), attrs});
  quantize_matrix_fold_t({call.in, call.out.last(2), call.attrs});
}

}  // namespace mxep
