"""The choice of experts from the router's logits, and its gradient. Each reads the logits once.

    logits (T, E)  --route----> expert_ids, weights (T, k)        the k best experts of each token
      bias (E,)                 share_sums (T/8, E) fp32         each expert's part of the scores, over 8 tokens

    dweights (T, k), dshares (E,), logits, expert_ids  --route_bwd--> dlogits (T, E), or two bf16 terms of it (T, 2 E)

The score of an expert is the softmax of the logits over all experts, or its own sigmoid. `bias` is added to the scores
for the choice alone. With groups, the choice is among the experts of the best groups. The weights are the scores of the
chosen experts, divided by their sum if `normalize`, times `route_scale`. "softmax_of_chosen" chooses by logits, and its
weights are the softmax over the chosen ones.

A share is a score divided by the sum over all experts. The sums of the shares over the tokens are what Switch's
auxiliary loss needs; their gradient is `dshares`. Of equal scores the lower expert comes first, NaN is above all
numbers, and -0 equals 0. A NaN logit makes its token's weights and gradients NaN, and share_sums of its 8 tokens. All
sums are fixed-point (oracle.py), so that every implementation writes the same bytes.
"""

import math
import struct

from ..dispatch import facts
from ..launch import (
    ArrayType,
    Call,
    KernelOp,
    Signature,
    Tiling,
    fail,
    require_dtype,
    require_rank,
    require_shape,
    require_size,
)
from ..tiles import cdiv, next_power_of_2

SCORES = ("softmax", "sigmoid", "softmax_of_chosen")
GROUP_SCORES = ("top2", "max")
MOST_EXPERTS, MOST_CHOSEN = 512, 32
CHUNK = 8
"""Tokens of one row of share_sums, and of one program of the Triton kernels."""
ABSENT = (0,)
"""The shape of an array that is left out."""


def _check_logits(op: str, logits: ArrayType) -> int:
    """The number of experts."""
    require_dtype(op, "logits", logits, "float32", "bfloat16")
    require_rank(op, "logits", logits, 2)
    experts = logits.shape[1]
    if not 1 <= experts <= MOST_EXPERTS:
        fail(ValueError, op, "logits", f"shape {logits.shape}", f"allowed: (T, E), E from 1 to {MOST_EXPERTS}")
    return experts


def _check_per_expert(op: str, name: str, array: ArrayType, experts: int) -> None:
    require_dtype(op, name, array, "float32")
    if array.shape != ABSENT:
        require_shape(op, name, array, (experts,), "one value per expert; or (0,) for none")


def _score_attrs(op: str, score_func: str, normalize: bool, route_scale: float) -> dict[str, int]:
    """The attributes of the options that both ops have."""
    if score_func not in SCORES:
        fail(ValueError, op, "score_func", repr(score_func), f"allowed: {', '.join(map(repr, SCORES))}")
    if normalize not in (False, True):
        fail(TypeError, op, "normalize", repr(normalize), "allowed: a bool")
    if score_func == "softmax_of_chosen" and not normalize:
        fail(ValueError, op, "normalize", "False", "allowed: True, since the softmax of the chosen sums to one")
    if isinstance(route_scale, bool) or not isinstance(route_scale, int | float):
        fail(TypeError, op, "route_scale", repr(route_scale), "allowed: a float")
    if not math.isfinite(route_scale) or not 2.0**-126 <= abs(route_scale) < 2.0**127:
        fail(ValueError, op, "route_scale", route_scale, "allowed: numbers that fp32 holds, except for 0")
    (bits,) = struct.unpack("<i", struct.pack("<f", route_scale))
    return {"score_func": SCORES.index(score_func), "normalize": int(normalize), "route_scale": bits}


