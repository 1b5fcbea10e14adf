// The CPU implementations behind the op table.
#pragma once

#include "op.h"

namespace mxep {

void quantize_row(const Call& call);
void quantize_row_packed(const Call& call);
void quantize_col(const Call& call);
void quantize_both(const Call& call);
void dequantize(const Call& call);
void permute_rows(const Call& call);
void permute_mx(const Call& call);
void sort_by_expert(const Call& call);
void row_map(const Call& call);
void fold_rows(const Call& call);
void quantize_row_fold(const Call& call);
void quantize_rowwise(const Call& call);
void permute_mx_fold(const Call& call);
void fold_groups(const Call& call);
void count_fold_loss(const Call& call);
void quantize_both_fold(const Call& call);
void block_scales(const Call& call);
void unblock_scales(const Call& call);
void swiglu(const Call& call);
void swiglu_row(const Call& call);
void swiglu_col(const Call& call);
void swiglu_both(const Call& call);
void swiglu_bwd(const Call& call);
void swiglu_bwd_row(const Call& call);
void swiglu_bwd_col(const Call& call);
void swiglu_bwd_both(const Call& call);
void combine(const Call& call);
void combine_bwd(const Call& call);

}  // namespace mxep
