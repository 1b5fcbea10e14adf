"""The whole MoE layer, from torch and from JAX, compared with a plain bf16 layer in each framework.

    inputs --torch--> y and gradients --SQNR against bf16--> events:    run | plain torch bf16
            '-JAX---> y and gradients --SQNR against bf16--> programs:  JAX | torch | plain torch bf16 | ragged_dot
    torch, captured --replay--> y and gradients --SQNR--> events:    replay | replay of plain torch bf16
                                                          programs:  the same, replayed several times in a row

JAX with held weights runs the forward and backward together only: a compilation takes as long as the measurement.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import torch

from .cases.case import Tensors
from .cases.error_check import Error
from .cases.moe_layer import (
    OPS,
    RECIPE,
    LayerInputs,
    check,
    flops,
    jax_program,
    layer_inputs,
    our_jax_program,
    our_torch_layer,
    plain_torch_layer,
    torch_programs,
)
from .cases.shapes import MoELayer, RoutedLayer
from .figures import device_timing
from .figures.device_timing import Each, torch_wait
from .figures.failures import failed, guarded
from .figures.results import Line
from .figures.timing import Sample
from .peers.moe_layer import jax_layer, ragged_dot_nbytes

PLAIN, RAGGED_DOT = "plain_torch_bf16", "ragged_dot"
# XLA holds several dense operands of a layer on ragged_dot at once: with 7 GiB each they fit into 139 GiB, with 16 GiB
# each they do not.
MAX_RAGGED_DOT_NBYTES = 8 << 30
HELD, GRAPH, IN_A_ROW = {"weights": "held"}, {"launch": "graph"}, {"clock": "in a row"}


def layer_lines(
    inputs: LayerInputs, op: str, frontend: str, how: Mapping[str, str], samples: Mapping[str, Sample],
    peak: int | None, error: Error,
) -> Iterator[Line]:  # fmt: skip
    """One line for each peer among the samples. how: HELD, GRAPH, IN_A_ROW, or several of them; part of the case."""
    ours = samples["run"]
    routed = {} if inputs.routing == "random" else {"routing": inputs.routing}
    for name, theirs in samples.items():
        if name == "run":
            continue
        yield Line(
            op=op,
            frontend=frontend,
            case={**inputs.shape._asdict(), "recipe": RECIPE, **how, **routed},
            us=ours.us,
            spread=ours.spread,
            n=ours.n,
            nbytes=0,
            flops=flops(inputs.shape, op),
            of_roof=None,
            roof=None,
            peer=name,
            peer_us=theirs.us,
            ratio=round(theirs.us / ours.us, 3),
            peak_nbytes=peak,
            error=error,
        )


def torch_lines(
    inputs: LayerInputs, reference: Tensors, named: Sequence[str], held: bool, each: Each
) -> Iterator[Line]:
    ours, plain = (torch_programs(layer(inputs), inputs) for layer in (our_torch_layer, plain_torch_layer))
    with inputs.ours.weights_held() if held else nullcontext():
        error = check(inputs, reference, ours["moe_layer_fwd_bwd"]())
        for op in named:
            peak = device_timing.peak_nbytes(ours[op])
            samples = each({"run": ours[op], PLAIN: plain[op]})
            yield from layer_lines(inputs, op, "torch", HELD if held else {}, samples, peak, error)


def captured(step: Callable[[], Tensors]) -> tuple[Callable[[], object], Tensors]:
    """A function that replays the step from a CUDA graph, and the outputs that every replay overwrites."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # compiles and fills caches, which a graph must not
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    return graph.replay, outputs


def graph_lines(inputs: LayerInputs, reference: Tensors, device: str, each: Each) -> Iterator[Line]:
    """Forward and backward of torch's layer and of the plain one, both in a CUDA graph: replayed with pauses, and as in
    training, one replay after the other."""
    op = "moe_layer_fwd_bwd"
    ours, plain = (torch_programs(layer(inputs), inputs)[op] for layer in (our_torch_layer, plain_torch_layer))
    (replay, outputs), (replay_plain, _) = captured(ours), captured(plain)
    replay()
    error = check(inputs, reference, outputs)
    yield from layer_lines(inputs, op, "torch", GRAPH, each({"run": replay, PLAIN: replay_plain}), None, error)
    wait = torch_wait(device)
    in_a_row = device_timing.programs({"run": (replay, wait), PLAIN: (replay_plain, wait)}, settle=True)
    yield from layer_lines(inputs, op, "torch", GRAPH | IN_A_ROW, in_a_row, None, error)


