"""Rows by a map, differentiable: each direction is one gather.

    gather      rows (M, K)   --row_map--> (P, K)      backward: inverse
    ungather    groups (P, N) --inverse--> (M, N)      backward: row_map

    forward    MXArray --gather--> MXArray  --> experts -->  MXGradArray --ungather--> MXGradArray
                (M, K)              (P, K)                     (P, N)                    (M, N)
    backward    bf16  <--gather---  bf16   <-- experts <--    MXFP8     <--gather------  MXFP8

Rows in front of the experts are MXFP8 forward and bf16 backward, rows behind them the other way round, so no row is
dequantized and quantized again between the network and the grouped products. A -1 in a map is padding, a row of zeros.

A `Reader` reads the rows: `HERE` reads rows of this rank, `Peers` of peer_memory.py rows of all ranks of a mesh axis.
The callers have checked the arguments.
"""

import dataclasses
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .. import ops
from ..ops.call import jitted
from ..ops.derivatives import arguments
from ..ops.mx_array import MXArray, MXGradArray, pack

Rows = TypeVar("Rows", jax.Array, MXArray)


@dataclasses.dataclass(frozen=True)
class Reader:
    """Ops that read rows of this rank by their numbers; a static argument."""

    def read(self, name: str, rows: jax.Array, row_map: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
        """The outputs of an op, "permute_rows", "permute_mx" or "combine", the unweighted sum of each token's rows."""
        unweighted = (jnp.zeros(0, jnp.float32),) if name == "combine" else ()
        found = getattr(ops, name)(rows, row_map, *unweighted, **options)
        return tuple(found) if isinstance(found, tuple) else (found,)

    def permute_rows(self, x: jax.Array, row_map: jax.Array) -> jax.Array:
        return self.read("permute_rows", x, row_map)[0]

    def permute_mx(self, packed: jax.Array, row_map: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, sf = self.read("permute_mx", packed, row_map)
        return q, sf

    def combine(self, rows: jax.Array, slots: jax.Array, out_dtype: jax.typing.DTypeLike) -> jax.Array:
        return self.read("combine", rows, slots, out_dtype=jnp.dtype(out_dtype).name)[0]

    def gather_mx(self, mx: MXArray, row_map: jax.Array) -> MXArray:
        """With its source, which a folded product reads in place of the result."""
        packed = mx.packed()
        q, sf = self.permute_mx(packed, row_map)
        return MXArray.from_bytes(q, sf, mx.dtype).gathered_from(packed, row_map)


HERE = Reader()


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _gather_mx(mx: MXArray, row_map: jax.Array, inverse: jax.Array, reader: Reader) -> MXArray:
    return reader.gather_mx(mx, row_map)


def _gather_mx_bwd(reader, inverse, grad: MXArray):
    return MXArray.cotangent(reader.permute_rows(grad.carrier, inverse)), None, None


_gather_mx.defvjp(
    lambda mx, row_map, inverse, reader: (_gather_mx(mx, row_map, inverse, reader), inverse), _gather_mx_bwd
)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _gather(x: jax.Array, row_map: jax.Array, inverse: jax.Array, reader: Reader) -> jax.Array:
    return reader.permute_rows(x, row_map)


_gather.defvjp(
    lambda x, row_map, inverse, reader: (_gather(x, row_map, inverse, reader), inverse),
    lambda reader, inverse, grad: (reader.permute_rows(grad, inverse), None, None),
)


def gather(op: str, x: Rows, row_map: jax.Array, inverse: jax.Array, reader: Reader = HERE) -> Rows:
    """x[row_map], zeros where the map is -1. x: an array or an MXArray."""
    run: Any = _gather_mx if isinstance(x, MXArray) else _gather
    return run(*arguments(op, x, row_map, inverse), reader)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _ungather_mx(x: MXGradArray, row_map: jax.Array, inverse: jax.Array, reader: Reader) -> MXGradArray:
    return MXGradArray.of(reader.permute_rows(x.value, inverse))


def _ungather_mx_fwd(x, row_map, inverse, reader):
    # With symbolic_zeros every leaf is (value, perturbed).
    return _ungather_mx(MXGradArray.of(x.value.value), row_map.value, inverse.value, reader), row_map.value


def _ungather_mx_bwd(reader, row_map, grad: MXGradArray):
    value, mx = grad.parts()
    value = None if value is None else reader.permute_rows(value, row_map)
    mx = None if mx is None else reader.permute_mx(pack(*mx), row_map)
    return MXGradArray.cotangent(value, mx, grad.uses), None, None


_ungather_mx.defvjp(_ungather_mx_fwd, _ungather_mx_bwd, symbolic_zeros=True)
_ungather_mx_jitted = jitted(_ungather_mx, 3)


def ungather(op: str, x: Any, row_map: jax.Array, inverse: jax.Array, reader: Reader = HERE) -> Any:
    """x[inverse]. x: an array, or an MXGradArray, whose gradient is gathered as MXFP8 bytes."""
    if not isinstance(x, MXGradArray):
        return gather(op, x, inverse, row_map, reader)
    return _ungather_mx_jitted(*arguments(op, x.once(op), row_map, inverse), reader)
