"""The loss of `compute="fold"` on a layer: the rows that its experts would receive, for
core_kernels/policy/numerics.py."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...core_kernels.launch import fail
from ...core_kernels.policy.numerics import NumericsReport, report
from .. import ops
from ..ops.call import require_tensor
from ..ops.checks import check_plain
from ..ops.mx_tensor import dequantized
from ..products.forms.form import AddedBias
from ..products.forms.mx import MX, MXForm
from ..routing.weighted_combine import weigh_slots
from .moe import MoE

OP = "numerics_report"


@torch.no_grad()
def numerics_report(moe: MoE, x: Tensor, dout: Tensor | None = None) -> NumericsReport:
    """Report the loss of folding the operands of `moe` on these tokens: whether to use `compute="exact"` instead.

    The report covers every MXFP8 operand of the routed experts, not of the shared expert, whatever the recipe's
    compute: activations, weights in both orientations, gradients. With recipe "mxfp8" it covers the operands along the
    tokens too.

    It runs forward and backward once without autograd; the layer does not change. The host reads two bytes per value
    of each operand and computes the report: some thousand tokens are enough.

    Args:
        moe: A layer that is whole on this device.
        x: (..., D) bfloat16 or float32, on the layer's device.
        dout: The gradient of the layer's output, like x; None draws normal values from a fixed seed.

    Returns:
        The report.

    Raises:
        ValueError: For shapes, devices, NaN, and a recipe that folds nothing.
        TypeError: For other dtypes.
        NotImplementedError: Where the experts are sharded.

    Example:
        >>> layer = MoE(64, 128, 2, RouterConfig(top_k=1), recipe="mxfp8")
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
    """
    _check(moe, x, dout)
    experts, recipe, router = moe.experts, moe.experts.recipe, moe.router_config
    x_TD = x.reshape(-1, x.shape[-1])
    if dout is None:
        dout = torch.randn(x.shape, generator=torch.Generator(x.device).manual_seed(0), dtype=x.dtype, device=x.device)
    dout_TD = dout.reshape(x_TD.shape).contiguous()

    _, (experts_TK, probs_TK, _) = moe._route(x_TD)
    order, _, counts = ops.sort_by_expert(experts_TK.reshape(-1), moe.num_experts)
    row_map, _, _, ends = ops.row_map(counts, order.shape[0], moe.num_experts, recipe.alignment)
    slot_P = torch.cat([order, order.new_full((1,), -1)])[row_map]
    token_P = slot_P // router.top_k  # -1 stays -1
    prob_P = torch.cat([probs_TK.reshape(-1), probs_TK.new_zeros(1)])[slot_P]

    sent, from_P = (weigh_slots(x_TD, probs_TK), slot_P) if router.prob_in == "input" else (x_TD, token_P)
    packed = ops.quantize_row_packed(sent.to(torch.bfloat16).contiguous(), int(recipe.rounding))
    dout_P = ops.permute_rows(dout_TD, token_P).float()
    dout_P = dout_P * prob_P[:, None] if router.prob_in == "combine" else dout_P

    form = MXForm("mx", int(recipe.rounding), recipe.wgrad_mx, upcasts=False)

    def product(x: Any, w: Any, bias: Tensor | None) -> Tensor:
        added = None if bias is None else AddedBias(bias.float())
        return form.mm(MX._make(x), MX._make(w), ends, torch.bfloat16, added, clear_rest=True)

    return report(
        ops, lambda t: t.cpu().numpy(), product, recipe, experts.activation.attributes,
        x=ops.permute_mx(packed, from_P), dout=dout_P.to(torch.bfloat16),
        prob=prob_P if router.prob_in == "swiglu" else prob_P[:0], ends=ends,
        weights=tuple(map(dequantized, (experts.w1, experts.w3, experts.w2))), biases=(experts.b1, experts.b3),
    )  # fmt: skip


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
