"""One small call of every op: arrays by their names, and the options that have no default.

Tests that go through all ops take these calls for the ops that they have no case of their own for.
"""

from typing import Any

import ml_dtypes
import numpy as np
from mxep.core_kernels.launch import ArrayType, KernelOp
from mxep.core_kernels.registry import OPS

SIZE = 32
PRODUCTS = {name for name in OPS if name.startswith(("grouped_", "logits_"))}
"""Ops with an error bound, which the framework's own matmul computes on a CPU; the others write exact bytes."""


def _types(dtype: str, **shapes: tuple[int, ...]) -> dict[str, ArrayType]:
    return {name: ArrayType(shape, dtype) for name, shape in shapes.items()}


SQUARE, COLUMN, ROW = (SIZE, SIZE), (SIZE, 1), (SIZE,)
TYPES = {
    **_types("bfloat16", x=SQUARE, gate=SQUARE, up=SQUARE, dh=SQUARE, rows=SQUARE, dy=SQUARE),
    **_types("float32", logits=SQUARE, dweights=COLUMN, dshares=ROW, weights=ROW),
    **_types("bfloat16", lhs=SQUARE, lhs_t=SQUARE, rhs=SQUARE, rhs_t=SQUARE),
    **_types("uint8", q=SQUARE, sf=COLUMN, packed=(SIZE, SIZE + 1), blocked=(128, 4)),
    **_types("uint8", lhs_q=SQUARE, lhs_sf=COLUMN, rhs_q=SQUARE, rhs_sf=COLUMN, lhs_qf=SQUARE, rhs_qf=SQUARE),
    **_types("int32", row_map=ROW, slots=COLUMN, order=ROW, expert_ids=ROW, counts=(1,), group_ends=(1,)),
    **_types("float32", prob=ROW, probs=COLUMN, bias=(1, SIZE)),
    **_types("bfloat16", dlogits=(SIZE, 2), weight=(1, SIZE), dx=SQUARE),
}
"""Name of an array -> its type in most ops."""
WEIGHTS = {
    **_types("uint8", rhs_q=(1, SIZE, SIZE), rhs_sf=(1, SIZE, 1), rhs_qf=(1, SIZE, SIZE)),
    **_types("bfloat16", rhs_t=(1, SIZE, SIZE)),
}
SPECIAL = {
    "route": _types("float32", bias=ROW),
    "route_bwd": _types("int32", expert_ids=COLUMN),
    "grouped_mm_mx": WEIGHTS,
    "grouped_mm_bf16": WEIGHTS,
    "grouped_mm_bf16_kn": _types("bfloat16", rhs=(1, SIZE, SIZE)),
    "grouped_mm_bf16_kn_sum": _types("bfloat16", rhs=(1, SIZE, SIZE), lhs2=SQUARE, rhs2=(1, SIZE, SIZE)),
    "grouped_mm_fold": WEIGHTS | _types("uint8", lhs_sf=ROW, rhs_sf=(1, SIZE)),
    "grouped_mm_fold_bias": WEIGHTS | _types("uint8", lhs_sf=ROW, rhs_sf=(1, SIZE)),
    "grouped_mm_fold_sum": WEIGHTS
    | _types("uint8", lhs_sf=ROW, rhs_sf=(1, SIZE), lhs2_sf=ROW, rhs2_sf=(1, SIZE))
    | _types("uint8", lhs2_qf=SQUARE, rhs2_qf=(1, SIZE, SIZE)),
    "grouped_mm_blockwise": WEIGHTS | _types("float32", lhs_sf=COLUMN, rhs_sf=(1, 1, 1)),
    "grouped_mm_fold_pair": WEIGHTS
    | _types("uint8", lhs_sf=ROW, rhs_sf=(1, SIZE), rhs2_qf=(1, SIZE, SIZE), rhs2_sf=(1, SIZE)),
    "grouped_wgrad_fold": _types("uint8", lhs_sf=(1, SIZE), rhs_sf=(1, SIZE)),
    "grouped_wgrad_fold_pair": _types("uint8", lhs_sf=(1, SIZE), rhs_sf=(1, SIZE), lhs2_qf=SQUARE, lhs2_sf=(1, SIZE)),
}
"""Op -> types of its arrays that differ."""
OPTIONS: dict[str, dict[str, Any]] = {
    "route": {"top_k": 1},
    "sort_by_expert": {"num_experts": 1},
    "row_map": {"num_rows": SIZE, "num_local_experts": 1},
    "slot_map": {"top_k": 1},
    "unblock_scales": {"num_rows": SIZE, "num_scales": 1},
}
INDICES = {"row_map": np.arange(SIZE), "slots": np.arange(SIZE), "order": np.arange(SIZE), "expert_ids": np.zeros(SIZE)}


def sample(op: KernelOp) -> tuple[list[ArrayType], dict[str, Any]]:
    """Types and options of a call."""
    types = TYPES | SPECIAL.get(op.name, {})
    return [types[name] for name in op.inputs], OPTIONS.get(op.name, {})


def sample_arrays(op: KernelOp) -> list[np.ndarray]:
    """Values of these types: normal numbers, E4M3 and E8M0 of magnitude one, rows that exist, one group."""
    rng = np.random.default_rng(0)
    arrays = []
    for name, (shape, dtype) in zip(op.inputs, sample(op)[0], strict=True):
        if dtype == "uint8":
            low = 120 if "sf" in name else 40
            arrays.append(rng.integers(low, low + 30, shape, np.uint8))
        elif dtype == "int32":
            arrays.append(INDICES.get(name, np.full(shape, SIZE)).reshape(shape).astype(np.int32))
        else:
            kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
            arrays.append(rng.standard_normal(shape).astype(kind))
    return arrays
