"""The whole MoE layer, from torch and from JAX, compared with a plain bf16 layer in each framework.

    inputs --torch--> y and gradients --SQNR against bf16--> events:    run | plain torch bf16
            '-JAX---> y and gradients --SQNR against bf16--> in a row:  JAX | torch | recipe bf16 | plain torch bf16 |
                                                                         ragged_dot
    torch, captured --replay--> y and gradients --SQNR--> events:    replay | replay of plain torch bf16
                                                          in a row:  the same | replay of recipe bf16
    torch, SonicMoE --y and gradients, SQNR--> in a row:     run | SonicMoE | recipe bf16 | plain torch bf16

Every line has the peak memory of both sides, and of back-to-back steps, forward and backward, the joules of both sides.
Recipe bf16 is our torch layer without quantization, on the same parameters. JAX with cached weights, and uneven layers,
run the forward and backward together only: a compilation takes as long as the measurement. `ragged_dot` takes ten times
as long as the others, and is left out of uneven layers.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import torch

from .cases.case import Tensors
from .cases.error_check import Error
from .cases.moe_layer import (
    OPS,
    RECIPE,
    SONIC_OP,
    LayerInputs,
    check,
    check_sonic,
    flops,
    jax_program,
    layer_inputs,
    our_jax_program,
    our_torch_layer,
    plain_torch_layer,
    recipe_bf16_layer,
    torch_programs,
)
from .cases.shapes import MoELayer, RoutedLayer
from .clocks import device_timing, energy
from .clocks.device_timing import Each, jax_end, torch_end
from .clocks.timing import Sample
from .figures.failures import failed, guarded
from .figures.results import Line
from .peers import sonic_moe
from .peers.moe_layer import MAX_RAGGED_DOT_NBYTES, jax_layer, ragged_dot_nbytes

T = TypeVar("T")
PLAIN, RECIPE_BF16, RAGGED_DOT = "plain_torch_bf16", "recipe_bf16", "ragged_dot"
HELD, GRAPH, IN_A_ROW = {"weights": "held"}, {"launch": "graph"}, {"clock": "in a row"}


class Found(NamedTuple):
    """What holds of a program's lines: the distance from bf16, and the peak memory, None without a GPU."""

    error: Error
    peak: int | None


def layer_lines(
    inputs: LayerInputs, op: str, frontend: str, how: Mapping[str, str], samples: Mapping[str, Sample],
    found: Found, peaks: Mapping[str, int | None], joules: Mapping[str, float] | None = None,
) -> Iterator[Line]:  # fmt: skip
    """One line for each peer among the samples. how: HELD, GRAPH, IN_A_ROW, or several of them; part of the case.
    peaks: memory of the peers. joules: of a step of each side, where measured."""
    joules = joules or {}
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
            peak_nbytes=found.peak,
            error=found.error,
            peer_peak_nbytes=peaks.get(name),
            joules=joules.get("run"),
            peer_joules=joules.get(name),
        )


def torch_lines(
    inputs: LayerInputs, reference: Tensors, named: Sequence[str], held: bool, each: Each, found: dict[str, Found],
    peaks: dict[str, int | None],
) -> Iterator[Line]:  # fmt: skip
    """Lines of single steps. Fills `found`, of our layer, and `peaks`, of the plain one, by op."""
    ours, plain = (torch_programs(layer(inputs), inputs) for layer in (our_torch_layer, plain_torch_layer))
    with inputs.ours.cached_weights() if held else nullcontext():
        error = check(inputs, reference, ours["moe_layer_fwd_bwd"]())
        for op in named:
            found[op] = Found(error, device_timing.peak_nbytes(ours[op]))
            peaks[op] = device_timing.peak_nbytes(plain[op])
            samples = each({"run": ours[op], PLAIN: plain[op]})
            yield from layer_lines(inputs, op, "torch", HELD if held else {}, samples, found[op], {PLAIN: peaks[op]})


