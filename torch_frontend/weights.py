"""Weights as the products multiply them: quantized in the call that uses them, or once for many calls by the user.

    w (G, N, K) --along K--> q (G, N, K), sf    out = a w^T        "as stored"
                '-along N--> q (G, K, N), sf    da  = dout w       "transposed"    one read of w makes both

Form "mx" on sm_90 multiplies these dequantized, in bf16. Form "bf16" quantizes nothing.

A call quantizes the weights that it is given, and what its backward needs of them lives until then. Nothing is kept for
the next call: no version counter sees `.data`, collectives or another process write. Who wants to quantize once for
several microbatches, an evaluation or serving says so, and holds the result: `quantize_weights`.
"""

import dataclasses
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..core_kernels.dispatch import facts
from ..core_kernels.formats import BLOCK, Rounding
from ..core_kernels.launch import fail
from ..core_kernels.recipe import Form, Recipe
from . import ops
from ._checks import check_floats
from ._device import arch_of
from ._torch_private import has_version, owner_of, version_of
from .mx_tensor import MXTensor


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
Operand = Tensor | Quantized
"""What a product multiplies: bf16, or bytes."""


@dataclasses.dataclass(frozen=True)
class QuantizedWeights:
    """Weights with the bytes that the products multiply in their place; made by `quantize_weights`.

    values (G, N, K): bf16 or fp32, gets the weight gradient; forward and input gradient do not read it. as_stored,
    transposed: bytes along K and along N; None for recipe "bf16". form, rounding: how they were made.
    """

    values: Tensor
    as_stored: Quantized | None
    transposed: Quantized | None
    form: Form
    rounding: Rounding

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        """What the weight gradient comes in."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def requires_grad(self) -> bool:
        return self.values.requires_grad

    def with_values(self, values: Tensor) -> "QuantizedWeights":
        """The same bytes for values that are differentiated: the parameter that they were quantized from.

        Raises ValueError for another shape, TypeError unless it is bf16 or fp32.
        """
        check_float_weights("QuantizedWeights.with_values", "values", values)
        if values.shape != self.values.shape:
            got, allowed = f"shape {tuple(values.shape)}", f"allowed: {tuple(self.values.shape)}"
            fail(ValueError, "QuantizedWeights.with_values", "values", got, allowed)
        return dataclasses.replace(self, values=values)


Weights = Tensor | QuantizedWeights
Held = tuple[Quantized | None, Quantized | None] | None
"""`as_stored` and `transposed` of QuantizedWeights; None for a plain weight."""


def quantize_weights(w: Tensor, recipe: Recipe | str = "mxfp8_wgrad_with_hp") -> QuantizedWeights:
    """Quantize w (G, N, K) along both of its last dims, for all calls until it changes.

    w: contiguous, bf16 or fp32, as a linear layer stores it; K, N multiples of 32. `mxfp8_grouped_mm` and
    `grouped_swiglu_ffn` take the result wherever they take weights, with a recipe of the same form and rounding, and
    give w its gradient. The bytes are of w as it is now: whoever writes to w quantizes again. The experts of a layer
    have `GroupedExperts.weights_held`.

    They are 2.06 bytes per weight; 4 for exact products on Hopper, which multiply them dequantized. "auto" chooses
    their form by w's device.

    >>> w = torch.ones(2, 32, 64, requires_grad=True)
    >>> held = quantize_weights(w, "mxfp8")
    >>> held.as_stored.sf.shape, held.transposed.sf.shape
    (torch.Size([2, 32, 2]), torch.Size([2, 64, 1]))

    Raises ValueError (shape, layout), TypeError (dtype).
    """
    op, recipe = "quantize_weights", Recipe.parse(recipe)
    check_float_weights(op, "w", w)
    for dim in (1, 2):
        if w.shape[dim] % BLOCK and recipe.operands != "bf16":
            fail(ValueError, op, "w", f"dim {dim} = {w.shape[dim]}", f"allowed: multiples of {BLOCK}")
    if not w.is_contiguous():
        fail(ValueError, op, "w", f"strides {w.stride()}", "allowed: a contiguous (G, N, K)")
    form, rounding = recipe.form(arch_of(w.device)), recipe.rounding
    if form == "bf16":
        return QuantizedWeights(w, None, None, form, rounding)
    return QuantizedWeights(w, *both_ways(w.detach(), form, int(rounding)), form, rounding)


def check_float_weights(op: str, argument: str, w: object) -> None:
    """Raise unless w is a plain (G, N, K) or (G, K, N) in bf16 or fp32."""
    if isinstance(w, DTensor):
        fail(TypeError, op, argument, "a DTensor", "allowed: this rank's part of it: .to_local()")
    if isinstance(w, MXTensor):
        fail(TypeError, op, argument, "an MXTensor", "allowed: bfloat16 or float32 weights, or quantize_weights(w)")
    check_floats(op, argument, cast(Tensor, w), 3)


def check_held(op: str, argument: str, w: QuantizedWeights, form: Form, rounding: Rounding) -> None:
    """Raise ValueError unless w was quantized as the call multiplies."""
    if w.form != form or (form != "bf16" and w.rounding != rounding):
        got = f"QuantizedWeights of form {w.form!r} with {w.rounding.name}"
        allowed = f"allowed: form {form!r} with {rounding.name}; call quantize_weights with this call's recipe"
        fail(ValueError, op, argument, got, allowed)


def stays(w: Tensor) -> bool:
    """Whether the memory of w outlives the forward, so that bytes of it may as well.

    FSDP2 frees what it gathered when the forward is over. What it gathers is a leaf that nobody has written in place:
    its version counter stays 0. Weights that merely look so are quantized once more in the backward.
    """
    if torch.compiler.is_compiling():
        return True
    owner = owner_of(w)
    return not owner.is_leaf or owner.is_inference() or (has_version and version_of(owner) > 0)


def for_call(w: Tensor, held: Held, form: Form, rounding: int, both: bool) -> tuple[Operand, Quantized | None]:
    """w along K and along N; None there unless it is held or `both` are asked for."""
    if form == "bf16":
        return w.to(torch.bfloat16), None
    if held is not None and held[0] is not None:
        return held[0], held[1]
    return both_ways(w, form, rounding) if both else (along_k(w, form, rounding), None)


def as_multiplied(x: MX) -> MX | Upcast:
    """MX in the way that the tensor cores of its device take it."""
    return Upcast(ops.dequantize(*x)) if facts(arch_of(x.q.device)).upcasts else x


def along_k(w: Tensor, form: Form, rounding: int) -> Quantized:
    """w (G, N, K) -> q (G, N, K), quantized along its last dim."""
    return quantize_rows(w.contiguous(), form, rounding)


def along_n(w: Tensor, form: Form, rounding: int) -> Operand:
    """w (G, N, K) -> (G, K, N), quantized along N."""
    if form == "bf16":
        return w.transpose(-2, -1).to(torch.bfloat16).contiguous()
    if form == "row":
        return quantize_rows(w.transpose(-2, -1).contiguous(), form, rounding)
    return _in_form(MX(*ops.quantize_col(w.contiguous(), rounding)), form)


def both_ways(w: Tensor, form: Form, rounding: int) -> tuple[Quantized, Quantized]:
    """w (G, N, K) along K, as it lies, and along N, transposed; MX of one read."""
    if form == "row":
        w_t = w.transpose(-2, -1).contiguous()
        return quantize_rows(w.contiguous(), form, rounding), quantize_rows(w_t, form, rounding)
    q, sf, q_t, sf_t = ops.quantize_both(w.contiguous(), rounding)
    return _in_form(MX(q, sf), form), _in_form(MX(q_t, sf_t), form)


def _in_form(x: MX, form: Form) -> Quantized:
    return as_multiplied(x) if form == "mx" else Folded(*ops.fold_rows(*x))


def quantize_rows(x: Tensor, form: Form, rounding: int) -> Quantized:
    """x (..., K), contiguous, along its last dim."""
    if form == "mx":
        return as_multiplied(MX(*ops.quantize_row(x, rounding)))
    return Folded(*(ops.quantize_row_fold if form == "fold" else ops.quantize_rowwise)(x, rounding))
