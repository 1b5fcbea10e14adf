"""Quantized weights: for one call and its backward, or once for many calls.

    w (G, N, K) --along K--> q (G, N, K), sf    out = x w^T        "as_stored"
                '-along N--> q (G, K, N), sf    dx  = dout w       "transposed"    one read of w makes both

Form "mx" on sm_90 dequantizes these bytes and multiplies bf16. Form "bf16" quantizes nothing.

A call quantizes its weights, and the bytes along N live until its backward. The next call starts again: no version
counter sees a write through `.data`, by a collective or by another process, so a cache could be stale. A caller that
quantizes once for several microbatches, an evaluation or serving holds the result of `quantize_weights`.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..core_kernels.dispatch import facts
from ..core_kernels.formats import BLOCK, WEIGHT_HEADROOM, Rounding
from ..core_kernels.launch import fail
from ..core_kernels.recipe import Form, Recipe
from . import _direct as ops
from ._checks import check_bias, check_floats
from ._device import arch_of
from ._launch import check_devices
from ._torch_private import has_version, owner_of, version_of
from .mx_tensor import MXTensor


class MX(NamedTuple):
    """E4M3 bytes q (..., K) with one E8M0 byte per 32 values, sf (..., K/32)."""

    q: Tensor
    sf: Tensor


class Folded(NamedTuple):
    """E4M3 bytes q (..., K) with one E8M0 byte per row, sf (...). Along M tokens in G groups: q (K, M) with one E8M0
    byte per feature and chunk of 256 tokens, sf (`spans(M, G)`, K)."""

    q: Tensor
    sf: Tensor


class Blockwise(NamedTuple):
    """E4M3 bytes q (..., K) with one fp32 scale per 128 values, sf (..., K/128); of weights q (G, N, K) with one per
    128 x 128 values, sf (G, N/128, K/128)."""

    q: Tensor
    sf: Tensor


class Upcast(NamedTuple):
    """MX dequantized to bf16, the operand of form "mx" on sm_90."""

    x: Tensor


class KN(NamedTuple):
    """bf16 weights (G, K, N) of a product over K: a linear layer's (G, N, K), as stored, in its input gradient."""

    w: Tensor


Quantized = MX | Folded | Blockwise | Upcast
Operand = Tensor | Quantized
"""An operand of a product: a bf16 tensor, or quantized bytes."""
WeightOperand = Operand | KN


@dataclasses.dataclass(frozen=True)
class QuantizedWeights:
    """Weights and their quantized bytes, which the products multiply instead; made by `quantize_weights`.

    values (G, N, K): bf16 or fp32, receives the weight gradient; forward and input gradient do not read it. as_stored,
    transposed: the operands along K and along N; None for recipe "bf16". form, rounding: the format of the operands.
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
        """The dtype of the weight gradient."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def requires_grad(self) -> bool:
        return self.values.requires_grad

    def with_values(self, values: Tensor) -> "QuantizedWeights":
        """Return the same bytes with other values, the parameter that they were quantized from and that is
        differentiated.

        Raises ValueError for another shape, TypeError unless it is bf16 or fp32.
        """
        if values is self.values:
            return self
        check_float_weights("QuantizedWeights.with_values", "values", values)
        if values.shape != self.values.shape:
            got, allowed = f"shape {tuple(values.shape)}", f"allowed: {tuple(self.values.shape)}"
            fail(ValueError, "QuantizedWeights.with_values", "values", got, allowed)
        return dataclasses.replace(self, values=values)


Weights = Tensor | QuantizedWeights
Held = tuple[Quantized | None, Quantized | None] | None
"""The operands `as_stored` and `transposed` of QuantizedWeights; None for a plain weight."""


def quantize_weights(w: Tensor, recipe: Recipe | str = "mxfp8") -> QuantizedWeights:
    """Quantize w (G, N, K) along both of its last dims, for all calls until w changes.

    w: contiguous, bf16 or fp32, as a linear layer stores it; K and N multiples of 32. `grouped_mm` and
    `grouped_swiglu_ffn` take the result in place of w, with a recipe of the same form and rounding, and give w its
    gradient. After a write to w the caller quantizes again. `GroupedExperts.weights_held` does this for a layer.

    The bytes take 2.06 bytes per weight; 4 for exact products on Hopper, which multiply dequantized weights. The
    device of w decides what compute "auto" is.

    >>> w = torch.ones(2, 32, 64, requires_grad=True)
    >>> quantized = quantize_weights(w)
    >>> quantized.as_stored.sf.shape, quantized.transposed.sf.shape
    (torch.Size([2, 32, 2]), torch.Size([2, 64, 1]))

    Raises ValueError (shape, layout) and TypeError (dtype).
    """
    op, recipe = "quantize_weights", Recipe.parse(recipe)
    check_float_weights(op, "w", w)
    for dim in (1, 2):
        if w.shape[dim] % BLOCK and recipe.operands != "bf16":
            fail(ValueError, op, "w", f"dim {dim} = {w.shape[dim]}", f"allowed: multiples of {BLOCK}")
    if not w.is_contiguous():
        fail(ValueError, op, "w", f"strides {w.stride()}", "allowed: a contiguous (G, N, K)")
    form, rounding = form_of(recipe, w.device), recipe.rounding
    if form == "bf16":
        return QuantizedWeights(w, None, None, form, rounding)
    return QuantizedWeights(w, *quantize_both_ways(w.detach(), form, int(rounding)), form, rounding)


