"""What a run tells: balance, bytes between ranks, and values that quantization loses, of every layer of a model.

model --forward hooks--> counts, overflow (on the device, no synchronization) --scalars--> tensors
                                                                              '-read-----> dict per layer
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ...core_kernels.formats import BLOCK, E8M0_BIAS
from ...core_kernels.launch import fail
from ...core_kernels.policy.metrics import MoEMetrics, describe
from ...core_kernels.policy.prob_in import ProbIn
from ...core_kernels.policy.recipe import Recipe
from .. import ops
from .moe import MoE, MoEStats

SATURATED = 0x7E
"""The E4M3 code of 448, without the sign."""


def moe_metrics(
    stats: MoEStats, dim: int, *, recipe: Recipe | str = "mxfp8", ranks: int = 1, prob_in: ProbIn = "swiglu"
) -> MoEMetrics:
    """The metrics of one forward of a layer as a dict of Python numbers; the host waits for the device.

    stats: of `MoE`. dim, recipe, prob_in: of the layer. ranks: that share its experts, a divisor of their number.
    `MoEMetrics` names the entries. Raises TypeError and ValueError for other sizes and names.

    >>> moe = MoE(32, 64, num_experts=4, top_k=2, force_balance=True)
    >>> _, stats = moe(torch.ones(6, 32))
    >>> metrics = moe_metrics(stats, 32, ranks=2)
    >>> metrics["tokens_per_expert"], metrics["imbalance"], metrics["wire_nbytes"]
    ([3, 3, 3, 3], 1.0, 2424)
    """
    counts = stats.counts.tolist()
    return describe(counts, int(stats.overflow), dim, Recipe.parse(recipe), ranks, prob_in)


def lost_values(x: Tensor, recipe: Recipe) -> Tensor:
    """(3,) int64: nonzero values of x (..., D), how many of them MXFP8 flushes to zero, how many it saturates.

    >>> lost_values(torch.tensor([[1.0, 2e-3, 1e-6] + [0.0] * 29]), Recipe.parse("mxfp8")).tolist()
    [3, 1, 0]
    """
    x = x.detach().reshape(-1, x.shape[-1]).to(torch.bfloat16).contiguous()
    q, sf = ops.quantize_row(x, int(recipe.rounding))
    size, code = x.float().abs(), q & 0x7F
    largest = torch.ldexp(torch.full(sf.shape, 448.0, device=x.device), sf.int() - E8M0_BIAS)
    largest = largest.repeat_interleave(BLOCK, 1)
    counts = size > 0, (size > 0) & (code == 0), (code == SATURATED) & (size > largest)
    return torch.stack([count.sum() for count in counts])


class MoERecorder:
    """Metrics of every `MoE` of a model, summed over its forwards since the last `reset`, by forward hooks.

    numerics: also count the values that quantization flushes to zero or saturates, of the tokens and of the gradient of
        each layer's output; that quantizes both once more. FLOOR rounding alone saturates.

    Hooks add small tensors on the device and never synchronize. A recomputed forward (activation checkpointing) counts
    twice; a deep copy of the model does not count. `close`, or the end of a `with` block, removes the hooks.

    >>> model = nn.Sequential(nn.Linear(32, 32))
    >>> model.moe = MoE(32, 64, num_experts=4, top_k=2, force_balance=True)
    >>> with MoERecorder(model) as recorder:
    ...     _ = model.moe(torch.ones(6, 32))
    ...     scalars, layers = recorder.scalars(), recorder.read()
    >>> scalars["imbalance"], layers["moe"]["tokens_per_expert"]
    (tensor(1.), [3, 3, 3, 3])

    Raises ValueError for a model without `MoE`, and with numerics for layers whose recipe is not of MXFP8.
    """

    def __init__(self, model: nn.Module, *, numerics: bool = False) -> None:
        self._layers = {name or "moe": m for name, m in model.named_modules() if isinstance(m, MoE)}
        if not self._layers:
            got = f"a {type(model).__name__} without MoE"
            fail(ValueError, "MoERecorder", "model", got, "allowed: a model with MoE layers")
        for name, moe in self._layers.items():
            if numerics and not moe.experts.recipe.mx:
                got, allowed = f"recipe {moe.experts.recipe.name!r} of {name}", "allowed: with 'mxfp8' recipes alone"
                fail(ValueError, "MoERecorder", "numerics", got, allowed)
        self._numerics = numerics
        self._sums: dict[str, dict[str, Tensor]] = {}
        self._hooks = [
            moe.register_forward_hook(self._hook(name), with_kwargs=True) for name, moe in self._layers.items()
        ]

    def _hook(self, name: str) -> Callable[..., None]:
        # A function: a deep copy of the layer keeps it as it is, and would copy a bound method with its recorder.
        def hook(moe: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            if moe is self._layers[name]:  # and no copy of it, such as an average of the weights
                self._forward(name, moe, args[0] if args else kwargs["x"], out)

        return hook

    def _forward(self, name: str, moe: nn.Module, x: Tensor, out: Any) -> None:
        y, stats = out
        assert isinstance(stats, MoEStats)
        self._add(name, "counts", stats.counts)
        self._add(name, "overflow", stats.overflow)
        if self._numerics:
            recipe: Any = moe.experts.recipe  # type: ignore[union-attr]
            self._add(name, "tokens", lost_values(x, recipe))
            if y.requires_grad:
                y.register_hook(lambda grad: self._add(name, "gradients", lost_values(grad, recipe)))

    def _add(self, name: str, key: str, value: Tensor) -> None:
        sums = self._sums.setdefault(name, {})
        value = value.detach().to(torch.int64)  # sums of many steps do not fit int32
        sums[key] = sums[key] + value if key in sums else value.clone()

    def scalars(self) -> dict[str, Tensor]:
        """Over all layers, as scalars on the device: imbalance, the largest; dead_experts and overflow, the sums. With
        numerics tokens_flushed, tokens_saturated, gradients_flushed and gradients_saturated: shares of the nonzero
        values. Empty before a forward.

        For TensorBoard: `for name, value in recorder.scalars().items(): writer.add_scalar(f"moe/{name}", value, step)`
        """
        layers = list(self._sums.values())
        if not layers:
            return {}
        ratios = [s["counts"].amax() * s["counts"].numel() / s["counts"].sum().clamp_min(1) for s in layers]
        found = {
            "imbalance": torch.stack(ratios).amax(),
            "dead_experts": torch.stack([(s["counts"] == 0).sum() for s in layers]).sum(),
            "overflow": torch.stack([s["overflow"] for s in layers]).sum(),
        }
        for key in ("tokens", "gradients"):
            if counts := [s[key] for s in layers if key in s]:
                nonzero, flushed, saturated = torch.stack(counts).sum(0).unbind()
                found |= {f"{key}_flushed": flushed / nonzero.clamp_min(1)}
                found |= {f"{key}_saturated": saturated / nonzero.clamp_min(1)}
        return found

    def read(self) -> dict[str, MoEMetrics]:
        """The metrics of each layer by its name in the model, as `moe_metrics`; the host waits for the device."""
        found = {}
        for name, sums in self._sums.items():
            moe = self._layers[name]
            ranks = moe.experts.expert_parallel
            counts, overflow = sums["counts"].tolist(), int(sums["overflow"])
            layer = moe.router.in_features, moe.experts.recipe, ranks.degree if ranks else 1, moe.prob_in
            found[name] = describe(counts, overflow, *layer)
        return found

    def reset(self) -> None:
        """Forget the forwards so far."""
        self._sums.clear()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> "MoERecorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
