"""The two arrays that carry MXFP8 through `jax.grad`, each with companions that compile away.

JAX gives integer arrays no gradient, and a cotangent has the dtype of its value. So a value in bytes with a bf16
gradient, and a bf16 value with a gradient in bytes, each have companions: zeros of the other dtype.

                 forward reads        backward sums cotangents of
    MXArray      q, sf  (uint8)       carrier (bf16 or fp32, zeros)         forward MXFP8, backward bf16
    MXGradArray  value  (bf16)        q_grad (e4m3), sf_grad (bf16), uses   forward bf16, backward MXFP8

JAX sums cotangents, including symbolic zeros, so every companion has a dtype whose zero is additive: byte 0x00 of e4m3,
and for a scale a bf16 integer, 0 to 255, exact. (JAX's zero of e8m0 is the byte of NaN.) The bytes of two readers must
not be added: each reader sends 1 on `uses`, and a sum above 1 makes the gradient NaN.

No forward code reads a companion, so inside `jax.jit` it takes neither memory nor a collective.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.export import register_pytree_node_serialization

from ...core_kernels.formats import BLOCK, Rounding
from ...core_kernels.launch import fail, require_multiple
from .. import ops
from .call import jitted, vary, varying_axes
from .checks import check_bytes, check_floats, check_matrix, dtype_name, rounding_of
from .derivatives import arguments, arguments_by_rows
from .shapes import Bytes, Float

_USE_ONCE = "pass it once to a function that takes an MXGradArray; use `.value` elsewhere, whose gradient is float"

E8M0_NAN = np.uint8(255)


def _leaves(kind: Any, *leaves: jax.Array | None) -> Any:
    """A cotangent. JAX accepts None for a leaf with a zero cotangent; the annotations of `kind` do not."""
    return kind(*leaves)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MXArray:
    """A matrix in MXFP8, scaled along its rows, whose gradient is an ordinary float matrix.

    q and sf have no gradient. The functions of this package send theirs to the carrier; other functions of q and sf
    have none.

    Attributes:
        q: (M, K) uint8, E4M3 bytes.
        sf: (M, K/32) uint8, E8M0 bytes.
        carrier: (M, K), zeros of the dtype before quantization; its cotangent is the gradient of the matrix.
        group_ends: (G,) int32, of the rows that `dispatch` or `permute` laid out; None for other rows. The grouped
            products follow it.
        source: of rows that a row map gathered, the packed rows (R, K + K/32) uint8 and the map (M,) int32; or None. A
            folded product reads these, and inside `jax.jit` nothing gathers q and sf then.

    Example:
        >>> mx = MXArray.quantize(jnp.full((1, 32), 3.0))
        >>> mx.shape, mx.sf.tolist(), mx.dequantize()[0, 0].item()  # 384 * 2^-7
        ((1, 32), [[120]], 3.0)
    """

    q: jax.Array
    sf: jax.Array
    carrier: jax.Array
    group_ends: jax.Array | None = None
    source: tuple[jax.Array, jax.Array] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.carrier.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of `dequantize()` and of the gradient."""
        return self.carrier.dtype

    @classmethod
    def from_bytes(
        cls, q: Bytes[jax.Array, "M K"], sf: Bytes[jax.Array, "M K/32"], dtype: jax.typing.DTypeLike = "bfloat16"
    ) -> "MXArray":
        """Wrap E4M3 data and E8M0 scales. The source of the bytes gets no gradient.

        Args:
            q: (M, K) uint8, K a multiple of 32.
            sf: (M, K/32) uint8.
            dtype: bfloat16 or float32, of `dequantize()` and of the gradient.

        Returns:
            An MXArray (M, K).

        Raises:
            ValueError: unless q is (M, K) and sf (M, K/32).
            TypeError: other dtypes.

        Example:
            >>> mx = MXArray.quantize(jnp.full((1, 32), 3.0))
            >>> MXArray.from_bytes(mx.q, mx.sf, "float32").dequantize()[0, 0].item()
            3.0
        """
        op = "MXArray.from_bytes"
        dtype = dtype_name(op, "dtype", dtype)
        for name, x in (("q", q), ("sf", sf)):
            check_bytes(op, name, x)
        if sf.shape[0] != q.shape[0] or BLOCK * sf.shape[1] != q.shape[1]:
            fail(ValueError, op, "sf", f"shape {sf.shape} with q {q.shape}", "allowed: (M, K/32) with (M, K)")
        return cls(q, sf, vary(jnp.zeros_like(q, dtype=dtype), varying_axes(q, sf)))

    @classmethod
    def from_packed(cls, packed: jax.Array, dtype: jax.typing.DTypeLike = "bfloat16") -> "MXArray":
        """Wrap packed rows. The source of the bytes gets no gradient.

        Args:
            packed: (M, K + K/32) uint8, rows `[q | sf]`.
            dtype: bfloat16 or float32, of `dequantize()` and of the gradient.

        Returns:
            An MXArray (M, K).

        Raises:
            ValueError: another width.
            TypeError: other dtypes.

        Example:
            >>> packed = ops.quantize_row_packed(jnp.full((1, 32), 3.0))
            >>> MXArray.from_packed(packed).dequantize()[0, 0].item()
            3.0
        """
        op = "MXArray.from_packed"
        check_bytes(op, "packed", packed)
        require_multiple(op, "packed", packed.shape[1], BLOCK + 1, "last dim", "32 elements and their scale")
        dtype = dtype_name(op, "dtype", dtype)
        k = packed.shape[1] // (BLOCK + 1) * BLOCK
        return cls.from_bytes(packed[:, :k], packed[:, k:], dtype)

    @classmethod
    def quantize(cls, x: Float[jax.Array, "M K"], rounding: Rounding | str = Rounding.RCEIL) -> "MXArray":
        """Quantize a matrix along its rows; differentiable, the gradient passes unchanged.

        Args:
            x: (M, K) bf16 or fp32, K a multiple of 32.
            rounding: a `Rounding` or its name.

        Returns:
            An MXArray (M, K) with x's dtype.

        Raises:
            ValueError: K is no multiple of 32, an unknown rounding.
            TypeError: another dtype.

        Example:
            >>> MXArray.quantize(jnp.full((1, 32), 1.06, jnp.float32)).dequantize()[0, 0].item()
            1.0
        """
        op = "MXArray.quantize"
        check_floats(op, "x", x)
        check_matrix(op, "x", x)
        rounding = rounding_of(op, "rounding", rounding)
        return _quantize(*arguments_by_rows(op, x), rounding)

    def dequantize(self) -> Float[jax.Array, "M K"]:
        """Return the values; differentiable, the gradient passes unchanged.

        Returns:
            (M, K) in `dtype`.

        Example:
            >>> MXArray.quantize(jnp.full((1, 32), 1.06)).dequantize()[0, 0].item()
            1.0
        """
        return _dequantize(MXArray(*arguments_by_rows("MXArray.dequantize", self.q, self.sf, self.carrier)))

    def laid_out(self, group_ends: jax.Array) -> "MXArray":
        """These rows, with the ends of their groups."""
        return dataclasses.replace(self, group_ends=group_ends)

    def gathered_from(self, packed: jax.Array, row_map: jax.Array) -> "MXArray":
        """These rows, with their source."""
        return dataclasses.replace(self, source=(packed, row_map))

    def packed(self) -> jax.Array:
        """Return packed rows. XLA makes no copy for an array of `from_packed`. Bytes have no gradient.

        Returns:
            (M, K + K/32) uint8, rows `[q | sf]`.

        Example:
            >>> MXArray.quantize(jnp.ones((1, 32))).packed().shape
            (1, 33)
        """
        return pack(self.q, self.sf)

    @classmethod
    def cotangent(cls, grad: jax.Array) -> "MXArray":
        """The cotangent of an array whose matrix has gradient `grad`. Bytes have no gradient."""
        return _leaves(cls, None, None, grad)


