"""The JAX frontend's public functions, under `jax.jit` on JAX's default device; expert parallelism on four CPU
devices (tests/conftest.py)."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from mxep import jax_frontend as mxep
from mxep.core_kernels.policy.recipe import Recipe
from mxep.jax_frontend import ops
from mxep.jax_frontend.exchange.all_to_all import plan_exchange
from mxep.jax_frontend.exchange.rows import permute as to_groups
from mxep.jax_frontend.integrations.torchao import (
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    unpermute_hp_fwd_mxfp8_bwd,
)
from mxep.jax_frontend.ops.mx_array import MXGradArray

from ..layer.layers import LAYERS, RANKS, RUNS, WIRE
from . import KERNEL_OPS

FP8_TENSOR_CORES = jax.default_backend() != "cpu"
SM90_SUMS = FP8_TENSOR_CORES and jax.devices()[0].compute_capability == "9.0"
FLUSHES_SUBNORMALS = not FP8_TENSOR_CORES  # XLA's matmul on a CPU
# Ranks without a GPU each are compared with the dense layer of the same device; tests/gpu/exchange/ranks.py has GPUs.
EXPERT_PARALLEL = not FP8_TENSOR_CORES
Array = np.ndarray
Pair = tuple[Array, Array]

# By default XLA leaves out a rounding to bf16 in a fusion, depending on where it cuts the graph: layers on 1 and on 4
# ranks then differ by roundings to bf16 (51 dB). With this option they agree to the bit, and the tests require it.
EXACT = {"xla_allow_excess_precision": False}


@cache
def compiled(name: str, options: tuple[tuple[str, Any], ...]) -> Callable:
    return jax.jit(partial(getattr(ops, name), **dict(options)))


def run(name: str, *inputs: Array, **options: Any) -> Any:
    results = compiled(name, tuple(options.items()))(*inputs)
    return tuple(map(np.asarray, results)) if isinstance(results, tuple) else np.asarray(results)


OPS: dict[str, Callable] = {name: partial(run, name) for name in KERNEL_OPS}


@jax.custom_vjp
def with_mx_gradient(out: MXGradArray, q: jax.Array, sf: jax.Array) -> jax.Array:
    """The value of `out`; its gradient is the pair q, sf whatever the cotangent, as in a combine."""
    return out.value


with_mx_gradient.defvjp(
    lambda out, q, sf: (out.value, (q, sf)), lambda pair, _: (MXGradArray.cotangent(None, pair), None, None)
)


@partial(jax.jit, static_argnames="recipe")
def _grouped_mm(a, b_t, group_ends, dout, recipe: Recipe):
    def forward(a, w):
        options = {"recipe": recipe, "mx_grad": isinstance(dout, tuple), "pad_token_groups": False}
        out = mxep.grouped_mm(a, w, group_ends, **options)
        return with_mx_gradient(out, *dout) if isinstance(dout, tuple) else out

    a = mxep.MXArray.from_bytes(*a) if isinstance(a, tuple) else a
    out, backward = jax.vjp(forward, a, b_t.mT)
    da, dw = backward(jnp.zeros_like(out) if isinstance(dout, tuple) else dout)
    return out, da.carrier if isinstance(a, mxep.MXArray) else da, dw.mT


def grouped_mm(
    a: Array | Pair, b_t: Array, group_ends: Array, dout: Array | Pair, recipe: Recipe
) -> tuple[Array, Array, Array]:
    """out (M, N), da (M, K), db_t (G, K, N)."""
    return tuple(map(np.asarray, _grouped_mm(a, b_t, group_ends, dout, recipe)))


@partial(jax.jit, static_argnames="recipe", compiler_options=EXACT)
def _linear(given, dout, recipe: Recipe):
    def forward(given):
        return mxep.dense(given["x"], given["w"].T, given.get("bias"), recipe=recipe)

    out, backward = jax.vjp(forward, given)
    return {"out": out, **backward(dout)[0]}


def linear(x: Array, w: Array, bias: Array | None, dout: Array, recipe: Recipe) -> dict[str, Array]:
    """out (..., N) and the gradients: of x "x" (..., K), of w "w" (N, K), and of bias "bias" if there is one."""
    given = {"x": x, "w": w} | ({} if bias is None else {"bias": bias})
    return {name: np.asarray(value) for name, value in _linear(given, dout, recipe).items()}


@partial(jax.jit, static_argnames=("recipe", "activation"), compiler_options=EXACT)
def _swiglu_ffn(x, weights, group_ends, prob, dout, recipe: Recipe, activation: mxep.SwiGLU):
    def forward(x, weights, prob):
        options = {"group_ends": group_ends, "recipe": recipe, "activation": activation}
        w1, w3, w2 = (weights[name] for name in ("w1", "w3", "w2"))
        b1, b3, b2 = (weights.get(name) for name in ("b1", "b3", "b2"))
        return mxep.grouped_swiglu_ffn(x, w1, w3, w2, prob=prob, biases=(b1, b3, b2), **options)

    out, backward = jax.vjp(forward, x, weights, prob)
    dx, dweights, dprob = backward(dout)
    return {"out": out, "x": dx, **dweights, "prob": dprob}


def swiglu_ffn(
    x: Array | Pair,
    weights: dict[str, Array],
    group_ends: Array,
    prob: Array | None,
    dout: Array | Pair,
    recipe: Recipe,
    **numbers: float,
) -> dict[str, Array]:
    """out (P, D) and the gradients: of x "x", of "w1", "w3", "w2", of prob "prob" if there is one, and of "b1", "b3",
    "b2" if `weights` has them. numbers: of SwiGLU."""
    results = _swiglu_ffn(x, weights, group_ends, prob, dout, recipe, mxep.SwiGLU(**numbers))
    return {name: np.asarray(value) for name, value in results.items()}


@partial(jax.jit, static_argnames=("ranks", "alignment"))
def _permute(rows, counts, dout, ranks: int, alignment: int):
    # No Exchange of ours has ranks whose rows follow each other without slack.
    sizes = {"num_rows": rows.shape[0], "num_local_experts": counts.shape[0] // ranks, "alignment": alignment}
    maps = mxep.ops.row_map(counts, **sizes)
    groups, groups_vjp = jax.vjp(
        lambda x: to_groups(x, counts, alignment)[0] if ranks == 1 else mxep.gather_rows(x, maps.row_map, maps.inverse),
        rows,
    )
    back, back_vjp = jax.vjp(lambda x: unpermute_hp_fwd_mxfp8_bwd(x, maps), dout)
    return groups, *groups_vjp(dout), back, *back_vjp(rows)


def permute(rows: Array, counts: Array, ranks: int, dout: Array, alignment: int) -> tuple[Array, Array, Array, Array]:
    """Rows (M, K) to padded groups (P, K) and back; each with its gradient for `dout` (P, K), and `rows` as dout."""
    groups, drows, back, dback = map(np.asarray, _permute(rows, counts, dout, ranks, alignment))
    return groups, drows, back, dback


def mesh(ranks: int) -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[:ranks]), ("ep",))


def _wire(rows, counts, grad, expert_out, dback):
    exchange = plan_exchange(counts, "ep", num_rows=rows.shape[0])

    def dispatch(x):
        mx = a2a_dispatch_mxfp8_fwd_hp_bwd(x, exchange)
        return mx.carrier, (mx.q, mx.sf)

    _, backward, (there_q, there_sf) = jax.vjp(dispatch, rows, has_aux=True)
    (drows,) = backward(grad)
    sent_back = MXGradArray.wrap(expert_out)
    back, backward = jax.vjp(lambda x: a2a_combine_hp_fwd_mxfp8_bwd(x, exchange), sent_back)
    (dexpert,) = backward(dback)
    _, (q, sf) = dexpert.parts()
    return {"q": there_q, "sf": there_sf, "rows.grad": drows, "back": back, "grad.q": q, "grad.sf": sf}


def wire(name: str) -> list[dict[str, Array]]:
    """Per rank: q, sf, rows.grad, back, grad.q, grad.sf; the slack of the buffers, NaN on the way in, is cut away."""
    case = WIRE[name]
    capacity, k = max(map(sum, case.splits)), case.rows[0].shape[1]
    starts = [np.cumsum([0, *(row[rank] for row in case.splits)]) for rank in range(RANKS)]

    def send_buffer(rows: tuple[Array, ...]) -> Array:
        out = np.full((RANKS, capacity, k), np.nan, rows[0].dtype)
        for rank, part in enumerate(rows):
            out[rank, : len(part)] = part
        return out.reshape(-1, k)

    def receive_buffer(received: list[Array]) -> Array:
        out = np.full((RANKS, RANKS, capacity, k), np.nan, received[0].dtype)
        for rank, part in enumerate(received):
            for source, piece in enumerate(np.split(part, starts[rank][1:-1])):
                out[rank, source, : len(piece)] = piece
        return out.reshape(-1, k)

    def cut(rank: int, key: str, value: jax.Array) -> Array:
        part = np.asarray(value).reshape(RANKS, -1, value.shape[1])[rank]
        if key in ("rows.grad", "back"):
            return part[: sum(case.splits[rank])]
        pieces = part.reshape(RANKS, capacity, -1)
        return np.concatenate([pieces[source, : case.splits[source][rank]] for source in range(RANKS)])

    rows, received = send_buffer(case.rows), receive_buffer(case.received())
    spec = PartitionSpec("ep")
    run = jax.jit(jax.shard_map(_wire, mesh=mesh(RANKS), in_specs=spec, out_specs=spec))
    results = run(rows, np.array(case.splits, np.int32).reshape(-1), received, received, rows)
    return [{key: cut(rank, key, value) for key, value in results.items()} for rank in range(RANKS)]


def _config(
    params: dict[str, Array], recipe: Recipe, top_k: int, score: str, normalize: bool, prob_in: str
) -> mxep.MoEConfig:
    num_experts, hidden, dim = params["w1"].shape
    router = mxep.RouterConfig(top_k, score_func=score, normalize=normalize, prob_in=prob_in)
    return mxep.MoEConfig(dim, hidden, num_experts, router, recipe=recipe)


def _tree(params: dict[str, Array]) -> dict[str, Any]:
    return {"router": params["router"], "experts": {name: params[name] for name in ("w1", "w2", "w3")}}


def _flat(grads: dict[str, Any], x: jax.Array) -> dict[str, Array]:
    return {name: np.asarray(g) for name, g in {"x": x, "router": grads["router"], **grads["experts"]}.items()}


@partial(jax.jit, static_argnames="config", compiler_options=EXACT)
def _moe(params, x, dy, config):
    y, backward, stats = jax.vjp(lambda params, x: mxep.moe.apply(params, x, config), params, x, has_aux=True)
    return y, stats, backward(dy)


def moe(
    x: Array, params: dict[str, Array], dy: Array, recipe: Recipe, **options: Any
) -> tuple[Array, dict[str, Array], dict[str, Array]]:
    """The dense layer: y, its statistics, and the gradients of x and of every parameter."""
    y, stats, grads = _moe(_tree(params), x, dy, _config(params, recipe, **options))
    return np.asarray(y), {name: np.asarray(s) for name, s in stats._asdict().items()}, _flat(*grads)


@cache
def ranked_layer(config: mxep.MoEConfig, degree: int) -> Callable:
    """A function of params, x, dy -> y, counts, (dparams, dx) on `degree` ranks, compiled once."""
    spec = PartitionSpec("ep")

    def one_rank(params, x):
        y, stats = mxep.moe.apply(params, x, config, axis_name="ep")
        return y, stats.counts

    @partial(jax.jit, compiler_options=EXACT)
    def run(params, x, dy):
        specs = {"router": PartitionSpec(), "experts": spec}
        outputs = (spec, PartitionSpec())
        ranks = jax.shard_map(one_rank, mesh=mesh(degree), in_specs=(specs, spec), out_specs=outputs)
        y, backward, counts = jax.vjp(ranks, params, x, has_aux=True)
        return y, counts, backward(dy)

    return run


def layer(name: str, run: str, degree: int) -> dict[str, Array]:
    """The layer on `degree` ranks, put together: y, counts, and the gradients of x, router, w1, w2, w3."""
    case = LAYERS[name]
    on_ranks = ranked_layer(_config(case.params, RUNS[run], **case.options), degree)
    y, counts, grads = on_ranks(_tree(case.params), case.x, case.dy)
    return {"y": np.asarray(y), "counts": np.asarray(counts), **_flat(*grads)}
