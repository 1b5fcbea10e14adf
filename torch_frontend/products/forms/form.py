"""The protocol of an operand form, and what its implementations share.

    out = x w^T       rows      x  weights along K        mm, mm_pair of two weights
    dx  = dout w      rows      x  weights along N        mm, mm_sum of two products
    dw  = dout^T x    tokens^T  x  tokens                 wgrad, wgrad_pair of two gradients with the same x

A form is one object, the FORM of a file of this folder. It makes the operands of a recipe's products and multiplies
them; nothing else asks what an operand is. `weights.format_of` finds it. A kernel that computes less than a method is
called more often: the functions below that end with _unfused. This code runs below autograd: no checks, no gradients.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ....core_kernels.policy.recipe import Form
from ....core_kernels.policy.swiglu_gradient import Needs
from ....core_kernels.registry import OPS
from ....core_kernels.swiglu.activation import Numbers
from ...ops import direct as ops
from ...ops.call import call_out
from ...ops.launch import dtype_name
from ...ops.mx_tensor import dequantized

if TYPE_CHECKING:
    from ..backward_operands import BackwardOperands

Maybe = Tensor | None
DType = torch.dtype


class Operands(NamedTuple):
    """Of an activation or a gradient, along its rows and along the tokens; None for one that nothing needs."""

    rows: Any = None
    tokens: Any = None


class WeightOperands(NamedTuple):
    """Of weights (G, N, K): along K, for out; along N, for dx, or None if the backward makes it."""

    along_k: Any = None
    along_n: Any = None


class TokenGroups(NamedTuple):
    """The groups of a weight gradient. `row_map` pads them to whole blocks of tokens; `ends` are the ends after it."""

    ends: Tensor
    row_map: Maybe = None


class AddedBias(NamedTuple):
    """values (G, N) fp32. row_weights (M,) fp32 multiply the bias of each row. one_group: values (1, N) are the bias of
    all rows, and the last end is their number."""

    values: Tensor
    row_weights: Maybe = None
    one_group: bool = False


Added = AddedBias | None


class Glu(NamedTuple):
    """The arguments of SwiGLU; prob is of `row_probabilities`. ends: of the groups of rows."""

    gate: Tensor
    up: Tensor
    prob: Tensor
    numbers: Numbers
    ends: Tensor

    def hidden(self) -> Tensor:
        """h (M, F) bf16."""
        return ops.swiglu(self.gate, self.up, self.prob, self.ends, *self.numbers)


class SwiGLUGradient(NamedTuple):
    """dgate and dup along rows and tokens, and in bf16; None for one that nothing needs. Rows may be bf16, which
    `Format.rows` quantizes."""

    dprob: Tensor
    gate_rows: Any = None
    up_rows: Any = None
    gate_tokens: Any = None
    up_tokens: Any = None
    values: tuple[Maybe, Maybe] = None, None


class Format(Protocol):
    """An operand form. Products are rounded once, and are written to `out` if given.

    Rows past the last of `ends` are unspecified in everything that is made of rows: no kernel reads or writes them.
    clear_rest: rows of a product past the last end are zeros.

    name, rounding, wgrad_mx, upcasts: of a recipe on a device. wgrad_mx: tokens are quantized, in whole blocks;
        otherwise they are what is given, in bf16 or fp32. upcasts: the device multiplies no MX.
    quantizes: weights have bytes to hold.
    rows: x along its last dim, of floats, of an MXTensor, or of the MX that a kernel wrote; an operand is returned
        unchanged. ends: None for weights. headroom: of a fold; gathered rows have none.
    tokens: x along its rows, transposed. MX is along the tokens already; an operand is returned unchanged.
    activation: rows of x, and tokens where one read makes both. whole: whether a weight gradient reads whole blocks.
    gradient: rows and tokens of dout, whose groups are whole blocks.
    along_k: the right operand (G, N, K) of a product over K, of w (G, N, K), an MXTensor too if the form quantizes.
    along_n: (G, K, N), of a product over N.
    weights: both, in one read where a kernel makes both.
    hidden: rows of h, by the kernel that computes h if it can. swiglu_backward: what follows from `steps.dh`.
    mm: rows (M, K) x w (G, N, K) [+ bias] -> (M, N). mm_pair: of the same rows with two weights of one shape.
    mm_sum: rows x w + rows2 x w2.
    wgrad: tokens of dout (M, N) and of x (M, K) -> (G, N, K). wgrad_pair: of each of two gradients that is not None,
        with the same x.
    """

    @property
    def name(self) -> Form: ...
    @property
    def rounding(self) -> int: ...
    @property
    def wgrad_mx(self) -> bool: ...
    @property
    def upcasts(self) -> bool: ...
    @property
    def quantizes(self) -> bool: ...

    def rows(self, x: Any, ends: Maybe = None, headroom: int = 0) -> Any: ...
    def tokens(self, x: Any, groups: TokenGroups) -> Any: ...
    def activation(self, x: Tensor, ends: Tensor, whole: bool) -> Operands: ...
    def gradient(self, dout: Tensor, ends: Tensor) -> Operands: ...
    def along_k(self, w: Tensor) -> Any: ...
    def along_n(self, w: Tensor) -> Any: ...
    def weights(self, w: Tensor) -> WeightOperands: ...
    def hidden(self, glu: Glu) -> Any: ...
    def swiglu_backward(self, steps: "BackwardOperands", needs: Needs) -> SwiGLUGradient: ...

    def mm(
        self, rows: Any, w: Any, ends: Tensor, dtype: DType, bias: Added = None, out: Maybe = None,
        clear_rest: bool = False,
    ) -> Tensor: ...  # fmt: skip
    def mm_pair(
        self, rows: Any, w: Any, w2: Any, ends: Tensor, dtype: DType, bias: Maybe = None, bias2: Maybe = None,
        clear_rest: bool = False,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
    def mm_sum(
        self, rows: Any, w: Any, rows2: Any, w2: Any, ends: Tensor, dtype: DType, out: Maybe = None,
        clear_rest: bool = False,
    ) -> Tensor: ...  # fmt: skip
    def wgrad(self, dout: Any, x: Any, ends: Tensor, dtype: DType) -> Tensor: ...
    def wgrad_pair(
        self, douts: Sequence[Any], x: Any, ends: Tensor, dtypes: Sequence[DType]
    ) -> tuple[Maybe, Maybe]: ...


FormatType = Callable[..., Format]
"""Of name, rounding, wgrad_mx and upcasts."""


def written(name: str, operands: tuple[Tensor, ...], dtype: DType, out: Maybe, clear_rest: bool) -> Tensor:
    """The only output of a product of rows, in `out` if there is one."""
    if out is None:
        return getattr(ops, name)(*operands, dtype_name(dtype), clear_rest)
    call_out((out,), OPS[name], *operands, out_dtype=dtype_name(dtype), clear_rest=clear_rest)
    return out


def as_bf16(x: Tensor) -> Tensor:
    return dequantized(x).to(torch.bfloat16).contiguous()


def rows_alone(form: Format, x: Tensor, ends: Tensor, whole: bool) -> Operands:
    return Operands(form.rows(x, ends))


def as_given(form: Format, x: Any, groups: TokenGroups) -> Any:
    return x


def share_gradient(form: Format, dout: Tensor, ends: Tensor) -> Operands:
    return Operands(dout, dout)


def wgrad_bf16(form: Format, dout: Tensor, x: Tensor, ends: Tensor, dtype: DType) -> Tensor:
    return ops.grouped_wgrad_bf16(as_bf16(dout), as_bf16(x), ends, dtype_name(dtype))


def swiglu_unfused(form: Format, steps: "BackwardOperands", needs: Needs) -> SwiGLUGradient:
    """dgate and dup in bf16, which are operands along the tokens too."""
    return steps.in_bf16(needs)


def bias_unfused(
    form: Format, rows: Any, w: Any, ends: Tensor, dtype: DType, bias: AddedBias, out: Maybe, clear_rest: bool
) -> Tensor:
    """The bias is added to the fp32 sums of a kernel."""
    sums = form.mm(rows, w, ends, torch.float32, clear_rest=clear_rest)
    if bias.one_group:  # added and rounded in one kernel, without a bias per row
        return torch.add(sums, bias.values, out=sums.new_empty(sums.shape, dtype=dtype) if out is None else out)
    added = bias_of_rows(bias.values, ends, sums.shape[0])
    if bias.row_weights is not None:
        in_group = torch.arange(sums.shape[0], device=sums.device) < ends[-1:]
        added = added * torch.where(in_group, bias.row_weights, 0)[:, None]
    return (sums + added).to(dtype) if out is None else out.copy_(sums + added)


def bias_of_rows(bias: Tensor, ends: Tensor, rows: int) -> Tensor:
    """bias (G, N) -> (rows, N), the bias of each row's group; zeros past the last end."""
    row = torch.arange(rows, dtype=ends.dtype, device=ends.device)
    group = torch.searchsorted(ends, row, right=True)
    return torch.nn.functional.pad(bias, (0, 0, 0, 1))[group]


