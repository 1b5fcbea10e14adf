"""Inputs of every op, with any number of rows and any seed: the cases of the GPU tests.

    CASES[name].inputs(seed, m) -> tensors on DEVICE     .torch(*tensors) | .jax(*tensors) -> outputs

The inputs contain rows past the last group, padding, empty slots and an empty group: parts that a kernel could skip.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import ml_dtypes
import numpy as np
import torch
from mxep.core_kernels.fold import plan_both, plan_matrix, plan_requantize
from mxep.jax_frontend import _call as jax_launch
from mxep.jax_frontend import ops as jax_ops
from mxep.torch_frontend import ops as torch_ops
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
K, N, GROUPS = 160, 64, 3

Tensors = tuple[Tensor, ...]
Rng = torch.Generator


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
        if self.op not in ("quantize_both_fold", "requantize_col_fold", "quantize_matrix_fold"):
            return 0
        x, ends = inputs[0], inputs[-1]
        if self.op == "quantize_matrix_fold":
            return 4 * plan_matrix.scratch_words(x.shape[:-2].numel(), *x.shape[-2:])
        if self.op == "requantize_col_fold":
            return plan_requantize.scratch_bytes(*x.shape, ends.shape[0])
        return plan_both.scratch_bytes(*x.shape, ends.shape[0], str(x.dtype).removeprefix("torch."))

    def inputs(self, seed: int = 0, m: int = 96) -> Tensors:
        return tuple(x.to(DEVICE) for x in self.make(Rng().manual_seed(seed), m))

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


# --- inputs ---------------------------------------------------------------------------------------------


def floats(rng: Rng, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal values; every row has its own magnitude. One in 500 is NaN, infinite, zero or subnormal in fp32."""
    x = torch.randn(shape, generator=rng) * torch.exp2(3 * torch.randn(*shape[:-1], 1, generator=rng))
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 2.0**-130, 0.0])
    chosen = special[torch.randint(0, 5, shape, generator=rng)]
    return torch.where(torch.rand(shape, generator=rng) < 0.002, chosen, x).to(dtype)


def _finite(rng: Rng, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng).bfloat16()


def _matrix(rng: Rng, m: int) -> Tensors:
    return (floats(rng, m, K),)


def _matrix_fp32(rng: Rng, m: int) -> Tensors:
    return (floats(rng, m, K, dtype=torch.float32),)


def _experts(rng: Rng, m: int) -> Tensors:
    return (floats(rng, GROUPS, m, K),)


