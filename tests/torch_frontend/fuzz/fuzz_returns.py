"""The bad values that may return in test_fuzz.py, per argument, with the reason; ../may_return.py reads the list."""

from ...may_return import (
    ALONE,
    BFLOAT16,
    COUNTS,
    EMPTY,
    FEWER_GROUPS,
    FLOAT32,
    INT32,
    INT64,
    INTEGERS,
    LARGE,
    MORE_GROUPS,
    NO_ROWS,
    NO_VALUES,
    NONE,
    NUMBERS,
    ONE_FOR_ALL,
    REAL,
    ROWS_LESS,
    ROWS_MORE,
    SHORT,
    Rows,
    any_size,
    blocks,
    larger,
    may,
    more_blocks,
)

STRIDED = may("the same values, which are copied where a kernel needs them in order", "transposed")
META = may("a meta tensor gives a meta tensor", "meta")
MX = may("rows that are quantized already", "MXTensor")
ELEMENTS = may("E4M3 is what the bytes are", "float8")
OTHER_BYTES = may("rows of bytes", "float8", "uint8")
FALSE = may("torch reads None as False where a schema has a bool", "None")
OTHER_IDS = may("other experts", "all 0", "all 1", "one 0", "one 1")
ONE_HOT = may("all rows to one expert", "all 0", "all 1", "one 1")
MOVED = may("values are moved, of any dtype of floats", "float16", "float32", "float64", "float8")
SWAPPED = may("both dims are free", "dims swapped")
WHOLE = may("33 bytes a block", "dim 1 * 2", "dim 1 = 0")
TWICE, PADDING = may("a row twice", "one 0", "one 1"), may("a row of padding", "one -1")
ANY_MAP = may("padding alone, or a row many times", "all -1", "all 0", "all 1")
ALL_ROWS = may("no ends: all rows", "None", "all dims = 0", "dim 0 = 0")
LAST_ROW = may("its last row is in no group", "dim 0 - 1")

