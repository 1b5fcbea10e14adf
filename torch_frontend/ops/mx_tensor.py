"""MXTensor: MXFP8 rows as a tensor that autograd and torch.compile can carry.

    MXTensor (M, K) of orig_dtype  =  q (M, K) uint8  +  sf (M, K/32) uint8
                                      .qdata view: float8_e4m3fn   .scale view: float8_e8m0fnu

It is a payload, not a number type: the functions of this package pass it to each other, and any other operation raises
and names `.dequantize()`. After a packed all-to-all q and sf are views of one buffer, which nothing here copies.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core_kernels.formats import BLOCK, Rounding
from ...core_kernels.launch import fail
from . import direct as ops
from .call import require_tensor
from .differentiable import differentiable
from .launch import as_bytes
from .private import unwrapped_results, wrapper

aten = torch.ops.aten


class MXTensor(Tensor):
    """MXFP8 values with one E8M0 scale per 32 along the last dim.

    Args:
        q: (..., K) uint8 or float8_e4m3fn, K a multiple of 32.
        sf: (..., K/32) uint8 or float8_e8m0fnu.
        orig_dtype: bfloat16 or float32, the dtype for autograd and of `dequantize()`.

    Raises:
        ValueError: shapes, device.
        TypeError: dtypes.

    Example:
        >>> mx = MXTensor.quantize(torch.full((1, 32), 3.0))
        >>> mx.qdata[0, 0].item(), mx.scale[0, 0].item(), mx.dequantize()[0, 0].item()
        (384.0, 0.0078125, 3.0)

    Source:
        OCP Microscaling Formats (MX) Specification v1.0, section 5.
    """

    q: Tensor
    sf: Tensor
    orig_dtype: torch.dtype

    # Attributes of torchao's MXTensor; here there is one format in one layout.
    elem_dtype = torch.float8_e4m3fn
    block_size = BLOCK
    is_swizzled_scales = False

    # The results of other operations are not wrapped again.
    __torch_function__ = unwrapped_results

    @staticmethod
    def __new__(cls, q: Tensor, sf: Tensor, orig_dtype: torch.dtype = torch.bfloat16) -> "MXTensor":
        _check_parts("MXTensor", "q", q, "sf", sf, orig_dtype)
        return mx_rows(as_bytes(q), as_bytes(sf), orig_dtype)

    @staticmethod
    def quantize(x: Tensor, rounding: Rounding | str = Rounding.RCEIL, packed: bool = False) -> "MXTensor":
        """Quantize a tensor along its last dim. Differentiable: the gradient passes through unchanged.

        Args:
            x: (M, K) or (G, M, K), bfloat16 or float32, K a multiple of 32.
            rounding: a `Rounding` or its name.
            packed: x is (M, K), and q and sf are views of rows `[q | sf]` in one buffer. `gather_rows`, `spread_rows`
                and an all-to-all read such rows without a copy; a product copies q and sf.

        Returns:
            An MXTensor of x's shape, with x's dtype as orig_dtype.

        Raises:
            ValueError: shape, an unknown rounding.
            TypeError: dtype.

        Example:
            >>> mx = MXTensor.quantize(torch.full((1, 32), 3.0), packed=True)
            >>> mx.shape, mx.q.stride(), mx.dequantize()[0, 0].item()
            (torch.Size([1, 32]), (33, 1), 3.0)
        """
        op = "MXTensor.quantize"
        if not isinstance(packed, bool):
            fail(TypeError, op, "packed", repr(packed), "allowed: bool")
        return _quantized(op, "x", x, Rounding.parse(rounding, op), packed)

    @staticmethod
    def from_packed(packed: Tensor, orig_dtype: torch.dtype = torch.bfloat16) -> "MXTensor":
        """Wrap packed rows as views, without a copy.

        Args:
            packed: (M, K + K/32) uint8, rows `[q | sf]`.
            orig_dtype: bfloat16 or float32.

        Returns:
            An MXTensor (M, K).

        Raises:
            ValueError: shape.
            TypeError: dtype.

        Example:
            >>> packed = ops.quantize_row_packed(torch.full((1, 32), 3.0))
            >>> MXTensor.from_packed(packed).dequantize()[0, 0].item()
            3.0
        """
        op = "MXTensor.from_packed"
        require_tensor(op, "packed", packed)
        if packed.dtype != torch.uint8:
            fail(TypeError, op, "packed", f"dtype {packed.dtype}", "allowed: uint8")
        if packed.dim() != 2 or packed.shape[1] % (BLOCK + 1):
            got, allowed = f"shape {tuple(packed.shape)}", "allowed: (M, K + K/32), 32 elements and their scale"
            fail(ValueError, op, "packed", got, allowed)
        k = packed.shape[1] // (BLOCK + 1) * BLOCK
        return MXTensor(packed[:, :k], packed[:, k:], orig_dtype)

    @staticmethod
    def to_mx(
        data_hp: Tensor,
        elem_dtype: torch.dtype,
        block_size: int = BLOCK,
        scaling_mode: "Rounding | str" = Rounding.FLOOR,
        kernel_preference: Any = None,
        act_quant_kwargs: None = None,
        is_swizzled_scales: bool = False,
        mxfp8_dim0_cast_kernel_choice: Any = None,
    ) -> "MXTensor":
        """`quantize` with the signature and the defaults (FLOOR) of torchao's `MXTensor.to_mx`.

        Args:
            data_hp: (M, K) or (G, M, K), bfloat16 or float32, K a multiple of 32.
            elem_dtype: torch.float8_e4m3fn.
            block_size: 32.
            scaling_mode: a `Rounding`, its name, or torchao's member of that name.
            kernel_preference: no effect: the device decides the kernel.
            act_quant_kwargs: None.
            is_swizzled_scales: False.
            mxfp8_dim0_cast_kernel_choice: no effect.

        Returns:
            An MXTensor of data_hp's shape.

        Raises:
            ValueError: shape, any other value of an argument.
            TypeError: dtype.

        Example:
            >>> MXTensor.to_mx(torch.full((1, 32), 3.0), torch.float8_e4m3fn, scaling_mode="rceil").scale[0, 0].item()
            0.0078125
        """
        op = "MXTensor.to_mx"
        _check_torchao(op, elem_dtype, block_size, act_quant_kwargs, is_swizzled_scales)
        return _quantized(op, "data_hp", data_hp, Rounding.parse(scaling_mode, op, "scaling_mode"))

    @staticmethod
    def from_qdata_and_scales(
        qdata: Tensor,
        scales: Tensor,
        orig_dtype: torch.dtype,
        *,
        block_size: int = BLOCK,
        kernel_preference: Any = None,
        act_quant_kwargs: None = None,
        is_swizzled_scales: bool = False,
    ) -> "MXTensor":
        """`MXTensor(q, sf, orig_dtype)` with torchao's signature.

        Args:
            qdata: (..., K) float8_e4m3fn.
            scales: (..., K/32) float8_e8m0fnu or uint8, one per block, row-major.
            orig_dtype: bfloat16 or float32.
            block_size: 32.
            kernel_preference: no effect.
            act_quant_kwargs: None.
            is_swizzled_scales: False.

        Returns:
            An MXTensor of qdata's shape.

        Raises:
            ValueError: shapes, devices, any other value of an argument.
            TypeError: dtypes.

        Example:
            >>> mx = MXTensor.quantize(torch.full((1, 32), 3.0))
            >>> MXTensor.from_qdata_and_scales(mx.qdata, mx.scale, torch.float32).dequantize()[0, 0].item()
            3.0
        """
        op = "MXTensor.from_qdata_and_scales"
        require_tensor(op, "qdata", qdata)
        _check_torchao(op, qdata.dtype, block_size, act_quant_kwargs, is_swizzled_scales, "qdata")
        _check_parts(op, "qdata", qdata, "scales", scales, orig_dtype)
        return MXTensor(qdata, scales, orig_dtype)

    @property
    def qdata(self) -> Tensor:
        return self.q.view(torch.float8_e4m3fn)

    @property
    def scale(self) -> Tensor:
        return self.sf.view(torch.float8_e8m0fnu)

    def dequantize(self, output_dtype: torch.dtype | None = None) -> Tensor:
        """Return the values: exact in float32, and in bfloat16 unless a value leaves its range.

        Differentiable: the gradient passes through unchanged.

        Args:
            output_dtype: bfloat16 or float32; None is orig_dtype.

        Returns:
            A tensor of the same shape.

        Raises:
            TypeError: another dtype.

        Example:
            >>> MXTensor.quantize(torch.full((1, 32), 1.06)).dequantize()[0, 0].item()
            1.0
        """
        if output_dtype is not None:
            _check_float("MXTensor.dequantize", "output_dtype", output_dtype)
        return _dequantize(self, output_dtype or self.orig_dtype)

    def contiguous_parts(self) -> tuple[Tensor, Tensor]:
        """Return q and sf, each contiguous, as ops read them.

        Returns:
            q (..., K) and sf (..., K/32), uint8.

        Example:
            >>> q, sf = MXTensor.quantize(torch.full((1, 32), 3.0)).contiguous_parts()
            >>> sf.tolist()  # 2^-7
            [[120]]
        """
        return self.q.contiguous(), self.sf.contiguous()

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["q", "sf"], self.orig_dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], orig_dtype: torch.dtype, size: Any, stride: Any) -> "MXTensor":
        return mx_rows(inner["q"], inner["sf"], orig_dtype)

    def __coerce_same_metadata_as_tangent__(self, expected_metadata: Any, expected_type: type | None = None) -> Any:
        """A compiled backward that was traced with a plain gradient gets a plain gradient."""
        return self.dequantize() if expected_type is Tensor else None

    def _stable_hash_for_caching(self) -> str:
        return str((tuple(self.shape), self.orig_dtype, self.device))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # By the constructor, which checks what a file holds. Views of one buffer stay views of one.
        return MXTensor, (self.q, self.sf, self.orig_dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"MXTensor(shape={tuple(self.shape)}, orig_dtype={self.orig_dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = _RULES.get(func)
        if rule is not None:
            return rule(func, *args, **(kwargs or {}))
        remedy = (
            "allowed: the functions of mxep.torch_frontend; for anything else call .dequantize() first; for a "
            "gradient, pass mxfp8_bwd=False to a2a_combine_hp_fwd_mxfp8_bwd"
        )
        return fail(NotImplementedError, str(func), "argument", "an MXTensor", remedy)


torch.serialization.add_safe_globals([MXTensor])  # for torch.load, which by default loads nothing else


def mx_rows(q: Tensor, sf: Tensor, orig_dtype: torch.dtype) -> MXTensor:
    """`MXTensor` of bytes that an op has returned, unchecked."""
    self = wrapper(MXTensor, q.shape, orig_dtype, q.device)
    self.q, self.sf, self.orig_dtype = q, sf, orig_dtype
    return self


def _check_parts(op: str, q_name: str, q: Tensor, sf_name: str, sf: Tensor, orig_dtype: object) -> None:
    """Raise unless q and sf are the two parts of MX rows."""
    for name, part, float8 in ((q_name, q, torch.float8_e4m3fn), (sf_name, sf, torch.float8_e8m0fnu)):
        require_tensor(op, name, part)
        if isinstance(part, MXTensor) or part.dtype not in (torch.uint8, float8):
            got = "an MXTensor" if isinstance(part, MXTensor) else f"dtype {part.dtype}"
            fail(TypeError, op, name, got, f"allowed: uint8 or {float8}")
    _check_float(op, "orig_dtype", orig_dtype)
    if q.dim() == 0 or q.shape[-1] % BLOCK:
        fail(ValueError, op, q_name, f"shape {tuple(q.shape)}", f"allowed: (..., K), K a multiple of {BLOCK}")
    if sf.shape != (*q.shape[:-1], q.shape[-1] // BLOCK):
        allowed = f"allowed: {(*q.shape[:-1], q.shape[-1] // BLOCK)}, one scale per {BLOCK} values of {q_name}"
        fail(ValueError, op, sf_name, f"shape {tuple(sf.shape)}", allowed)
    if q.device != sf.device:
        fail(ValueError, op, sf_name, f"device {sf.device}", f"allowed: {q.device}, where {q_name} is")


def _check_float(op: str, argument: str, dtype: object) -> None:
    if dtype is not torch.bfloat16 and dtype is not torch.float32:
        fail(TypeError, op, argument, repr(dtype), "allowed: torch.bfloat16 or torch.float32")


def _check_torchao(
    op: str, elem_dtype: Any, block_size: Any, act_quant_kwargs: Any, is_swizzled_scales: Any, name: str = "elem_dtype"
) -> None:
    """Raise ValueError unless torchao's format arguments describe MXFP8 with row-major scales."""
    for argument, value, allowed, why in (
        (name, elem_dtype, torch.float8_e4m3fn, "the elements of MXFP8 here"),
        ("block_size", block_size, BLOCK, "the block of MXFP8"),
        ("act_quant_kwargs", act_quant_kwargs, None, "quantize activations where they are multiplied"),
        ("is_swizzled_scales", is_swizzled_scales, False, "scales in rows; call ops.unblock_scales"),
    ):
        if type(value) is not type(allowed) or value != allowed:
            fail(ValueError, op, argument, repr(value), f"allowed: {allowed}, {why}")


