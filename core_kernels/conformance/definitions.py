"""The definition of every op by the op's name, from the oracles of all families; and of a whole feed-forward."""

from collections.abc import Callable

from ..combine import oracle as combine
from ..fold import oracle as fold
from ..grouped_gemm.blockwise import oracle as grouped_gemm_blockwise
from ..grouped_gemm.exact import oracle as grouped_gemm
from ..grouped_gemm.folded import oracle as oracle_folded
from ..oracle_math import Array
from ..permute import oracle as permute
from ..quantize import oracle as quantize
from ..quantize import oracle_blockwise as quantize_blockwise
from ..reference import ffn
from ..registry import OPS
from ..router import oracle as router
from ..routing import oracle as routing
from ..scale_layout import oracle as scale_layout
from ..swiglu import oracle as swiglu

ORACLES = (
    *(quantize, quantize_blockwise, permute, router, routing, scale_layout, swiglu, combine, fold),
    *(grouped_gemm, oracle_folded, grouped_gemm_blockwise),
)


def swiglu_ffn(x: Array, w1: Array, w3: Array, w2: Array, group_ends: Array, prob: Array) -> Array:
    """x (P, D) bf16, w1 and w3 (G, F, D), w2 (G, D, F) bf16, prob (P,) fp32 or (0,) -> out (P, D) bf16.

    Operands of each product are quantized along its sum, by RCEIL; gate, up and h are rounded to bf16. Rows past the
    last end are zeros.
    """
    return ffn.swiglu_ffn(x, w1, w3, w2, group_ends, prob, ffn.Precision("mx", True))


DEFINITIONS: dict[str, Callable] = {
    name: value for oracle in ORACLES for name, value in vars(oracle).items() if name in OPS
} | {"swiglu_ffn": swiglu_ffn}
