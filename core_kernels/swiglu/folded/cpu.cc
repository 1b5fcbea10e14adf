// SwiGLU's h, folded, and its gradients with h, folded; see plan.py and plan_bwd.py. The quantized codes are
// folded in place.
#include "fold/cpu.h"

#include <array>
#include <vector>

#include "cpu/ops.h"
#include "formats.h"

namespace mxep {
namespace {

constexpr int64_t kNoHeadroom[] = {0}, kOfGradients[] = {kGradientHeadroom};

// The block scales of codes (R, C): (R, C/32).
struct BlockScales {
  explicit BlockScales(const Array& codes)
      : shape{codes.dim(0), codes.dim(1) / kBlock}, bytes(static_cast<size_t>(shape[0] * shape[1])) {}
  BlockScales(const BlockScales&) = delete;

  Array array() { return {bytes.data(), shape, DType::u8}; }

  std::array<int64_t, 2> shape;
  std::vector<uint8_t> bytes;
};

}  // namespace

void swiglu_row_fold(const Call& call) {
  const Array &qf = call.out[0], &row_sf = call.out[1];
  BlockScales sf(qf);
  const std::array quantized{qf, sf.array()}, folded{qf, row_sf};
  const std::array blocks{qf, sf.array(), call.in[3]};
  swiglu_row({call.in, quantized, call.attrs});
  fold_rows({blocks, folded, kNoHeadroom});
}

void swiglu_bwd_fold(const Call& call) {
  const Array &ends = call.in[4], &dprob = call.out[10];
  block_ends("swiglu_bwd_fold", ends, call.in[0].dim(0));
  const std::array rows{call.out.subspan(0, 2), call.out.subspan(4, 2)};
  const std::array columns{call.out.subspan(2, 2), call.out.subspan(6, 2), call.out.subspan(8, 2)};
  std::array row_sf{BlockScales(rows[0][0]), BlockScales(rows[1][0])};
  std::array col_sf{BlockScales(columns[0][0]), BlockScales(columns[1][0]), BlockScales(columns[2][0])};
  const std::array quantized{rows[0][0],    row_sf[0].array(), columns[0][0], col_sf[0].array(),
                             rows[1][0],    row_sf[1].array(), columns[1][0], col_sf[1].array(),
                             columns[2][0], col_sf[2].array(), dprob};
  swiglu_bwd_all({call.in, quantized, call.attrs});
  for (size_t i = 0; i < rows.size(); ++i) {
    const std::array blocks{rows[i][0], row_sf[i].array(), ends};
    fold_rows({blocks, rows[i], kOfGradients});
  }
  for (size_t i = 0; i < columns.size(); ++i) {
    const std::array blocks{columns[i][0], col_sf[i].array(), ends};
    fold_groups({blocks, columns[i], {}});
  }
}

}  // namespace mxep