def captured(step: Callable[[], Tensors]) -> tuple[Callable[[], object], Tensors, int | None]:
    """A function that replays the step from a CUDA graph, the outputs that every replay overwrites, and the peak of the
    memory that the graph's step takes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # compiles and fills caches, which a graph must not
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()

    def capture() -> Tensors:
        # A thread of XLA that frees memory would end a capture of all threads.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            return step()

    outputs, peak = device_timing.with_peak(capture)
    return graph.replay, outputs, peak


def graph_lines(inputs: LayerInputs, reference: Tensors, device: str, each: Each) -> Iterator[Line]:
    """Forward and backward of torch's layer, of recipe bf16 and of the plain one, each in a CUDA graph: our layer and
    the plain one replayed with pauses, and all of them as in training, one replay after the other."""
    op = "moe_layer_fwd_bwd"
    layers = {"run": our_torch_layer, PLAIN: plain_torch_layer, RECIPE_BF16: recipe_bf16_layer}
    graphs = {name: captured(torch_programs(layer(inputs), inputs)[op]) for name, layer in layers.items()}
    replays = {name: replay for name, (replay, _, _) in graphs.items()}
    peaks, end = {name: peak for name, (_, _, peak) in graphs.items()}, torch_end(device)
    for replay in replays.values():
        replay()
    check(inputs, reference, graphs[RECIPE_BF16][1])
    found = Found(check(inputs, reference, graphs["run"][1]), peaks["run"])
    yield from layer_lines(inputs, op, "torch", GRAPH, each({n: replays[n] for n in ("run", PLAIN)}), found, peaks)
    in_a_row = device_timing.in_a_row({name: (run, end) for name, run in replays.items()})
    yield from layer_lines(inputs, op, "torch", GRAPH | IN_A_ROW, in_a_row, found, peaks)


def _peak(program: Any) -> int | None:
    """Of a compiled program: XLA's temporaries and outputs."""
    memory: Any = getattr(program, "memory_analysis", lambda: None)()
    return memory and memory.temp_size_in_bytes + memory.output_size_in_bytes


def _ragged_dot(inputs: LayerInputs, op: str) -> tuple[Callable[[], Any], int | None]:
    """The plain JAX layer, compiled, and its peak memory; its weights are copies in the layout of ragged_dot."""
    x, dy, router = (jax.dlpack.from_dlpack(a.detach()) for a in (inputs.x, inputs.dy, inputs.weights.router))
    experts = (jax.dlpack.from_dlpack(w.detach().mT.contiguous()) for w in inputs.weights[1:])
    layer = lambda x, weights: jax_layer(x, weights, inputs.shape.top_k)  # noqa: E731
    program, arguments = jax_program(layer, op, x, dy, (router, *experts))
    return partial(program, *arguments), _peak(program)


def _of_torch(measured: Mapping[str, T]) -> dict[str, T]:
    """Of the rounds with JAX: torch's layer as "run", and its peers in torch."""
    names = {"run": "torch_frontend", PLAIN: PLAIN, RECIPE_BF16: RECIPE_BF16}
    return {name: measured[at] for name, at in names.items() if at in measured}


def in_a_row_lines(
    inputs: LayerInputs, reference: Tensors, named: Sequence[str], held: bool, ragged: bool, device: str,
    failures: list[str], torch_found: Mapping[str, Found], plain_peaks: Mapping[str, int | None],
) -> Iterator[Line]:  # fmt: skip
    """Lines of back-to-back steps: of JAX's layer against torch's and the plain ones, and of torch's against recipe
    bf16 and the plain one, all of them timed in the same rounds. ragged: against `ragged_dot` too, where its operands
    fit."""
    ours, plain = (torch_programs(layer(inputs), inputs) for layer in (our_torch_layer, plain_torch_layer))
    end, how, read = torch_end(device), HELD if held else {}, energy.counter()
    recipe_bf16 = torch_programs(recipe_bf16_layer(inputs), inputs)
    t, d, f, e, k = inputs.shape
    ragged = ragged and ragged_dot_nbytes(t * k, max(d, f), e) <= MAX_RAGGED_DOT_NBYTES
    with inputs.ours.cached_weights() if held else nullcontext():
        for op in named:
            program, arguments = our_jax_program(inputs, op, held)
            outputs = tuple(map(torch.from_dlpack, program(*arguments)))
            found = Found(check(inputs, reference[: len(outputs)], outputs), _peak(program))
            del outputs
            steps: dict[str, device_timing.Step] = {
                "run": (partial(program, *arguments), jax_end),
                "torch_frontend": (ours[op], end),
                PLAIN: (plain[op], end),
            }
            peaks = {"torch_frontend": torch_found[op].peak, PLAIN: plain_peaks[op]}
            try:
                outputs = recipe_bf16[op]()
                check(inputs, reference[: len(outputs)], outputs)
                del outputs
                peaks[RECIPE_BF16] = device_timing.peak_nbytes(recipe_bf16[op])
                steps[RECIPE_BF16] = recipe_bf16[op], end
            except Exception:
                failed(f"{op}: peer {RECIPE_BF16}", failures)
            if ragged:
                try:
                    peer, peaks[RAGGED_DOT] = _ragged_dot(inputs, op)
                    jax.block_until_ready(peer())
                    steps[RAGGED_DOT] = peer, jax_end
                except Exception:
                    failed(f"{op} in JAX: peer {RAGGED_DOT}", failures)
            samples = device_timing.in_a_row(steps)
            used = {name: step for name, step in steps.items() if name != RAGGED_DOT}
            joules = energy.joules(used, read) if op == "moe_layer_fwd_bwd" else {}
            in_jax = {name: sample for name, sample in samples.items() if name != RECIPE_BF16}
            yield from layer_lines(inputs, op, "jax", how, in_jax, found, peaks, joules)
            samples, joules = _of_torch(samples), _of_torch(joules)
            yield from layer_lines(inputs, op, "torch", how | IN_A_ROW, samples, torch_found[op], peaks, joules)


