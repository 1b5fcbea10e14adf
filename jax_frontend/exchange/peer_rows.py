"""Rows in the memory of all ranks of a mesh axis, read by gathers and sums whose maps have numbers across ranks.

    rows (R, W) on each rank            row r of rank q has the number q R + r
    map (P,) of numbers, -1 for none -> (P, W) on each rank, by its own map

cuda     one kernel per GPU and call, which reads the rows of the others over NVLink and writes the result, between two
         meetings of the ranks (peer_memory.py). Rows are sent without a buffer in between.
others   the definition: the op of the same name, on the rows of all ranks
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla

from ... import cpp_bindings
from ...core_kernels.launch import ArrayType
from .. import ops
from ..ops.call import array_type, aval, vary, varying_axes
from ..ops.checks import check_type
from ..ops.mesh import Axes, axis_size
from ..ops.mx_array import MXArray
from ..products.gathers import HERE, Reader
from .peer_memory import PeerMemory

Across = PeerMemory | None
"""The memory of the ranks to whose rows a map leads; None: its numbers are rows of this rank."""

TARGETS = {name: f"mxep.peers.{name}" for name in cpp_bindings.peer_ffi_targets()}
for _name, _capsule in cpp_bindings.peer_ffi_targets().items():
    jax.ffi.register_ffi_target(TARGETS[_name], _capsule, platform="CUDA")

_OPERANDS = {"permute_rows": (), "permute_mx": (), "combine": (ArrayType((0,), "float32"),)}
"""The inputs of each op behind the rows and the map."""
peers_p = Primitive("mxep_peers")
peers_p.multiple_results = True
peers_p.def_impl(partial(xla.apply_primitive, peers_p))


def all_ranks(x: jax.Array, across: Axes) -> jax.Array:
    """The rows of all ranks, one rank after the other; no gradient."""
    if not x.shape[0]:
        return x
    # XLA:CPU widens a bf16 collective to fp32, but not a collective over uint16.
    bits = jnp.uint16 if x.dtype == jnp.bfloat16 else x.dtype
    gathered = lax.all_gather(lax.bitcast_convert_type(x, bits), across, tiled=True)
    return lax.bitcast_convert_type(gathered, x.dtype)


@dataclasses.dataclass(frozen=True)
class Peers(Reader):
    """Reads rows of all ranks of a memory, in the enclosing shard_map."""

    memory: PeerMemory

    def gather_mx(self, mx: MXArray, row_map: jax.Array) -> MXArray:
        """Without a source: no product reads rows of other ranks."""
        q, sf = self.permute_mx(mx.packed(), row_map)
        return MXArray.from_bytes(q, sf, mx.dtype)

    def read(self, name: str, rows: jax.Array, row_map: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
        rank = rank_of(self.memory)
        axes = tuple(sorted({*varying_axes(rows, row_map, rank)}))
        rows, row_map, rank = (vary(x, axes) for x in (rows, row_map, rank))
        # A gather shares the rows that have a source among its threads: others may be most of the rows.
        mapped = () if name == "combine" else (_mapped(row_map),)
        if not rows.size or not row_map.size:
            return HERE.read(name, rows, jnp.full_like(row_map, -1), **options)

        def of_peers(*inputs: jax.Array) -> tuple[jax.Array, ...]:
            arguments = {"name": name, "options": tuple(options.items()), "group": self.memory.number}
            return tuple(vary(x, axes) for x in peers_p.bind(*inputs, **arguments))

        def definition(rows: jax.Array, row_map: jax.Array, *_: jax.Array) -> tuple[jax.Array, ...]:
            everywhere = all_ranks(rows, self.memory.axis_name)
            return tuple(vary(x, axes) for x in HERE.read(name, everywhere, row_map, **options))

        return lax.platform_dependent(rows, row_map, rank, *mapped, cuda=of_peers, default=definition)


def rank_of(memory: PeerMemory) -> jax.Array:
    """(1,) int32, the rank of this device along the axes of the memory."""
    memory.check_here("PeerMemory")
    return lax.axis_index(memory.axis_name).astype(jnp.int32)[None]


def _mapped(row_map: jax.Array) -> jax.Array:
    """(1,) int32, the number of rows after which the map is -1 alone."""
    row = jnp.arange(1, row_map.shape[0] + 1, dtype=jnp.int32)
    return jnp.where(row_map >= 0, row, 0).max(initial=0, keepdims=True)


def reader_of(op: str, across: Across) -> Reader:
    """What reads along `across`: `HERE` for None and for one rank. Raises TypeError unless it is None or a PeerMemory,
    and ValueError outside of a shard_map over its axes."""
    check_type(op, "across", across, PeerMemory, type(None))
    return Peers(across) if across is not None and axis_size(op, across.axis_name, "across") > 1 else HERE


@peers_p.def_abstract_eval
def _abstract_eval(rows, row_map, rank, *_mapped, name: str, options: tuple, group: int):
    signature = ops.OPS[name].signature(array_type(rows), array_type(row_map), *_OPERANDS[name], **dict(options))
    return list(map(aval, signature.out))


def _lower_cuda(ctx, *operands, name: str, options: tuple, group: int):
    return jax.ffi.ffi_lowering(TARGETS[name])(ctx, *operands, group=np.int64(group))


mlir.register_lowering(peers_p, _lower_cuda, platform="cuda")
