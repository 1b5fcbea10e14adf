"""The gradient of the tokens: from the logits of the router, and from the experts.

    dlogits (T, 2 E)  | high | low |, from `route_bwd`
    weight  (E, D)      w                                 --> high w + low w + dx, in fp32, rounded once (T, D)
    dx      (T, D)      from the experts

A value is read once and written once, 4 bytes; a framework's product and its sum with dx move 8 to 16.
"""

from ..dispatch import facts
from ..launch import ArrayType, Call, KernelOp, Signature, Tiling, require_dtype, require_rank, require_shape
from ..tiles import cdiv, next_power_of_2, tiles
from .plan import ABSENT


def _check(dlogits: ArrayType, weight: ArrayType, dx: ArrayType) -> Signature:
    op = "logits_bwd"
    for name, array in (("dlogits", dlogits), ("weight", weight), ("dx", dx)):
        require_dtype(op, name, array, "bfloat16")
    require_rank(op, "dlogits", dlogits, 2)
    require_rank(op, "weight", weight, 2)
    (tokens, _), (experts, dim) = dlogits.shape, weight.shape
    require_shape(op, "dlogits", dlogits, (tokens, 2 * experts), "two terms per expert of weight (E, D)")
    if dx.shape != ABSENT:
        require_shape(op, "dx", dx, (tokens, dim), "a row per row of dlogits, as wide as weight; or (0,) for none")
    return Signature((ArrayType((tokens, dim), "bfloat16"),))


def _tile(call: Call, arch: str) -> Tiling:
    (tokens, dim), experts, t = call.out[0].shape, call.inputs[1].shape[0], tiles(call.op, arch)
    grid = (cdiv(tokens, t.m) * cdiv(dim, t.n),)
    f = facts(arch)
    meta = {"E": experts, "D": dim, "ADDS": call.inputs[2].shape != ABSENT, "HW_CAST": f.hw_cast, "TCGEN05": f.tcgen05}
    # A tensor core multiplies 16 bf16 values at a time along the experts.
    blocks = {"BLOCK_M": t.m, "BLOCK_N": t.n, "BLOCK_E": min(t.k, max(next_power_of_2(experts), 16))}
    return t.tiling(grid, {"T": tokens}, **meta, **blocks)


logits_bwd = KernelOp(
    "logits_bwd",
    """The gradient of x from the gradient of logits = x weight^T, added to another gradient of x.

    Args:
        dlogits: (T, 2 E) bf16, two terms of the gradient of the logits, as `route_bwd` with split returns.
        weight: (E, D) bf16.
        dx: (T, D) bf16, from the experts; or (0,) for none.

    Returns:
        total (T, D) bf16 = dx + high weight + low weight, summed in fp32 and rounded once.

    Raises:
        ValueError: shape.
        TypeError: dtype.

    Example:
        >>> terms, weight = xp.asarray([[1, 0.5]], dtype=xp.bfloat16), xp.asarray([[2, 4]], dtype=xp.bfloat16)
        >>> ops.logits_bwd(terms, weight, xp.ones((1, 2), dtype=xp.bfloat16)).tolist()
        [[4.0, 7.0]]
    """,
    ("dlogits", "weight", "dx"),
    ("total",),
    _check,
    _tile,
    "router.kernel_logits:logits_bwd_kernel",
)
