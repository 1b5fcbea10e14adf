#include <sys/mman.h>

#include <iterator>

#include "cpu/ops.h"

namespace mxep {
namespace {

// Frameworks hand out fresh memory. At 4 KiB a page, the faults of a 32 MiB output cost three times what
// computing it does; a page of 2 MiB needs one. A hint: where it is refused, nothing changes but time.
void prefer_huge_pages(const Array& out) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  const uintptr_t data = reinterpret_cast<uintptr_t>(out.data);
  const uintptr_t begin = (data + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t end = (data + out.nbytes()) & ~(kHugePage - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)out;
#endif
}

}  // namespace

void run_op(const Op& op, const Call& call) {
  for (const Array& out : call.out) prefer_huge_pages(out);
  op.run(call);
}

std::span<const Op> cpu_ops() {
  static constexpr Op kOps[] = {
      // name, inputs, outputs, attrs, run
      {"quantize_row", 1, 2, 2, quantize_row},
      {"quantize_row_packed", 1, 1, 2, quantize_row_packed},
      {"quantize_col", 1, 2, 2, quantize_col},
      {"quantize_both", 1, 4, 2, quantize_both},
      {"dequantize", 2, 1, 0, dequantize},
      {"permute_rows", 2, 1, 0, permute_rows},
      {"permute_mx", 2, 2, 0, permute_mx},
      {"sort_by_expert", 1, 3, 1, sort_by_expert},
      {"row_map", 1, 4, 3, row_map},
      {"fold_rows", 2, 2, 0, fold_rows},
      {"quantize_row_fold", 1, 2, 2, quantize_row_fold},
      {"quantize_rowwise", 1, 2, 2, quantize_rowwise},
      {"permute_mx_fold", 2, 2, 0, permute_mx_fold},
      {"fold_groups", 3, 2, 0, fold_groups},
      {"count_fold_loss", 3, 3, 0, count_fold_loss},
      {"quantize_both_fold", 2, 4, 2, quantize_both_fold},
      {"block_scales", 2, 1, 0, block_scales},
      {"unblock_scales", 2, 1, 0, unblock_scales},
      {"swiglu", 3, 1, 0, swiglu},
      {"swiglu_row", 3, 2, 2, swiglu_row},
      {"swiglu_col", 3, 2, 2, swiglu_col},
      {"swiglu_both", 3, 4, 2, swiglu_both},
      {"swiglu_bwd", 4, 3, 0, swiglu_bwd},
      {"swiglu_bwd_row", 4, 5, 2, swiglu_bwd_row},
      {"swiglu_bwd_col", 4, 5, 2, swiglu_bwd_col},
      {"swiglu_bwd_both", 4, 9, 2, swiglu_bwd_both},
      {"combine", 3, 1, 0, combine},
      {"combine_bwd", 5, 2, 0, combine_bwd},
  };
  static_assert(std::size(kOps) == kNumCpuOps);
  return kOps;
}

}  // namespace mxep
