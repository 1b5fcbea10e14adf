"""Dense layers as Flax NNX modules. Needs flax: pip install 'mxep[flax]'.

MXLinear        nnx.Linear in all but its product, `dense` or, on a mesh, `sharded_dense`
convert_linear  nnx.Linear of a model --> MXLinear, in place: module.__class__, parameters are kept
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ...core_kernels.formats import BLOCK
from ...core_kernels.launch import fail
from ...core_kernels.policy.linear import same_rows, why_unconverted
from ...core_kernels.policy.recipe import Recipe
from ..layer.linear import remaining_axes, sharded_dense
from ..ops.checks import check_size, check_type
from ..ops.mesh import AnyMesh
from ..products.linear import checked_dense
from ..products.weights import recipe_of

try:
    from flax import nnx
except ImportError as error:
    raise ImportError(
        "mxep.jax_frontend.integrations.nnx_linear: flax is missing; install it with `pip install 'mxep[flax]'`"
    ) from error

Filter = Callable[[nnx.Module, str], bool | None]
DEFAULTS = {"dot_general": jax.lax.dot_general, "precision": None, "preferred_element_type": None}
KERNEL_INIT, BIAS_INIT = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()
"""nnx.Linear's."""


class MXLinear(nnx.Linear):
    """`nnx.Linear` with a recipe: `layer(x)` is `dense(x, kernel, bias, recipe=recipe)`.

    Parameters, their names and initial values are the same: kernel (K, N) and bias (N,).

    Args:
        in_features: K, a positive multiple of 32.
        out_features: N, a positive multiple of 32.
        recipe: a Recipe or its name.
        use_bias: whether there is a bias.
        dtype: of the result, bfloat16 or float32; None: what x and the parameters promote to. Nothing is cast before
            it is quantized.
        param_dtype: of the parameters.
        kernel_init: as in `nnx.Linear`.
        bias_init: as in `nnx.Linear`.
        rngs: draws the parameters with its "params" stream.
        x_spec: the PartitionSpec of x for `sharded_dense`, which runs the layer. Without it `dense` runs it on one
            device, or inside `jax.shard_map`.
        w_spec: the PartitionSpec of the kernel for `sharded_dense`. New parameters are sharded by it, the bias by its
            dim N, and `nnx.get_partition_spec` returns it.
        mesh: as in `sharded_dense`.

    Raises:
        ValueError: sizes, one of the specs alone, and as `sharded_dense`.
        TypeError: for values of another type.

    Example:
        >>> layer = MXLinear(32, 64, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((5, 32))).shape, layer.kernel.shape
        ((5, 64), (32, 64))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        recipe: Recipe | str = "mxfp8",
        use_bias: bool = True,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        kernel_init: Callable[..., jax.Array] = KERNEL_INIT,
        bias_init: Callable[..., jax.Array] = BIAS_INIT,
        rngs: nnx.Rngs,
        x_spec: PartitionSpec | None = None,
        w_spec: PartitionSpec | None = None,
        mesh: AnyMesh | None = None,
    ) -> None:
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            check_size("MXLinear", name, size, 1)
            if size % BLOCK:
                fail(ValueError, "MXLinear", name, size, f"allowed: positive multiples of {BLOCK}")
        if (x_spec is None) != (w_spec is None):
            fail(ValueError, "MXLinear", "x_spec, w_spec", "one of them", "allowed: both, or none")
        kernel: Mapping[str, Any] = MappingProxyType({})
        bias: Mapping[str, Any] = MappingProxyType({})
        if x_spec is not None and w_spec is not None:
            check_type("MXLinear", "x_spec", x_spec, PartitionSpec)
            check_type("MXLinear", "w_spec", w_spec, PartitionSpec)
            kernel = {"out_sharding": (*w_spec, *[None] * (2 - len(w_spec))), "mesh": mesh}
            bias = {"out_sharding": (remaining_axes(x_spec, w_spec) or None,), "mesh": mesh}
        super().__init__(
            in_features, out_features, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype,
            kernel_init=kernel_init, bias_init=bias_init, rngs=rngs, kernel_metadata=kernel, bias_metadata=bias,
        )  # fmt: skip
        self.recipe, self.x_spec, self.w_spec, self.mesh = recipe_of("MXLinear", recipe), x_spec, w_spec, mesh

    def __call__(self, inputs: jax.Array, out_sharding: None = None) -> jax.Array:
        """x (..., K) bf16 or fp32 -> (..., N). out_sharding: None; `jax.reshard` moves the result."""
        if out_sharding is not None:
            fail(ValueError, "MXLinear", "out_sharding", out_sharding, "allowed: None; `jax.reshard` moves the result")
        w, bias = self.kernel[...], None if self.bias is None else self.bias[...]
        given = [array.dtype for array in (inputs, w, bias) if array is not None]
        dtype = jnp.result_type(*given) if self.dtype is None else self.dtype
        if self.x_spec is None or self.w_spec is None:
            return checked_dense("MXLinear", inputs, w, bias, self.recipe, dtype)
        placed: dict[str, Any] = {"x_spec": self.x_spec, "w_spec": self.w_spec, "mesh": self.mesh}
        return sharded_dense(inputs, w, bias, recipe=self.recipe, out_dtype=dtype, **placed)


class LinearReport(NamedTuple):
    """What `convert_linear` has done.

    Attributes:
        recipe: of the converted modules.
        converted: names of the converted modules.
        others: (name, reason) of every other nnx.Linear, which runs as before.
    """

    recipe: Recipe
    converted: tuple[str, ...]
    others: tuple[tuple[str, str], ...]


def convert_linear(
    model: nnx.Module,
    filter_fn: Filter | None = None,
    recipe: Recipe | str = "mxfp8",
) -> LinearReport:
    """Run the nnx.Linear layers of a model with a recipe: each becomes an `MXLinear`, in place, with its parameters.

    Heads, routers and layers too small to gain run as before, and so do LinearGeneral, Einsum and other classes. A
    parameter with a sharding of its own is gathered unless the call is inside `jax.shard_map`; there build `MXLinear`
    with specs.

    Args:
        model: bf16 or fp32 parameters.
        filter_fn: filter_fn(module, name) of each nnx.Linear: True converts it whatever its name and size, False leaves
            it, None leaves it to the rules. A name joins attributes and indices by dots.
        recipe: a `Recipe` or its name.

    Returns:
        The converted modules; every other nnx.Linear with the reason.

    Raises:
        ValueError: no nnx.Linear is left to convert, a chosen kernel is tied or has a dim that is no multiple of 32.
            Nothing is changed then, nor by another error.
        TypeError: dtypes, arguments.

    Example:
        >>> model = nnx.Sequential(nnx.Linear(32, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, 10, rngs=nnx.Rngs(0)))
        >>> convert_linear(model, lambda module, name: module.out_features == 64).converted
        ('layers.0',)
    """
    op = "convert_linear"
    check_type(op, "model", model, nnx.Module)
    if filter_fn is not None and not callable(filter_fn):
        fail(TypeError, op, "filter_fn", repr(filter_fn), "allowed: filter_fn(module, name) -> bool or None, or None")
    recipe = recipe_of(op, recipe)
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    linears = {name: module for name, module in modules.items() if isinstance(module, nnx.Linear)}
    sizes = {name: (module.out_features, module.in_features) for name, module in linears.items()}
    groups, reasons = same_rows(sizes), {}
    for name, module in linears.items():
        asked = None if filter_fn is None else filter_fn(module, name)
        if asked is not None:
            reasons[name] = "" if asked else "filter_fn returns False"
        elif type(module) not in (nnx.Linear, MXLinear):
            reasons[name] = f"a {type(module).__name__}"
        elif own := _list_own(module):
            reasons[name] = f"{own} of its own"
        else:
            reasons[name] = why_unconverted(name, sizes, groups)
    chosen = {name: module for name, module in linears.items() if not reasons[name]}
    if not chosen:
        got = (
            "; ".join(f"{name}: {why}" for name, why in [*reasons.items()][:4]) or f"{type(model).__name__} without one"
        )
        allowed = "allowed: a model with an nnx.Linear that gains, or that filter_fn returns True for"
        fail(ValueError, op, "model", got, allowed)
    kernels: dict[int, list[str]] = {}
    for name, module in modules.items():
        for attribute, value in vars(module).items():
            if isinstance(value, nnx.Param):
                kernels.setdefault(id(value), []).append(f"{name}.{attribute}".lstrip("."))
    for name, module in chosen.items():
        _check(op, module, name, kernels[id(module.kernel)])
    for module in chosen.values():
        module.__class__ = MXLinear
        module.recipe, module.x_spec, module.w_spec, module.mesh = recipe, None, None, None  # type: ignore[attr-defined]
    return LinearReport(recipe, tuple(chosen), tuple((name, why) for name, why in reasons.items() if why))


def _list_own(module: nnx.Linear) -> str:
    """The settings of a module's product that `MXLinear` does not have."""
    return ", ".join(name for name, default in DEFAULTS.items() if getattr(module, name, default) is not default)


