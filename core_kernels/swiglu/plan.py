"""SwiGLU between the two products of an expert, forward and backward, quantized on its way out.

    gate, up (M, F)  --swiglu---------> h (M, F) bf16         h = silu(gate) * up * prob
      prob (M,)      --swiglu_row-----> quantize_row(h)       for the product with w2
                     --swiglu_col-----> quantize_col(h)       for w2's gradient

    dh, gate, up     --swiglu_bwd-----> dgate, dup (M, F) bf16, dprob (M,) fp32
      prob           --swiglu_bwd_row-> quantize_row of each; likewise _col and _both

`prob` of shape (0,) weighs every row one. h, dgate and dup are rounded to bf16 before they are quantized, so a fused
op writes the bytes of the two ops it replaces. oracle.py defines every byte; only the order of dprob's sum is free.
"""

from ..formats import BLOCK, Rounding, scale_attrs
from ..launch import ArrayType, KernelOp, Launch, require_dtype, require_multiple, require_rank, require_shape
from ..tiles import cdiv, hw_cast, strip_tiles, tiles
from . import kernel as kernels


def _is_weighted(op: str, arrays: dict[str, ArrayType], prob: ArrayType) -> bool:
    """Check the arguments of `op`, `arrays` being those that have gate's shape; whether `prob` has a weight per row."""
    require_rank(op, "gate", arrays["gate"], 2)
    shape = arrays["gate"].shape
    for name, array in arrays.items():
        require_dtype(op, name, array, "bfloat16")
        require_shape(op, name, array, shape, "gate's")
    require_dtype(op, "prob", prob, "float32")
    # An empty tensor's size is a number also while a compiler traces; one that is a symbol counts rows.
    if len(prob.shape) == 1 and isinstance(prob.shape[0], int) and prob.shape[0] == 0:
        return False
    require_shape(op, "prob", prob, shape[:1], "one weight per row; or (0,): every row weighs one")
    return True


def _result_types(op: str, shape: tuple[int, ...], row: bool, col: bool) -> tuple[ArrayType, ...]:
    """What an (M, F) result is written as: bf16, or bytes scaled along rows, columns or both."""
    m, f = shape
    if row:
        require_multiple(op, "gate", f, BLOCK, "last dim")
    if col:
        require_multiple(op, "gate", m, BLOCK, "dim 0 (scaled along)")
    along_row = (ArrayType((m, f), "uint8"), ArrayType((m, f // BLOCK), "uint8")) if row else ()
    along_col = (ArrayType((f, m), "uint8"), ArrayType((f, m // BLOCK), "uint8")) if col else ()
    return along_row + along_col or (ArrayType((m, f), "bfloat16"),)


def _define(op: str, kernel: object, inputs: tuple[str, ...], row: bool = False, col: bool = False) -> KernelOp:
    backward, quantized = "dh" in inputs, row or col
    parts = ("_q", "_sf") * row + ("_q_t", "_sf_t") * col or ("",)
    names = ("dgate", "dup") if backward else ("h",)
    outputs = (*(f"{name}{part}" for name in names for part in parts), *(("dprob",) if backward else ()))

    def launch(arrays: tuple[ArrayType, ...], arch: str, attrs: dict[str, int]) -> Launch:
        *same_shape, prob = arrays
        weighted = _is_weighted(op, dict(zip(inputs, same_shape, strict=False)), prob)
        m, f = shape = arrays[0].shape
        result = _result_types(op, shape, row, col)
        out = (*result, *result, prob) if backward else result
        if arch == "cpu":
            return Launch(out, tuple(attrs.values()))
        t = strip_tiles(op, arch, f) if backward and not col else tiles(op, arch, row_width=f)
        down, across = cdiv(m, t.m), cdiv(f, t.k)
        return Launch(
            out=out,
            attrs=tuple(attrs.values()),
            # a backward program with `prob` walks along its rows, also where they are empty
            grid=(down, 1 if weighted else across) if backward else (down * across,),
            scalars={"M": m},
            meta={"F": f, "WEIGHTED": weighted, **attrs, "HW_CAST": hw_cast(arch), "BLOCK_M": t.m, "BLOCK_K": t.k},
            num_warps=t.num_warps,
            num_stages=t.num_stages,
        )

    def plan(*arrays: ArrayType, arch: str) -> Launch:
        return launch(arrays, arch, {})

    def plan_quantized(
        *arrays: ArrayType, arch: str, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False
    ) -> Launch:
        return launch(arrays, arch, scale_attrs(op, rounding, satfinite))

    attrs, make_plan = (("rounding", "satfinite"), plan_quantized) if quantized else ((), plan)
    return KernelOp(op, kernel, inputs, outputs, attrs, make_plan)


_FORWARD, _BACKWARD = ("gate", "up", "prob"), ("dh", "gate", "up", "prob")
swiglu = _define("swiglu", kernels.forward_kernel, _FORWARD)
swiglu_row = _define("swiglu_row", kernels.row_kernel, _FORWARD, row=True)
swiglu_col = _define("swiglu_col", kernels.col_kernel, _FORWARD, col=True)
swiglu_bwd = _define("swiglu_bwd", kernels.bwd_kernel, _BACKWARD)
swiglu_bwd_row = _define("swiglu_bwd_row", kernels.bwd_row_kernel, _BACKWARD, row=True)
swiglu_bwd_col = _define("swiglu_bwd_col", kernels.bwd_col_kernel, _BACKWARD, col=True)
swiglu_bwd_both = _define("swiglu_bwd_both", kernels.bwd_both_kernel, _BACKWARD, row=True, col=True)
