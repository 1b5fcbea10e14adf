// Matrices quantized and folded along both dims; see plan.py. The columns' codes are folded in place.
#include <array>
#include <vector>

#include "cpu/ops.h"
#include "formats.h"

namespace mxep {

void quantize_matrix_fold(const Call& call) {
  const std::array<int64_t, 3> attrs{call.attrs[0], call.attrs[1], kWeightHeadroom};
  quantize_row_fold({call.in, call.out.first(2), attrs});
  const Array &qf_t = call.out[2], &col_sf = call.out[3];
  const std::array shape{qf_t.leading(1), qf_t.dim(-1) / kBlock};
  std::vector<uint8_t> bytes(static_cast<size_t>(shape[0] * shape[1]));
  const std::array columns{qf_t, Array{bytes.data(), shape, DType::u8}}, folded{qf_t, col_sf};
  quantize_col({call.in, columns, call.attrs});
  fold_rows({columns, folded, std::span(attrs).last(1)});
}

}  // namespace mxep
