"""Cases of the family `quantize`."""

from ..cases import F32, GROUPS, Arrays, Case, K, Rng, floats
from .oracle import quantize_row

ROWS = (
    *("quantize_row", "quantize_row_packed", "quantize_rowwise"),
    *("quantize_blockwise", "quantize_squares", "quantize_squares_both"),
)
COLUMNS = ("quantize_col", "quantize_both")


def matrix(rng: Rng, m: int) -> Arrays:
    return (floats(rng, m, K),)


def matrix_fp32(rng: Rng, m: int) -> Arrays:
    return (floats(rng, m, K, dtype=F32),)


def experts(rng: Rng, m: int) -> Arrays:
    return (floats(rng, GROUPS, m, K),)


def mx(rng: Rng, m: int) -> Arrays:
    return quantize_row(floats(rng, m, K))


def of_matrices(*ops: str, multiple: int = 1) -> dict[str, Case]:
    makes = {"": matrix, "_fp32": matrix_fp32, "_3d": experts}
    return {
        f"{op}{kind}": Case(op, make, {}, multiple)
        for op in ops
        for kind, make in makes.items()
        if (op, kind) != ("quantize_row_packed", "_3d")
    }


CASES = {
    **of_matrices(*ROWS),
    **of_matrices(*COLUMNS, multiple=32),
    "quantize_both_floor_satfinite": Case("quantize_both", matrix, {"rounding": 1, "satfinite": True}, 32),
    "dequantize": Case("dequantize", mx),
    "dequantize_fp32": Case("dequantize", mx, {"out_dtype": "float32"}),
}