PUBLIC: Rows = (
    ("GroupedExperts.forward.groups_PD grouped_swiglu_ffn.x", NUMBERS, FLOAT32, STRIDED, MX),
    ("GroupedExperts.forward.padded_counts", INTEGERS, NO_ROWS, STRIDED, may("an expert without rows", "one 0")),
    (
        "GroupedExperts.forward.probs_P combine.probs grouped_swiglu_ffn.prob swiglu.prob weighted_combine.probs"
        " route.selection_bias",
        *(NUMBERS, STRIDED, NONE),
    ),
    ("GroupedExperts.num_experts MoE.num_experts", may("other numbers of experts", "1", "7")),
    ("MXTensor.from_packed.packed", any_size(0), WHOLE, EMPTY, STRIDED, META),
    ("MXTensor.dequantize.output_dtype combine.out_dtype weighted_combine.out_dtype", NONE),
    ("ExpertParallel.recipe MoE.shared capabilities.device force_implementation.implementation", NONE),
    ("MXTensor.from_qdata_and_scales.qdata MXTensor.q", STRIDED, ELEMENTS),
    ("MXTensor.from_qdata_and_scales.scales MXTensor.sf", STRIDED),
    ("MXTensor.quantize.x", NUMBERS, any_size(0), blocks(1), EMPTY, FLOAT32, STRIDED, META),
    ("MXTensor.to_mx.data_hp", NUMBERS, any_size(0), blocks(1), EMPTY, ROWS_MORE, FLOAT32, STRIDED, META),
    ("MoE.forward.x MXLinear.forward.x linear.x", NUMBERS, any_size(0), ROWS_MORE, ROWS_LESS, FLOAT32, STRIDED),
    ("linear.w", NUMBERS, FLOAT32, STRIDED),
    ("linear.bias", NUMBERS, NONE, FLOAT32, STRIDED),
    ("linear.out_dtype", NONE),
    ("MoE.forward.routed.experts", ONE_HOT, INT32),
    ("MoE.forward.routed.x grouped_mm.w", NUMBERS, FLOAT32, STRIDED),
    ("MoE.forward.routed.weights", NUMBERS),
    ("dispatch_probs.probs swiglu.gate swiglu.up update_selection_bias.selection_bias", NUMBERS, STRIDED),
    ("RouterConfig.top_k", may("a choice among 7 experts or more, which a layer checks", "7")),
    ("RouterConfig.num_groups", may("groups of as many experts or more, which a layer checks", "7", str(2**31 - 1))),
    ("RouterConfig.route_scale", REAL, may("weights of the other sign", "-1.0")),
    ("QuantizedWeights.with_values.values", NUMBERS, FLOAT32, STRIDED, META),
    ("Recipe.name", may("any name", "''", "'int32'", "'complex64'", "type str")),
    ("SwiGLU.alpha", REAL),
    ("SwiGLU.limit", REAL, NONE),
    ("SwiGLU.offset", REAL, may("another offset", "-1.0", "0.0")),
    ("a2a_dispatch.input", NUMBERS, any_size(1), FLOAT32, STRIDED, META),
    (
        "a2a_combine_hp_fwd_mxfp8_bwd.input a2a_dispatch_mxfp8_fwd_hp_bwd.input to_mxfp8_a2a_dequant.input",
        *(NUMBERS, blocks(1), FLOAT32, STRIDED, META),
    ),
    ("a2a_*.group_name dispatch.group to_mxfp8_a2a_dequant.group", ALONE),
    ("grouped_mm.x *_grouped_mm.A", NUMBERS, larger(0), FLOAT32, STRIDED, MX),
    ("mxfp8_grouped_mm.B_t grouped_swiglu_ffn.w?", NUMBERS, FLOAT32),
    ("bf16_grouped_mm.B_t", NUMBERS, blocks(1), FLOAT32),
    ("fp8_rowwise_grouped_mm.B_t", NUMBERS, more_blocks(1), FLOAT32),
    ("grouped_mm.group_ends *_grouped_mm.offs", NO_ROWS, SHORT, INT64, STRIDED),
    ("grouped_mm.bias mxfp8_grouped_mm.bias grouped_swiglu_ffn.biases.b1 grouped_swiglu_ffn.biases.b3",
     NUMBERS, ONE_FOR_ALL, NONE, FLOAT32, STRIDED),
    ("grouped_swiglu_ffn.biases.b2", NUMBERS, NONE, FLOAT32, STRIDED),
    ("grouped_swiglu_ffn.group_ends", NO_ROWS, INT64, STRIDED),
    ("combine.groups weighted_combine.rows", NUMBERS, any_size(1), FLOAT32, STRIDED),
    ("dispatch.rows dispatch.TokenReplicas.rows", NUMBERS, blocks(1), FLOAT32, STRIDED),
    ("dispatch.counts", INTEGERS, may("fewer experts, the last of which has no row", "dim 0 - 1"), STRIDED),
    (
        "dispatch.TokenReplicas.order dispatch.TokenReplicas.inverse gather_rows.row_map gather_rows.inverse"
        " spread_rows.order spread_rows.inverse weighted_combine.order",
        *(INT64, STRIDED),
    ),
    ("weighted_combine.slots", INT32, STRIDED),
    (
        "gather_rows.x spread_rows.x permute_mxfp8_fwd_hp_bwd.mx_tensor unpermute_hp_fwd_mxfp8_bwd.input",
        *(NUMBERS, any_size(1), FLOAT32, STRIDED, MX),
    ),
    ("permute_mxfp8_fwd_hp_bwd.num_tokens_per_expert", INTEGERS, STRIDED),
    ("unpermute_hp_fwd_mxfp8_bwd.permuted_indices", may("padding", "all -1", "one -1"), INT64, STRIDED),
    ("MoEStats.metrics.ranks", may("one rank", "1")),
    ("numerics_report.x", LARGE, FLOAT32, STRIDED),
    ("numerics_report.dout", LARGE, NONE, FLOAT32, STRIDED),
    ("pack_expert_weights.[wb][13]", NUMBERS, STRIDED),
    ("pack_expert_weights.[wb]2 unpack_expert_weights.gate_up* unpack_expert_weights.down*",
     NUMBERS, MOVED, STRIDED, META),
    ("quantize_weights.w", NUMBERS, any_size(0), blocks(1), blocks(2), EMPTY, FLOAT32, META),
    ("route.logits", NUMBERS, any_size(0), FLOAT32, STRIDED),
    (
        "sort_by_expert.expert_ids", INTEGERS, OTHER_IDS, any_size(0), any_size(1), SWAPPED, EMPTY, STRIDED, META,
        may("the slots of all tokens", "a dim less"),
    ),
    ("sort_by_expert.num_experts", may("experts without rows", "7")),
    ("update_selection_bias.counts", INTEGERS, COUNTS, STRIDED),
    ("update_selection_bias.rate", REAL),
)  # fmt: skip