def form_of(recipe: Recipe, device: torch.device) -> Form:
    """The operand format of the recipe's products on a device."""
    return recipe.form(arch_of(device))


def check_float_weights(op: str, argument: str, w: object) -> None:
    """Raise unless w is a plain (G, N, K) in bf16 or fp32."""
    if isinstance(w, DTensor):
        fail(TypeError, op, argument, "a DTensor", "allowed: this rank's part of it: .to_local()")
    if isinstance(w, MXTensor):
        fail(TypeError, op, argument, "an MXTensor", "allowed: bfloat16 or float32 weights, or quantize_weights(w)")
    check_floats(op, argument, cast(Tensor, w), 3)


def check_weights(op: str, argument: str, w: object, form: Form, rounding: Rounding) -> None:
    """Raise TypeError unless w is a float tensor or QuantizedWeights, ValueError for QuantizedWeights of another form
    or rounding."""
    if not isinstance(w, QuantizedWeights):
        check_float_weights(op, argument, w)
    elif w.form != form or (form != "bf16" and w.rounding != rounding):
        got = f"QuantizedWeights of form {w.form!r} with {w.rounding.name}"
        allowed = f"allowed: form {form!r} with {rounding.name}; call quantize_weights with this call's recipe"
        fail(ValueError, op, argument, got, allowed)


def values_and_held(w: Weights) -> tuple[Tensor, Held]:
    """The tensor that receives the gradient, and the operands of QuantizedWeights."""
    return (w.values, (w.as_stored, w.transposed)) if isinstance(w, QuantizedWeights) else (w, None)


def check_ffn_weights(
    op: str, name: str, x: Tensor, weights: Sequence[Weights], biases: Sequence[Tensor | None], recipe: Recipe
) -> tuple[tuple[Tensor, ...], tuple[Held, ...], tuple[Tensor | None, ...]]:
    """Values and held operands of w1, w3, w2, and b1, b3, b2 as (G, N) fp32; raises unless they fit each other and the
    rows of x, named `name`."""
    form = form_of(recipe, x.device)
    for of, w in zip(("w1", "w3", "w2"), weights, strict=True):
        check_weights(op, of, w, form, recipe.rounding)
    (w1, w3, w2), held = zip(*map(values_and_held, weights), strict=True)
    groups, f, d = w1.shape
    if x.shape[1] != d:
        fail(ValueError, op, name, f"shape {tuple(x.shape)}", f"allowed: (P, {d}), the D of w1 (G, F, D)")
    for of, w, shape in (("w3", w3, (groups, f, d)), ("w2", w2, (groups, d, f))):
        if w.shape != shape:
            fail(ValueError, op, of, f"shape {tuple(w.shape)}", f"allowed: {shape}, by w1's {tuple(w1.shape)}")
    for of, size in (("F", f), ("D", d)):
        if size % BLOCK:
            fail(ValueError, op, "w1", f"{of} = {size}", f"allowed: multiples of {BLOCK}")
    for of, w in (("w1", w1), ("w3", w3), ("w2", w2)):
        if not w.is_contiguous():
            fail(ValueError, op, of, f"strides {w.stride()}", "allowed: contiguous; unpack_expert_weights unpacks once")
    check_devices(op, name, x.device, w1=w1, w3=w3, w2=w2)
    sizes = zip(("b1", "b3", "b2"), biases, (f, f, d), strict=True)
    biases = tuple(b if b is None else check_bias(op, of, b, groups, n, x.device) for of, b, n in sizes)
    return (w1, w3, w2), held, biases


