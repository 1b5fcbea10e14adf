"""The bad values that may return in test_fuzz.py, per argument, with the reason; ../may_return.py reads the list.

Arrays of bad values are computed with; all else is traced alone, where the ops know the values of group ends and no
others.
"""

from ...may_return import (
    ALONE,
    BFLOAT16,
    BITS,
    COUNTS,
    EMPTY,
    FEWER_GROUPS,
    FLOAT32,
    INT64,
    INTEGERS,
    MORE_GROUPS,
    NO_ROWS,
    NO_VALUES,
    NONE,
    NUMBERS,
    ONE_FOR_ALL,
    REAL,
    ROWS_MORE,
    SHORT,
    Rows,
    any_size,
    blocks,
    larger,
    may,
    more_blocks,
)

SMALL, LARGE = ("1", "7"), str(2**31 - 1)
SWAPPED = may("both dims are free", "dims swapped")
ALL_ROWS = may("no ends: all rows", "None", "all dims = 0", "dim 0 = 0")
PACKED = may("33 bytes a block", "dim 1 * 2", "dim 1 = 0")
ANY_SUM = may("counts of fewer rows; more are dropped", "all 0", "all 1", "one 0", "one 1")
SOME_COUNTS = may("traced alone: the sum of the counts is unknown", *(f"dim 0 {n}" for n in ("- 1", "= 1")))
ANY_MAP = may("padding, or a row many times", "all -1", "all 0", "all 1", "one -1", "one 0", "one 1")
OTHER_IDS = may("other experts", "all 0", "all 1", "one 0", "one 1")
UNREAD = may("the gradient alone reads it", *BITS.names)
MOVED = may(
    "values are moved, of any dtype of floats; jax.numpy makes fp32 of float64", "float16", "float32", "float64"
)

PUBLIC: Rows = (
    ("MXArray.from_packed.packed", any_size(0), PACKED, EMPTY),
    ("MXArray.quantize.x MXGradArray.wrap.value dispatch.rows", NUMBERS, any_size(0), blocks(1), EMPTY, FLOAT32),
    ("MoEConfig.num_experts", may("another number of experts", *SMALL, LARGE)),
    ("RouterConfig.top_k", may("a choice among 7 experts or more, which a layer checks", "7")),
    ("RouterConfig.num_groups", may("groups of as many experts or more, which a layer checks", "7", LARGE)),
    ("RouterConfig.route_scale", REAL, may("weights of the other sign", "-1.0")),
    ("QuantizedWeights.with_values.values grouped_mm.w grouped_swiglu_ffn.[wx]* moe.apply.x", NUMBERS, FLOAT32),
    ("SwiGLU.alpha update_selection_bias.rate", REAL),
    ("SwiGLU.limit", REAL, NONE),
    ("SwiGLU.offset", REAL, may("another offset", "-1.0", "0.0")),
    (
        "a2a_combine_hp_fwd_mxfp8_bwd.input a2a_dispatch_mxfp8_fwd_hp_bwd.input to_mxfp8_a2a_dequant.input",
        *(NUMBERS, blocks(1), FLOAT32),
    ),
    (
        "a2a_dispatch.input combine.groups gather_rows.x spread_rows.x unpermute_hp_fwd_mxfp8_bwd.input"
        " weighted_combine.rows",
        *(NUMBERS, any_size(1), FLOAT32),
    ),
    ("capabilities.platform force_implementation.implementation combine.out_dtype weighted_combine.out_dtype", NONE),
    ("moe.sharded_apply.expert_axis moe.sharded_apply.fsdp_axis ragged_dot_mxfp8.preferred_element_type", NONE),
    ("MoEConfig.deduplicate MoEConfig.on_overflow MoEConfig.transport dispatch.transport", NONE),
    ("moe.specs.*_axis", may("the name of any axis", "'int32'", "'complex64'", "type str"), ALONE),
    ("combine.probs grouped_swiglu_ffn.prob route.selection_bias swiglu.prob weighted_combine.probs", NUMBERS, NONE),
    ("dispatch_probs.probs moe.apply.weights swiglu.gate swiglu.up update_selection_bias.selection_bias", NUMBERS),
    ("plan_exchange.capacity", may("a number of rows, or None for all", *SMALL, LARGE, "None")),
    ("MoEConfig.capacity_factor dispatch.capacity_factor", REAL, NONE),
    (
        "dispatch.counts plan_exchange.counts permute*.num_tokens_per_expert",
        *(INTEGERS, ANY_SUM, SOME_COUNTS, larger(0)),
    ),
    ("plan_exchange.num_rows", may("another number of rows", "0", *SMALL, LARGE)),
    ("grouped_mm.x ragged_dot_mxfp8.lhs route.logits", NUMBERS, any_size(0), FLOAT32),
    ("grouped_mm.bias", NUMBERS, ONE_FOR_ALL, NONE, FLOAT32),
    ("MoEConfig.shared", NONE),
    ("grouped_mm.group_ends grouped_swiglu_ffn.group_ends", NO_ROWS, SHORT, INTEGERS),
    ("ragged_dot_mxfp8.group_sizes", ANY_SUM, INTEGERS),
    ("dense.x sharded_dense.x", NUMBERS, any_size(0), ROWS_MORE, FLOAT32, may("one row", "a dim less")),
    ("dense.w sharded_dense.w", NUMBERS, FLOAT32),
    ("dense.bias sharded_dense.bias", NUMBERS, NONE, FLOAT32),
    ("dense.out_dtype sharded_dense.out_dtype", NONE),
    ("ragged_dot_mxfp8.rhs", NUMBERS, blocks(2), FLOAT32),
    ("moe.apply.experts", OTHER_IDS, INTEGERS),
    ("moe.sharded_apply.x", NUMBERS, any_size(0), ROWS_MORE, FLOAT32),
    ("permute.x", NUMBERS, any_size(0), any_size(1), EMPTY, FLOAT32),
    ("quantize_weights.w", NUMBERS, any_size(0), blocks(1), blocks(2), EMPTY, FLOAT32),
    ("gather_rows.row_map", ANY_MAP, any_size(0), EMPTY, INT64),
    ("gather_rows.inverse spread_rows.inverse", UNREAD, INTEGERS),
    (
        "spread_rows.order",
        *(any_size(0), EMPTY, INT64),
        may("padding, or a token many times", "all -1", "all 0", "all 1", "one -1", "one 0"),
    ),
    ("weighted_combine.order", UNREAD, INTEGERS),
    ("weighted_combine.slots", ANY_MAP, INT64),
    (
        "sort_by_expert.expert_ids", OTHER_IDS, any_size(0), any_size(1), EMPTY, INTEGERS, SWAPPED,
        may("the slots of all tokens", "a dim less"),
    ),
    ("sort_by_expert.num_experts", may("traced alone: experts without rows, or without a number", *SMALL, LARGE)),
    ("unpack_expert_weights.gate_up* unpack_expert_weights.down*", NUMBERS, MOVED),
    ("update_selection_bias.counts", INTEGERS, COUNTS),
)  # fmt: skip

