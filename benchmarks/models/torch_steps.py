"""`python -m benchmarks models`: whole training steps of models of transformers, in tokens per second, on one GPU; by
torchrun on several, whose weights FSDP2 shards.

    one layer    --gradients against grouped_mm; experts alone, forward and backward; memory--> layers that fit
    these layers --losses of the first steps against grouped_mm--> back-to-back optimizer steps, candidates alternating
                 '-torch.profiler, in steps that are not timed--> the parts of a step --> the ceiling

    mxfp8         experts of mxep, registered in transformers
    recipe_bf16   the same without quantization
    grouped_mm    transformers' own, on torch._grouped_mm

The layers of every candidate are compiled. The faster of the last two is the peer, `best_bf16`. A candidate that fails
is printed; the run measures the others and then ends with an error. `--only NAME` measures one model, within
ten minutes. `--frontend jax`: jax_steps.py. On several GPUs the model has the layers that fit into one, and one layer
is checked and timed on every GPU by itself.
"""

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from mxep.torch_frontend.integrations.transformers import register_experts
from torch import Tensor, nn

from ..cases.error_check import Error
from ..cases.models import check, fit, parts, sharded
from ..cases.models.sizes import MODELS, Model, experts_of
from ..cases.models.training import BATCHES, Batches, ExpertsInput, Training, experts_input, imbalance
from ..clocks import device_timing, energy
from ..clocks.timing import Sample
from ..clocks.training_steps import training_steps
from ..ep import join, rank_device
from ..figures.failures import failed, guarded
from ..figures.model_lines import Measured, Sizes, case_of, find_best, model_lines, print_parts, print_rates, with_idle
from ..figures.results import Line

NAMES = tuple(MODELS)
REFERENCE = "grouped_mm"
CANDIDATES = {"mxfp8": "mxfp8", "recipe_bf16": "bf16", REFERENCE: REFERENCE}
"""Name -> transformers' name of the implementation. The reference is measured first where the order matters."""
BF16 = ("recipe_bf16", REFERENCE)
TIMED_LR = 1e-6  # the first weights' routing does not change
# A layer is compiled for every implementation, GPT-OSS's two kinds of layers too.
COMPILED = {"recompile_limit": 32, "fail_on_recompile_limit_hit": True}


class OneLayer(NamedTuple):
    """The results of a model of one layer. errors: of the candidates without a failure; experts: times of the experts
    alone, forward and backward; largest_group: its rows, relative to the mean; memory: the most of all candidates,
    None without a GPU."""

    errors: Mapping[str, Error]
    experts: Mapping[str, Sample]
    largest_group: float
    weights: int
    weights_of_layer: int
    memory: fit.Memory | None


def _experts_step(module: nn.Module, given: ExpertsInput, training: Training, implementation: str) -> Callable[[], Any]:
    """Forward and backward of the experts of a layer, compiled as in the layer."""
    x, weights = (t.clone().requires_grad_() for t in (given.x, given.weights))
    leaves = [x, weights, *module.parameters()]
    training.use(implementation)
    experts: Any = torch.compile(lambda *arguments: module(*arguments), dynamic=False)
    dy = torch.randn_like(x)

    def step() -> tuple[Tensor, ...]:
        training.use(implementation)
        return torch.autograd.grad(experts(x, given.indices, weights), leaves, dy)

    return step


def one_layer(name: str, model: Model, batches: Batches, device: str, failures: list[str]) -> OneLayer:
    """Check the gradients, time the experts, and measure the memory of a micro-batch."""
    training = Training(model, 1, batches, device, check.CHECKED_LR, whole=True)
    module, given = experts_input(training)
    want = check.gradients(training, REFERENCE)
    errors: dict[str, Error] = {REFERENCE: {"grade": "reference", "sqnr_db": 0.0}}
    for candidate in (of for of in CANDIDATES if of != REFERENCE):
        try:
            got = check.gradients(training, CANDIDATES[candidate])
            errors[candidate] = check.gradients_error(candidate, got, want, given.rows)
            del got
        except Exception:
            failed(f"{name}: gradients of {candidate}", failures)
    del want
    end, memory = device_timing.torch_end(device), []
    for candidate in errors if device == "cuda" else ():  # the peaks of compiled layers
        training.use(CANDIDATES[candidate])
        memory.append(fit.micro_batch_memory(training))
    training.optimizer.zero_grad()
    steps = {candidate: (_experts_step(module, given, training, CANDIDATES[candidate]), end) for candidate in errors}
    experts = device_timing.in_a_row(steps)
    most = fit.Memory(max(m.saved for m in memory), max(m.peak for m in memory)) if memory else None
    return OneLayer(errors, experts, imbalance(given.rows), *fit.weights_of(training), most)


