"""JAX's kernels of peers on the GPUs of one process, run by test_one_gpu.py under compute-sanitizer:

    XLA_PYTHON_CLIENT_ALLOCATOR=platform compute-sanitizer python -m tests.gpu.exchange.peers_of_jax PART RANKS

PART: a name of PARTS. RANKS: the number of GPUs, one or more. A group of one rank runs the same kernels as a group of
several, with one address. Results are compared with NumPy, and the program of the exchange with its definition.
"""

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from mxep.core_kernels.quantize.oracle import quantize_row
from mxep.core_kernels.swiglu.activation import PLAIN
from mxep.jax_frontend import sort_by_expert
from mxep.jax_frontend.exchange import device_exchange
from mxep.jax_frontend.exchange.all_to_all import TokenReplicas
from mxep.jax_frontend.exchange.peer_memory import Peers

from ...torch_frontend.overlap.ep_device import HIDDEN, LOCAL, RECIPE, TOP_K, D

AXIS = "ranks"
ROWS, MAPPED, TOKENS = 33, 70, 24
WIDTHS = 96, 7, 130
"""Of rows: multiples of 16 bytes and not."""
BF16 = ml_dtypes.bfloat16


def on_ranks(function: Callable[..., Any], ranks: int, *arrays: np.ndarray) -> list[np.ndarray]:
    """function of each rank's part of the arrays (ranks, ...), on `ranks` devices; its results, (ranks, ...)."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:ranks]), (AXIS,))

    def of_rank(*parts: jax.Array) -> Any:
        return jax.tree.map(lambda a: a[None], tuple(function(*(part[0] for part in parts))))

    spec = P(AXIS)
    run = jax.jit(jax.shard_map(of_rank, mesh=mesh, in_specs=(spec,) * len(arrays), out_specs=spec))
    return [np.asarray(a) for a in run(*arrays)]


def same(got: np.ndarray, want: np.ndarray, what: object) -> None:
    assert got.shape == want.shape, (what, got.shape, want.shape)
    assert got.tobytes() == want.tobytes(), what


def maps(rng: np.random.Generator, ranks: int, *shape: int) -> np.ndarray:
    """Numbers of rows across ranks; some of no row, the last ones too."""
    found = rng.integers(-1, ranks * ROWS, (ranks, *shape), np.int32)
    found[:, -3:] = -1
    return found


def gathers(ranks: int, width: int) -> None:
    rng, read = np.random.default_rng(width), Peers(AXIS).read
    rows = rng.standard_normal((ranks, ROWS, width), np.float32).astype(BF16)
    row_map = maps(rng, ranks, MAPPED)
    (got,) = on_ranks(partial(read, "permute_rows"), ranks, rows, row_map)
    padded = np.append(rows.reshape(-1, width), np.zeros((1, width), BF16), 0)
    same(got, padded[row_map], ("permute_rows", width))


def gathers_of_mx(ranks: int) -> None:
    rng, k = np.random.default_rng(1), 96
    q, sf = quantize_row(rng.standard_normal((ranks * ROWS, k), np.float32).astype(BF16))
    packed, row_map = np.concatenate([q, sf], 1), maps(rng, ranks, MAPPED)
    got = on_ranks(partial(Peers(AXIS).read, "permute_mx"), ranks, packed.reshape(ranks, ROWS, -1), row_map)
    padded = np.append(packed, np.zeros((1, packed.shape[1]), np.uint8), 0)[row_map]
    for one, want in zip(got, np.split(padded, [k], 2), strict=True):
        same(one, want, "permute_mx")


def sums(ranks: int, width: int, dtype: Any) -> None:
    rng = np.random.default_rng(width)
    rows = rng.standard_normal((ranks, ROWS, width), np.float32).astype(dtype)
    slots = maps(rng, ranks, TOKENS, TOP_K)
    (got,) = on_ranks(partial(Peers(AXIS).read, "combine"), ranks, rows, slots)
    want = np.zeros((ranks, TOKENS, width), np.float32)
    padded = np.append(rows.reshape(-1, width), np.zeros((1, width), dtype), 0).astype(np.float32)
    for k in range(TOP_K):
        want += padded[slots[:, :, k]]
    same(got, want.astype(got.dtype), ("combine", width, dtype))


def layer(ranks: int) -> Callable[..., Any]:
    def step(x, ids, probs, dy, w1, w3, w2):
        def forward(x, probs, w1, w3, w2):
            order, inverse, counts = sort_by_expert(ids, LOCAL * ranks)
            tokens = TokenReplicas(x, order, inverse, TOP_K)
            weights = w1, w3, w2
            arguments = probs, counts, weights, weights, RECIPE, PLAIN, AXIS, None, "nan", False
            return device_exchange.exchange_ffn(tokens, *arguments)[0]

        y, gradients = jax.vjp(forward, x, probs, w1, w3, w2)
        return y, *gradients(dy)

    return step


def program(ranks: int) -> None:
    rng, hidden = np.random.default_rng(0), HIDDEN["cpu" if jax.default_backend() == "cpu" else "cuda"]
    draw = lambda *shape: rng.standard_normal((ranks, *shape), np.float32).astype(BF16)  # noqa: E731
    ids = np.argsort(rng.random((ranks, TOKENS, LOCAL * ranks)))[..., :TOP_K].astype(np.int32)
    probs = rng.random((ranks, TOKENS, TOP_K), np.float32)
    weights = draw(LOCAL, hidden, D), draw(LOCAL, hidden, D), draw(LOCAL, D, hidden)
    inputs = draw(TOKENS, D), ids, probs, draw(TOKENS, D), *weights
    got = on_ranks(layer(ranks), ranks, *inputs)
    real = device_exchange.lax
    device_exchange.lax = SimpleNamespace(  # type: ignore[assignment]
        **{**vars(lax), "platform_dependent": lambda *arrays, cuda, default: default(*arrays)}
    )
    try:
        want = on_ranks(layer(ranks), ranks, *inputs)
    finally:
        device_exchange.lax = real
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        same(one, other, ("program", i))


def rows(ranks: int) -> None:
    for width in WIDTHS:
        gathers(ranks, width)
        for dtype in (BF16, jnp.float32):
            sums(ranks, width, dtype)
    gathers_of_mx(ranks)


PARTS = {"rows": rows, "program": program}


def main(part: str, ranks: str) -> None:
    PARTS[part](int(ranks))
    print(f"ran {part} on {ranks}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
