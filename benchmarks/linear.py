"""`python -m benchmarks linear`: the dense layer on one GPU, forward and both gradients, from bf16.

    case --torch--> outputs --SQNR against bf16--> in a row: run | graph | compiled | F.linear, three times | peers
          '-JAX---> outputs --the same-----------> in a row: JAX | torch | a bf16 dot

All candidates of a case are timed in the same rounds, each from the launch by the host to the end on the GPU, step
behind step: an eager step that the host cannot launch fast enough is as slow here as in training. 16384 rows have all
peers. 2048 and 4096 rows are timed eagerly and in a graph, where a layer is to be no slower than `F.linear`.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import jax
import torch
from mxep.core_kernels.launch import fail

from .cases import linear as cases
from .cases.case import Tensors
from .cases.error_check import Error
from .cases.linear import OPS, Operands, Size
from .clocks import device_timing
from .clocks.device_timing import Step, torch_end
from .clocks.timing import Sample
from .figures.failures import failed, guarded
from .figures.results import Line
from .gpu_moe_layer import captured
from .peers import linear as peers
from .peers.linear import BF16, BF16_COMPILED, JAX_BF16, SCALED_MM, TORCHAO

NAMES = OPS
RECIPE = "mxfp8"
OTHER_RECIPES = ("mxfp8_wgrad_with_hp", "fp8_rowwise")
"""Timed eagerly, with 16384 rows."""
GRAPH, COMPILED = "graph", "compiled"
ROUNDS, FEW_ROUNDS = 4, 2
"""10 samples of the cases with all peers, 5 of the others: a run takes less than five minutes."""
Steps = dict[str, Callable[[], Tensors]]


def _line(
    op: str, frontend: str, size: Size, how: Mapping[str, object], samples: Mapping[str, Sample], run: str, peer: str,
    error: Error, peak: int | None,
) -> Line:  # fmt: skip
    ours, theirs = samples[run], samples[peer]
    return Line(
        op=op,
        frontend=frontend,
        case={**size.case, **how, "clock": "in a row"},
        us=ours.us,
        spread=ours.spread,
        n=ours.n,
        nbytes=0,
        flops=size.flops,
        of_roof=None,
        roof=None,
        peer=peer.removeprefix(f"{GRAPH} "),
        peer_us=theirs.us,
        ratio=round(theirs.us / ours.us, 3),
        peak_nbytes=peak,
        error=error,
    )


def _checked(what: str, steps: Steps, reference: Sequence[torch.Tensor], failures: list[str]) -> dict[str, Error]:
    """The errors of the steps that run and compute the same; the others are removed."""
    errors = {}
    for name, step in list(steps.items()):
        try:
            errors[name] = cases.check(step(), reference)
        except Exception:
            failed(f"{what}: {name}", failures)
            del steps[name]
    return errors


def _timed(steps: Steps, device: str, rounds: int = FEW_ROUNDS) -> dict[str, Sample]:
    end = torch_end(device)
    programs: dict[str, Step] = {name: (step, end) for name, step in steps.items()}
    return device_timing.in_a_row(programs, rounds)


def _graphs(steps: Steps, names: Sequence[str]) -> Steps:
    """Replays of the steps named, by "graph NAME"."""
    found: Steps = {}
    for name in names:
        replay, outputs, _ = captured(steps[name])
        found[f"{GRAPH} {name}"] = partial(_replayed, replay, outputs)
    return found


def _replayed(replay: Callable[[], object], outputs: Tensors) -> Tensors:
    replay()
    return outputs


def torch_lines(size: Size, o: Operands, device: str, whole: bool, failures: list[str]) -> Iterator[Line]:
    """whole: with compiled programs, peers and other recipes."""
    what, on_gpu = f"linear {tuple(size)}", device == "cuda"
    x, (w,), (dout,) = o
    steps: Steps = {"run": cases.step(o, cases.ours(RECIPE)), BF16: cases.step(o, peers.linear_bf16)}
    reference = steps[BF16]()
    if whole:
        steps |= {recipe: cases.step(o, cases.ours(recipe)) for recipe in OTHER_RECIPES}
        steps[SCALED_MM] = cases.step(o, peers.scaled_mm(on_gpu))
    if whole and on_gpu:
        steps[COMPILED] = cases.step(o, torch.compile(cases.ours(RECIPE), dynamic=False))
        steps[BF16_COMPILED] = cases.step(o, torch.compile(peers.linear_bf16, dynamic=False))
        if peers.has_torchao():
            steps[TORCHAO] = peers.torchao_step(x, w, dout)
    if on_gpu:
        steps |= _graphs(steps, ("run", BF16))
    errors = _checked(what, steps, reference, failures)
    peak = device_timing.peak_nbytes(steps["run"])
    samples = _timed(steps, device, ROUNDS if whole else FEW_ROUNDS)
    line = partial(_line, OPS[0], "torch", size)
    eager = [name for name in (BF16, BF16_COMPILED, SCALED_MM, TORCHAO) if name in samples]
    for name in eager:
        yield line({"recipe": RECIPE}, samples, "run", name, errors["run"], peak)
    for recipe in OTHER_RECIPES:
        if recipe in samples:
            yield line({"recipe": recipe}, samples, recipe, BF16, errors[recipe], None)
    if f"{GRAPH} run" in samples and f"{GRAPH} {BF16}" in samples:
        how = {"recipe": RECIPE, "launch": GRAPH}
        yield line(how, samples, f"{GRAPH} run", f"{GRAPH} {BF16}", errors[f"{GRAPH} run"], None)
    if COMPILED in samples:
        for name in eager[1:]:
            yield line({"recipe": RECIPE, "launch": COMPILED}, samples, COMPILED, name, errors[COMPILED], None)


def shared_lines(size: Size, o: Operands, device: str, failures: list[str]) -> Iterator[Line]:
    """Layers that read the same x, which is quantized once."""
    steps: Steps = {"run": cases.shared_step(o, RECIPE), BF16: cases.shared_step(o, None)}
    errors = _checked(f"linear {tuple(size)}", steps, steps[BF16](), failures)
    peak = device_timing.peak_nbytes(steps["run"])
    yield _line(OPS[1], "torch", size, {"recipe": RECIPE}, _timed(steps, device), "run", BF16, errors["run"], peak)


def jax_lines(size: Size, o: Operands, device: str) -> Iterator[Line]:
    reference = cases.step(o, peers.linear_bf16)()
    programs: dict[str, Step] = {}
    errors: dict[str, Error] = {}
    for name, recipe in (("run", RECIPE), (JAX_BF16, None)):
        program, arguments = cases.jax_program(o, recipe)
        errors[name] = cases.check([torch.from_dlpack(out) for out in program(*arguments)], reference)
        programs[name] = partial(program, *arguments), _jax_end
    programs["torch_frontend"] = cases.step(o, cases.ours(RECIPE)), torch_end(device)
    samples = device_timing.in_a_row(programs, FEW_ROUNDS)
    for peer in (JAX_BF16, "torch_frontend"):
        yield _line(OPS[0], "jax", size, {"recipe": RECIPE}, samples, "run", peer, errors["run"], None)


def _jax_end(result: Sequence[jax.Array]) -> Callable[[], object]:
    return partial(jax.block_until_ready, result[0])


def lines(
    only: Sequence[str],
    large: Sequence[Size] = cases.LARGE,
    few_rows: Sequence[Size] = cases.FEW_ROWS,
    shared: Sequence[Size] = cases.SHARED,
    device: str = "cuda",
) -> Iterator[Line]:
    """Check and measure the ops named, or all. Raises RuntimeError at the end if anything failed.

    large, few_rows, shared, device: other than the defaults only in tests, on a CPU.
    """
    if unknown := set(only) - set(NAMES):
        fail(ValueError, "linear", "ops", ", ".join(sorted(unknown)), f"allowed: {', '.join(NAMES)}")
    failures: list[str] = []
    runs: list[tuple[str, Size]] = [("large", size) for size in large] + [("few", size) for size in few_rows]
    named = [*(runs if not only or OPS[0] in only else ()),
             *((("shared", size) for size in shared) if not only or OPS[1] in only else ())]  # fmt: skip
    for kind, size in named:
        torch.compiler.reset()  # after a few sizes a function would no longer be compiled
        what, o = f"linear {tuple(size)}", cases.operands(size, device)
        if kind == "shared":
            yield from guarded(what, shared_lines(size, o, device, failures), failures)
        else:
            yield from guarded(what, torch_lines(size, o, device, kind == "large", failures), failures)
        if kind == "large":
            gc.collect()
            torch.cuda.empty_cache()  # memory for JAX
            yield from guarded(f"{what} in JAX", jax_lines(size, o, device), failures)
        del o
        gc.collect()
        torch.cuda.empty_cache()
    if failures:
        raise RuntimeError("linear: " + "; ".join(failures))
