"""The loss of `compute="fold"`, "balanced" and "stepped" on a layer: each operand of the layer, folded and unfolded.

    x, params --route, quantize, multiply--> x  w1  w3  gate  up  h  w2          forward
    dout -----gather, quantize, multiply---> dout  w2_t  dh  dgate  dup  w1_t  w3_t   backward, as far as operands go
                                             x_t  h_t  dout_t  dgate_t  dup_t    recipe "mxfp8"
    each --fold--> counts, energies --> core_kernels/fold/report.py

The products are the exact ones on any device, so that no operand contains the error of an earlier fold.
"""

from functools import reduce

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..core_kernels.fold.report import (
    BALANCED,
    Measured,
    NumericsReport,
    report,
    row_slices,
    share_apart,
    slots_of_blocks,
)
from ..core_kernels.formats import BLOCK, E8M0_NAN, GRADIENT_HEADROOM, WEIGHT_HEADROOM
from ..core_kernels.launch import fail
from . import ops
from ._call import require_tensor
from ._checks import check_plain
from .balanced import GroupedRows
from .moe import MoE
from .products import bias_of_rows
from .weighted_combine import weigh_slots

OP = "numerics_report"
CHUNK = 1 << 24
"""Values per step of the energies, which are fp32."""


@torch.no_grad()
def numerics_report(moe: MoE, x: Tensor, dout: Tensor | None = None) -> NumericsReport:
    """Report the loss of folding the operands of `moe` on these tokens: whether another compute is needed.

    x: (..., D) bfloat16 or float32, on the layer's device. dout: the gradient of the layer's output, like x; None
    draws normal values from a fixed seed. The report covers every MXFP8 operand of the recipe, whatever its compute:
    activations, weights in both orientations, gradients; with recipe "mxfp8" also the operands along the tokens.

    Runs forward and backward once without autograd; the layer does not change. The host reads a quarter of a byte per
    value of each operand: some thousand tokens are enough.

    >>> layer = MoE(64, 128, num_experts=2, top_k=1, recipe="mxfp8")
    >>> tokens = torch.randn(512, 64)
    >>> numerics_report(layer, tokens).lossy()
    ()
    >>> with torch.no_grad():  # 32 channels 2^16 larger, their weights 2^16 smaller
    ...     layer.router.weight[:, :32] *= 2**-16
    ...     layer.experts.w1[..., :32] *= 2**-16
    ...     layer.experts.w3[..., :32] *= 2**-16
    >>> tokens[:, :32] *= 2**16
    >>> numerics_report(layer, tokens).lossy()
    ('x', 'w1', 'w3')

    Raises ValueError (shapes, devices, NaN, a recipe that folds nothing), TypeError (dtypes), NotImplementedError where
    the experts are sharded.
    """
    _check(moe, x, dout)
    recipe, rounding, top_k = moe.experts.recipe, int(moe.experts.recipe.rounding), moe.top_k
    w1, w3, w2 = moe.experts.w1, moe.experts.w3, moe.experts.w2
    numbers = moe.experts.activation.attributes
    x_TD = x.reshape(-1, x.shape[-1])
    if dout is None:
        dout = torch.randn(x.shape, generator=torch.Generator(x.device).manual_seed(0), dtype=x.dtype, device=x.device)
    dout_TD = dout.reshape(x_TD.shape).contiguous()

    _, (experts_TK, probs_TK, _) = moe._route(x_TD)
    order, _, counts = ops.sort_by_expert(experts_TK.reshape(-1), moe.num_experts)
    row_map, _, _, ends = ops.row_map(counts, order.shape[0], moe.num_experts, recipe.alignment)
    slot_P = torch.cat([order, order.new_full((1,), -1)])[row_map]
    token_P = slot_P // top_k  # -1 stays -1
    prob_P = torch.cat([probs_TK.reshape(-1), probs_TK.new_zeros(1)])[slot_P]
    in_swiglu = prob_P if moe.prob_in == "swiglu" else prob_P[:0]

    of: dict[str, Measured] = {}
    operands: dict[str, GroupedRows] = {}

    def measure(name: str, x: GroupedRows, headroom: int) -> None:
        operands[name], of[name] = x, _rows(x, headroom)

    def rows(name: str, q: Tensor, sf: Tensor, headroom: int = 0) -> tuple[Tensor, Tensor]:
        measure(name, GroupedRows(q, sf, ends), headroom)
        return q, sf

    def weight(name: str, q: Tensor, sf: Tensor) -> tuple[Tensor, Tensor]:
        measure(name, GroupedRows.of_weights(q, sf), WEIGHT_HEADROOM)
        return q, sf

    def tokens(name: str, q: Tensor, sf: Tensor) -> None:
        of[name] = _tokens(q, sf, ends)

    sent, from_P = (weigh_slots(x_TD, probs_TK), slot_P) if moe.prob_in == "input" else (x_TD, token_P)
    packed = ops.quantize_row_packed(sent.to(torch.bfloat16).contiguous(), rounding)
    x_P = rows("x", *ops.permute_mx(packed, from_P))
    gate = _product(x_P, weight("w1", *ops.quantize_row(w1, rounding)), ends, moe.experts.b1)
    up = _product(x_P, weight("w3", *ops.quantize_row(w3, rounding)), ends, moe.experts.b3)
    rows("h", *ops.swiglu_row(gate, up, in_swiglu, rounding, False, *numbers))
    weight("w2", *ops.quantize_row(w2, rounding))

    dout_P = ops.permute_rows(dout_TD, token_P).float()
    dout_P = dout_P * prob_P[:, None] if moe.prob_in == "combine" else dout_P
    d_P = rows("dout", *ops.quantize_row(dout_P.to(torch.bfloat16), rounding))
    dh = ops.grouped_mm_mx(*d_P, *weight("w2_t", *ops.quantize_col(w2, rounding)), ends)
    dgate, dup, _ = ops.swiglu_bwd(dh, gate, up, in_swiglu, *numbers)
    for name, gradient, w in (("dgate", dgate, w1), ("dup", dup, w3)):
        rows(name, *ops.quantize_row(gradient, rounding), headroom=GRADIENT_HEADROOM)
        weight("w1_t" if w is w1 else "w3_t", *ops.quantize_col(w, rounding))

    if recipe.wgrad_mx:
        tokens("x_t", *ops.quantize_col(ops.dequantize(*x_P), rounding))
        tokens("dgate_t", *ops.quantize_col(dgate, rounding))
        tokens("dup_t", *ops.quantize_col(dup, rounding))
        tokens("h_t", *ops.swiglu_col(gate, up, in_swiglu, rounding, False, *numbers))
        tokens("dout_t", *ops.quantize_col(ops.dequantize(*d_P), rounding))
    for name, weights in BALANCED.items():
        own, others = operands[name].level(), [operands[w].level() for w in weights]
        other = reduce(torch.minimum, others)
        of[name] = of[name]._replace(balanced=_balanced(operands[name], own, other))
        for w in weights:
            of[w] = of[w]._replace(balanced=_balanced(operands[w], other, own))
    return report(of)


