"""What a run tells: balance, bytes between ranks, and values that quantization loses, of every layer of a model.

model --forward hooks--> counts, overflow (on the device, no synchronization) --scalars--> tensors
                                                                              '-read-----> dict per layer
"""

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ...core_kernels.formats import BLOCK, E8M0_BIAS
from ...core_kernels.launch import fail
from ...core_kernels.policy.metrics import MoEMetrics
from ...core_kernels.policy.recipe import Recipe
from .. import ops
from ..ops.checks import check_flag
from .moe import MoE, MoEStats

SATURATED = 0x7E
"""The E4M3 code of 448, without the sign."""


def lost_values(x: Tensor, recipe: Recipe) -> Tensor:
    """Count nonzero values of x, how many of them MXFP8 flushes to zero, and how many it saturates.

    Args:
        x: (..., D), D a multiple of 32.
        recipe: Of MXFP8.

    Returns:
        (3,) int64.

    Example:
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


class _Hook:
    """Calls a recorder after the forward of its layer. The hook of a deep copy or a saved model calls none."""

    def __init__(self, recorder: "MoERecorder | None" = None, name: str = "") -> None:
        self.recorder, self.name = recorder, name

    def __call__(self, moe: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if self.recorder is not None and moe is self.recorder._layers[self.name]:
            self.recorder._forward(self.name, moe, args[0] if args else kwargs["x"], out)

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return _Hook, ()


class MoERecorder:
    """Metrics of every `MoE` of a model, summed over its forwards since the last `reset`, by forward hooks.

    Hooks add small tensors on the device and never synchronize. A recomputed forward (activation checkpointing) counts
    twice; a deep copy of the model does not count, and neither does a model from `torch.load`. `close`, or the end of a
    `with` block, removes the hooks.

    Args:
        model: A module with `MoE` layers.
        numerics: Also count the values that quantization flushes to zero or saturates, of the tokens and of the
            gradient of each layer's output. That quantizes both once more. FLOOR rounding alone saturates.

    Raises:
        ValueError: For a model without `MoE`, and with numerics for layers whose recipe is not of MXFP8.

    Example:
        >>> model = nn.Sequential(nn.Linear(32, 32))
        >>> model.moe = MoE(32, 64, 4, RouterConfig(2, force_balance=True))
        >>> with MoERecorder(model) as recorder:
        ...     _ = model.moe(torch.ones(6, 32))
        ...     scalars, layers = recorder.scalars(), recorder.read()
        >>> scalars["imbalance"], layers["moe"]["tokens_per_expert"]
        (tensor(1.), [3, 3, 3, 3])
    """

    def __init__(self, model: nn.Module, *, numerics: bool = False) -> None:
        if not isinstance(model, nn.Module):
            fail(TypeError, "MoERecorder", "model", type(model).__name__, "allowed: a module")
        check_flag("MoERecorder", "numerics", numerics)
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
            moe.register_forward_hook(_Hook(self, name), with_kwargs=True) for name, moe in self._layers.items()
        ]

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
        """Compute metrics over all layers, as scalars on the device.

        For TensorBoard: `for name, value in recorder.scalars().items(): writer.add_scalar(f"moe/{name}", value, step)`

        Returns:
            imbalance, the largest of all layers; dead_experts and overflow, the sums. With numerics also
            tokens_flushed, tokens_saturated, gradients_flushed and gradients_saturated: shares of the nonzero values.
            It is empty before a forward.
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
        """Compute the metrics of each layer, as `MoEStats.metrics`; the host waits for the device.

        Returns:
            The metrics by the layer's name in the model.
        """
        found = {}
        for name, sums in self._sums.items():
            moe = self._layers[name]
            ranks = moe.experts.expert_parallel
            stats = MoEStats(sums["counts"], sums["counts"].new_zeros(()), sums["overflow"])
            found[name] = stats.metrics(
                moe.router.in_features, recipe=moe.experts.recipe, ranks=ranks.degree if ranks else 1,
                prob_in=moe.router_config.prob_in,
            )  # fmt: skip
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
