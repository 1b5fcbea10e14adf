"""Rows past the last group end never show: not in real rows, and not in public results, which are zeros there.

Twice the same program: with zeros in the padding, and with NaN there and in the memory that outputs get. XLA on a CPU
allocates with malloc, which writes a byte to what it allocates if it is told to. tests/gpu/layer/test_padding.py has
the same on a GPU, whose memory pool has NaN before.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mxep.jax_frontend import MoEConfig, MXArray, Recipe, RouterConfig, SwiGLU, grouped_mm, grouped_swiglu_ffn, moe
from mxep.jax_frontend.ops import cpu_gemm, launch
from mxep.jax_frontend.products.ffn import swiglu_ffn
from mxep.jax_frontend.products.gathers import gather

ON_A_CPU = jax.default_backend() == "cpu"
ROWS, ENDS, DIM, HIDDEN = 640, (32, 32, 352), 128, 64
END = ENDS[-1]
RECIPES = {
    "mxfp8": Recipe.parse("mxfp8"),
    "mxfp8_fold": Recipe("mxfp8", compute="fold"),
    **{name: Recipe.parse(name) for name in ("mxfp8_wgrad_with_hp", "fp8_rowwise", "fp8_blockwise", "bf16")},
    "fp8_blockwise_wgrad_with_hp": Recipe.parse("fp8_blockwise", wgrad_with_hp=True),
}
Named = dict[str, Any]
M_PERTURB, HUGE = -6, 0x7F
"""mallopt's parameter; its byte: NaN as E4M3, 3.4e38 as bf16 and fp32."""


@contextmanager
def poisoned_memory() -> Iterator[None]:
    if not ON_A_CPU:
        jax.block_until_ready(jnp.full(1 << 31, 0xFF, jnp.uint8))  # freed, it is the next to be allocated
        yield
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_PERTURB, HUGE ^ 0xFF)
    try:
        yield
    finally:
        mallopt(M_PERTURB, 0)


@pytest.fixture
def products_begin_with_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """M-grouped products of a CPU, which are XLA loops and write zeros past the last end, write NaN there."""

    def clear_caches() -> None:
        jax.clear_caches()
        launch._cpu_product.cache_clear()

    def initial(shape: tuple[int, ...], dtype: str, *like: jax.Array) -> jax.Array:
        found = zeros(shape, dtype, *like)
        return ~found if dtype.startswith("uint") else found  # the bits of an M-grouped product

    zeros = cpu_gemm._varying_zeros
    with monkeypatch.context() as patched:
        patched.setattr(cpu_gemm, "_varying_zeros", initial)
        clear_caches()
        yield
    clear_caches()


def poisoned(run: Any) -> Named:
    """The results with NaN in the padding and in fresh memory."""
    with poisoned_memory():
        return jax.tree.map(np.asarray, run(np.nan))


def twice(run: Any) -> tuple[Named, Named]:
    """The results with zeros and with poison."""
    return jax.tree.map(np.asarray, run(0.0)), poisoned(run)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def weights(*shapes: tuple[int, ...]) -> list[jax.Array]:
    return [normal(10 + i, *shape) * shape[-1] ** -0.5 for i, shape in enumerate(shapes)]


def padded(x: jax.Array, rows: int, fill: float) -> jax.Array:
    return jnp.concatenate([x, jnp.full((rows - len(x), *x.shape[1:]), fill, x.dtype)])


def gathered(tokens: jax.Array) -> MXArray:
    """(ROWS, DIM): MXFP8 rows of tokens (END + 1, DIM) through a map; past the last end all are the last token."""
    order = np.random.default_rng(0).permutation(END).astype(np.int32)
    row_map = np.where(np.arange(END) % 32 == 3, -1, order)  # padding within groups
    row_map = jnp.asarray(np.concatenate([row_map, np.full(ROWS - END, END, np.int32)]))
    inverse = jnp.asarray(np.append(np.argsort(order).astype(np.int32), -1))
    return gather("test", MXArray.quantize(tokens), row_map, inverse)


def real_rows(found: Named) -> Named:
    return {name: x[:END] if x.shape[0] == ROWS else x for name, x in found.items()}


def same_bits(got: Named, want: Named) -> None:
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert np.isfinite(x.astype(np.float32)).all(), name
        np.testing.assert_array_equal(x.reshape(-1).view(np.uint8), want[name].reshape(-1).view(np.uint8), name)