def outlives_forward(w: Tensor) -> bool:
    """Whether the memory of w is still there in the backward, so that bytes of it may be saved for the backward.

    FSDP2 frees its all-gathered parameters after the forward. Such a parameter is a leaf without an in-place write: its
    version counter is 0. A plain leaf with version 0 looks the same; it is quantized again in the backward.
    """
    if torch.compiler.is_compiling():
        return True
    owner = owner_of(w)
    return not owner.is_leaf or owner.is_inference() or (has_version and version_of(owner) > 0)


def is_transpose(w: Tensor) -> bool:
    """Whether w (G, N, K) is the transpose of a contiguous (G, K, N), whose operands are those of w, exchanged."""
    return not w.is_contiguous() and w.mT.is_contiguous()


def for_call(w: Tensor, held: Held, form: Form, rounding: int, both: bool) -> tuple[WeightOperand, Quantized | None]:
    """The operands of w along K and along N. The second is None unless w is held or `both` is set."""
    if form == "bf16":
        return (KN(w.mT.to(torch.bfloat16)) if is_transpose(w) else w.to(torch.bfloat16)), None
    if held is not None and held[0] is not None:
        return held[0], held[1]
    return quantize_both_ways(w, form, rounding) if both else (along_k(w, form, rounding), None)


def as_multiplied(x: MX) -> MX | Upcast:
    """MX as the tensor cores of its device read it: dequantized to bf16 on sm_90."""
    return Upcast(ops.dequantize(*x)) if facts(arch_of(x.q.device)).upcasts else x


def along_k(w: Tensor, form: Form, rounding: int) -> Quantized:
    """w (G, N, K) -> (G, N, K), quantized along K."""
    if is_transpose(w):
        return cast(Quantized, along_n(w.mT, form, rounding))
    if is_block(form):
        return Blockwise(*ops.quantize_squares(w.contiguous(), form == "block_power_of_two"))
    return quantize_rows(w.contiguous(), form, rounding, WEIGHT_HEADROOM)


def along_n(w: Tensor, form: Form, rounding: int) -> WeightOperand:
    """w (G, N, K) -> (G, K, N), quantized along N; bf16 stays as stored."""
    if is_transpose(w):
        return w.mT.to(torch.bfloat16) if form == "bf16" else along_k(w.mT, form, rounding)
    if form == "bf16":
        return KN(w.to(torch.bfloat16).contiguous())
    if is_block(form):
        return quantize_both_ways(w, form, rounding)[1]
    if form == "row":
        return quantize_rows(w.transpose(-2, -1).contiguous(), form, rounding)
    return mx_rows(MX(*ops.quantize_col(w.contiguous(), rounding)), form, WEIGHT_HEADROOM)


def quantize_both_ways(w: Tensor, form: Form, rounding: int) -> tuple[Quantized, Quantized]:
    """w (G, N, K) along K, as stored, and along N, transposed. Only weights scaled by row are read twice."""
    if is_transpose(w):
        first, second = quantize_both_ways(w.mT, form, rounding)
        return second, first
    w = w.contiguous()
    if is_block(form):
        q, sf, q_t, sf_t = ops.quantize_squares_both(w, form == "block_power_of_two")
        return Blockwise(q, sf), Blockwise(q_t, sf_t)
    if form == "row":
        return quantize_rows(w, form, rounding), quantize_rows(w.transpose(-2, -1).contiguous(), form, rounding)
    if form == "fold":
        qf, row_sf, qf_t, col_sf = ops.quantize_matrix_fold(w, rounding)
        return Folded(qf, row_sf), Folded(qf_t, col_sf)
    q, sf, q_t, sf_t = ops.quantize_both(w, rounding)
    return as_multiplied(MX(q, sf)), as_multiplied(MX(q_t, sf_t))


def mx_rows(x: MX, form: Form, headroom: int = 0) -> Quantized:
    """MX in the form "mx" or "fold". headroom: of a fold."""
    return as_multiplied(x) if form == "mx" else Folded(*ops.fold_rows(*x, headroom))


def quantize_rows(x: Tensor, form: Form, rounding: int, headroom: int = 0) -> Quantized:
    """Quantize x (..., K), contiguous, along its last dim. headroom: of a fold."""
    if is_block(form):
        return Blockwise(*ops.quantize_blockwise(x, form == "block_power_of_two"))
    if form == "mx":
        return as_multiplied(MX(*ops.quantize_row(x, rounding)))
    if form == "fold":
        return Folded(*ops.quantize_row_fold(x, rounding, False, headroom))
    return Folded(*ops.quantize_rowwise(x, rounding))


def is_block(form: Form) -> bool:
    """Whether operands have fp32 scales per 128 values."""
    return form in ("block", "block_power_of_two")
