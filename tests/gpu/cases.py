"""Inputs of every op, with any number of rows and any seed: the cases of the GPU tests.

CASES[name].inputs(seed, m) -> tensors on DEVICE     .torch(*tensors) | .jax(*tensors) -> outputs
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import ml_dtypes
import numpy as np
import torch
from mxep.core_kernels.fold.both import plan as plan_both
from mxep.core_kernels.fold.gathered import plan_requantize
from mxep.core_kernels.fold.matrix import plan as plan_matrix
from mxep.core_kernels.swiglu.folded import plan_bwd as plan_bwd_fold
from mxep.jax_frontend import ops as jax_ops
from mxep.jax_frontend.ops import call as jax_launch
from mxep.torch_frontend import ops as torch_ops
from torch import Tensor

from . import inputs
from .inputs import GROUPS, K, Rng, Tensors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Case:
    """make(rng, m) returns CPU tensors of m rows; m is a multiple of `multiple`. options(m) returns the options."""

    op: str
    make: Callable[[Rng, int], Tensors]
    options: Callable[[int], dict[str, Any]] = field(default=lambda m: {})
    multiple: int = 1

    @property
    def edges(self) -> tuple[int, ...]:
        return (0, 1, 33) if self.multiple == 1 else (0, 32)

    def scratch(self, inputs: Tensors) -> int:
        """Bytes of scratch memory that the CUDA kernel needs."""
        if self.op == "permute_mx_col_fold":
            packed, row_map, ends = inputs
            return plan_requantize.scratch_bytes(len(row_map), packed.shape[1] // 33 * 32, ends.shape[0])
        if self.op == "swiglu_bwd_fold":
            return 4 * plan_bwd_fold.scratch_words(*inputs[0].shape)
        if self.op not in ("quantize_both_fold", "requantize_col_fold", "quantize_matrix_fold"):
            return 0
        x, ends = inputs[0], inputs[-1]
        if self.op == "quantize_matrix_fold":
            return 4 * plan_matrix.scratch_words(x.shape[:-2].numel(), *x.shape[-2:])
        if self.op == "requantize_col_fold":
            return plan_requantize.scratch_bytes(*x.shape, ends.shape[0])
        return plan_both.scratch_bytes(*x.shape, ends.shape[0], str(x.dtype).removeprefix("torch."))

    def inputs(self, seed: int = 0, m: int = 96) -> Tensors:
        return tuple(x.to(DEVICE) for x in self.make(np.random.default_rng(seed), m))

    def torch(self, *inputs: Tensor, m: int = 96) -> Tensors:
        outputs = getattr(torch_ops, self.op)(*inputs, **self.options(m))
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def jax(self, *inputs: Tensor, m: int = 96) -> list[jax.Array]:
        return self.jitted(m)(*map(to_numpy, inputs))

    def jitted(self, m: int = 96) -> Any:
        return _jitted(self.op, tuple(self.options(m).items()))


@cache
def _jitted(op: str, options: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(lambda *arrays: jax_launch.call(jax_ops.OPS[op], *arrays, **dict(options)))


def to_numpy(x: Tensor) -> np.ndarray:
    return x.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.cpu().numpy()


def as_bytes(x: Tensor | jax.Array) -> np.ndarray:
    return np.ascontiguousarray(to_numpy(x) if isinstance(x, Tensor) else np.asarray(x)).reshape(-1).view(np.uint8)


def same_bytes(got: Any, want: Any) -> None:
    """Assert that all outputs have the same shapes and bytes."""
    assert [tuple(x.shape) for x in got] == [tuple(x.shape) for x in want]
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_array_equal(as_bytes(g), as_bytes(w), err_msg=f"output {i}")


_OF_MATRICES = (
    *("quantize_row", "quantize_row_packed", "quantize_row_fold", "quantize_rowwise"),
    *("quantize_col", "quantize_both", "quantize_blockwise", "quantize_squares", "quantize_squares_both"),
)
_COLUMNS = (
    *("quantize_col", "quantize_both", "quantize_both_fold", "requantize_col_fold", "permute_mx_col_fold"),
    *("quantize_matrix_fold", "swiglu_col", "swiglu_bwd_col", "swiglu_bwd_both", "swiglu_bwd_all", "swiglu_bwd_fold"),
)
_CLAMPED = {"alpha": 1.702, "limit": 1.0, "offset": 1.0}


def _case(op: str, make: Callable[[Rng, int], Tensors], **options: Any) -> Case:
    return Case(op, make, lambda m: options, multiple=32 if op in _COLUMNS else 1)


CASES = {
    **{op: _case(op, inputs.matrix) for op in _OF_MATRICES},
    **{f"{op}_fp32": _case(op, inputs.matrix_fp32) for op in _OF_MATRICES},
    **{f"{op}_3d": _case(op, inputs.experts) for op in _OF_MATRICES if op != "quantize_row_packed"},
    "quantize_both_floor_satfinite": _case("quantize_both", inputs.matrix, rounding=1, satfinite=True),
    "dequantize": _case("dequantize", inputs.mx),
    "dequantize_fp32": _case("dequantize", inputs.mx, out_dtype="float32"),
    "permute_rows": _case("permute_rows", inputs.rows_and_map),
    "permute_mx": _case("permute_mx", inputs.packed_and_map),
    "route": _case("route", inputs.route, top_k=5, route_scale=2.5),
    "route_bf16": _case("route", inputs.route_bf16, top_k=3, score_func="softmax_of_chosen"),
    "route_in_groups": _case("route", inputs.route, top_k=6, score_func="sigmoid", num_groups=5, top_k_groups=2),
    "route_in_groups_by_max": _case(
        "route", inputs.route, top_k=6, normalize=False, num_groups=8, top_k_groups=3, group_score="max"
    ),
    "route_balanced": _case("route", inputs.route, top_k=5, score_func="sigmoid", force_balance=True),
    "route_bwd": _case("route_bwd", inputs.route_bwd, score_func="sigmoid", route_scale=2.5),
    "route_bwd_bf16": _case("route_bwd", inputs.route_bwd_bf16),
    "route_bwd_of_chosen": _case("route_bwd", inputs.route_bwd, score_func="softmax_of_chosen"),
    "route_bwd_in_two_terms": _case("route_bwd", inputs.route_bwd, split=True),
    "logits_bwd": _case("logits_bwd", inputs.logits_bwd),
    "logits_bwd_alone": _case("logits_bwd", inputs.logits_bwd_alone),
    "logits_bwd_of_many": _case("logits_bwd", inputs.logits_bwd_of_many),
    "sort_by_expert": _case("sort_by_expert", inputs.expert_ids, num_experts=9),
    "row_map": Case("row_map", inputs.counts, lambda m: {"num_rows": m, "num_local_experts": GROUPS}),
    "slot_map": Case("slot_map", inputs.sorted_slots, lambda m: {"top_k": 1 if m % 3 else 3}),
    "fold_rows": _case("fold_rows", inputs.mx),
    "fold_rows_headroom": _case("fold_rows", inputs.mx, headroom=3),
    "fold_groups": Case("fold_groups", inputs.groups, multiple=32),
    "fold_groups_of_many": Case("fold_groups", inputs.many_groups, multiple=32),
    "quantize_both_fold": _case("quantize_both_fold", inputs.matrix_and_ends),
    "quantize_both_fold_fp32": _case("quantize_both_fold", inputs.matrix_and_ends_fp32, rounding=1, satfinite=True),
    "requantize_col_fold": _case("requantize_col_fold", inputs.mx_and_ends),
    "permute_mx_fold": _case("permute_mx_fold", inputs.packed_and_map),
    "permute_mx_col_fold": _case("permute_mx_col_fold", inputs.packed_map_and_ends),
    "quantize_matrix_fold": _case("quantize_matrix_fold", inputs.weight, rounding=1, satfinite=True),
    "quantize_matrix_fold_3d": _case("quantize_matrix_fold", inputs.matrices),
    "quantize_matrix_fold_beyond": _case("quantize_matrix_fold", inputs.weights_beyond),
    "quantize_matrix_fold_sorted": _case("quantize_matrix_fold", inputs.weights_sorted, rounding=1),
    "block_scales": _case("block_scales", inputs.scales),
    "unblock_scales": Case("unblock_scales", inputs.blocked_scales, lambda m: {"num_rows": m, "num_scales": K // 32}),
    "combine": _case("combine", inputs.combine),
    "combine_unweighted_fp32": _case("combine", inputs.unweighted(inputs.combine), out_dtype="float32"),
    "combine_bwd": _case("combine_bwd", inputs.combine_bwd),
    "combine_bwd_row": _case("combine_bwd_row", inputs.combine_bwd_row),
    "combine_bwd_unweighted": _case("combine_bwd", inputs.unweighted(inputs.combine_bwd)),
    **{f"swiglu{to}": _case(f"swiglu{to}", inputs.swiglu) for to in ("", "_row", "_row_fold", "_col")},
    **{f"swiglu_bwd{to}": _case(f"swiglu_bwd{to}", inputs.swiglu_bwd) for to in ("", "_row", "_col", "_both", "_all")},
    **{
        f"swiglu{to}_clamped": _case(f"swiglu{to}", inputs.swiglu, **_CLAMPED)
        for to in ("", "_row", "_row_fold", "_col")
    },
    **{
        f"swiglu_bwd{to}_clamped": _case(f"swiglu_bwd{to}", inputs.swiglu_bwd, **_CLAMPED)
        for to in ("", "_row", "_col", "_both", "_all")
    },
    "swiglu_unweighted": _case("swiglu", inputs.unweighted(inputs.swiglu)),
    "swiglu_row_fold_unweighted": _case("swiglu_row_fold", inputs.unweighted(inputs.swiglu)),
    "swiglu_bwd_unweighted": _case("swiglu_bwd", inputs.unweighted(inputs.swiglu_bwd)),
    "swiglu_bwd_all_unweighted": _case("swiglu_bwd_all", inputs.unweighted(inputs.swiglu_bwd)),
    "swiglu_bwd_fold": _case("swiglu_bwd_fold", inputs.swiglu_bwd_fold),
    "swiglu_bwd_fold_clamped": _case("swiglu_bwd_fold", inputs.swiglu_bwd_fold, rounding=1, satfinite=True, **_CLAMPED),
    "swiglu_bwd_fold_unweighted": _case("swiglu_bwd_fold", inputs.swiglu_bwd_fold_unweighted),
    "swiglu_bwd_fold_wide": _case("swiglu_bwd_fold", inputs.swiglu_bwd_fold_wide),
    "swiglu_bwd_fold_beyond": _case("swiglu_bwd_fold", inputs.swiglu_bwd_fold_beyond),
    "grouped_mm_mx": _case("grouped_mm_mx", inputs.grouped_mm_mx),
    "grouped_mm_bf16": _case("grouped_mm_bf16", inputs.grouped_mm_bf16),
    "grouped_wgrad_mx": Case("grouped_wgrad_mx", inputs.grouped_wgrad_mx, multiple=32),
    "grouped_wgrad_bf16": _case("grouped_wgrad_bf16", inputs.grouped_wgrad_bf16),
    "grouped_wgrad_bf16_t": Case("grouped_wgrad_bf16_t", inputs.wgrad_t, multiple=32),
    "grouped_mm_bf16_kn": _case("grouped_mm_bf16_kn", inputs.grouped_mm_bf16_kn),
    "grouped_mm_bf16_kn_sum": _case("grouped_mm_bf16_kn_sum", inputs.grouped_mm_bf16_kn_sum),
    "grouped_mm_bf16_kn_tiles": _case("grouped_mm_bf16_kn", inputs.kn_of_many_tiles, out_dtype="float32"),
    "grouped_mm_bf16_tiles": _case("grouped_mm_bf16", inputs.mm_of_many_tiles, out_dtype="float32"),
    "grouped_wgrad_bf16_tiles": _case("grouped_wgrad_bf16", inputs.wgrad_of_many_tiles, out_dtype="float32"),
    "grouped_wgrad_bf16_t_tiles": Case(
        "grouped_wgrad_bf16_t", inputs.wgrad_t_of_many_tiles, lambda m: {"out_dtype": "float32"}, multiple=32
    ),
    "grouped_mm_fold": _case("grouped_mm_fold", inputs.grouped_mm_fold),
    "grouped_mm_fold_fp32": _case("grouped_mm_fold", inputs.grouped_mm_fold, out_dtype="float32"),
    "grouped_mm_fold_bias": _case("grouped_mm_fold_bias", inputs.grouped_mm_fold_bias),
    "grouped_mm_fold_sum": _case("grouped_mm_fold_sum", inputs.grouped_mm_fold_sum),
    "grouped_mm_fold_sum_fp32": _case("grouped_mm_fold_sum", inputs.grouped_mm_fold_sum, out_dtype="float32"),
    "grouped_mm_fold_bias_fp32": _case("grouped_mm_fold_bias", inputs.grouped_mm_fold_bias, out_dtype="float32"),
    "grouped_mm_blockwise": _case("grouped_mm_blockwise", inputs.grouped_mm_blockwise),
    "grouped_mm_blockwise_tiles": _case("grouped_mm_blockwise", inputs.blockwise_of_many_tiles, out_dtype="float32"),
    "grouped_mm_fold_pair": _case("grouped_mm_fold_pair", inputs.grouped_mm_fold_pair),
    "grouped_mm_fold_pair_tiles": _case("grouped_mm_fold_pair", inputs.mm_pair_of_many_tiles, out_dtype="float32"),
    "grouped_wgrad_fold": Case("grouped_wgrad_fold", inputs.grouped_wgrad_fold, multiple=32),
    "grouped_wgrad_fold_pair": Case("grouped_wgrad_fold_pair", inputs.grouped_wgrad_fold_pair, multiple=32),
    "grouped_wgrad_fold_pair_tiles": Case(
        "grouped_wgrad_fold_pair", inputs.wgrad_pair_of_many_tiles, lambda m: {"out_dtype": "float32"}, multiple=32
    ),
}
EDGES = [(name, m) for name, case in CASES.items() for m in case.edges]
