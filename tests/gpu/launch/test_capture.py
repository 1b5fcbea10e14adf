"""Ops inside a training step: streams, CUDA graphs, torch.compile, XLA's command buffers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import torch
from mxep.jax_frontend import ops as jax_ops
from mxep.jax_frontend.ops import call as jax_launch
from torch import Tensor

from ..cases import CASES, DEVICE, Case, floats, same_bytes, to_numpy


@pytest.mark.parametrize("name", CASES)
def test_a_cuda_graph_replays_the_op_on_new_values(name: str) -> None:
    """The capture fails on a host synchronisation, an allocation outside torch's allocator, or another stream."""
    case = CASES[name]
    static, new = case.inputs(seed=0), case.inputs(seed=1)
    case.torch(*static)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = case.torch(*static)
    for old, x in zip(static, new, strict=True):
        old.copy_(x)
    for out in outputs:
        out.view(-1).view(torch.uint8).fill_(0xFF)
    graph.replay()
    same_bytes(case.specified(new, outputs), case.specified(new, case.torch(*new)))


@pytest.mark.parametrize("name", CASES)
def test_an_op_runs_on_the_current_stream(name: str) -> None:
    """The stream sleeps before it copies the inputs. A launch on another stream would read the old values."""
    case = CASES[name]
    wrong, right = case.inputs(seed=0), case.inputs(seed=1)
    want = case.torch(*right)
    static = tuple(x.clone() for x in wrong)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # about 100 ms: longer than a loaded host needs to reach the query
        for old, x in zip(static, right, strict=True):
            old.copy_(x)
        got = case.torch(*static)
    assert not side.query(), "the op waited for the device"
    side.synchronize()
    same_bytes(case.specified(right, got), case.specified(right, want))


@pytest.mark.parametrize("name", CASES)
def test_no_op_waits_for_the_device(name: str) -> None:
    case = CASES[name]
    inputs = case.inputs()
    case.torch(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.torch(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CASES)
def test_torch_compile_without_a_graph_break(name: str) -> None:
    case = CASES[name]
    torch.compiler.reset()  # all cases compile the same code, and Dynamo limits recompilations
    compiled = torch.compile(case.torch, fullgraph=True)
    for seed in range(2):
        inputs = case.inputs(seed)
        same_bytes(case.specified(inputs, compiled(*inputs)), case.specified(inputs, case.torch(*inputs)))


def chain(call: Callable[..., Any], x: Any, row_map: Any, prob: Any) -> tuple[Any, ...]:
    """Packs, permutes, folds and dequantizes rows, applies SwiGLU, and quantizes both ways."""
    (packed,) = call("quantize_row_packed", x)
    q, sf = call("permute_mx", packed, row_map)
    qf, row_sf = call("fold_rows", q, sf)
    (rows,) = call("dequantize", q, sf)
    (h,) = call("swiglu", rows, rows, prob)
    return (qf, row_sf, h, *call("quantize_both", h))


def test_a_jitted_chain_of_ops_gives_the_same_bytes_again() -> None:
    """The chain is long enough for XLA to record a CUDA graph, which XLA updates when buffers move."""

    def in_jax(op: str, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        return jax_launch.call(jax_ops.OPS[op], *arrays)

    def in_torch(op: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        return Case(op, lambda rng, m: ()).torch(*tensors)

    run = jax.jit(partial(chain, in_jax))
    rng = np.random.default_rng(0)
    runs = []
    for _ in range(8):
        drawn = rng.integers(-1, 200, 256).astype(np.int32), rng.random(256, np.float32)
        inputs = (floats(rng, 200, 256), *map(torch.from_numpy, drawn))
        arrays = tuple(map(to_numpy, inputs))
        got = run(*arrays)
        runs.append((got, run(*arrays)))  # keeps the buffers alive, so that every run gets new ones
        want = chain(in_torch, *(x.to(DEVICE) for x in inputs))
        same_bytes(got, want)
    for first, second in runs:
        same_bytes(second, first)
