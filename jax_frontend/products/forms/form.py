"""The protocol of an operand form, and what its implementations share.

    out = x w^T       rows      x  weights along K        mm, mm_pair of two weights
    dx  = dout w      rows      x  weights along N        mm, mm_sum of two products
    dw  = dout^T x    tokens^T  x  tokens                 wgrad, wgrad_pair of two gradients with the same x

A form is one object, the FORM of a file of this folder. It makes the operands of a recipe's products and multiplies
them; nothing else asks what an operand is. `weights.format_of` finds it. A kernel that computes less than a method is
called more often: the functions below that end with _unfused. This code runs below autodiff: no checks, no gradients.
A form is a static argument of the programs that it is traced into.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from ....core_kernels.formats import Rounding
from ....core_kernels.policy.recipe import Form
from ....core_kernels.swiglu.activation import Numbers
from ... import ops
from ...ops.call import rounded
from ...ops.mx_array import MXArray

Maybe = jax.Array | None
MX = tuple[jax.Array, jax.Array]
"""q and sf, one scale per 32 values, in the order in which a product reads them."""


class Operands(NamedTuple):
    """Of an activation or a gradient, along its rows and along the tokens; None for one that is made later."""

    rows: Any = None
    tokens: Any = None


class WeightOperands(NamedTuple):
    """Of weights: along their last dim, and along dim 1, transposed."""

    as_stored: Any = None
    transposed: Any = None


class AddedBias(NamedTuple):
    """values (G, N) fp32. row_weights (M,) fp32 multiply the bias of each row. one_group: values (1, N) are the bias of
    all rows, and the last end is their number."""

    values: jax.Array
    row_weights: Maybe = None
    one_group: bool = False


Added = AddedBias | None


class Glu(NamedTuple):
    """The arguments of SwiGLU; prob is of `row_probabilities`. ends: of the groups of rows."""

    gate: jax.Array
    up: jax.Array
    prob: jax.Array
    numbers: Numbers
    ends: jax.Array

    def hidden(self) -> jax.Array:
        """h (M, F) bf16."""
        return ops.swiglu(self.gate, self.up, self.prob, self.ends, *self.numbers)

    def gradient(self, dh: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """dgate and dup in bf16, and dprob."""
        return ops.swiglu_bwd(dh, self.gate, self.up, self.prob, self.ends, *self.numbers)


class SwiGLUGradient(NamedTuple):
    """dgate and dup; h along the tokens; dgate and dup in bf16, or None. Rows may be bf16, which `Format.rows`
    quantizes."""

    gate: Operands
    up: Operands
    hidden: Any
    dprob: jax.Array
    values: tuple[Maybe, Maybe] = None, None


class Format(Protocol):
    """An operand form. Products are rounded once.

    Rows past the last of `ends` are unspecified in everything that is made of rows: no kernel reads or writes them.
    clear_rest: rows of a product past the last end are zeros.

    name, rounding, wgrad_mx, upcasts: of a recipe in a program traced now. wgrad_mx: tokens are quantized, in whole
        blocks; otherwise they are bf16. upcasts: the device multiplies no MX.
    quantizes: weights have bytes to hold.
    rows: x along its last dim, of floats, of an MXArray, or of MX; another operand is returned unchanged. ends: None
        for weights. headroom: of a fold; rows through a map have none.
    tokens: x along its rows, transposed. saved: x with what `tokens` reads of it.
    activation: rows of x, and tokens where one read makes both. gradient: rows and tokens of dout.
    along_rows: weights along their last dim. along_columns: along dim 1, transposed.
    weights: both, in one read where a kernel makes both; MX is not dequantized.
    hidden: rows of h, by the kernel that computes h if it can. swiglu_backward: what follows from dh.
    mm: rows (M, K) x w (G, N, K) [+ bias] -> (M, N). mm_pair: of the same rows with two weights of one shape.
    mm_sum: rows x w + rows2 x w2.
    wgrad: tokens of dout (M, N) and of x (M, K) -> (G, N, K). wgrad_pair: of two gradients with the same x.
    """

    @property
    def name(self) -> Form: ...
    @property
    def rounding(self) -> Rounding: ...
    @property
    def wgrad_mx(self) -> bool: ...
    @property
    def quantizes(self) -> bool: ...

    def rows(self, x: Any, ends: Maybe = None, headroom: int = 0) -> Any: ...
    def tokens(self, x: Any, ends: jax.Array) -> Any: ...
    def saved(self, x: Any) -> Any: ...
    def activation(self, x: Any, ends: jax.Array) -> Operands: ...
    def gradient(self, dout: Any, ends: jax.Array) -> Operands: ...
    def along_rows(self, w: jax.Array) -> Any: ...
    def along_columns(self, w: jax.Array) -> Any: ...
    def weights(self, w: jax.Array) -> WeightOperands: ...
    def hidden(self, glu: Glu) -> Any: ...
    def swiglu_backward(self, dh: jax.Array, glu: Glu, need_values: bool) -> SwiGLUGradient: ...
    def mm(
        self, rows: Any, w: Any, ends: jax.Array, dtype: Any, bias: Added = None, clear_rest: bool = False
    ) -> jax.Array: ...
    def mm_pair(
        self, rows: Any, w: Any, w2: Any, ends: jax.Array, bias: Maybe, bias2: Maybe, clear_rest: bool
    ) -> tuple[jax.Array, jax.Array]: ...
    def mm_sum(
        self, rows: Any, w: Any, rows2: Any, w2: Any, ends: jax.Array, dtype: Any, clear_rest: bool = False
    ) -> jax.Array: ...
    def wgrad(self, dout: Any, x: Any, ends: jax.Array, dtype: Any) -> jax.Array: ...
    def wgrad_pair(
        self, dout: Any, dout2: Any, x: Any, ends: jax.Array, dtypes: Sequence[Any]
    ) -> tuple[jax.Array, jax.Array]: ...


FormatType = Callable[..., Format]
"""Of name, rounding, wgrad_mx and upcasts."""


def as_bf16(x: Any) -> jax.Array:
    """An array, MXArray or MX in bf16, rounded if bf16 does not hold its values."""
    if isinstance(x, MXArray):
        x = (x.q, x.sf)
    return ops.dequantize(x[0], x[1], out_dtype="bfloat16") if isinstance(x, tuple) else x.astype(jnp.bfloat16)


def floats(x: Any) -> jax.Array:
    """x, dequantized to bf16 if it is MX."""
    return as_bf16(x) if isinstance(x, tuple | MXArray) else x


def without_source(form: Format, x: Any) -> Any:
    return dataclasses.replace(x, source=None) if isinstance(x, MXArray) else x


def rows_alone(form: Format, x: Any, ends: jax.Array) -> Operands:
    return Operands(form.rows(x, ends))


def bf16_tokens(form: Format, x: Any, ends: jax.Array) -> jax.Array:
    return as_bf16(x)


def gradient_unfused(form: Format, dout: Any, ends: jax.Array) -> Operands:
    return Operands(form.rows(dout, ends), form.tokens(dout, ends))


def wgrad_bf16(form: Format, dout: jax.Array, x: jax.Array, ends: jax.Array, dtype: Any) -> jax.Array:
    return ops.grouped_wgrad_bf16(dout, x, ends, out_dtype=dtype)


def swiglu_unfused(form: Format, dh: jax.Array, glu: Glu, need_values: bool) -> SwiGLUGradient:
    """dgate and dup in bf16, which are operands along the tokens too."""
    dgate, dup, dprob = glu.gradient(dh)
    gate, up = (Operands(d, form.tokens(d, glu.ends)) for d in (dgate, dup))
    return SwiGLUGradient(gate, up, glu.hidden(), dprob, (dgate, dup))


def bias_unfused(
    form: Format, rows: Any, w: Any, ends: jax.Array, dtype: Any, bias: AddedBias, clear_rest: bool
) -> jax.Array:
    """The bias is added to the fp32 sums of a kernel."""
    sums = form.mm(rows, w, ends, "float32", clear_rest=clear_rest)
    if bias.one_group:
        return (sums + bias.values).astype(dtype)
    added = bias_of_rows(bias.values, ends, sums.shape[0])
    if bias.row_weights is not None:
        in_group = jnp.arange(sums.shape[0]) < ends[-1:]
        added = added * jnp.where(in_group, bias.row_weights, 0)[:, None]
    return (sums + added).astype(dtype)


def bias_of_rows(bias: jax.Array, ends: jax.Array, rows: int) -> jax.Array:
    """bias (G, N) -> (rows, N), the bias of each row's group; zeros past the last end."""
    row = jnp.arange(rows, dtype=ends.dtype)
    group = (row[:, None] >= ends[None]).sum(1, dtype=jnp.int32)  # not jnp.searchsorted, see ep.plan_exchange
    return jnp.pad(bias, ((0, 1), (0, 0)))[group]


def pair_unfused(
    form: Format, rows: Any, w: Any, w2: Any, ends: jax.Array, bias: Maybe, bias2: Maybe, clear_rest: bool
) -> tuple[jax.Array, jax.Array]:
    first = form.mm(rows, w, ends, "bfloat16", None if bias is None else AddedBias(bias), clear_rest)
    return first, form.mm(rows, w2, ends, "bfloat16", None if bias2 is None else AddedBias(bias2), clear_rest)


def sum_unfused(
    form: Format, rows: Any, w: Any, rows2: Any, w2: Any, ends: jax.Array, dtype: Any, clear_rest: bool = False
) -> jax.Array:
    first = form.mm(rows, w, ends, "float32", clear_rest=clear_rest)
    return rounded(first + form.mm(rows2, w2, ends, "float32", clear_rest=clear_rest), dtype)


def wgrads_unfused(
    form: Format, dout: Any, dout2: Any, x: Any, ends: jax.Array, dtypes: Sequence[Any]
) -> tuple[jax.Array, jax.Array]:
    return form.wgrad(dout, x, ends, dtypes[0]), form.wgrad(dout2, x, ends, dtypes[1])