def lines(
    only: Sequence[str], layers: Sequence[MoELayer], uneven: Sequence[RoutedLayer], device: str, each: Each,
    failures: list[str],
) -> Iterator[Line]:  # fmt: skip
    """The lines of the ops named. Uneven layers are measured forward and backward together, without cached weights and
    graphs."""
    named = tuple(op for op in OPS if op in only)
    both = tuple(op for op in named if op == "moe_layer_fwd_bwd")
    all_layers = [*((RoutedLayer(shape, "random"), True) for shape in layers if named),
                  *((layer, False) for layer in uneven if both)]  # fmt: skip
    for (shape, routing), whole in all_layers:
        of = f"{tuple(shape)}, routing {routing}"
        for inputs, reference in guarded(f"moe_layer: inputs of {of}", _inputs(shape, routing, device), failures):
            for held in (False, True) if whole else (False,):
                what = f"moe_layer {of}{', weights held' if held else ''}"
                found, peaks = {}, {}
                one_by_one = torch_lines(inputs, reference, named if whole else both, held, each, found, peaks)
                yield from guarded(what, one_by_one, failures)
                torch.cuda.empty_cache()  # memory for JAX
                alone = whole and not held
                in_a_row = in_a_row_lines(
                    inputs, reference, named if alone else both, held, alone, device, failures, found, peaks
                )
                yield from guarded(f"{what} in JAX", in_a_row, failures)
            if whole and device == "cuda" and "moe_layer_fwd_bwd" in named:
                what = f"moe_layer {of}, in a graph"
                yield from guarded(what, graph_lines(inputs, reference, device, each), failures)
            del inputs, reference
        gc.collect()
        torch.cuda.empty_cache()


def _against_sonic(shape: MoELayer, device: str) -> Iterator[Line]:
    """The torch layer against SonicMoE, recipe bf16 and the plain layer, timed in the same rounds."""
    op, end = "moe_layer_fwd_bwd", torch_end(device)
    for inputs, reference in _inputs(shape, "random", device):
        layers = {"run": our_torch_layer, RECIPE_BF16: recipe_bf16_layer, PLAIN: plain_torch_layer}
        steps = {name: torch_programs(layer(inputs), inputs)[op] for name, layer in layers.items()}
        steps[sonic_moe.NAME] = sonic_moe.sonic_step(inputs.x, inputs.weights, inputs.dy, shape.top_k)
        error = check(inputs, reference, steps["run"]())
        check(inputs, reference, steps[RECIPE_BF16]())
        error = {**error, "sonic_moe_sqnr_db": check_sonic(inputs, steps[sonic_moe.NAME]())["sqnr_db"]}
        peaks = {name: device_timing.peak_nbytes(step) for name, step in steps.items()}
        timed: dict[str, device_timing.Step] = {name: (step, end) for name, step in steps.items()}
        samples, joules = device_timing.in_a_row(timed), energy.joules(timed, energy.counter())
        how = IN_A_ROW | {sonic_moe.NAME: sonic_moe.version(), "configurations": sonic_moe.CONFIGURATIONS}
        found = Found(error, peaks["run"])
        for line in layer_lines(inputs, op, "torch", how, samples, found, peaks, joules):
            yield replace(line, op=SONIC_OP)


def sonic_lines(layers: Sequence[MoELayer], device: str, failures: list[str]) -> Iterator[Line]:
    """The lines of the layers against SonicMoE; none without the package."""
    if not sonic_moe.has_sonic_moe():
        print("sonic-moe: not installed")
        return
    for shape in layers:
        yield from guarded(f"{sonic_moe.NAME} {tuple(shape)}", _against_sonic(shape, device), failures)
        gc.collect()
        torch.cuda.empty_cache()


def _inputs(shape: MoELayer, routing: str, device: str) -> Iterator[tuple[LayerInputs, Tensors]]:
    """The inputs of a layer, and y and the gradients of the plain layer.

    The plain layer has an fp32 router here, as ours: bf16 logits select other experts for some tokens.
    """
    inputs = layer_inputs(shape, device, routing=routing)
    yield inputs, torch_programs(plain_torch_layer(inputs, torch.float32), inputs)["moe_layer_fwd_bwd"]()
