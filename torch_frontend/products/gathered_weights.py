"""Weights of which an all-gather leaves the bytes that products read, in place of the values.

    shard (G / ranks, N, K) --quantize--> bytes --all-gather--> GatheredWeights (G, N, K): along K, along N, or both

The tensor has the shape, the dtype and the gradient of the weights. Its bytes are freed after the forward and gathered
again for the backward, so an autograd function saves the tensor and reads the bytes when it multiplies.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core_kernels.launch import fail
from ..ops.private import unwrapped_results, wrapper
from .forms.form import WeightOperands

aten = torch.ops.aten


class GatheredBytes:
    """The operands of the latest all-gather of a weight."""

    def __init__(self) -> None:
        self.operands = WeightOperands()

    @property
    def along_k(self) -> Any:
        return self._read("along_k")

    @property
    def along_n(self) -> Any:
        return self._read("along_n")

    def has(self, name: str) -> bool:
        """Whether the operand of this name was gathered and is not freed."""
        operand = getattr(self.operands, name)
        return operand is not None and all(part.untyped_storage().size() for part in operand)

    def _read(self, name: str) -> Any:
        if not self.has(name):
            hint = "call the experts as a module, and do not change the resharding between forward and backward"
            fail(RuntimeError, "quantized_gather", name, "no bytes", "allowed: gathered weights", hint=hint)
        return getattr(self.operands, name)


class CopiedBytes(GatheredBytes):
    """A copy of the bytes along K, for a backward that runs a forward again; along N the bytes of the latest gather."""

    def __init__(self, of: GatheredBytes) -> None:
        super().__init__()
        self.operands = WeightOperands(of.along_k._make(part.clone() for part in of.along_k))
        self.of = of

    @property
    def along_n(self) -> Any:
        return self.of.along_n


class GatheredWeights(Tensor):
    """(G, N, K) without values; see the top of the file. Made by `gathered_weights`."""

    gathered: GatheredBytes

    __torch_function__ = unwrapped_results

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"GatheredWeights(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = _RULES.get(func)
        if rule is not None:
            return rule(*args, **(kwargs or {}))
        allowed = "allowed: products of the experts; the values are in the sharded parameter, after reshard()"
        return fail(NotImplementedError, str(func), "argument", "weights gathered as bytes", allowed)


def gathered_weights(shape: Sequence[int], dtype: torch.dtype, device: torch.device, of: GatheredBytes) -> Tensor:
    """Weights (G, N, K) whose bytes are, at any time, the operands of `of`."""
    self = wrapper(GatheredWeights, shape, dtype, device)
    self.gathered = of
    return self


def copied(w: Tensor | None) -> Tensor | None:
    """Weights with a copy of their bytes along K, if they were gathered."""
    if not isinstance(w, GatheredWeights):
        return w
    return gathered_weights(w.shape, w.dtype, w.device, CopiedBytes(w.gathered))


def _same(w: GatheredWeights) -> Tensor:
    return gathered_weights(w.shape, w.dtype, w.device, w.gathered)


def _same_shape(w: GatheredWeights, shape: Sequence[int], *strides: Any, **offset: Any) -> Tensor:
    """What FSDP2 and DTensor do to a whole parameter: a view of all of it."""
    if tuple(shape) != tuple(w.shape):
        fail(NotImplementedError, "view", "argument", "weights gathered as bytes", f"allowed: all, {tuple(w.shape)}")
    return _same(w)


def _zeros(w: GatheredWeights, **options: Any) -> Tensor:
    return torch.zeros(w.shape, dtype=options.get("dtype") or w.dtype, device=w.device)


_RULES: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.view.default: _same_shape,
    aten.as_strided.default: _same_shape,
    aten.zeros_like.default: _zeros,  # the gradient of weights that a backward did not reach
}