def _product(x: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor], ends: Tensor, bias: Tensor | None) -> Tensor:
    """x w^T [+ bias (G, N)] in bf16, rounded once."""
    if bias is None:
        return ops.grouped_mm_mx(*x, *w, ends)
    sums = ops.grouped_mm_mx(*x, *w, ends, "float32")
    return (sums + bias_of_rows(bias.float(), ends, sums.shape[0])).to(torch.bfloat16)


def _check(moe: MoE, x: Tensor, dout: Tensor | None) -> None:
    if not isinstance(moe, MoE):
        fail(TypeError, OP, "moe", f"a {type(moe).__name__}", "allowed: a MoE")
    weights = dict(moe.experts.named_parameters()) | {"router.weight": moe.router.weight}
    for name, w in weights.items():
        if isinstance(w, DTensor):
            whole = "allowed: a layer that is whole on this device; call it before parallelize_module"
            fail(NotImplementedError, OP, "moe", f"{name} as a DTensor", whole)
    if not moe.experts.recipe.mx:
        got = f"recipe {moe.experts.recipe.name!r}"
        fail(ValueError, OP, "moe", got, "allowed: 'mxfp8' or 'mxfp8_wgrad_with_hp'; others fold nothing")
    for name, value in (("x", x), ("dout", dout)):
        if name == "dout" and value is None:
            continue
        require_tensor(OP, name, value)
        assert value is not None
        check_plain(OP, name, value)
        if value.dtype not in (torch.bfloat16, torch.float32):
            fail(TypeError, OP, name, f"dtype {value.dtype}", "allowed: bfloat16 or float32")
        if value.device != moe.router.weight.device:
            allowed = f"allowed: {moe.router.weight.device}, where the layer is; move it with .to()"
            fail(ValueError, OP, name, f"device {value.device}", allowed)
    dim = moe.router.in_features
    if x.dim() < 1 or x.shape[-1] != dim:
        fail(ValueError, OP, "x", f"shape {tuple(x.shape)}", f"allowed: (..., {dim})")
    if dout is not None and dout.shape != x.shape:
        fail(ValueError, OP, "dout", f"shape {tuple(dout.shape)}", f"allowed: {tuple(x.shape)}, x's")
    for name, value in {**weights, "x": x, "dout": dout}.items():
        if value is not None and not value.isfinite().all():
            fail(ValueError, OP, name, "NaN or infinity", "allowed: finite values; other values have no SQNR")