OPS: Rows = (
    # Options.
    (
        "ops.*.satfinite ops.*.power_of_two ops.*.clear_rest ops.route*.normalize ops.route.force_balance"
        " ops.route_bwd.split",
        FALSE,
    ),
    ("ops.swiglu*.alpha", REAL),
    ("ops.swiglu*.limit", REAL, may("no limit", "0.0")),
    ("ops.swiglu*.offset", REAL, may("another offset", "-1.0", "0.0")),
    ("ops.route*.route_scale", REAL, may("weights of the other sign", "-1.0")),
    ("ops.route.top_k", may("another number of choices", "1", "7")),
    ("ops.*.headroom", may("another headroom", "0", "1", "7")),
    ("ops.*.rounding", may("the other rounding", "0", "1")),
    ("ops.row_map.num_local_experts", may("one expert per rank", "1")),
    ("ops.unblock_scales.num_scales", may("more scales, which take as many blocks", "7")),
    # Rows in bf16 or fp32.
    ("ops.combine_bwd*.dy ops.combine_bwd*.rows", NUMBERS, FLOAT32),
    ("ops.combine.rows", NUMBERS, larger(0), any_size(1), SWAPPED, FLOAT32),
    ("ops.permute_rows.x", NUMBERS, larger(0), any_size(1), SWAPPED, FLOAT32, OTHER_BYTES),
    ("ops.quantize_blockwise.x", NUMBERS, any_size(0), any_size(1), SWAPPED, EMPTY, ROWS_MORE, FLOAT32),
    ("ops.quantize_squares*.x", NUMBERS, any_size(0), any_size(1), SWAPPED, EMPTY, ROWS_MORE, FLOAT32, META),
    ("ops.quantize_row.x", NUMBERS, any_size(0), blocks(1), SWAPPED, EMPTY, ROWS_MORE, FLOAT32, META),
    ("ops.quantize_row_packed.x", NUMBERS, any_size(0), blocks(1), SWAPPED, EMPTY, FLOAT32, META),
    (
        "ops.quantize_row_fold.x ops.quantize_rowwise.x",
        *(NUMBERS, any_size(0), more_blocks(1), SWAPPED, ROWS_MORE, FLOAT32),
    ),
    ("ops.quantize_both.x", NUMBERS, blocks(0), blocks(1), EMPTY, SWAPPED, ROWS_MORE, FLOAT32, META),
    (
        "ops.quantize_both_fold.x ops.quantize_blockwise_fold.x",
        *(NUMBERS, more_blocks(0), more_blocks(1), SWAPPED, FLOAT32),
    ),
    ("ops.quantize_matrix_fold*.x", NUMBERS, more_blocks(0), more_blocks(1), SWAPPED, ROWS_MORE, FLOAT32, META),
    ("ops.quantize_col.x", NUMBERS, blocks(0), any_size(1), EMPTY, SWAPPED, ROWS_MORE, FLOAT32, META),
    ("ops.grouped_mm_bf16.lhs ops.grouped_mm_bf16_kn.lhs", NUMBERS, larger(0), LAST_ROW),
    ("ops.grouped_mm_bf16.rhs_t ops.grouped_wgrad_bf16.?hs", NUMBERS, any_size(1)),
    ("ops.grouped_mm_bf16_kn.rhs", NUMBERS, any_size(2)),
    ("ops.grouped_wgrad_bf16_t.?hs_t", NUMBERS, any_size(0)),
    ("ops.swiglu*.gate ops.swiglu*.up ops.swiglu*.dh ops.logits_bwd.*", NUMBERS),
    ("ops.grouped_mm_bf16_kn_sum.?hs ops.grouped_mm_bf16_kn_sum.?hs2 ops.grouped_mm_fold_bias.bias", NUMBERS),
    ("ops.route.logits", NUMBERS, any_size(0), BFLOAT16),
    ("ops.route_bwd.logits", NUMBERS, BFLOAT16),
    # Numbers in fp32.
    ("ops.combine*.probs ops.route_bwd.dweights ops.grouped_mm_blockwise*.?hs*_sf", NUMBERS),
    ("ops.route.bias ops.route_bwd.dshares ops.slot_map.weights ops.swiglu*.prob", NUMBERS, NO_VALUES),
    # Codes and scales.
    (
        "ops.dequantize.q ops.fold_groups.q ops.fold_rows*.q ops.requantize_col_fold.q"
        " ops.grouped_mm_mx.?hs_q ops.grouped_wgrad_mx.?hs_q ops.grouped_*_fold*.?hs_qf ops.grouped_*_fold*.?hs2_qf"
        " ops.grouped_mm_blockwise*.lhs*_q ops.grouped_mm_blockwise_sum.rhs*_q",
        ELEMENTS,
    ),
    ("ops.grouped_mm_blockwise.rhs_q", ELEMENTS, may("128 rows, which are one square too", "dim 1 * 2")),
    ("ops.permute_q_sf.q", ELEMENTS, STRIDED, META),
    ("ops.permute_q_sf.sf", STRIDED, META),
    ("ops.permute_mx.packed ops.permute_mx_col_fold.packed", larger(0), WHOLE),
    ("ops.permute_mx_fold.packed", larger(0), may("33 bytes a block", "dim 1 * 2")),
    ("ops.block_scales.sf", larger(0), LAST_ROW, any_size(1)),
    # Ends of groups, counts and maps.
    ("ops.grouped_mm_*.group_ends ops.unblock_scales.group_ends", NO_ROWS, SHORT),
    ("ops.grouped_wgrad_fold*.group_ends", NO_ROWS),
    (
        "ops.fold_groups.group_ends ops.quantize_both_fold.group_ends ops.*_col_fold.group_ends"
        " ops.grouped_wgrad_mx.group_ends ops.quantize_blockwise_fold.group_ends",
        *(NO_ROWS, FEWER_GROUPS, MORE_GROUPS),
    ),
    (
        "ops.fold_rows.group_ends ops.permute_mx_fold.group_ends ops.quantize_blockwise.group_ends"
        " ops.quantize_row*.group_ends ops.swiglu.group_ends ops.swiglu_bwd.group_ends ops.swiglu_row_fold.group_ends"
        " ops.swiglu_blockwise.group_ends ops.swiglu_blockwise_bwd.group_ends",
        *(NO_ROWS, SHORT, FEWER_GROUPS, ALL_ROWS),
    ),
    ("ops.swiglu_bwd_fold.group_ends", NO_ROWS, FEWER_GROUPS),
    ("ops.grouped_wgrad_bf16*.group_ends ops.block_scales.group_ends", NO_ROWS, SHORT, FEWER_GROUPS),
    ("ops.permute_q_sf.row_map", ANY_MAP, TWICE, any_size(0), EMPTY, META),
    (
        "ops.permute_mx.row_map ops.permute_rows.row_map ops.permute_mx_fold.row_map",
        *(ANY_MAP, TWICE, PADDING, any_size(0), EMPTY),
    ),
    ("ops.permute_mx_col_fold.row_map", ANY_MAP, TWICE, PADDING, more_blocks(0)),
    ("ops.combine.slots", ANY_MAP, TWICE, may("no row", "one -1")),
    ("ops.row_map.counts", may("fewer rows than there are", "all 0", "all 1", "one 0", "one 1"), NO_VALUES, META),
    ("ops.slot_map.counts", may("an expert more, without slots", "dim 0 + 1")),
    ("ops.sort_by_expert.expert_ids", any_size(0), EMPTY, OTHER_IDS, META),
    ("ops.route_bwd.expert_ids", OTHER_IDS),
)  # fmt: skip
ROWS = (*PUBLIC, *OPS)