def pair_unfused(
    form: Format, rows: Any, w: Any, w2: Any, ends: Tensor, dtype: DType, bias: Maybe = None, bias2: Maybe = None,
    clear_rest: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    biases = (None if b is None else AddedBias(b) for b in (bias, bias2))
    first, second = (
        form.mm(rows, of, ends, dtype, b, clear_rest=clear_rest) for of, b in zip((w, w2), biases, strict=True)
    )
    return first, second


def sum_unfused(
    form: Format, rows: Any, w: Any, rows2: Any, w2: Any, ends: Tensor, dtype: DType, out: Maybe = None,
    clear_rest: bool = False,
) -> Tensor:  # fmt: skip
    first = form.mm(rows, w, ends, torch.float32, clear_rest=clear_rest)
    second = form.mm(rows2, w2, ends, torch.float32, clear_rest=clear_rest)
    # Added and rounded in one kernel: 10 bytes per value, and not 18.
    return torch.add(first, second, out=first.new_empty(first.shape, dtype=dtype) if out is None else out)


def wgrads_unfused(
    form: Format, douts: Sequence[Any], x: Any, ends: Tensor, dtypes: Sequence[DType]
) -> tuple[Maybe, Maybe]:
    dw, dw2 = (
        None if dout is None else form.wgrad(dout, x, ends, dtype) for dout, dtype in zip(douts, dtypes, strict=True)
    )
    return dw, dw2
