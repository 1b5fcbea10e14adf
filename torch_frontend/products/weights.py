"""Quantized weights: for one call and its backward, or once for many calls.

    w (G, N, K) --along K--> q (G, N, K), sf    out = x w^T        "as_stored"
                '-along N--> q (G, K, N), sf    dx  = dout w       "transposed"    one read of w makes both

Form "mx" on sm_90 dequantizes these bytes and multiplies bf16. Form "bf16" quantizes nothing.

A call quantizes its weights, and the bytes along N live until its backward. The next call starts again: no version
counter sees a write through `.data`, by a collective or by another process, so a cache could be stale. A caller that
quantizes once for several microbatches, an evaluation or serving holds the result of `quantize_weights`.

Frozen weights are an MXTensor: the bytes along K alone, without a gradient. A backward dequantizes them and quantizes
the values along N, so its input gradient is the gradient of a call with these values as weights.
"""

import dataclasses
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Literal, cast, get_args, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...core_kernels.dispatch import facts
from ...core_kernels.formats import BLOCK, Rounding
from ...core_kernels.launch import fail
from ...core_kernels.policy.recipe import Form, Recipe
from ..ops import direct as ops
from ..ops.checks import check_bias, check_flag, check_floats
from ..ops.device import arch_of
from ..ops.launch import check_devices
from ..ops.mx_tensor import MXTensor
from ..ops.private import has_version, owner_of, version_of
from .forms.form import Format, FormatType, WeightOperands
from .gathered_weights import GatheredWeights

FORMS: dict[Form, FormatType] = {
    name: import_module(f".forms.{name.partition('_')[0]}", __package__).FORM for name in get_args(Form)
}
"""A form is in the file of the first word of its name."""
FROZEN: tuple[Form, ...] = ("mx", "fold", "bf16")
"""Forms that multiply an MXTensor as weights."""


def format_of(recipe: Recipe, device: torch.device) -> Format:
    """The operand form of the recipe's products on a device."""
    arch = arch_of(device)
    name = recipe.form(arch)
    return FORMS[name](name, int(recipe.rounding), recipe.wgrad_mx, facts(arch).upcasts)


@dataclasses.dataclass(frozen=True)
class QuantizedWeights:
    """Weights and their quantized bytes, which the products multiply instead; made by `quantize_weights`.

    Attributes:
        values: (G, N, K), bf16 or fp32, receives the weight gradient; forward and input gradient do not read it.
        as_stored: the operand along K; None for recipe "bf16".
        transposed: the operand along N; None for recipe "bf16".
        form: the format of the operands.
        rounding: of the scales.
    """

    values: Tensor
    as_stored: Any
    transposed: Any
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
        """Return the same bytes with other values: the parameter that they were quantized from, and that is
        differentiated.

        Args:
            values: (G, N, K) bfloat16 or float32.

        Returns:
            The QuantizedWeights.

        Raises:
            ValueError: another shape.
            TypeError: unless it is bf16 or fp32.

        Example:
            >>> w = torch.ones(2, 32, 64)
            >>> quantize_weights(w).with_values(w.requires_grad_()).requires_grad
            True
        """
        if values is self.values:
            return self
        check_float_weights("QuantizedWeights.with_values", "values", values)
        if values.shape != self.values.shape:
            got, allowed = f"shape {tuple(values.shape)}", f"allowed: {tuple(self.values.shape)}"
            fail(ValueError, "QuantizedWeights.with_values", "values", got, allowed)
        return dataclasses.replace(self, values=values)


Weights = Tensor | QuantizedWeights
Cached = WeightOperands | None
"""The operands of QuantizedWeights; None for a plain weight and for an MXTensor."""


