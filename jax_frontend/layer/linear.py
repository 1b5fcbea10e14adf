"""A dense layer on a mesh: the product of each device's part, inside `jax.shard_map`.

    axis of w's dim            in x's spec                     what happens
    K or N, "fsdp"             a dim of rows                   w is gathered; the sum of its gradients is scattered
    K, "row-wise"              the last dim                    a device's sums are partial: psum
    K                          none                            w is gathered
    N, "column-wise"           none                            the last dim of out has it

A device quantizes what it multiplies: blocks of 32 values have one scale on any mesh, and a folded row one per device.
"""

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ...core_kernels.launch import fail
from ...core_kernels.policy.recipe import Recipe
from ..ops.checks import check_floats, check_type, dtype_name
from ..ops.mesh import AnyMesh, axes_of, mesh_of, over_mesh, ranks_of
from ..ops.shapes import Float
from ..products.linear import checked_dense


def _parts(spec: PartitionSpec, dims: int) -> list[tuple[str, ...]]:
    """The axes of each dim."""
    axes = [axes_of(PartitionSpec(part)) for part in spec]
    return axes + [()] * (dims - len(axes))


def sharded_dense(
    x: Float[jax.Array, "... K"],
    w: Float[jax.Array, "K N"],
    bias: Float[jax.Array, " N"] | None = None,
    *,
    x_spec: PartitionSpec,
    w_spec: PartitionSpec,
    recipe: Recipe | str = "mxfp8",
    out_dtype: jax.typing.DTypeLike | None = None,
    mesh: AnyMesh | None = None,
) -> Float[jax.Array, "... N"]:
    """Run `dense` on a mesh, on global arrays, under `jax.jit` and shardings alone: `dense` inside `jax.shard_map`.

    Args:
        x: As in `dense`, of all devices.
        w: As in `dense`, of all devices, in floats.
        bias: As in `dense`; on every device whole along axes that x is split by, split as the dim N of out.
        x_spec: The PartitionSpec of x. An axis in its last dim contracts: w_spec has it in dim K, row-wise.
        w_spec: The PartitionSpec of w. An axis of rows of x is gathered (FSDP), another axis in dim N remains
            (column-wise), another axis in dim K is gathered.
        recipe: As in `dense`.
        out_dtype: As in `dense`. Partial sums of an axis that contracts are added in this dtype.
        mesh: None is the mesh of `jax.set_mesh`, or the mesh of x if it has explicit axes.

    Returns:
        out, of x_spec but for its last dim, which has the axes of dim N that remain.

    Raises:
        ValueError: As `dense`, and for specs that do not fit x, w or the mesh.
        TypeError: As `dense`.

    Example:
        >>> auto = (jax.sharding.AxisType.Auto,) * 2
        >>> mesh = jax.make_mesh((1, 1), ("data", "model"), auto, devices=jax.devices()[:1])
        >>> specs = {"x_spec": PartitionSpec("data"), "w_spec": PartitionSpec("data", "model")}
        >>> sharded_dense(jnp.ones((4, 32)), jnp.ones((32, 64)), mesh=mesh, **specs).shape
        (4, 64)
    """
    op = "sharded_dense"
    check_type(op, "x_spec", x_spec, PartitionSpec)
    check_type(op, "w_spec", w_spec, PartitionSpec)
    check_type(op, "mesh", mesh, Mesh, AbstractMesh, type(None))
    for name, array, dims in (("x", x, None), ("w", w, 2)):
        check_floats(op, name, array)
        if dims is not None and array.ndim != dims:
            fail(ValueError, op, name, f"shape {array.shape}", "allowed: (K, N)")
    if bias is not None:
        check_floats(op, "bias", bias)
        if bias.shape != w.shape[1:]:
            fail(ValueError, op, "bias", f"shape {bias.shape}", f"allowed: {w.shape[1:]}")
    if not x.ndim:
        fail(ValueError, op, "x", "shape ()", f"allowed: (..., {w.shape[0]}), the K of w (K, N)")
    mesh = mesh_of(op, mesh, x)
    _check_specs(op, mesh, x_spec=(x_spec, x.shape), w_spec=(w_spec, w.shape))
    *_, contracted = _parts(x_spec, x.ndim)
    rows = axes_of(x_spec)
    along_k, along_n = _parts(w_spec, 2)
    if contracted and along_k != contracted:
        got = f"{w_spec} with x_spec {x_spec}"
        fail(ValueError, op, "w_spec", got, f"allowed: {contracted} in dim K, which the last dim of x is split by")
    column = remaining_axes(x_spec, w_spec)
    if along_n and column and column != along_n:
        got = f"{along_n} in dim N, of which x's rows have some"
        fail(ValueError, op, "w_spec", got, "allowed: axes that all split x's rows, or that split none of them")
    out_dtype = dtype_name(op, "out_dtype", x.dtype if out_dtype is None else out_dtype)
    out_spec = PartitionSpec(*[part or None for part in _parts(x_spec, x.ndim)[:-1]], column or None)

    def local(x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
        for axis in () if contracted else reversed(along_k):  # the last varies fastest
            # Where the axis splits no rows, all of its devices compute the same, with one gradient.
            w = lax.all_gather(w, axis, axis=0, tiled=True, to="varying" if axis in rows else "invarying")
        if along_n and not column:
            w = lax.all_gather(w, along_n, axis=1, tiled=True)
        if not contracted:
            return checked_dense(op, x, w, bias, recipe, out_dtype)
        out = lax.psum(checked_dense(op, x, w, None, recipe, out_dtype), contracted)
        return out if bias is None else (out.astype("float32") + bias.astype("float32")).astype(out_dtype)

    run = over_mesh(local, mesh, (x_spec, w_spec, PartitionSpec(column or None)), out_spec)
    return run(x, w, bias)


def remaining_axes(x_spec: PartitionSpec, w_spec: PartitionSpec) -> tuple[str, ...]:
    """The axes of w's dim N, and of the last dim of out, that are not gathered: they do not split rows of x."""
    rows = axes_of(PartitionSpec(*x_spec))
    return tuple(axis for axis in _parts(w_spec, 2)[1] if axis not in rows)


def _check_specs(op: str, mesh: AnyMesh, **specs: tuple[PartitionSpec, tuple[int, ...]]) -> None:
    """Raise ValueError unless the axes are the mesh's and divide the dims."""
    for name, (spec, shape) in specs.items():
        if len(spec) > len(shape):
            fail(ValueError, op, name, spec, f"allowed: at most {len(shape)} parts, a part for each dim of {shape}")
        for dim, axes in enumerate(_parts(spec, len(shape))):
            for axis in axes:
                if axis not in mesh.axis_names:
                    fail(ValueError, op, name, repr(axis), f"allowed: axes of the mesh, {mesh.axis_names}")
            ranks = ranks_of(mesh, axes, of_part=True)
            if shape[dim] % ranks:
                allowed = f"allowed: multiples of the {ranks} devices of {axes}"
                fail(ValueError, op, name, f"dim {dim} = {shape[dim]}", allowed)