def _ragged_dot(inputs: LayerInputs, op: str) -> device_timing.Program:
    """The plain JAX layer, compiled; its weights are copies in the layout of ragged_dot."""
    x, dy, router = (jax.dlpack.from_dlpack(a.detach()) for a in (inputs.x, inputs.dy, inputs.weights.router))
    experts = (jax.dlpack.from_dlpack(w.detach().mT.contiguous()) for w in inputs.weights[1:])
    layer = lambda x, weights: jax_layer(x, weights, inputs.shape.top_k)  # noqa: E731
    program, arguments = jax_program(layer, op, x, dy, (router, *experts))
    return partial(program, *arguments), jax.block_until_ready


def jax_lines(
    inputs: LayerInputs, reference: Tensors, named: Sequence[str], held: bool, device: str, failures: list[str]
) -> Iterator[Line]:
    ours, plain = (torch_programs(layer(inputs), inputs) for layer in (our_torch_layer, plain_torch_layer))
    wait = torch_wait(device)
    t, d, f, e, k = inputs.shape
    fits = ragged_dot_nbytes(t * k, max(d, f), e) <= MAX_RAGGED_DOT_NBYTES
    with inputs.ours.weights_held() if held else nullcontext():
        for op in [op for op in named if not (held and op == "moe_layer_fwd")]:
            program, arguments = our_jax_program(inputs, op, held)
            outputs = tuple(map(torch.from_dlpack, program(*arguments)))
            error = check(inputs, reference[: len(outputs)], outputs)
            del outputs
            candidates: dict[str, device_timing.Program] = {
                "run": (partial(program, *arguments), jax.block_until_ready),
                "torch_frontend": (ours[op], wait),
                PLAIN: (plain[op], wait),
            }
            if fits and not held:
                try:
                    peer, wait_for = _ragged_dot(inputs, op)
                    wait_for(peer())
                    candidates[RAGGED_DOT] = peer, wait_for
                except Exception:
                    failed(f"{op} in JAX: peer {RAGGED_DOT}", failures)
            memory: Any = getattr(program, "memory_analysis", lambda: None)()
            peak = memory and memory.temp_size_in_bytes + memory.output_size_in_bytes
            samples = device_timing.programs(candidates, settle=True)
            yield from layer_lines(inputs, op, "jax", HELD if held else {}, samples, peak, error)


def lines(
    only: Sequence[str], layers: Sequence[MoELayer], uneven: Sequence[RoutedLayer], device: str, each: Each,
    failures: list[str],
) -> Iterator[Line]:  # fmt: skip
    """The lines of the ops named. Uneven layers are not measured with held weights or in a graph."""
    named = tuple(op for op in OPS if op in only)
    all_layers = [*((RoutedLayer(shape, "random"), True) for shape in layers), *((layer, False) for layer in uneven)]
    for (shape, routing), whole in all_layers if named else ():
        of = f"{tuple(shape)}, routing {routing}"
        for inputs, reference in guarded(f"moe_layer: inputs of {of}", _inputs(shape, routing, device), failures):
            for held in (False, True) if whole else (False,):
                what = f"moe_layer {of}{', weights held' if held else ''}"
                yield from guarded(what, torch_lines(inputs, reference, named, held, each), failures)
                torch.cuda.empty_cache()  # memory for JAX
                in_jax = jax_lines(inputs, reference, named, held, device, failures)
                yield from guarded(f"{what} in JAX", in_jax, failures)
            if whole and device == "cuda" and "moe_layer_fwd_bwd" in named:
                what = f"moe_layer {of}, in a graph"
                yield from guarded(what, graph_lines(inputs, reference, device, each), failures)
            del inputs, reference
        gc.collect()
        torch.cuda.empty_cache()


def _inputs(shape: MoELayer, routing: str, device: str) -> Iterator[tuple[LayerInputs, Tensors]]:
    """The inputs of a layer, and y and the gradients of the plain layer.

    The plain layer has an fp32 router here, as ours: bf16 logits select other experts for some tokens.
    """
    inputs = layer_inputs(shape, device, routing=routing)
    yield inputs, torch_programs(plain_torch_layer(inputs, torch.float32), inputs)["moe_layer_fwd_bwd"]()
