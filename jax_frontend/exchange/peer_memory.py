"""Rows in the memory of all ranks of a mesh axis, read by gathers and sums whose maps have numbers across ranks.

    rows (R, W) on each rank            row r of rank q has the number q R + r
    map (P,) of numbers, -1 for none -> (P, W) on each rank, by its own map

cuda     one kernel per GPU and call, which reads the rows of the others over NVLink and writes the result. The streams
         of the GPUs wait for each other before and after. Rows are sent without a buffer in between. One process has
         all GPUs. core_kernels/peer/cuda_run.cu draws it.
others   the definition: the op of the same name, on the rows of all ranks
"""

import dataclasses
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla
from jax.sharding import AxisType

from ... import cpp_bindings
from ...core_kernels.launch import ArrayType, fail, require_choice
from .. import ops
from ..ops import device
from ..ops.call import array_type, aval, vary, varying_axes
from ..ops.mesh import Axes, axis_names, axis_size
from ..ops.mx_array import MXArray
from ..products.gathers import HERE, Reader

Across = Axes | None
"""The mesh axes of the enclosing shard_map along which a map leads; None: its numbers are rows of this rank."""
Transport = Literal["all_to_all", "peer_memory"]
"""all_to_all: collectives of XLA, on any number of processes. peer_memory: kernels that read the memory of the other
GPUs of this process."""

TARGETS = {name: f"mxep.peers.{name}" for name in cpp_bindings.peer_ffi_targets()}
for _name, _capsule in cpp_bindings.peer_ffi_targets().items():
    jax.ffi.register_ffi_target(TARGETS[_name], _capsule, platform="CUDA")

_OPERANDS = {"permute_rows": (), "permute_mx": (), "combine": (ArrayType((0,), "float32"),)}
"""The inputs of each op behind the rows and the map."""
peers_p = Primitive("mxep_peers")
peers_p.multiple_results = True
peers_p.def_impl(partial(xla.apply_primitive, peers_p))


def check_transport(op: str, transport: Any) -> None:
    """Raise ValueError unless it is one of `Transport`."""
    require_choice(op, "transport", transport, get_args(Transport))


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
    """Reads rows of all ranks along mesh axes of the enclosing shard_map."""

    across: Axes

    def gather_mx(self, mx: MXArray, row_map: jax.Array) -> MXArray:
        """Without a source: no product reads rows of other ranks."""
        q, sf = self.permute_mx(mx.packed(), row_map)
        return MXArray.from_bytes(q, sf, mx.dtype)

    def read(self, name: str, rows: jax.Array, row_map: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
        if device.arch() != "cpu":
            _check_processes(f"{name} of peers")
        place, devices = _place(self.across)
        axes = tuple(sorted({*varying_axes(rows, row_map, place)}))
        rows, row_map, place = (vary(x, axes) for x in (rows, row_map, place))
        # A gather shares the rows that have a source among its threads: others may be most of the rows.
        mapped = () if name == "combine" else (_mapped(row_map),)
        if not rows.size or not row_map.size:
            return HERE.read(name, rows, jnp.full_like(row_map, -1), **options)

        def of_peers(*inputs: jax.Array) -> tuple[jax.Array, ...]:
            arguments = {"name": name, "options": tuple(options.items()), "devices": devices}
            return tuple(vary(x, axes) for x in peers_p.bind(*inputs, **arguments))

        def definition(rows: jax.Array, row_map: jax.Array, *_: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(vary(x, axes) for x in HERE.read(name, all_ranks(rows, self.across), row_map, **options))

        return lax.platform_dependent(rows, row_map, place, *mapped, cuda=of_peers, default=definition)


def _mapped(row_map: jax.Array) -> jax.Array:
    """(1,) int32, the number of rows after which the map is -1 alone."""
    row = jnp.arange(1, row_map.shape[0] + 1, dtype=jnp.int32)
    return jnp.where(row_map >= 0, row, 0).max(initial=0, keepdims=True)


def reader_of(op: str, across: Across) -> Reader:
    """What reads along `across`: `HERE` for None and for one rank. Raises ValueError or TypeError unless it is None or
    mesh axes of the enclosing shard_map."""
    return Peers(across) if across is not None and axis_size(op, across, "across") > 1 else HERE


def _check_processes(op: str) -> None:
    if (processes := jax.process_count()) > 1:
        allowed = "allowed: one process with all GPUs of the mesh, or transport='all_to_all'"
        fail(NotImplementedError, op, "processes", processes, allowed)


def _place(across: Axes) -> tuple[jax.Array, int]:
    """(2,) int32, the number of this device's group of ranks and its rank there; and the devices of the program."""
    mesh = jax.sharding.get_abstract_mesh()
    inside = axis_names("peer_memory", "across", across)
    other = tuple(name for name in mesh.axis_names if name not in inside)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    automatic = tuple(name for name in other if kinds[name] != AxisType.Manual and mesh.shape[name] > 1)
    if automatic:
        allowed = f"allowed: a shard_map over all axes of the mesh, {mesh.axis_names}, or transport='all_to_all'"
        fail(NotImplementedError, "peer_memory", "axes", f"{automatic} outside of shard_map", allowed)
    manual = tuple(name for name in other if kinds[name] == AxisType.Manual)
    group = lax.axis_index(manual) if manual else jnp.int32(0)
    axes = tuple(sorted({*manual, *inside}))
    return jnp.stack([vary(jnp.asarray(i, jnp.int32), axes) for i in (group, lax.axis_index(inside))]), mesh.size


@peers_p.def_abstract_eval
def _abstract_eval(rows, row_map, place, *_mapped, name: str, options: tuple, devices: int):
    signature = ops.OPS[name].signature(array_type(rows), array_type(row_map), *_OPERANDS[name], **dict(options))
    return list(map(aval, signature.out))


def _lower_cuda(ctx, *operands, name: str, options: tuple, devices: int):
    op = f"{name} of peers"
    if device.compute_capability() not in cpp_bindings.cuda_archs:
        got = "no CUDA kernels in this build for this GPU"
        fail(NotImplementedError, op, "build", got, "allowed: transport='all_to_all', or `make install-gpu` with nvcc")
    _check_processes(op)
    return jax.ffi.ffi_lowering(TARGETS[name])(ctx, *operands, devices=np.int64(devices))


mlir.register_lowering(peers_p, _lower_cuda, platform="cuda")