@overload
def quantize_weights(w: Tensor, recipe: Recipe | str = ..., *, frozen: Literal[False] = ...) -> QuantizedWeights: ...
@overload
def quantize_weights(w: Tensor, recipe: Recipe | str = ..., *, frozen: Literal[True]) -> MXTensor: ...
def quantize_weights(w: Tensor, recipe: Recipe | str = "mxfp8", *, frozen: bool = False) -> QuantizedWeights | MXTensor:
    """Quantize w along both of its last dims, for all calls until w changes.

    `grouped_mm` and `grouped_swiglu_ffn` take the result in place of w, with a recipe of the same form and rounding,
    and give w its gradient. After a write to w the caller quantizes again. `GroupedExperts.cached_weights` does this
    for a layer.

    The bytes take 2.06 bytes per weight; 4 for exact products on Hopper, which multiply dequantized weights. The device
    of w decides what compute "auto" is.

    Frozen weights take 1.03 bytes and no gradient, and nothing refers to w. Every MXFP8 recipe multiplies them, and
    recipe "bf16" multiplies their values. The forward is bitwise the forward of w. The input gradient is bitwise the
    gradient of a call with `.dequantize()` of the result as weights.

    Args:
        w: (G, N, K) bfloat16 or float32, contiguous, as a linear layer stores it; K and N multiples of 32.
        recipe: a `Recipe` or its name.
        frozen: return an `MXTensor`, for weights that get no gradient, such as the base of LoRA; with an MXFP8 recipe.
            `integrations.frozen.freeze_weights` does this for the layers of a model.

    Returns:
        The bytes along K and along N, and w. If frozen, an MXTensor (G, N, K), the bytes along K.

    Raises:
        ValueError: shape, layout.
        TypeError: dtype.

    Example:
        >>> w = torch.ones(2, 32, 64, requires_grad=True)
        >>> quantized = quantize_weights(w)
        >>> quantized.as_stored.sf.shape, quantized.transposed.sf.shape
        (torch.Size([2, 32, 2]), torch.Size([2, 64, 1]))
        >>> quantize_weights(w, frozen=True)
        MXTensor(shape=(2, 32, 64), orig_dtype=torch.float32, device=cpu)
    """
    op, recipe = "quantize_weights", Recipe.parse(recipe)
    check_flag(op, "frozen", frozen)
    check_float_weights(op, "w", w)
    if frozen and not recipe.mx:
        fail(ValueError, op, "recipe", f"{recipe.name!r} with frozen=True", "allowed: one with operands 'mxfp8'")
    for dim in (1, 2):
        if w.shape[dim] % BLOCK and recipe.operands != "bf16":
            fail(ValueError, op, "w", f"dim {dim} = {w.shape[dim]}", f"allowed: multiples of {BLOCK}")
    if not w.is_contiguous():
        fail(ValueError, op, "w", f"strides {w.stride()}", "allowed: a contiguous (G, N, K)")
    if frozen:
        return MXTensor.quantize(w.detach(), recipe.rounding)
    form = format_of(recipe, w.device)
    operands = form.weights(w.detach()) if form.quantizes else WeightOperands()
    return QuantizedWeights(w, operands.along_k, operands.along_n, form.name, recipe.rounding)


def check_float_weights(op: str, argument: str, w: object) -> None:
    """Raise unless w is a plain (G, N, K) in bf16 or fp32."""
    if isinstance(w, DTensor):
        fail(TypeError, op, argument, "a DTensor", "allowed: this rank's part of it: .to_local()")
    if isinstance(w, MXTensor):
        fail(TypeError, op, argument, "an MXTensor", "allowed: bfloat16 or float32 weights")
    check_floats(op, argument, cast(Tensor, w), 3)