register_pytree_node_serialization(
    MXArray, serialized_name="mxep.MXArray", serialize_auxdata=lambda _: b"", deserialize_auxdata=lambda _: ()
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MXGradArray:
    """A bf16 or fp32 matrix whose gradient is received in MXFP8: the value between a grouped GEMM and the combine.

    One unpermute or combine may take it: JAX adds the cotangents of two uses, and bytes cannot be added. A second use
    raises ValueError in eager code and gives NaN gradients inside jit, scan and checkpoint. `value` may have any other
    use; its gradient is added to the MXFP8 one.

    Attributes:
        value: (M, N) bf16 or fp32.
        q_grad: (M, N) e4m3, zeros; its cotangent has the bytes of the gradient.
        sf_grad: (M, N/32) bf16, zeros; its cotangent has the scales as integers 0 to 255.
        uses: (1,) fp32, zero; its cotangent is the number of readers.
    """

    value: jax.Array
    q_grad: jax.Array
    sf_grad: jax.Array
    uses: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.value.dtype

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"MXGradArray: attribute: got {name!r}; {_USE_ONCE}")

    def _no_arithmetic(self, *_: object) -> Any:
        fail(TypeError, "MXGradArray", "operand", "an MXGradArray in arithmetic", hint=_USE_ONCE)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _no_arithmetic
    __neg__ = __pow__ = __matmul__ = __rmatmul__ = __getitem__ = _no_arithmetic

    def __jax_array__(self) -> jax.Array:
        """jnp functions call this."""
        return self._no_arithmetic()

    def once(self, op: str) -> "MXGradArray":
        """This array, for the one op that sends its gradient; ValueError for a second one."""
        if self.__dict__.get("_taken"):
            allowed = "allowed: one use, or `.value`, whose gradients add up"
            fail(ValueError, op, "input", "an MXGradArray that was already used", allowed)
        object.__setattr__(self, "_taken", True)
        return self

    @classmethod
    def wrap(cls, value: jax.Array) -> "MXGradArray":
        """Wrap a matrix. Its gradient is received in MXFP8 and dequantized.

        Args:
            value: (M, N) bf16 or fp32, N a multiple of 32.

        Returns:
            An MXGradArray (M, N).

        Raises:
            ValueError: N is no multiple of 32, or value is no matrix.
            TypeError: another dtype.

        Example:
            >>> MXGradArray.wrap(jnp.ones((1, 32))).value.shape
            (1, 32)
        """
        op = "MXGradArray.wrap"
        check_floats(op, "value", value)
        if value.ndim != 2:
            fail(ValueError, op, "value", f"shape {value.shape}", "allowed: (M, N)")
        require_multiple(op, "value", value.shape[1], BLOCK, "last dim", "its gradient is quantized along it")
        return _wrapped(*arguments(op, value))

    @classmethod
    def of(cls, value: jax.Array) -> "MXGradArray":
        """Wrap value (M, N) with fresh companions; for code below autodiff, which reads their cotangents."""
        (m, n), axes = value.shape, varying_axes(value)
        zeros = jnp.zeros((m, n), jnp.float8_e4m3fn), jnp.zeros((m, n // BLOCK), jnp.bfloat16), jnp.zeros(1)
        return cls(value, *(vary(x, axes) for x in zeros))

    @classmethod
    def cotangent(
        cls, value: jax.Array | None, mx: tuple[jax.Array, jax.Array] | None, uses: jax.Array | None = None
    ) -> "MXGradArray":
        """A cotangent of its two parts, either of which may be absent. `uses` of an incoming cotangent is passed on."""
        if mx is None:
            return _leaves(cls, value, None, None, None)
        q, sf = mx
        if uses is None:
            uses = vary(jnp.ones(1), varying_axes(q))
        return _leaves(cls, value, lax.bitcast_convert_type(q, jnp.float8_e4m3fn), sf.astype(jnp.bfloat16), uses)

    def parts(self) -> tuple[jax.Array | None, tuple[jax.Array, jax.Array] | None]:
        """The float part and the MX part (q, sf as bytes) of a cotangent, None for a symbolic zero."""
        value = None if isinstance(self.value, SymbolicZero) else self.value
        if isinstance(self.q_grad, SymbolicZero):
            return value, None
        return value, (lax.bitcast_convert_type(self.q_grad, jnp.uint8), self.sf_grad.astype(jnp.uint8))

    def poisoned(self) -> tuple[jax.Array | None, tuple[jax.Array, jax.Array] | None]:
        """`parts` of a cotangent. Every scale is NaN if the bytes of two readers were added."""
        value, mx = self.parts()
        return value, mx and (mx[0], jnp.where((self.uses > 1).any(), E8M0_NAN, mx[1]))


def received(grad: jax.Array | MXGradArray) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The gradient of a result: an array, or (q, sf) if it was received as bytes."""
    if not isinstance(grad, MXGradArray):
        return grad
    value, mx = grad.poisoned()
    if value is None:
        if mx is not None:
            return mx
        allowed = "allowed: the MXGradArray itself to one unpermute or combine, `.value` elsewhere, or stop_gradient"
        fail(ValueError, "MXGradArray", "cotangent", "no gradient", allowed)
    if mx is None:
        return value
    return value + ops.dequantize(*mx, out_dtype=value.dtype)


def values_of(primals: Any) -> Any:
    """The values of a tree. With symbolic_zeros JAX passes every leaf as (value, perturbed)."""
    return jax.tree.map(lambda leaf: leaf.value, primals, is_leaf=lambda leaf: hasattr(leaf, "perturbed"))


def differentiated(primals: Any) -> bool:
    """Whether any leaf has a gradient, of a tree as `values_of` takes it."""
    return any(leaf.perturbed for leaf in jax.tree.leaves(primals, is_leaf=lambda leaf: hasattr(leaf, "perturbed")))


def pack(q: jax.Array, sf: jax.Array) -> jax.Array:
    return jnp.concatenate([q, sf], axis=1)


def _quantize_fwd(x, rounding):
    return MXArray.from_packed(ops.quantize_row_packed(x, rounding=rounding), x.dtype), None


@jax.custom_vjp
def _dequantize(mx: MXArray) -> jax.Array:
    return ops.dequantize(mx.q, mx.sf, out_dtype=mx.dtype)


_dequantize.defvjp(lambda mx: (_dequantize(mx), None), lambda _, grad: (MXArray.cotangent(grad),))


@jax.custom_vjp
def _wrap(value: jax.Array) -> MXGradArray:
    return MXGradArray.of(value)


def _wrap_bwd(_: None, grad: MXGradArray) -> tuple[jax.Array]:
    came = received(grad)
    return (ops.dequantize(*came, out_dtype=grad.value.dtype) if isinstance(came, tuple) else came,)


_wrap.defvjp(lambda x: (_wrap(x.value), None), _wrap_bwd, symbolic_zeros=True)
_wrapped = jitted(_wrap)

_quantize = jax.custom_vjp(lambda x, rounding: _quantize_fwd(x, rounding)[0], nondiff_argnums=(1,))
_quantize.defvjp(_quantize_fwd, lambda rounding, _, grad: (grad.carrier,))
