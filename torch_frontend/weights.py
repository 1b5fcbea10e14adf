"""Weights as the products multiply them, quantized once and kept until they change.

    w (G, N, K) --along K--> q (G, N, K), sf    out = a w^T
                '-along N--> q (G, K, N), sf    da  = dout w       form "mx" on sm_90: these dequantized, in bf16

    kept by parameter:  {(view, orientation, form, rounding, stream): what is multiplied}
    let go              when the parameter's version counter or memory is another, when any torch optimizer has
                        stepped, and with the parameter

The version counter sees every in-place write but those through `.data`, which old optimizers use: hence the hook. A
DTensor counts itself, not its local part: `local` says whose part a tensor is. What FSDP2 gathers is written behind
the counter's back too, and freed after each use. Its counter stays 0, so nothing is kept of a tensor that nobody has
written in place since it was made.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.weak import WeakTensorKeyDictionary

from ..core_kernels.recipe import Form
from . import ops
from ._device import arch_of


class MX(NamedTuple):
    """E4M3 bytes q (..., K) and one E8M0 byte per 32 of them, sf (..., K/32)."""

    q: Tensor
    sf: Tensor


class Folded(NamedTuple):
    """E4M3 bytes q (..., K) and one E8M0 byte per row of them, sf (...); or, along M tokens in G groups, one per span
    of them and row: q (K, M), sf (`spans(M, G)`, K)."""

    q: Tensor
    sf: Tensor


class Upcast(NamedTuple):
    """MX dequantized to bf16: what form "mx" multiplies on sm_90."""

    x: Tensor


Quantized = MX | Folded | Upcast


class _Kept(NamedTuple):
    state: tuple[int, int]
    operands: dict[tuple[Any, ...], Quantized]


_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_keep = True


def _forget(*_: Any) -> None:
    _kept.clear()


register_optimizer_step_post_hook(_forget)


@contextmanager
def keep_quantized_weights(keep: bool) -> Iterator[None]:
    """Within the block keep quantized weights between calls, or (False) quantize them in every call and keep none.

    They are kept by default, in both orientations, until the weight changes: 2.06 bytes per weight, and 4 for exact
    products on Hopper, which multiply them dequantized. Pass False where memory is short, or where weights are written
    through `.data` by something that is no torch optimizer. The setting is process-wide. In compiled functions, in
    CUDA graphs, under FSDP2 and before a weight's first in-place write (initialisation is one) weights are quantized
    where they are used.

    >>> with keep_quantized_weights(False):
    ...     y = layer(x)
    """
    global _keep
    before, _keep = _keep, keep
    _forget()
    try:
        yield
    finally:
        _keep = before


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself; differentiable."""
    if not isinstance(parameter, DTensor):
        return parameter
    part = cast(Tensor, parameter.to_local())
    if not torch.compiler.is_compiling() and part._base is not None:
        _owners[part._base] = weakref.ref(parameter)
    return part


def as_multiplied(x: MX) -> MX | Upcast:
    """MX in the way that the tensor cores of its device take it."""
    return Upcast(ops.dequantize(*x)) if arch_of(x.q.device) == "sm_90" else x


def along_k(w: Tensor, form: Form, rounding: int) -> Quantized:
    """w (G, N, K) -> q (G, N, K), quantized along its last dim."""
    return _quantized(w, "k", form, rounding)


def along_n(w: Tensor, form: Form, rounding: int) -> Quantized:
    """w (G, N, K) -> q (G, K, N), quantized along N."""
    return _quantized(w, "n", form, rounding)


def _quantized(w: Tensor, along: str, form: Form, rounding: int) -> Quantized:
    operands = _operands_of(w)
    if operands is None:
        return _quantize(w, along, form, rounding)
    stream = torch.cuda.current_stream(w.device) if w.is_cuda else None
    key = (w.storage_offset(), w.shape, w.stride(), along, form, rounding, stream)
    if key not in operands:
        operands[key] = _quantize(w, along, form, rounding)
    return operands[key]


def _operands_of(w: Tensor) -> dict[tuple[Any, ...], Quantized] | None:
    """What is kept of the parameter that w is, or is a view of, as it is now; None where nothing may be kept."""
    base = w._base if w._base is not None else w
    # A trace would hold this call's bytes for all calls, and so would a graph that is being captured. What is
    # computed from a parameter lives for one call alone.
    traced = type(base) not in (Tensor, nn.Parameter) or is_in_torch_dispatch_mode()
    if not _keep or traced or not base.is_leaf or base.is_inference():
        return None
    if w.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    owner = _owners[base]() if base in _owners else base
    if owner is None or not owner._version:
        return None
    state = (owner._version, base.data_ptr())
    kept = _kept.get(base)
    if kept is None or kept.state != state:
        kept = _kept[base] = _Kept(state, {})
    return kept.operands


def _quantize(w: Tensor, along: str, form: Form, rounding: int) -> Quantized:
    w = w.contiguous()
    if along == "k":
        return quantize_rows(w, form, rounding)
    if form == "row":
        return quantize_rows(w.transpose(-2, -1).contiguous(), form, rounding)
    turned = MX(*ops.quantize_col(w, rounding))
    return as_multiplied(turned) if form == "mx" else Folded(*ops.fold_rows(*turned))


def quantize_rows(x: Tensor, form: Form, rounding: int) -> Quantized:
    """x (..., K), contiguous, along its last dim."""
    if form == "mx":
        return as_multiplied(MX(*ops.quantize_row(x, rounding)))
    return Folded(*(ops.quantize_row_fold if form == "fold" else ops.quantize_rowwise)(x, rounding))