def _slices(x: GroupedRows) -> tuple[slice, ...]:
    return row_slices(x.ends.cpu().numpy())


def _rows(x: GroupedRows, headroom: int = 0) -> Measured:
    """Folded to one scale per row, and stepped."""
    (q, sf, _), groups = x, _slices(x)
    qf, row_sf = ops.fold_rows(q, sf, headroom)
    of = _measure(q, sf, qf, row_sf[:, None].expand_as(sf).contiguous(), groups)
    qf, _, step_sf, apart = ops.fold_rows_stepped(q, sf)
    stepped = _measure(q, sf, qf, step_sf.T.contiguous(), groups)
    return of._replace(stepped=stepped, apart=share_apart(apart.cpu().numpy(), sf.shape[1], groups[-1].stop))


def _balanced(x: GroupedRows, own: Tensor, other: Tensor) -> Measured:
    """Folded by the levels of both operands. Unmoved, a block has the scale of its row less what it moved."""
    qf, row_sf = x.folded(own, other)
    moved = torch.div(own.int() - other.int(), 2, rounding_mode="trunc")
    row = torch.arange(x.q.shape[0], dtype=torch.int32, device=x.q.device)
    of_rows = torch.nn.functional.pad(moved, (0, 0, 0, 1))[torch.searchsorted(x.ends, row, right=True)]
    target = (row_sf[:, None].int() - of_rows).clamp(0, E8M0_NAN - 1)
    target = torch.where(row_sf[:, None] == E8M0_NAN, E8M0_NAN, target).to(torch.uint8)
    return _measure(x.q, x.sf, qf, target, _slices(x))


def _tokens(q: Tensor, sf: Tensor, ends: Tensor) -> Measured:
    """Folded to one scale per row and chunk of 256 tokens."""
    qf, span_sf = ops.fold_groups(q, sf, ends)
    slots = torch.from_numpy(slots_of_blocks(ends.cpu().numpy(), sf.shape[1])).to(q.device)
    target = torch.where(slots < 0, E8M0_NAN, span_sf[slots.clamp_min(0)].T).to(torch.uint8).contiguous()
    return _measure(q, sf, qf, target, (slice(0, q.shape[0]),))


def _measure(q: Tensor, sf: Tensor, qf: Tensor, target: Tensor, groups: tuple[slice, ...]) -> Measured:
    """q (R, K), its scales (R, K/32), its fold qf, and the scale byte `target` of each folded block."""
    nonzero, rounded, flushed = (int(n.sum(dtype=torch.int64)) for n in ops.count_fold_loss(q, sf, target))
    top = torch.where(target == E8M0_NAN, 0, target).amax(1)
    parts = zip(*(x.split(max(CHUNK // q.shape[1], 1)) for x in (q, sf, qf, target, top)), strict=True)
    signal, noise = (torch.cat(e).cpu().numpy() for e in zip(*(_energies(*part) for part in parts), strict=True))
    return Measured((nonzero, rounded, flushed), signal, noise, top.cpu().numpy(), groups)


def _energies(q: Tensor, sf: Tensor, qf: Tensor, target: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Per row and block: the squares of the values and of the fold's error, in units of the row's top scale."""
    nan = (sf == E8M0_NAN) | (target == E8M0_NAN)
    value, folded = _values(q, sf, top, nan), _values(qf, target, top, nan)
    return value.square().sum(-1), (value - folded).square().sum(-1)


def _values(q: Tensor, byte: Tensor, top: Tensor, nan: Tensor) -> Tensor:
    """(R, K/32, 32) fp32 in units of the row's top scale; zeros for NaN."""
    # The shift stops at 2^-60, so that squares are fp32 numbers; the fold flushes such values anyway.
    shift = (byte.int() - top[:, None].int()).clamp(-60, 0)
    scale = torch.where(nan, 0, (127 + shift) << 23).view(torch.float32)
    return q.view(torch.float8_e4m3fn).float().nan_to_num(0).unflatten(1, (-1, BLOCK)) * scale[..., None]