def feed_forward(recipe: Recipe, kind: str, biased: bool, function: Any) -> Any:
    """fill -> the result and all gradients."""
    groups, ends = len(ENDS), jnp.asarray(ENDS, jnp.int32)
    experts = weights((groups, HIDDEN, DIM), (groups, HIDDEN, DIM), (groups, DIM, HIDDEN))
    biases = weights((groups, HIDDEN), (groups, HIDDEN), (groups, DIM)) if biased else []
    named = dict(zip(("w1", "w3", "w2", "b1", "b3", "b2"), [*experts, *biases], strict=False))
    options = {"activation": SwiGLU(limit=1.0), "recipe": recipe, "pad_token_groups": False}

    def result(leaves: Named) -> jax.Array:
        biases = tuple(leaves[name] for name in ("b1", "b3", "b2")) if biased else None
        x = leaves["x"] if kind == "bf16" else gathered(leaves["x"])
        return function(x, *(leaves[w] for w in ("w1", "w3", "w2")), ends, leaves["prob"], biases=biases, **options)

    @jax.jit
    def program(leaves: Named, dout: jax.Array) -> Named:
        out, vjp = jax.vjp(result, leaves)
        return {"out": out, **vjp(dout)[0]}

    def run(fill: float) -> Named:
        x = padded(normal(0, END, DIM), ROWS if kind == "bf16" else END + 1, fill)
        prob = padded(jnp.abs(normal(1, END)).astype(jnp.float32), ROWS, fill)
        return program({"x": x, "prob": prob, **named}, padded(normal(2, END, DIM), ROWS, fill))

    return run


def in_layer(*arguments: Any, **options: Any) -> Any:
    return swiglu_ffn(*arguments, **options, clear_rest=False)


GATHERED = [(name, "gathered", False) for name, recipe in RECIPES.items() if recipe.mx]


@pytest.mark.filterwarnings("ignore:.*the last end is")
@pytest.mark.parametrize(
    ("recipe", "kind", "biased"), [*((name, "bf16", biased) for name in RECIPES for biased in (False, True)), *GATHERED]
)
def test_a_feed_forward(recipe: str, kind: str, biased: bool, products_begin_with_nan: None) -> None:
    want, got = twice(feed_forward(RECIPES[recipe], kind, biased, in_layer))
    same_bits(real_rows(got), real_rows(want))


@pytest.mark.filterwarnings("ignore:.*the last end is")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_public_feed_forward(recipe: str) -> None:
    want, got = twice(feed_forward(RECIPES[recipe], "bf16", False, grouped_swiglu_ffn))
    same_bits(got, want)
    for name in ("out", "x", "prob"):
        assert not got[name][END:].any(), name


@pytest.mark.filterwarnings("ignore:.*the last end is")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_product(recipe: str) -> None:
    (w,), ends = weights((len(ENDS), HIDDEN, DIM)), jnp.asarray(ENDS, jnp.int32)

    @jax.jit
    def program(x: jax.Array, dout: jax.Array) -> Named:
        product = partial(grouped_mm, group_ends=ends, recipe=RECIPES[recipe], pad_token_groups=False)
        out, vjp = jax.vjp(product, x, w)
        return dict(zip(("out", "x", "w"), (out, *vjp(dout)), strict=True))

    def run(fill: float) -> Named:
        return program(*(padded(normal(i, END, n), ROWS, fill) for i, n in enumerate((DIM, HIDDEN))))

    want, got = twice(run)
    same_bits(got, want)
    assert not got["out"][END:].any()
    assert not got["x"][END:].any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer(recipe: str, products_begin_with_nan: None) -> None:
    """Its groups have padding within groups and past the last one."""
    config = MoEConfig(64, 96, 4, RouterConfig(top_k=2, prob_in="swiglu"), recipe=RECIPES[recipe])
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), moe.init(jax.random.key(0), config))

    @jax.jit
    def program(x: jax.Array, dy: jax.Array) -> Named:
        y, vjp = jax.vjp(lambda params, x: moe.apply(params, x, config)[0], params, x)
        return {str(i): leaf for i, leaf in enumerate(jax.tree.leaves((y, vjp(dy))))}

    want, got = twice(lambda fill: program(normal(0, 48, 64), normal(1, 48, 64)))
    same_bits(got, want)
