"""FSDP2's all-gather of experts as the bytes that their products read, in place of their values.

    sharded parameter, whole experts --before--> bytes --FSDP2--> --after--> GatheredWeights     forward: along K
         fp32 or bf16, unchanged                                                                 backward: along N

FSDP2 calls `fsdp_pre_all_gather` and `fsdp_post_all_gather` of a sharded parameter's local tensor that has them. Here
they are attributes of a plain tensor: optimizers, clipping and checkpoints see the parameter that they see without.
A shard of whole experts has the bytes that it has in the whole weight, since no scale is of two experts.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core_kernels.launch import fail
from ...core_kernels.policy.recipe import Recipe
from ..exchange.shards import sharded
from ..ops.private import begin_gather
from ..products.forms.form import Format, WeightOperands
from ..products.gathered_weights import GatheredBytes, GatheredWeights, gathered_weights
from ..products.weights import format_of
from .cached_weights import CachedWeights

OP = "quantized_gather"
WEIGHTS = "w1", "w3", "w2"


class Sent(NamedTuple):
    """What `before` tells `after`: the size of the whole weight, and the types of the operands, None for one that is
    not sent."""

    shape: torch.Size
    along_k: Any
    along_n: Any


class QuantizedGather:
    """Of one `GroupedExperts`.

    dtype: of the weights in the products, by FSDP2's mixed precision; None is the parameter's. recomputes: a backward
    has run the forward again, so that the next backwards need both operands.
    """

    def __init__(self, recipe: Recipe, dtype: torch.dtype | None) -> None:
        self.recipe, self.dtype, self.recomputes = recipe, dtype, False
        self.bytes = {name: GatheredBytes() for name in WEIGHTS}

    def install(self, experts: Any) -> None:
        """On experts that FSDP2 has sharded."""
        experts.quantized_gather = self
        self.attach(experts)
        experts.register_load_state_dict_post_hook(lambda module, _: self.attach(module))  # for assign=True

    def attach(self, experts: nn.Module) -> None:
        """To the sharded parameters; again whenever their local tensors are other ones."""
        for name in WEIGHTS:
            parameter = getattr(experts, name)
            (local, *_), _ = parameter.__tensor_flatten__()  # to_local() is another tensor with the same memory
            shard = getattr(parameter, local)
            shard.fsdp_pre_all_gather = partial(self.before, name)
            shard.fsdp_post_all_gather = partial(self.after, name)

    def before(
        self, name: str, mesh: Any, outer_size: torch.Size, outer_stride: Sequence[int], module: Any, mp_policy: Any
    ) -> tuple[list[Tensor], Sent]:
        """The bytes of this rank's shard."""
        phase = begin_gather(module, name)
        again = self.recomputes or (module.recompute and name != "w2")
        along_k, along_n = phase != "backward" or again, phase != "forward"
        parameter = getattr(module, name)
        if module._held is None:
            operands = self._quantized(sharded(parameter, None), along_k, along_n)
        else:
            operands = module._held.operands_of(name, parameter)
        sent = WeightOperands(operands.along_k if along_k else None, operands.along_n if along_n else None)
        parts = [part for operand in sent if operand is not None for part in operand]
        return parts, Sent(outer_size, *(None if operand is None else type(operand) for operand in sent))

    def after(
        self, name: str, gathered: tuple[Tensor, ...], sent: Sent, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]] | None:
        """The bytes of all ranks. FSDP2 frees their memory after use, and takes the tensor that the first call returns
        for all gathers."""
        parts = iter(gathered)
        kinds = sent.along_k, sent.along_n
        operands = (None if kind is None else kind._make(next(parts) for _ in kind._fields) for kind in kinds)
        self.bytes[name].operands = WeightOperands(*operands)
        if out is not None:
            return None
        return gathered_weights(sent.shape, dtype, gathered[0].device, self.bytes[name]), []

    def require(self, experts: Any, weights: Sequence[Tensor]) -> None:
        """Of the weights of a forward: gather again if their bytes are of a backward, which runs the forward again."""
        for name, w in zip(WEIGHTS, weights, strict=True):
            if not isinstance(w, GatheredWeights):
                allowed = "allowed: bytes, by calls of the module that `shard_moe` has sharded"
                fail(RuntimeError, OP, name, "weights gathered as values", allowed)
        if not all(self.bytes[name].has("along_k") for name in WEIGHTS):
            self.recomputes = True
            experts.reshard()
            experts.unshard()

    def cached(self, parameters: Mapping[str, Tensor]) -> CachedWeights:
        """The shards of a block of `cached_weights`, quantized once."""
        shards = [sharded(w, None) for w in parameters.values()]
        for name, shard in zip(parameters, shards, strict=True):
            if isinstance(shard, GatheredWeights):
                allowed = "allowed: sharded ones; enter the block before `unshard()`"
                fail(ValueError, "cached_weights", name, "unsharded weights", allowed)
        cached = CachedWeights.of(parameters, [self._cast(shard) for shard in shards], self.recipe)
        values = [q.with_values(shard) for q, shard in zip(cached.quantized, shards, strict=True)]
        return cached._replace(quantized=tuple(values))

    def _cast(self, shard: Tensor) -> Tensor:
        return shard.detach() if self.dtype is None else shard.detach().to(self.dtype)

    def _quantized(self, shard: Tensor, along_k: bool, along_n: bool) -> WeightOperands:
        form, w = format_of(self.recipe, shard.device), self._cast(shard)
        if along_k and along_n:
            return form.weights(w)
        return WeightOperands(form.along_k(w)) if along_k else WeightOperands(None, form.along_n(w))


def why_values(experts: Any, local: int, ranks: int, device: torch.device) -> str | None:
    """Why these experts are gathered as values; None if as bytes. local: experts of each of `ranks` data ranks."""
    if ranks == 1:
        return "one data rank, which gathers nothing"
    if local % ranks:
        return f"{local} experts, which {ranks} data ranks do not divide"
    form = format_of(experts.recipe, device)
    return None if form.quantizes and not _upcasts(form) else f"recipe {experts.recipe.name!r}, which multiplies bf16"


def _upcasts(form: Format) -> bool:
    return form.name == "mx" and form.upcasts
