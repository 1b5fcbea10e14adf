"""`jax.shard_map` for functions that are called under `jax.jit` alone, or inside a shard_map over some of the axes."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ...core_kernels.launch import fail
from .call import vary

AnyMesh = Mesh | AbstractMesh
Axes = str | tuple[str, ...]
"""One mesh axis or several, of which the first varies slowest."""


def mesh_of(op: str, mesh: AnyMesh | None, x: jax.Array) -> AnyMesh:
    """The mesh of the enclosing shard_map or `jax.set_mesh`, else the given mesh, else the mesh of x's type.

    Raises ValueError without any."""
    context = jax.sharding.get_abstract_mesh()
    if context.manual_axes or (mesh is None and not context.empty):
        return context
    found = jax.typeof(x).sharding.mesh if mesh is None else mesh
    if found.empty:
        fail(ValueError, op, "mesh", "None", "allowed: a jax.sharding.Mesh, or None inside jax.set_mesh(mesh)")
    return found


def axes_of(spec: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes of a PartitionSpec, in order."""
    return tuple(axis for part in spec for axis in ((part,) if isinstance(part, str) else part or ()))


def ranks_of(mesh: AnyMesh, axes: tuple[str | None, ...], of_part: bool = False) -> int:
    """The ranks along axes of a mesh. of_part: along those that are not manual yet, which divide an argument."""
    manual = mesh.manual_axes if of_part and isinstance(mesh, AbstractMesh) else ()
    return math.prod(mesh.shape[axis] for axis in axes if axis is not None and axis not in manual)


_AN_AXIS = "allowed: a mesh axis of the enclosing jax.shard_map, a tuple of them, or None"


def axis_names(op: str, argument: str, axes: Axes | None) -> tuple[str, ...]:
    """Mesh axes as a tuple; TypeError unless they are names."""
    names = axes if isinstance(axes, tuple) else (axes,)
    if axes is not None and not all(isinstance(name, str) for name in names):
        fail(TypeError, op, argument, repr(axes), _AN_AXIS)
    return () if axes is None else tuple(map(str, names))


def axis_size(op: str, axes: Axes | None, argument: str = "axis_name") -> int:
    """The ranks along mesh axes of the enclosing shard_map, 1 for None; ValueError if there is no such axis."""
    names = axis_names(op, argument, axes)
    try:
        return lax.axis_size(names) if names else 1
    except NameError:
        fail(ValueError, op, argument, repr(axes), _AN_AXIS)


def over_mesh(local: Callable, mesh: AnyMesh, in_specs: Any, out_specs: Any) -> Callable:
    """shard_map of `local` over the axes of the mesh that are not manual yet.

    The specs name all axes; an argument is the part that belongs to the manual ones.
    """
    manual = frozenset(mesh.manual_axes) if isinstance(mesh, AbstractMesh) else frozenset()
    if not manual:
        return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    rest = tuple(axis for axis in mesh.axis_names if axis not in manual)
    if not rest:
        return local
    in_specs, out_specs = (
        jax.tree.map(lambda spec: _without(spec, manual), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
        for specs in (in_specs, out_specs)
    )
    return _inside(local, rest, in_specs, out_specs)


def _without(spec: PartitionSpec, axes: frozenset[str]) -> PartitionSpec:
    parts = (tuple(a for a in ((p,) if isinstance(p, str) else p or ()) if a not in axes) for p in spec)
    return PartitionSpec(*(part or None for part in parts))


def _inside(local: Callable, axes: tuple[str, ...], in_specs: Any, out_specs: Any) -> Callable:
    """shard_map over `axes` inside another one, with a gradient of its own.

    JAX 0.10.2 gives saved arrays that vary along the outer axes a spec with these axes, and then refuses it. Here an
    array that varies along `axes` is saved as one part per device, and every other one as it is.
    """

    def mapped(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes))

    def varies(leaf: jax.Array) -> bool:
        return not jax.typeof(leaf).mat.varying.isdisjoint(axes)

    def forward(*arguments: Any) -> Any:
        def with_residuals(*arguments: Any) -> Any:
            out, backward = jax.vjp(local, *arguments)
            parts = jax.tree.map(lambda leaf: vary(leaf, axes)[None] if varies(leaf) else None, backward)
            whole = jax.tree.map(lambda leaf: None if varies(leaf) else leaf, backward)
            return out, parts, whole

        specs = (out_specs, PartitionSpec(axes), PartitionSpec())
        out, parts, whole = mapped(with_residuals, in_specs, specs)(*arguments)
        return out, (parts, whole)

    def backward(residuals: Any, cotangents: Any) -> Any:
        def gradients(parts: Any, whole: Any, cotangents: Any) -> Any:
            def join(part: jax.Array | None, leaf: jax.Array | None) -> jax.Array | None:
                return leaf if part is None else part[0]

            return jax.tree.map(join, parts, whole, is_leaf=lambda leaf: leaf is None)(cotangents)

        (parts, whole), specs = residuals, (PartitionSpec(axes), PartitionSpec(), out_specs)
        return mapped(gradients, specs, in_specs)(parts, whole, cotangents)

    run = jax.custom_vjp(mapped(local, in_specs, out_specs))
    run.defvjp(forward, backward)
    return run