def check_choice(
    op: str, *, top_k: int, score_func: str, normalize: bool, route_scale: float, num_groups: int, top_k_groups: int,
    group_score: str, force_balance: bool,
) -> dict[str, int]:  # fmt: skip
    """The attributes of `route`; raises ValueError or TypeError for options that no number of experts allows."""
    for name, size in (("top_k", top_k), ("num_groups", num_groups), ("top_k_groups", top_k_groups)):
        require_size(op, name, size, 1)
    if group_score not in GROUP_SCORES:
        fail(ValueError, op, "group_score", repr(group_score), f"allowed: {' or '.join(map(repr, GROUP_SCORES))}")
    if top_k_groups > num_groups:
        fail(ValueError, op, "top_k_groups", top_k_groups, f"allowed: 1 to num_groups = {num_groups}")
    if top_k > MOST_CHOSEN:
        fail(ValueError, op, "top_k", top_k, f"allowed: 1 to the most of the op = {MOST_CHOSEN}")
    if force_balance not in (False, True):
        fail(TypeError, op, "force_balance", repr(force_balance), "allowed: a bool")
    if force_balance and num_groups > 1:
        fail(ValueError, op, "force_balance", "True", "allowed: False with groups; pass num_groups=1")
    groups = {"num_groups": num_groups, "top_k_groups": top_k_groups, "group_score": GROUP_SCORES.index(group_score)}
    attrs = {"top_k": top_k, **_score_attrs(op, score_func, normalize, route_scale), **groups}
    return {**attrs, "force_balance": int(force_balance)}


def find_misfit(
    experts: int, top_k: int, num_groups: int, top_k_groups: int, group_score: str
) -> tuple[str, int, str] | None:
    """The option of `check_choice` that does not fit this number of experts: its name, its value, what is allowed."""
    if experts % num_groups or (num_groups > 1 and experts == num_groups and group_score == "top2"):
        allowed = f"allowed: divisors of {experts}, the number of experts, with at least 2 experts in a group"
        return "num_groups", num_groups, allowed
    most = experts // num_groups * top_k_groups
    if top_k > most:
        what = "num_experts" if num_groups == 1 else "the experts of the chosen groups"
        return "top_k", top_k, f"allowed: 1 to {what} = {most}"
    return None


def _check_route(
    logits: ArrayType, bias: ArrayType, *, top_k: int, score_func: str = "softmax", normalize: bool = True,
    route_scale: float = 1.0, num_groups: int = 1, top_k_groups: int = 1, group_score: str = "top2",
    force_balance: bool = False,
) -> Signature:  # fmt: skip
    op = "route"
    experts = _check_logits(op, logits)
    _check_per_expert(op, "bias", bias, experts)
    attrs = check_choice(
        op, top_k=top_k, score_func=score_func, normalize=normalize, route_scale=route_scale, num_groups=num_groups,
        top_k_groups=top_k_groups, group_score=group_score, force_balance=force_balance,
    )  # fmt: skip
    if misfit := find_misfit(experts, top_k, num_groups, top_k_groups, group_score):
        fail(ValueError, op, *misfit)
    tokens = logits.shape[0]
    out = (
        ArrayType((tokens, top_k), "int32"),
        ArrayType((tokens, top_k), "float32"),
        ArrayType((cdiv(tokens, CHUNK), experts), "float32"),
    )
    return Signature(out, attrs)


def _check_route_bwd(
    dweights: ArrayType, dshares: ArrayType, logits: ArrayType, expert_ids: ArrayType, *,
    score_func: str = "softmax", normalize: bool = True, route_scale: float = 1.0, split: bool = False,
) -> Signature:  # fmt: skip
    op = "route_bwd"
    experts = _check_logits(op, logits)
    require_dtype(op, "expert_ids", expert_ids, "int32")
    require_rank(op, "expert_ids", expert_ids, 2)
    if not 1 <= expert_ids.shape[1] <= min(experts, MOST_CHOSEN):
        allowed = f"allowed: (T, k), k from 1 to {min(experts, MOST_CHOSEN)}"
        fail(ValueError, op, "expert_ids", f"shape {expert_ids.shape}", allowed)
    require_shape(op, "expert_ids", expert_ids, (logits.shape[0], expert_ids.shape[1]), "a row per row of logits")
    require_dtype(op, "dweights", dweights, "float32")
    require_shape(op, "dweights", dweights, expert_ids.shape, "expert_ids'")
    _check_per_expert(op, "dshares", dshares, experts)
    if split not in (False, True):
        fail(TypeError, op, "split", repr(split), "allowed: a bool")
    if split:
        require_dtype(op, "logits", logits, "float32")
    out = ArrayType((logits.shape[0], 2 * experts), "bfloat16") if split else logits
    return Signature((out,), {**_score_attrs(op, score_func, normalize, route_scale), "split": int(split)})


