"""JAX's kernels of peers on the GPUs of one process, run by test_one_gpu.py under compute-sanitizer:

    XLA_PYTHON_CLIENT_ALLOCATOR=platform compute-sanitizer python -m tests.gpu.exchange.peers_of_jax PART RANKS

PART: a name of PARTS. RANKS: the number of GPUs, one or more. A group of one rank runs the same kernels as a group of
several, with one address. Results are compared with NumPy, and the program of the exchange with its definition.
processes_of_jax.py runs the parts in several processes: each compares the results of its own devices.
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
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mxep.core_kernels.quantize.oracle import quantize_row
from mxep.core_kernels.swiglu.activation import PLAIN
from mxep.jax_frontend import sort_by_expert
from mxep.jax_frontend.exchange import device_exchange
from mxep.jax_frontend.exchange.all_to_all import TokenReplicas
from mxep.jax_frontend.exchange.peer_memory import PeerMemory
from mxep.jax_frontend.exchange.peer_rows import Peers

from ...torch_frontend.overlap.ep_device import HIDDEN, LOCAL, RECIPE, TOP_K, D

AXIS = "ranks"
ROWS, MAPPED, TOKENS = 33, 70, 24
WIDTHS = 96, 7, 130
"""Of rows: multiples of 16 bytes and not."""
BF16 = ml_dtypes.bfloat16


def memory_of(ranks: int, **options: Any) -> PeerMemory:
    memory = PeerMemory(jax.sharding.Mesh(np.array(jax.devices()[:ranks]), (AXIS,)), AXIS, **options)
    if ranks == 1 and jax.default_backend() == "gpu":
        memory._connect(1000)  # a layer on one rank needs none
    return memory


def on_ranks(function: Callable[..., Any], memory: PeerMemory, *arrays: np.ndarray) -> list[jax.Array]:
    """function of each rank's part of the arrays (ranks, ...), on its device; its results, (ranks, ...)."""

    def of_rank(*parts: jax.Array) -> Any:
        return jax.tree.map(lambda a: a[None], tuple(function(*(part[0] for part in parts))))

    spec, sharding = P(AXIS), NamedSharding(memory.mesh, P(AXIS))
    run = jax.jit(jax.shard_map(of_rank, mesh=memory.mesh, in_specs=(spec,) * len(arrays), out_specs=spec))
    return list(run(*(jax.make_array_from_callback(a.shape, sharding, lambda i, a=a: a[i]) for a in arrays)))


def same(got: jax.Array, want: np.ndarray | jax.Array, what: object) -> None:
    """On the devices of this process."""
    assert got.shape == want.shape, (what, got.shape, want.shape)
    shards = {s.device: s.data for s in want.addressable_shards} if isinstance(want, jax.Array) else {}
    for shard in got.addressable_shards:
        expected = shards[shard.device] if shards else want[shard.index]
        assert np.asarray(shard.data).tobytes() == np.asarray(expected).tobytes(), (what, shard.device)


def maps(rng: np.random.Generator, ranks: int, *shape: int) -> np.ndarray:
    """Numbers of rows across ranks; some of no row, the last ones too."""
    found = rng.integers(-1, ranks * ROWS, (ranks, *shape), np.int32)
    found[:, -3:] = -1
    return found


def gathers(memory: PeerMemory, width: int) -> None:
    rng, read, ranks = np.random.default_rng(width), Peers(memory).read, memory.ranks
    rows = rng.standard_normal((ranks, ROWS, width), np.float32).astype(BF16)
    row_map = maps(rng, ranks, MAPPED)
    (got,) = on_ranks(partial(read, "permute_rows"), memory, rows, row_map)
    padded = np.append(rows.reshape(-1, width), np.zeros((1, width), BF16), 0)
    same(got, padded[row_map], ("permute_rows", width))


def gathers_of_mx(memory: PeerMemory) -> None:
    rng, k, ranks = np.random.default_rng(1), 96, memory.ranks
    q, sf = quantize_row(rng.standard_normal((ranks * ROWS, k), np.float32).astype(BF16))
    packed, row_map = np.concatenate([q, sf], 1), maps(rng, ranks, MAPPED)
    got = on_ranks(partial(Peers(memory).read, "permute_mx"), memory, packed.reshape(ranks, ROWS, -1), row_map)
    padded = np.append(packed, np.zeros((1, packed.shape[1]), np.uint8), 0)[row_map]
    for one, want in zip(got, np.split(padded, [k], 2), strict=True):
        same(one, want, "permute_mx")


def sums(memory: PeerMemory, width: int, dtype: Any) -> None:
    rng, ranks = np.random.default_rng(width), memory.ranks
    rows = rng.standard_normal((ranks, ROWS, width), np.float32).astype(dtype)
    slots = maps(rng, ranks, TOKENS, TOP_K)
    (got,) = on_ranks(partial(Peers(memory).read, "combine"), memory, rows, slots)
    want = np.zeros((ranks, TOKENS, width), np.float32)
    padded = np.append(rows.reshape(-1, width), np.zeros((1, width), dtype), 0).astype(np.float32)
    for k in range(TOP_K):
        want += padded[slots[:, :, k]]
    same(got, want.astype(got.dtype), ("combine", width, dtype))


def layer(memory: PeerMemory) -> Callable[..., Any]:
    def step(x, ids, probs, dy, w1, w3, w2):
        def forward(x, probs, w1, w3, w2):
            order, inverse, counts = sort_by_expert(ids, LOCAL * memory.ranks)
            tokens = TokenReplicas(x, order, inverse, TOP_K)
            weights = w1, w3, w2
            arguments = probs, counts, weights, weights, RECIPE, PLAIN, memory, None, "nan", False
            return device_exchange.exchange_ffn(tokens, *arguments)[0]

        y, gradients = jax.vjp(forward, x, probs, w1, w3, w2)
        return y, *gradients(dy)

    return step


def program(memory: PeerMemory) -> None:
    ranks, rng = memory.ranks, np.random.default_rng(0)
    hidden = HIDDEN["cpu" if jax.default_backend() == "cpu" else "cuda"]
    draw = lambda *shape: rng.standard_normal((ranks, *shape), np.float32).astype(BF16)  # noqa: E731
    ids = np.argsort(rng.random((ranks, TOKENS, LOCAL * ranks)))[..., :TOP_K].astype(np.int32)
    probs = rng.random((ranks, TOKENS, TOP_K), np.float32)
    weights = draw(LOCAL, hidden, D), draw(LOCAL, hidden, D), draw(LOCAL, D, hidden)
    inputs = draw(TOKENS, D), ids, probs, draw(TOKENS, D), *weights
    got = on_ranks(layer(memory), memory, *inputs)
    real = device_exchange.lax
    device_exchange.lax = SimpleNamespace(  # type: ignore[assignment]
        **{**vars(lax), "platform_dependent": lambda *arrays, cuda, default: default(*arrays)}
    )
    try:
        want = on_ranks(layer(memory), memory, *inputs)
    finally:
        device_exchange.lax = real
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        same(one, other, ("program", i))


def rows(memory: PeerMemory) -> None:
    for width in WIDTHS:
        gathers(memory, width)
        for dtype in (BF16, jnp.float32):
            sums(memory, width, dtype)
    gathers_of_mx(memory)


PARTS = {"rows": rows, "program": program}


def main(part: str, ranks: str) -> None:
    PARTS[part](memory_of(int(ranks)))
    print(f"ran {part} on {ranks}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