def _quantized(op: str, argument: str, x: Tensor, rounding: Rounding, packed: bool = False) -> MXTensor:
    require_tensor(op, argument, x)
    if isinstance(x, MXTensor):
        fail(TypeError, op, argument, "an MXTensor", "allowed: bfloat16 or float32 tensors; call .dequantize() first")
    if x.dtype not in (torch.bfloat16, torch.float32):
        fail(TypeError, op, argument, f"dtype {x.dtype}", "allowed: bfloat16 or float32")
    if x.dim() not in (2, 3) or x.shape[-1] % BLOCK:
        allowed = f"allowed: (M, K) or (G, M, K), K a multiple of {BLOCK}"
        fail(ValueError, op, argument, f"shape {tuple(x.shape)}", allowed)
    if packed and x.dim() != 2:
        fail(ValueError, op, argument, f"shape {tuple(x.shape)} with packed=True", "allowed: (M, K)")
    return _quantize(x.contiguous(), int(rounding), packed)


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: int, packed: bool) -> MXTensor:
        if packed:
            return MXTensor.from_packed(ops.quantize_row_packed(x, rounding), x.dtype)
        q, sf = ops.quantize_row(x, rounding)
        return MXTensor(q, sf, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mx: MXTensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = mx.orig_dtype
        return _values(mx, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


_quantize = differentiable("MXTensor.quantize", _Quantize)
_dequantize = differentiable("MXTensor.dequantize", _Dequantize)


def _values(mx: MXTensor, dtype: torch.dtype) -> Tensor:
    q, sf = mx.contiguous_parts()
    return ops.dequantize(q, sf, str(dtype).removeprefix("torch."))


def dequantized(x: Tensor) -> Tensor:
    """x itself, or the values of an MXTensor in its orig_dtype; for code below autograd."""
    return _values(x, x.orig_dtype) if isinstance(x, MXTensor) else x


# The operations that autograd, its tools and modules apply: save, alias, add two gradients, cast, move, load, inspect.


def _of_parts(func: Any, mx: MXTensor, dtype: torch.dtype) -> MXTensor:
    parts = {name: func(getattr(mx, name)) for name in mx.__tensor_flatten__()[0]}
    return mx.__tensor_unflatten__(parts, dtype, mx.shape, None)


def _same(func: Any, mx: MXTensor, *args: Any, **kwargs: Any) -> MXTensor:
    return _of_parts(func, mx, mx.orig_dtype)


def _view(func: Any, mx: MXTensor, size: Sequence[int]) -> MXTensor:
    k = mx.shape[-1]
    if list(size[-1:]) != [k]:
        allowed = f"allowed: sizes that end with {k}; call .dequantize() to reshape"
        fail(NotImplementedError, str(func), "size", tuple(size), allowed)
    return mx_rows(mx.q.view(size), mx.sf.view([*size[:-1], k // BLOCK]), mx.orig_dtype)


def _add(func: Any, a: Any, b: Any, **kwargs: Any) -> Tensor:
    if func is aten.add_.Tensor and isinstance(a, MXTensor):
        fail(NotImplementedError, str(func), "self", "an MXTensor", "allowed: plain tensors; call .dequantize() first")
    return func(dequantized(a), dequantized(b), **kwargs)


def _to_copy(
    func: Any,
    mx: MXTensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    **how: Any,
) -> MXTensor:
    if layout not in (None, torch.strided):
        fail(NotImplementedError, str(func), "layout", layout, "allowed: torch.strided; call .dequantize() first")
    if dtype not in (None, torch.bfloat16, torch.float32):
        fail(TypeError, str(func), "dtype", dtype, "allowed: bfloat16 or float32; call .dequantize() first")

    # The bytes are independent of orig_dtype, so autograd may cast a gradient; else a copy is asked for.
    cast = dtype not in (None, mx.orig_dtype)

    def moved(part: Tensor) -> Tensor:
        here = device in (None, part.device)
        return part if here and cast else part.clone() if here else func(part, device=device, **how)

    return _of_parts(moved, mx, dtype or mx.orig_dtype)


def _copy(func: Any, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Of `load_state_dict`: bytes to bytes, or their values to a plain tensor."""
    if not isinstance(to, MXTensor):
        return func(to, dequantized(source), non_blocking)
    if not isinstance(source, MXTensor):
        allowed = "allowed: an MXTensor, or MXTensor.quantize(values) of plain values"
        fail(NotImplementedError, str(func), "source", f"dtype {source.dtype}", allowed)
    func(to.q, source.q, non_blocking)
    func(to.sf, source.sf, non_blocking)
    return to


def _of_bytes(func: Any, mx: MXTensor, *args: Any) -> Any:
    return func(mx.q, *args)


def _on_values(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*map(dequantized, args), **kwargs)


_RULES: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten.view.default: _view,
    aten.copy_.default: _copy,
    aten.is_pinned.default: _of_bytes,
    aten.add.Tensor: _add,
    aten.add_.Tensor: _add,
    aten._to_copy.default: _to_copy,
    # Hooks and anomaly detection apply these to the values of a gradient; PEFT applies the last one to a weight.
    **dict.fromkeys(
        (
            aten.isnan.default,
            aten.isinf.default,
            aten.isfinite.default,
            aten.abs.default,
            aten.eq.Tensor,
            aten.eq.Scalar,
            aten.ne.Scalar,
            aten.linalg_vector_norm.default,
            aten.norm.Scalar,
            aten.norm.ScalarOpt_dim,
            aten.sum.default,
            aten.sum.dim_IntList,
            aten.mean.default,
            aten.mean.dim,
            aten.min.default,
            aten.max.default,
            aten.amin.default,
            aten.amax.default,
            aten.aminmax.default,
            aten.std.correction,
            aten.var.correction,
            aten.count_nonzero.default,
            aten.baddbmm.default,
        ),
        _on_values,
    ),
}
