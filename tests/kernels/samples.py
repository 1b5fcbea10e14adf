"""One small call of every op: types of its arrays, by their names, and the options that have no default."""

from typing import Any

from mxep.core_kernels.launch import ArrayType, KernelOp


def _types(dtype: str, **shapes: tuple[int, ...]) -> dict[str, ArrayType]:
    return {name: ArrayType(shape, dtype) for name, shape in shapes.items()}


SQUARE, SCALES = (32, 32), (32, 1)
TYPES = {
    **_types("bfloat16", x=SQUARE, gate=SQUARE, up=SQUARE, dh=SQUARE, rows=SQUARE, dy=SQUARE),
    **_types("bfloat16", lhs=SQUARE, lhs_t=SQUARE, rhs=SQUARE, rhs_t=SQUARE),
    **_types("uint8", q=SQUARE, sf=SCALES, target=SCALES, packed=(32, 33), blocked=(128, 4)),
    **_types("uint8", lhs_q=SQUARE, lhs_sf=SCALES, rhs_q=SQUARE, rhs_sf=SCALES, lhs_qf=SQUARE, rhs_qf=SQUARE),
    **_types("int32", row_map=(32,), slots=SCALES, order=(32,), expert_ids=(32,), counts=(1,), group_ends=(1,)),
    **_types("float32", prob=(32,), probs=SCALES, bias=(1, 32)),
}
"""Where ops use one name for several types, that of most of them."""
WEIGHTS = {
    **_types("uint8", rhs_q=(1, 32, 32), rhs_sf=(1, 32, 1), rhs_qf=(1, 32, 32)),
    **_types("bfloat16", rhs_t=(1, 32, 32)),
}
SPECIAL = {
    "grouped_mm_mx": WEIGHTS,
    "grouped_mm_bf16": WEIGHTS,
    "grouped_mm_fold": WEIGHTS | _types("uint8", lhs_sf=(32,), rhs_sf=(1, 32)),
    "grouped_mm_fold_bias": WEIGHTS | _types("uint8", lhs_sf=(32,), rhs_sf=(1, 32)),
    "grouped_wgrad_fold": _types("uint8", lhs_sf=(1, 32), rhs_sf=(1, 32)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "sort_by_expert": {"num_experts": 1},
    "row_map": {"num_rows": 32, "num_local_experts": 1},
    "unblock_scales": {"num_rows": 32, "num_scales": 1},
}


def sample(op: KernelOp) -> tuple[list[ArrayType], dict[str, Any]]:
    """Types and options of a call."""
    types = TYPES | SPECIAL.get(op.name, {})
    return [types[name] for name in op.inputs], OPTIONS.get(op.name, {})
