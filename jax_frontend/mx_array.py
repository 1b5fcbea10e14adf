"""The two arrays that carry MXFP8 through `jax.grad`, each with companions that compile away.

JAX gives integer arrays no gradient, and a cotangent has the dtype of its value. So a value in bytes whose
gradient is bf16, and a value in bf16 whose gradient is bytes, each travel with zeros of the other dtype:

                 forward reads        cotangents come back on
    MXArray      q, sf  (uint8)       carrier (bf16 or fp32, zeros)         forward MXFP8, backward bf16
    MXGradArray  value  (bf16)        q_grad (e4m3), sf_grad (e8m0), zeros  forward bf16, backward MXFP8

No forward code reads a companion, so inside `jax.jit` it takes neither memory nor a collective.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from ..core_kernels.formats import BLOCK, Rounding
from ..core_kernels.launch import fail
from . import ops
from ._call import vary, varying_axes


def _leaves(kind: Any, *leaves: jax.Array | None) -> Any:
    """A cotangent: JAX takes None for a leaf whose cotangent is zero, the annotations do not."""
    return kind(*leaves)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MXArray:
    """A matrix in MXFP8, scaled along its rows, whose gradient is an ordinary float matrix.

    q (M, K) uint8: E4M3 bytes.  sf (M, K/32) uint8: E8M0 bytes.
    carrier (M, K): zeros of the dtype it was quantized from; its cotangent is the gradient of the matrix.
    """

    q: jax.Array
    sf: jax.Array
    carrier: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.q.shape

    @property
    def dtype(self) -> jnp.dtype:
        """What `dequantize` returns and what gradients come in."""
        return self.carrier.dtype

    @classmethod
    def from_bytes(cls, q: jax.Array, sf: jax.Array, dtype: jax.typing.DTypeLike = "bfloat16") -> "MXArray":
        """Wrap E4M3 data and E8M0 scales (uint8)."""
        return cls(q, sf, vary(jnp.zeros(q.shape, dtype), varying_axes(q, sf)))

    @classmethod
    def from_packed(cls, packed: jax.Array, dtype: jax.typing.DTypeLike = "bfloat16") -> "MXArray":
        """Wrap wire rows `[q | sf]` (M, K + K/32) uint8."""
        k = packed.shape[1] // (BLOCK + 1) * BLOCK
        return cls.from_bytes(packed[:, :k], packed[:, k:], dtype)

    @classmethod
    def quantize(cls, x: jax.Array, rounding: Rounding | str = Rounding.RCEIL) -> "MXArray":
        """Quantize x (M, K) bf16 or fp32; differentiable, the gradient passes unchanged.

        >>> MXArray.quantize(jnp.full((1, 32), 1.06, jnp.float32)).dequantize()[0, 0].item()
        1.0

        Raises ValueError if K is no multiple of 32, TypeError for another dtype.
        """
        return _quantize(x, Rounding.parse(rounding))

    def dequantize(self) -> jax.Array:
        """(M, K) in `dtype`; differentiable, the gradient passes unchanged."""
        return _dequantize(self)

    def packed(self) -> jax.Array:
        """Wire rows `[q | sf]`; of an array that came from wire rows, XLA returns those without a copy."""
        return pack(self.q, self.sf)

    @classmethod
    def cotangent(cls, grad: jax.Array) -> "MXArray":
        """The cotangent of an array whose matrix has gradient `grad`: bytes have none."""
        return _leaves(cls, None, None, grad)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MXGradArray:
    """A bf16 or fp32 matrix whose gradient arrives in MXFP8: what travels from a grouped GEMM to the combine.

    value (M, N). q_grad (M, N) e4m3 and sf_grad (M, N/32) e8m0: zeros; their cotangents are the gradient.
    One unpermute or combine may take it: JAX adds the cotangents of two uses, and bytes cannot be added.
    `value` may be used anywhere besides; its own gradient is added to the MXFP8 one.
    """

    value: jax.Array
    q_grad: jax.Array
    sf_grad: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.value.dtype

    def once(self, op: str) -> "MXGradArray":
        """This array, for the one op that takes its gradient; ValueError for a second one."""
        if self.__dict__.get("_taken"):
            allowed = "allowed: one use, or `.value`, whose gradients add up"
            fail(ValueError, op, "input", "an MXGradArray that was already used", allowed)
        object.__setattr__(self, "_taken", True)
        return self

    @classmethod
    def wrap(cls, value: jax.Array) -> "MXGradArray":
        m, n = value.shape
        axes = varying_axes(value)
        q_grad = vary(jnp.zeros((m, n), jnp.float8_e4m3fn), axes)
        return cls(value, q_grad, vary(jnp.zeros((m, n // BLOCK), jnp.float8_e8m0fnu), axes))

    @classmethod
    def cotangent(cls, value: jax.Array | None, mx: tuple[jax.Array, jax.Array] | None) -> "MXGradArray":
        """A cotangent from its two parts, either of which may be absent."""
        if mx is None:
            return _leaves(cls, value, None, None)
        q, sf = mx
        e4m3, e8m0 = lax.bitcast_convert_type(q, jnp.float8_e4m3fn), lax.bitcast_convert_type(sf, jnp.float8_e8m0fnu)
        return _leaves(cls, value, e4m3, e8m0)

    def parts(self) -> tuple[jax.Array | None, tuple[jax.Array, jax.Array] | None]:
        """Of a cotangent: the float part and the MX part (q, sf as bytes), None where symbolically zero."""
        value = None if isinstance(self.value, SymbolicZero) else self.value
        if isinstance(self.q_grad, SymbolicZero):
            return value, None
        q, sf = (lax.bitcast_convert_type(x, jnp.uint8) for x in (self.q_grad, self.sf_grad))
        return value, (q, sf)


def pack(q: jax.Array, sf: jax.Array) -> jax.Array:
    return jnp.concatenate([q, sf], axis=1)


def _quantize_fwd(x, rounding):
    return MXArray.from_packed(ops.quantize_row_packed(x, rounding=rounding), x.dtype), None


@jax.custom_vjp
def _dequantize(mx: MXArray) -> jax.Array:
    return ops.dequantize(mx.q, mx.sf, out_dtype=mx.dtype)


_dequantize.defvjp(lambda mx: (_dequantize(mx), None), lambda _, grad: (MXArray.cotangent(grad),))

_quantize = jax.custom_vjp(lambda x, rounding: _quantize_fwd(x, rounding)[0], nondiff_argnums=(1,))
_quantize.defvjp(_quantize_fwd, lambda rounding, _, grad: (grad.carrier,))