def _check(op: str, module: nnx.Linear, name: str, names: list[str]) -> None:
    """Raise unless the module can become an MXLinear. names: of its kernel."""
    if type(module) not in (nnx.Linear, MXLinear):
        allowed = "allowed: nnx.Linear itself; a subclass has a call of its own"
        fail(TypeError, op, name, f"a {type(module).__name__}", allowed)
    if own := _list_own(module):
        allowed = "allowed: nnx.Linear's defaults; leave the module out with filter_fn"
        fail(ValueError, op, name, f"{own} of its own", allowed)
    for size, value in (("N", module.out_features), ("K", module.in_features)):
        if value % BLOCK or not value:
            allowed = f"allowed: positive multiples of {BLOCK}; leave the module out with filter_fn"
            fail(ValueError, op, name, f"{size} = {value}", allowed)
    others = [other for other in names if other != f"{name}.kernel".lstrip(".")]
    if others:
        allowed = "allowed: a kernel of its own; leave the module out with filter_fn"
        fail(ValueError, op, f"{name}.kernel", f"a kernel tied to {', '.join(others)}", allowed)
    for what, dtype in ((f"{name}.kernel", module.kernel.dtype), (name, module.dtype)):
        if dtype is not None and jnp.dtype(dtype).name not in ("bfloat16", "float32"):
            fail(TypeError, op, what, f"dtype {dtype}", "allowed: bfloat16 or float32")