def check_weights(op: str, argument: str, w: object, form: Format, rounding: Rounding) -> None:
    """Raise TypeError unless w is a float tensor, an MXTensor or QuantizedWeights, ValueError for QuantizedWeights of
    another form or rounding, and for an MXTensor that requires a gradient or that the form does not multiply."""
    if isinstance(w, MXTensor):
        check_floats(op, argument, w, 3)
        if w.requires_grad:
            allowed = "allowed: requires_grad=False, MXFP8 weights are frozen; or bfloat16 or float32 weights"
            fail(ValueError, op, argument, "an MXTensor that requires a gradient", allowed)
        if form.name not in FROZEN:
            allowed = "allowed: with recipe 'mxfp8', 'mxfp8_wgrad_with_hp' or 'bf16'"
            fail(ValueError, op, argument, f"an MXTensor for form {form.name!r}", allowed)
    elif not isinstance(w, QuantizedWeights):
        check_float_weights(op, argument, w)
    elif w.form != form.name or (form.quantizes and w.rounding != rounding):
        got = f"QuantizedWeights of form {w.form!r} with {w.rounding.name}"
        allowed = f"allowed: form {form.name!r} with {rounding.name}; call quantize_weights with this call's recipe"
        fail(ValueError, op, argument, got, allowed)


def values_and_cached(w: Weights) -> tuple[Tensor, Cached]:
    """The tensor that receives the gradient, and the operands of QuantizedWeights."""
    if not isinstance(w, QuantizedWeights):
        return w, None
    return w.values, WeightOperands(w.as_stored, w.transposed)


def check_ffn_weights(
    op: str, name: str, x: Tensor, weights: Sequence[Weights], biases: Sequence[Tensor | None], recipe: Recipe
) -> tuple[tuple[Tensor, ...], tuple[Cached, ...], tuple[Tensor | None, ...]]:
    """Values and cached operands of w1, w3, w2, and b1, b3, b2 as (G, N) fp32; raises unless they fit each other and
    the rows of x, named `name`."""
    form = format_of(recipe, x.device)
    for of, w in zip(("w1", "w3", "w2"), weights, strict=True):
        check_weights(op, of, w, form, recipe.rounding)
    (w1, w3, w2), cached = zip(*map(values_and_cached, weights), strict=True)
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
    return (w1, w3, w2), cached, biases


def outlives_forward(w: Tensor) -> bool:
    """Whether the memory of w is still there in the backward, so that bytes of it may be saved for the backward.

    FSDP2 frees its all-gathered parameters after the forward. Such a parameter is a leaf without an in-place write: its
    version counter is 0. A plain leaf with version 0 looks the same; it is quantized again in the backward.
    """
    if torch.compiler.is_compiling():
        return True
    owner = owner_of(w)
    return not owner.is_leaf or owner.is_inference() or (has_version and version_of(owner) > 0)


def _frozen_values(w: MXTensor) -> Tensor:
    return ops.dequantize(*w.contiguous_parts(), "bfloat16")


def is_transpose(w: Tensor) -> bool:
    """Whether w (G, N, K) is the transpose of a contiguous (G, K, N), whose operands are w's operands, exchanged."""
    return not w.is_contiguous() and w.mT.is_contiguous()


def quantize_for_call(w: Tensor, cached: Cached, form: Format, both: bool) -> WeightOperands:
    """The operands of w. The second is None unless w is cached or `both` is set and the form quantizes."""
    if isinstance(w, GatheredWeights):
        return WeightOperands(w.gathered.along_k)  # the bytes along N are gathered for the backward, and not saved
    if cached is not None and cached.along_k is not None:
        return cached
    if isinstance(w, MXTensor):
        return WeightOperands(form.along_k(w if form.quantizes else _frozen_values(w)))
    transposed = is_transpose(w)
    if not both or not form.quantizes:
        return WeightOperands(form.along_n(w.mT) if transposed else form.along_k(w))
    if not transposed:
        return form.weights(w)
    along_n, along_k = form.weights(w.mT)
    return WeightOperands(along_k, along_n)


def along_n(w: Any, form: Format) -> Any:
    """The operand along N of a backward: itself, or of weights (G, N, K)."""
    if isinstance(w, GatheredWeights):
        return w.gathered.along_n
    if not isinstance(w, Tensor):
        return w
    if isinstance(w, MXTensor):
        return form.along_n(_frozen_values(w))
    return form.along_k(w.mT) if is_transpose(w) else form.along_n(w)