OPS: Rows = (
    # Options.
    ("ops.swiglu*.alpha", REAL),
    ("ops.swiglu*.limit", REAL, may("no limit", "0.0")),
    ("ops.swiglu*.offset", REAL, may("another offset", "-1.0", "0.0")),
    ("ops.route*.route_scale", REAL, may("weights of the other sign", "-1.0")),
    ("ops.route.top_k", may("another number of choices", "1", "7")),
    ("ops.*.headroom", may("another headroom", "0", "7")),
    (
        "ops.combine_bwd_row.rounding ops.*_col_fold.rounding ops.quantize_matrix_fold*.rounding"
        " ops.swiglu_bwd_fold.rounding",
        may("the other rounding", "0", "1"),
    ),
    ("ops.unblock_scales.num_scales", may("fewer scales, which take as many blocks", "1")),
    ("ops.sort_by_expert.num_experts", may("traced alone: experts without rows, or without a number", *SMALL, LARGE)),
    ("ops.row_map.rank_rows", may("rows of all ranks in one", "0")),
    # Rows in bf16 or fp32.
    ("ops.combine_bwd*.dy ops.combine_bwd*.rows", NUMBERS, FLOAT32),
    ("ops.combine.rows", NUMBERS, any_size(0), any_size(1), EMPTY, FLOAT32),
    ("ops.permute_rows.x", NUMBERS, any_size(0), any_size(1), EMPTY, FLOAT32, may("rows of bytes", "uint8")),
    (
        "ops.quantize_blockwise.x ops.quantize_squares*.x",
        *(NUMBERS, any_size(0), any_size(1), SWAPPED, EMPTY, ROWS_MORE, FLOAT32),
    ),
    ("ops.quantize_row.x", NUMBERS, any_size(0), blocks(1), EMPTY, ROWS_MORE, FLOAT32),
    ("ops.quantize_row_packed.x", NUMBERS, any_size(0), blocks(1), EMPTY, FLOAT32),
    ("ops.quantize_row_fold.x ops.quantize_rowwise.x", NUMBERS, any_size(0), more_blocks(1), ROWS_MORE, FLOAT32),
    ("ops.quantize_both.x", NUMBERS, blocks(0), blocks(1), EMPTY, ROWS_MORE, FLOAT32),
    ("ops.quantize_both_fold.x ops.quantize_blockwise_fold.x", NUMBERS, more_blocks(0), more_blocks(1), FLOAT32),
    ("ops.quantize_matrix_fold*.x", NUMBERS, more_blocks(0), more_blocks(1), SWAPPED, ROWS_MORE, FLOAT32),
    ("ops.quantize_col.x", NUMBERS, blocks(0), any_size(1), EMPTY, ROWS_MORE, FLOAT32),
    ("ops.grouped_mm_bf16.lhs ops.grouped_mm_bf16_kn.lhs", NUMBERS, larger(0)),
    ("ops.grouped_wgrad_bf16_t.?hs_t", NUMBERS, any_size(0)),
    ("ops.grouped_mm_bf16.rhs_t ops.grouped_wgrad_bf16.?hs", NUMBERS, any_size(1)),
    ("ops.grouped_mm_bf16_kn.rhs", NUMBERS, any_size(2)),
    ("ops.swiglu*.gate ops.swiglu*.up ops.swiglu*.dh ops.logits_bwd.*", NUMBERS),
    ("ops.grouped_mm_bf16_kn_sum.?hs ops.grouped_mm_bf16_kn_sum.?hs2 ops.grouped_mm_fold_bias.bias", NUMBERS),
    ("ops.route.logits", NUMBERS, any_size(0), BFLOAT16),
    ("ops.route_bwd.logits", NUMBERS, BFLOAT16),
    # Numbers in fp32.
    ("ops.combine*.probs ops.route_bwd.dweights ops.grouped_mm_blockwise*.?hs*_sf", NUMBERS),
    ("ops.route.bias ops.route_bwd.dshares ops.slot_map.weights ops.swiglu*.prob", NUMBERS, NO_VALUES),
    # Codes and scales.
    ("ops.grouped_mm_blockwise.rhs_q", may("128 rows, which are one square too", "dim 1 * 2")),
    ("ops.permute_mx.packed ops.permute_mx_col_fold.packed", any_size(0), PACKED, EMPTY),
    ("ops.permute_mx_fold.packed", any_size(0), may("33 bytes a block", "dim 1 * 2")),
    ("ops.block_scales.sf", larger(0), any_size(1)),
    # Ends of groups, counts and maps.
    ("ops.grouped_mm_*.group_ends ops.unblock_scales.group_ends", NO_ROWS, SHORT),
    ("ops.grouped_wgrad_fold*.group_ends", NO_ROWS),
    (
        "ops.fold_groups.group_ends ops.quantize_both_fold.group_ends ops.grouped_wgrad_mx.group_ends"
        " ops.quantize_blockwise_fold.group_ends",
        *(NO_ROWS, FEWER_GROUPS),
    ),
    ("ops.grouped_wgrad_bf16*.group_ends ops.block_scales.group_ends", NO_ROWS, SHORT, FEWER_GROUPS),
    ("ops.*_col_fold.group_ends", NO_ROWS, FEWER_GROUPS, MORE_GROUPS),
    (
        "ops.fold_rows.group_ends ops.permute_mx_fold.group_ends ops.quantize_blockwise.group_ends"
        " ops.quantize_row*.group_ends ops.swiglu.group_ends ops.swiglu_bwd.group_ends ops.swiglu_row_fold.group_ends"
        " ops.swiglu_blockwise.group_ends ops.swiglu_blockwise_bwd.group_ends",
        *(NO_ROWS, SHORT, FEWER_GROUPS, ALL_ROWS),
    ),
    ("ops.swiglu_bwd_fold.group_ends", NO_ROWS, FEWER_GROUPS),
    ("ops.permute_mx.row_map ops.permute_mx_fold.row_map ops.permute_rows.row_map", ANY_MAP, any_size(0), EMPTY),
    ("ops.permute_mx_col_fold.row_map", ANY_MAP, more_blocks(0)),
    ("ops.combine.slots", ANY_MAP),
    ("ops.row_map.counts", ANY_SUM),
    ("ops.slot_map.counts", SOME_COUNTS, larger(0)),
    ("ops.sort_by_expert.expert_ids", OTHER_IDS, any_size(0), EMPTY),
    ("ops.route_bwd.expert_ids", OTHER_IDS),
)  # fmt: skip

ROWS = (*PUBLIC, *OPS)