def _tile_route(call: Call, arch: str) -> Tiling:
    (tokens, experts), (_, top_k), bias = call.inputs[0].shape, call.out[0].shape, call.inputs[1].shape
    meta = {"E": experts, "BIASED": bias != ABSENT, "HW_CAST": facts(arch).hw_cast, "BLOCK_M": CHUNK}
    # Groups are padded each for itself, up to twice as wide as without groups.
    groups = call.attrs["num_groups"]
    blocks = {"BLOCK_G": next_power_of_2(groups), "BLOCK_E": next_power_of_2(experts // groups)}
    width = blocks["BLOCK_G"] * blocks["BLOCK_E"]
    return Tiling(
        (cdiv(tokens, CHUNK),), {"T": tokens}, {**meta, **blocks, "BLOCK_K": next_power_of_2(top_k)}, _warps(width)
    )


def _tile_route_bwd(call: Call, arch: str) -> Tiling:
    (tokens, experts), top_k = call.inputs[2].shape, call.inputs[0].shape[1]
    width = next_power_of_2(experts)
    meta = {"E": experts, "top_k": top_k, "SHARED": call.inputs[1].shape != ABSENT, "HW_CAST": facts(arch).hw_cast}
    return Tiling((cdiv(tokens, CHUNK),), {"T": tokens}, {**meta, "BLOCK_M": CHUNK, "BLOCK_E": width}, _warps(width))


def _warps(width: int) -> int:
    """At most 16 values per thread, or 32 where a row has more than 512 places; 4 or 8 warps."""
    return min(max(CHUNK * width // (16 * 32), 4), 8)


_OPTIONS = """score_func: "softmax" over all experts, "sigmoid" of each, or "softmax_of_chosen".
        normalize: divide the weights of a token by their sum.
        route_scale: the factor of the weights."""

route = KernelOp(
    "route",
    f"""The experts of each token and their weights, from the logits of the router.

    Args:
        logits: (T, E) fp32 or bf16, E up to 512.
        bias: (E,) fp32, added to the scores for the choice alone, or (0,).
        top_k: experts per token, up to 32.
        {_OPTIONS}
        num_groups: the choice is among the top_k_groups best of num_groups groups of neighbouring experts.
        top_k_groups: the choice is among the top_k_groups best of num_groups groups of neighbouring experts.
        group_score: "top2", the sum of a group's two best, or "max", its best.
        force_balance: token t takes the experts t * top_k, t * top_k + 1, ... modulo E, whatever the scores, for
            benchmarks.

    Returns:
        expert_ids (T, top_k) int32, best first, equal scores by expert, NaN above all numbers; weights (T, top_k) fp32;
        share_sums (ceil(T/8), E) fp32: over 8 tokens each, the sum of an expert's share of its token's scores.

    Raises:
        ValueError: shape, value.
        TypeError: dtype.

    Example:
        >>> ids, weights, _ = ops.route(xp.asarray([[0.0, 2.0, 1.0]]), xp.zeros((0,)), 2, "sigmoid", False)
        >>> ids.tolist(), [round(float(w), 4) for w in weights[0]]
        ([[1, 2]], [0.8808, 0.7311])

    Source:
        Fedus et al., "Switch Transformers", 2021; DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2.
    """,
    ("logits", "bias"),
    ("expert_ids", "weights", "share_sums"),
    _check_route,
    _tile_route,
    "router.kernel:route_kernel",
)
route_bwd = KernelOp(
    "route_bwd",
    f"""The gradient of `route`: dlogits from the gradients of the weights and of the sums of shares.

    Args:
        dweights: (T, k) fp32.
        dshares: (E,) fp32, the gradient of the sum over all tokens of each expert's share, or (0,) for none.
        logits: (T, E) fp32 or bf16.
        expert_ids: (T, k) int32, different experts in a row, as `route` returns.
        {_OPTIONS}
        split: for fp32 logits, return two bf16 terms instead, for products with bf16.

    Returns:
        dlogits (T, E) in the dtype of logits; or its terms (T, 2 E) bf16: rounded, then the remainder, 0 where the
        first is no number.

    Raises:
        ValueError: shape, on a CPU also an expert that does not exist.
        TypeError: dtype.

    Example:
        >>> ids = xp.asarray([[1]], dtype=xp.int32)
        >>> ops.route_bwd(xp.ones((1, 1)), xp.zeros((0,)), xp.zeros((1, 2)), ids, "sigmoid", False).tolist()
        [[0.0, 0.25]]
    """,
    ("dweights", "dshares", "logits", "expert_ids"),
    ("dlogits",),
    _check_route_bwd,
    _tile_route_bwd,
    "router.kernel:route_bwd_kernel",
)