def _matrices(rng: Rng, m: int) -> Tensors:
    return (floats(rng, m // 32, 32, K),)


def _weight(rng: Rng, m: int) -> Tensors:
    """One matrix. It has rows if m is 0, too."""
    return (floats(rng, m + 32, K),)


def _mx(rng: Rng, m: int) -> Tensors:
    return torch_ops.quantize_row(floats(rng, m, K))


def _row_map(rng: Rng, m: int) -> Tensor:
    rows = torch.cat([torch.randperm(m, generator=rng), torch.full((9,), -1)])
    return rows[torch.randperm(len(rows), generator=rng)].int()


def _rows_and_map(rng: Rng, m: int) -> Tensors:
    return floats(rng, m, K), _row_map(rng, m)


def _packed_and_map(rng: Rng, m: int) -> Tensors:
    return torch_ops.quantize_row_packed(floats(rng, m, K)), _row_map(rng, m)


def _route(rng: Rng, m: int, experts: int = 40) -> Tensors:
    return floats(rng, m, experts, dtype=torch.float32), torch.randn(experts, generator=rng)


def _route_bf16(rng: Rng, m: int) -> Tensors:
    return floats(rng, m, 24), torch.empty(0)


def _route_bwd(rng: Rng, m: int, dtype: torch.dtype = torch.float32) -> Tensors:
    logits = floats(rng, m, 40, dtype=dtype)
    ids = torch.rand(m, 40, generator=rng).argsort(-1)[:, :5].int().contiguous()
    return torch.randn(m, 5, generator=rng), torch.randn(40, generator=rng), logits, ids


def _route_bwd_bf16(rng: Rng, m: int) -> Tensors:
    dweights, _, *others = _route_bwd(rng, m, torch.bfloat16)
    return dweights, torch.empty(0), *others


def _expert_ids(rng: Rng, m: int) -> Tensors:
    return (torch.tensor([1, 4, 6, 8], dtype=torch.int32)[torch.randint(0, 4, (m,), generator=rng)],)


def _counts(rng: Rng, m: int) -> Tensors:
    """Token counts from two ranks for three experts; the last expert receives none."""
    pair = torch.tensor([0, 1, 3, 4])[torch.randint(0, 4, (m,), generator=rng)]
    return (torch.bincount(pair, minlength=2 * GROUPS).int(),)


def _ends(rng: Rng, m: int, multiple: int = 1) -> Tensor:
    """Ends of three groups. The second group is empty; the last may end before the last row."""
    first, last = sorted(torch.randint(0, m // multiple + 1, (2,), generator=rng).tolist())
    return torch.tensor([first, first, last], dtype=torch.int32) * multiple


def _scales(rng: Rng, m: int) -> Tensors:
    return _mx(rng, m)[1], _ends(rng, m)


def _blocked_scales(rng: Rng, m: int) -> Tensors:
    sf, ends = _scales(rng, m)
    return torch_ops.block_scales(sf, ends), ends


def _combine(rng: Rng, m: int) -> Tensors:
    """m tokens with two slots each. Some slots are empty, and some rows are padding."""
    _, rows, slots, _, probs = _combine_bwd(rng, m)
    return rows, slots, probs


def _combine_bwd(rng: Rng, m: int) -> Tensors:
    num_rows = 2 * m + 5
    slots = torch.randperm(num_rows, generator=rng)[: 2 * m]
    slots[torch.rand(2 * m, generator=rng) < 0.2] = -1
    order = torch.full((num_rows,), -1)
    order[slots[slots >= 0]] = torch.arange(2 * m)[slots >= 0]
    probs = torch.rand(m, 2, generator=rng)
    return _finite(rng, m, 72), _finite(rng, num_rows, 72), slots.view(m, 2).int(), order.int(), probs


def _combine_bwd_row(rng: Rng, m: int) -> Tensors:
    dy, rows, *maps = _combine_bwd(rng, m)
    return dy[:, :64].contiguous(), rows[:, :64].contiguous(), *maps


def _unweighted(make: Callable[[Rng, int], Tensors]) -> Callable[[Rng, int], Tensors]:
    return lambda rng, m: (*make(rng, m)[:-1], torch.empty(0))


def _swiglu(rng: Rng, m: int) -> Tensors:
    return floats(rng, m, N), floats(rng, m, N), torch.rand(m, generator=rng)


def _swiglu_bwd(rng: Rng, m: int) -> Tensors:
    return floats(rng, m, N), *_swiglu(rng, m)


def _grouped_mm_bf16(rng: Rng, m: int) -> Tensors:
    return _finite(rng, m, K), _finite(rng, GROUPS, N, K), _ends(rng, m)


def _grouped_mm_bf16_kn(rng: Rng, m: int) -> Tensors:
    lhs, rhs_t, ends = _grouped_mm_bf16(rng, m)
    return lhs, rhs_t.mT.contiguous(), ends


def _grouped_mm_bf16_kn_sum(rng: Rng, m: int) -> Tensors:
    *pair, ends = _grouped_mm_bf16_kn(rng, m)
    return *pair, *_grouped_mm_bf16_kn(rng, m)[:2], ends


def _kn_of_many_tiles(rng: Rng, m: int) -> Tensors:
    """A contraction dim that is no multiple of a stage: a stage does not reach into the weights of the next group."""
    rhs = _finite(rng, GROUPS, 200, 808)
    rhs[1:, :56] = torch.nan
    return _finite(rng, m, 200), rhs, torch.full((3,), m - m // 8, dtype=torch.int32)


def _ragged(rng: Rng, m: int) -> Tensor:
    """Unaligned ends. The first group has one row if m > 0."""
    return torch.tensor([min(m, 1), max(min(m, 1), m // 3), m - m // 8], dtype=torch.int32)


def _mm_of_many_tiles(rng: Rng, m: int) -> Tensors:
    return _finite(rng, m, 200), _finite(rng, GROUPS, 808, 200), _ragged(rng, m)


def _wgrad_of_many_tiles(rng: Rng, m: int) -> Tensors:
    return _finite(rng, m, 808), _finite(rng, m, 328), _ragged(rng, m)


def _wgrad_t(rng: Rng, m: int) -> Tensors:
    return _finite(rng, N, m), _finite(rng, K, m), _ends(rng, m)


def _wgrad_t_of_many_tiles(rng: Rng, m: int) -> Tensors:
    return _finite(rng, 808, m), _finite(rng, 328, m), _ragged(rng, m)


def _grouped_mm_mx(rng: Rng, m: int) -> Tensors:
    lhs, rhs_t, ends = _grouped_mm_bf16(rng, m)
    return *torch_ops.quantize_row(lhs), *torch_ops.quantize_row(rhs_t), ends


def _grouped_wgrad_bf16(rng: Rng, m: int) -> Tensors:
    return _finite(rng, m, N), _finite(rng, m, K), _ends(rng, m)


def _grouped_wgrad_mx(rng: Rng, m: int) -> Tensors:
    lhs, rhs = _finite(rng, m, N), _finite(rng, m, K)
    return *torch_ops.quantize_col(lhs), *torch_ops.quantize_col(rhs), _ends(rng, m, 32)


def _grouped_mm_fold(rng: Rng, m: int) -> Tensors:
    lhs, rhs_t, ends = _grouped_mm_bf16(rng, m)
    return *torch_ops.quantize_row_fold(lhs), *torch_ops.quantize_row_fold(rhs_t), ends


def _grouped_mm_fold_bias(rng: Rng, m: int) -> Tensors:
    *operands, ends = _grouped_mm_fold(rng, m)
    return *operands, torch.randn(GROUPS, N, generator=rng), ends


def _grouped_mm_fold_sum(rng: Rng, m: int) -> Tensors:
    lhs, rhs_t = _finite(rng, m, 2 * K), _finite(rng, GROUPS, N, 2 * K)
    pairs = ((lhs[:, :K], rhs_t[..., :K]), (lhs[:, K:] * 2**60, rhs_t[..., K:] * 2**-60))
    return *(t for pair in pairs for x in pair for t in torch_ops.quantize_row_fold(x.contiguous())), _ends(rng, m)


def _grouped_mm_blockwise(rng: Rng, m: int) -> Tensors:
    lhs, rhs_t, ends = _grouped_mm_bf16(rng, m)
    return *torch_ops.quantize_blockwise(lhs), *torch_ops.quantize_squares(rhs_t), ends


def _blockwise_of_many_tiles(rng: Rng, m: int) -> Tensors:
    lhs, rhs_t = _finite(rng, m, 416), _finite(rng, GROUPS, 808, 416)
    return *torch_ops.quantize_blockwise(lhs), *torch_ops.quantize_squares(rhs_t), _ragged(rng, m)


def _mx_and_target(rng: Rng, m: int) -> Tensors:
    q, sf = _mx(rng, m)
    return q, sf, torch.randint(100, 140, sf.shape, generator=rng).byte()


def _weight_scales(rng: Rng, m: int) -> Tensors:
    return (torch.randint(0, 256, (GROUPS, m, K // 32), generator=rng).byte(),)


def _mx_and_lift(rng: Rng, m: int) -> Tensors:
    return *_mx(rng, m), torch.randint(0, 30, (GROUPS, K // 32), generator=rng).byte(), _ends(rng, m)


def _groups(rng: Rng, m: int) -> Tensors:
    return *torch_ops.quantize_col(floats(rng, m, N)), _ends(rng, m, 32)


def _matrix_and_ends(rng: Rng, m: int) -> Tensors:
    return floats(rng, m, K), _ends(rng, m, 32)


def _mx_and_ends(rng: Rng, m: int) -> Tensors:
    return *_mx(rng, m), _ends(rng, m, 32)


def _matrix_and_ends_fp32(rng: Rng, m: int) -> Tensors:
    return floats(rng, m, K, dtype=torch.float32), _ends(rng, m, 32)


def _grouped_wgrad_fold(rng: Rng, m: int) -> Tensors:
    lhs, rhs, ends = _finite(rng, m, N), _finite(rng, m, K), _ends(rng, m, 32)
    lhs_t, rhs_t = torch_ops.quantize_col(lhs), torch_ops.quantize_col(rhs)
    return *torch_ops.fold_groups(*lhs_t, ends), *torch_ops.fold_groups(*rhs_t, ends), ends


# --- cases ----------------------------------------------------------------------------------------------

_OF_MATRICES = (
    *("quantize_row", "quantize_row_packed", "quantize_row_fold", "quantize_rowwise"),
    *("quantize_col", "quantize_both", "quantize_blockwise", "quantize_squares", "quantize_squares_both"),
)
_COLUMNS = (
    *("quantize_col", "quantize_both", "quantize_both_fold", "requantize_col_fold"),
    *("quantize_matrix_fold", "swiglu_col", "swiglu_bwd_col", "swiglu_bwd_both"),
)
_CLAMPED = {"alpha": 1.702, "limit": 1.0, "offset": 1.0}


def _case(op: str, make: Callable[[Rng, int], Tensors], **options: Any) -> Case:
    return Case(op, make, lambda m: options, multiple=32 if op in _COLUMNS else 1)


CASES = {
    **{op: _case(op, _matrix) for op in _OF_MATRICES},
    **{f"{op}_fp32": _case(op, _matrix_fp32) for op in _OF_MATRICES},
    **{f"{op}_3d": _case(op, _experts) for op in _OF_MATRICES if op != "quantize_row_packed"},
    "quantize_both_floor_satfinite": _case("quantize_both", _matrix, rounding=1, satfinite=True),
    "dequantize": _case("dequantize", _mx),
    "dequantize_fp32": _case("dequantize", _mx, out_dtype="float32"),
    "permute_rows": _case("permute_rows", _rows_and_map),
    "permute_mx": _case("permute_mx", _packed_and_map),
    "route": _case("route", _route, top_k=5, route_scale=2.5),
    "route_bf16": _case("route", _route_bf16, top_k=3, score_func="softmax_of_chosen"),
    "route_in_groups": _case("route", _route, top_k=6, score_func="sigmoid", num_groups=5, top_k_groups=2),
    "route_in_groups_by_max": _case(
        "route", _route, top_k=6, normalize=False, num_groups=8, top_k_groups=3, group_score="max"
    ),
    "route_balanced": _case("route", _route, top_k=5, score_func="sigmoid", force_balance=True),
    "route_bwd": _case("route_bwd", _route_bwd, score_func="sigmoid", route_scale=2.5),
    "route_bwd_bf16": _case("route_bwd", _route_bwd_bf16),
    "route_bwd_of_chosen": _case("route_bwd", _route_bwd, score_func="softmax_of_chosen"),
    "sort_by_expert": _case("sort_by_expert", _expert_ids, num_experts=9),
    "row_map": Case("row_map", _counts, lambda m: {"num_rows": m, "num_local_experts": GROUPS}),
    "fold_rows": _case("fold_rows", _mx),
    "balance_scales": _case("balance_scales", _weight_scales),
    "fold_rows_balanced": _case("fold_rows_balanced", _mx_and_lift),
    "count_fold_loss": _case("count_fold_loss", _mx_and_target),
    "fold_groups": Case("fold_groups", _groups, multiple=32),
    "quantize_both_fold": _case("quantize_both_fold", _matrix_and_ends),
    "quantize_both_fold_fp32": _case("quantize_both_fold", _matrix_and_ends_fp32, rounding=1, satfinite=True),
    "requantize_col_fold": _case("requantize_col_fold", _mx_and_ends),
    "quantize_matrix_fold": _case("quantize_matrix_fold", _weight, rounding=1, satfinite=True),
    "quantize_matrix_fold_3d": _case("quantize_matrix_fold", _matrices),
    "block_scales": _case("block_scales", _scales),
    "unblock_scales": Case("unblock_scales", _blocked_scales, lambda m: {"num_rows": m, "num_scales": K // 32}),
    "combine": _case("combine", _combine),
    "combine_unweighted_fp32": _case("combine", _unweighted(_combine), out_dtype="float32"),
    "combine_bwd": _case("combine_bwd", _combine_bwd),
    "combine_bwd_row": _case("combine_bwd_row", _combine_bwd_row),
    "combine_bwd_unweighted": _case("combine_bwd", _unweighted(_combine_bwd)),
    **{f"swiglu{to}": _case(f"swiglu{to}", _swiglu) for to in ("", "_row", "_col")},
    **{f"swiglu_bwd{to}": _case(f"swiglu_bwd{to}", _swiglu_bwd) for to in ("", "_row", "_col", "_both")},
    **{f"swiglu{to}_clamped": _case(f"swiglu{to}", _swiglu, **_CLAMPED) for to in ("", "_row", "_col")},
    **{
        f"swiglu_bwd{to}_clamped": _case(f"swiglu_bwd{to}", _swiglu_bwd, **_CLAMPED)
        for to in ("", "_row", "_col", "_both")
    },
    "swiglu_unweighted": _case("swiglu", _unweighted(_swiglu)),
    "swiglu_bwd_unweighted": _case("swiglu_bwd", _unweighted(_swiglu_bwd)),
    "grouped_mm_mx": _case("grouped_mm_mx", _grouped_mm_mx),
    "grouped_mm_bf16": _case("grouped_mm_bf16", _grouped_mm_bf16),
    "grouped_wgrad_mx": Case("grouped_wgrad_mx", _grouped_wgrad_mx, multiple=32),
    "grouped_wgrad_bf16": _case("grouped_wgrad_bf16", _grouped_wgrad_bf16),
    "grouped_wgrad_bf16_t": Case("grouped_wgrad_bf16_t", _wgrad_t, multiple=32),
    "grouped_mm_bf16_kn": _case("grouped_mm_bf16_kn", _grouped_mm_bf16_kn),
    "grouped_mm_bf16_kn_sum": _case("grouped_mm_bf16_kn_sum", _grouped_mm_bf16_kn_sum),
    "grouped_mm_bf16_kn_tiles": _case("grouped_mm_bf16_kn", _kn_of_many_tiles, out_dtype="float32"),
    "grouped_mm_bf16_tiles": _case("grouped_mm_bf16", _mm_of_many_tiles, out_dtype="float32"),
    "grouped_wgrad_bf16_tiles": _case("grouped_wgrad_bf16", _wgrad_of_many_tiles, out_dtype="float32"),
    "grouped_wgrad_bf16_t_tiles": Case(
        "grouped_wgrad_bf16_t", _wgrad_t_of_many_tiles, lambda m: {"out_dtype": "float32"}, multiple=32
    ),
    "grouped_mm_fold": _case("grouped_mm_fold", _grouped_mm_fold),
    "grouped_mm_fold_fp32": _case("grouped_mm_fold", _grouped_mm_fold, out_dtype="float32"),
    "grouped_mm_fold_bias": _case("grouped_mm_fold_bias", _grouped_mm_fold_bias),
    "grouped_mm_fold_sum": _case("grouped_mm_fold_sum", _grouped_mm_fold_sum),
    "grouped_mm_fold_sum_fp32": _case("grouped_mm_fold_sum", _grouped_mm_fold_sum, out_dtype="float32"),
    "grouped_mm_fold_bias_fp32": _case("grouped_mm_fold_bias", _grouped_mm_fold_bias, out_dtype="float32"),
    "grouped_mm_blockwise": _case("grouped_mm_blockwise", _grouped_mm_blockwise),
    "grouped_mm_blockwise_tiles": _case("grouped_mm_blockwise", _blockwise_of_many_tiles, out_dtype="float32"),
    "grouped_wgrad_fold": Case("grouped_wgrad_fold", _grouped_wgrad_fold, multiple=32),
}
EDGES = [(name, m) for name, case in CASES.items() for m in case.edges]