def _layers(name: str, model: Model, one: OneLayer) -> int:
    """The layers that fit into this GPU, where the model of one layer is freed; two without a GPU."""
    if one.memory is None:
        return 2
    total = torch.cuda.get_device_properties(0).total_memory - torch.cuda.memory_allocated()
    layers = fit.layers_that_fit(total, one.weights, one.weights_of_layer, one.memory, model.layers)
    layers = sharded.extreme(layers, "cuda", dist.ReduceOp.MIN)
    fit.print_layers(name, layers, model.layers, total, one.weights, one.weights_of_layer, one.memory)
    return layers


def _run(training: Training, implementation: str) -> Tensor:
    training.use(implementation)
    return training.step()


def _weights(training: Training) -> int:
    """The weights that a token is multiplied by; of the experts' weights the chosen ones."""
    config, weights = training.config, 0
    for name, parameter in training.model.named_parameters():
        if ".experts." in name and "bias" not in name:
            weights += parameter.numel() * config.num_experts_per_tok // experts_of(config)
        elif parameter.dim() == 2 and "embed_tokens" not in name and "bias" not in name:
            weights += parameter.numel()
    return weights


def _collect(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def torch_lines(name: str, model: Model, batches: Batches, device: str, failures: list[str]) -> Iterator[Line]:
    """The line of every candidate but the best bf16 against that."""
    one = one_layer(name, model, batches, device, failures)
    _collect(device)
    training = Training(model, _layers(name, model, one), batches, device, TIMED_LR)
    want, errors = check.losses(training, REFERENCE), {REFERENCE: dict(one.errors[REFERENCE])}
    for candidate in (of for of in one.errors if of != REFERENCE):
        try:
            difference = check.losses_error(candidate, check.losses(training, CANDIDATES[candidate]), want)
            errors[candidate] = {**one.errors[candidate], "loss": difference}
        except Exception:
            failed(f"{name}: losses of {candidate}", failures)
    print(f"{name}: losses of the first steps {[round(loss, 4) for loss in want]};",
          f"the largest group of the first layer has {one.largest_group} times the mean", flush=True)  # fmt: skip
    training.restart(TIMED_LR)
    end = device_timing.torch_end(device)
    steps = {of: (partial(_run, training, CANDIDATES[of]), end) for of in CANDIDATES if of in errors}
    timed = training_steps(steps, energy.counter() if device == "cuda" else None)
    print_rates(name, timed, batches.tokens * sharded.ranks())
    best, measured = find_best(timed, BF16), {}
    for candidate in timed:
        training.use(CANDIDATES[candidate])
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        us, experts = timed[candidate].sample.us, one.experts[candidate]
        found = parts.step_parts(training)
        parts_us = with_idle(found.us, us)
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
        if peak is not None:
            peak = sharded.extreme(peak, device, dist.ReduceOp.MAX)
        joules = timed[candidate].joules
        if joules is not None:
            joules = round(sharded.total(joules, device), 2)
        steps = timed[candidate]._replace(joules=joules)
        measured[candidate] = Measured(steps, parts_us, experts, None, peak, errors[candidate])
        alone = experts.us * training.config.num_hidden_layers * batches.micro_batches
        print_parts(f"{name}, {candidate}", parts_us, found.other, us, alone)
    sizes = Sizes(training.config, batches, sharded.ranks(), _weights(training), one.largest_group)
    yield from model_lines("torch", case_of(name, model, sizes, model.attention), sizes, measured, best)


def lines(
    only: Sequence[str], models: Mapping[str, Model] = MODELS, batches: Batches = BATCHES, device: str = "cuda"
) -> Iterator[Line]:
    """Check and measure every model, or those named; the lines are of rank 0. Raises RuntimeError at the end if
    anything failed.

    models, batches, device: other than the defaults only in tests, on a CPU.
    """
    failures: list[str] = []
    if "RANK" in os.environ:  # a process of torchrun
        join("models", rank_device())
    for name in ("mxfp8", "bf16"):
        register_experts(name)
    with torch._dynamo.config.patch(COMPILED):
        for name, model in models.items():
            if not only or name in only:
                found = guarded(name, torch_lines(name, model, batches, device, failures), failures)
                yield from (line for line in found if not sharded.rank())
                _collect(device)
    if failures:
        raise RuntimeError("models: " + "; ".join(failures))
