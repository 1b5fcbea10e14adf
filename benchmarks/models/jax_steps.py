"""`python -m benchmarks models --frontend jax`: the steps of torch_steps.py in plain JAX, of Mixtral and Qwen3.

    one layer     --gradients against ragged_dot; experts and dense layers alone; XLA's plan--> layers that fit
    these layers  --losses of the first steps against recipe_bf16--> back-to-back optimizer steps, alternating
                  '-jax.profiler, in steps that are not timed--> the parts of a step --> the ceiling

    recipe_bf16   experts of mxep without quantization, dense layers a bf16 dot
    mxfp8         experts in MXFP8
    mxfp8_dense   experts in MXFP8, and q, k, v and o
    ragged_dot    experts on `jax.lax.ragged_dot`

`ragged_dot` writes dense operands: its gradients are of as many tokens as fit. The whole model has it only if its
experts alone are not much slower than recipe_bf16's; otherwise it is not the best bf16, and would take minutes a step.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from ..cases.error_check import Error
from ..cases.models import check, fit, model_jax, parts_jax
from ..cases.models.model_jax import RAGGED_DOT, Params, Products
from ..cases.models.sizes import MODELS, Model
from ..cases.models.training import BATCHES, Batches, imbalance
from ..cases.models.training_jax import Stepped, Training
from ..clocks import device_timing, energy
from ..clocks.device_timing import Step, jax_end
from ..clocks.timing import Sample
from ..clocks.training_steps import training_steps
from ..figures.failures import failed, guarded
from ..figures.model_lines import Measured, Sizes, case_of, find_best, model_lines, print_parts, print_rates, with_idle
from ..figures.results import Line
from ..peers.moe_layer import MAX_RAGGED_DOT_NBYTES, ragged_dot_nbytes

NAMES = ("mixtral-8x7b", "qwen3-30b-a3b")
LOSSES = "recipe_bf16"
CANDIDATES = {
    LOSSES: Products("bf16"),
    "mxfp8": Products("mxfp8"),
    "mxfp8_dense": Products("mxfp8", dense="mxfp8"),
    RAGGED_DOT: Products(RAGGED_DOT),
}
BF16 = (LOSSES, RAGGED_DOT)
TIMED_LR = 1e-6  # the first weights' routing does not change
MUCH_SLOWER = 1.5
CHECKED_NBYTES = MAX_RAGGED_DOT_NBYTES // 2
"""Of ragged_dot's dense operand where gradients are checked."""


class Alone(NamedTuple):
    """Of the first layer, without the rest. largest_group: its rows, relative to the mean."""

    experts: Mapping[str, Sample]
    dense: Mapping[str, Sample]
    largest_group: float


def _attention() -> str:
    return "cudnn" if jax.default_backend() == "gpu" else "xla"


def _dense_operand(sizes: model_jax.Sizes, tokens: int) -> int:
    return ragged_dot_nbytes(tokens * sizes.top_k, max(sizes.dim, sizes.hidden_dim), sizes.experts)


def checked_batches(sizes: model_jax.Sizes, batches: Batches) -> Batches:
    """One micro-batch of as many sequences, and then as long ones, as ragged_dot's dense operand allows."""
    sequences, length = batches.sequences, batches.length
    while _dense_operand(sizes, sequences * length) > CHECKED_NBYTES:
        sequences, length = (sequences // 2, length) if sequences > 1 else (sequences, length // 2)
    return Batches(sequences, length, micro_batches=1, steps=1)


def _torch(array: jax.Array) -> torch.Tensor:
    return torch.from_dlpack(array)


def _rows_of_experts(training: Training) -> tuple[jax.Array, tuple[jax.Array, jax.Array], torch.Tensor]:
    """Of the first micro-batch: rows for the first layer's experts, their weights and experts, rows of each expert."""
    sizes, ids = training.sizes, training.ids[0][0][:, :-1]
    x = jax.jit(partial(model_jax.experts_rows, sizes=sizes))(training.params, ids)
    weights, experts = jax.jit(partial(model_jax.route, top_k=sizes.top_k))(x, training.params["layers"][0]["router"])
    counts = jnp.bincount(experts.reshape(-1), length=sizes.experts)
    return x, (weights, experts), _torch(counts)


def gradients_errors(name: str, model: Model, batches: Batches, failures: list[str]) -> dict[str, Error]:
    """Of the candidates without a failure, in a model of one layer."""
    checked = checked_batches(model_jax.sizes_of(model.config(1)), batches)
    training = Training(model, 1, checked, _attention())
    training.compile(CANDIDATES)
    training.restart(check.CHECKED_LR)
    _, _, rows = _rows_of_experts(training)
    want = {of: _torch(gradient) for of, gradient in training.gradients(RAGGED_DOT).items()}
    errors: dict[str, Error] = {RAGGED_DOT: {"grade": "reference", "sqnr_db": 0.0}}
    for candidate in (of for of in CANDIDATES if of != RAGGED_DOT):
        try:
            got = {of: _torch(gradient) for of, gradient in training.gradients(candidate).items()}
            errors[candidate] = check.gradients_error(candidate, got, want, rows)
            del got
        except Exception:
            failed(f"{name}: gradients of {candidate} in JAX", failures)
    return errors


def _norm_end(result: Stepped) -> Callable[[], object]:
    return partial(jax.block_until_ready, result.norm)


def _program(function: Callable[..., Any], *arguments: Any) -> Step:
    """Forward and backward of a function, compiled; the last argument is the gradient of its result."""

    def step(*arguments: Any) -> Any:
        *given, gradient = arguments
        _, backward = jax.vjp(function, *given)
        return backward(gradient)

    return partial(jax.jit(step).lower(*arguments).compile(), *arguments), jax_end


def _experts_step(training: Training, x: jax.Array, routing: tuple[jax.Array, jax.Array], products: Products) -> Step:
    (weights, experts), layer = routing, training.params["layers"][0]

    def run(of_experts: Params, x: jax.Array, weights: jax.Array) -> jax.Array:
        given = {"router": layer["router"], "experts": of_experts}
        return model_jax.run_experts(given, x, training.sizes, products, (weights, experts))

    return _program(run, layer["experts"], x, weights, x)


def _dense_step(training: Training, x: jax.Array, products: Products) -> Step:
    """q, k and v of x, and o of rows like q."""
    layer = {name: training.params["layers"][0][name] for name in "qkvo"}
    rows = jnp.tile(x, (1, -(-layer["o"].shape[0] // x.shape[1])))[:, : layer["o"].shape[0]]

    def run(layer: Params, x: jax.Array, rows: jax.Array) -> tuple[jax.Array, ...]:
        return *(model_jax.multiply(x, layer[name], products) for name in "qkv"), model_jax.multiply(
            rows, layer["o"], products
        )

    gradients = tuple(jnp.ones((len(x), layer[name].shape[1]), x.dtype) for name in "qkvo")
    return _program(run, layer, x, rows, gradients)


def measure_alone(training: Training, candidates: Mapping[str, Products]) -> Alone:
    """Forward and backward of the first layer's experts, and of its dense layers."""
    x, routing, rows = _rows_of_experts(training)
    experts = {of: _experts_step(training, x, routing, products) for of, products in candidates.items()}
    of_experts = device_timing.in_a_row(experts)
    kinds = {products.dense: products for products in candidates.values()}
    by_kind = device_timing.in_a_row({str(kind): _dense_step(training, x, of) for kind, of in kinds.items()})
    of_dense = {of: by_kind[str(products.dense)] for of, products in candidates.items()}
    return Alone(of_experts, of_dense, imbalance(rows))


def _layers(name: str, model: Model, one: Training, candidates: Mapping[str, Products]) -> int:
    """The layers that fit into this GPU, where the model of one layer is freed; two without a GPU."""
    if jax.default_backend() != "gpu":
        return 2
    two = Training(model, 2, one.batches, one.attention)
    one.compile(candidates)
    two.compile(candidates)
    saved = max(two.temporaries(of) - one.temporaries(of) for of in candidates)
    memory = fit.Memory(saved, max(one.temporaries(of) for of in candidates))
    weights = sum(one.weights.values())
    of_layer = sum(two.weights.values()) - weights
    total = (jax.devices()[0].memory_stats() or {})["bytes_limit"]
    layers = fit.layers_that_fit(total, weights, of_layer, memory, model.layers)
    fit.print_layers(name, layers, model.layers, total, weights, of_layer, memory)
    return layers


def _weights(training: Training) -> int:
    """The weights that a token is multiplied by; of the experts' weights the chosen ones."""
    sizes, weights = training.sizes, 0
    for name, shape in model_jax.named_shapes(sizes).items():
        if ".experts." in name:
            weights += training.weights[name] * sizes.top_k // sizes.experts
        elif len(shape) == 2 and name != "embed":
            weights += training.weights[name]
    return weights


def _losses(training: Training, candidate: str) -> list[float]:
    """Of the first steps, from the first weights."""
    training.restart(check.CHECKED_LR)
    return [float(sum(map(float, training.step(candidate).losses))) for _ in range(check.CHECKED_STEPS)]


def jax_lines(name: str, model: Model, batches: Batches, failures: list[str]) -> Iterator[Line]:
    """The line of every candidate but the best bf16 against that."""
    errors = gradients_errors(name, model, batches, failures)
    gc.collect()
    if jax.default_backend() == "gpu":
        torch.cuda.empty_cache()  # of the comparison
    one = Training(model, 1, batches, _attention())
    candidates = {of: products for of, products in CANDIDATES.items() if of in errors}
    if LOSSES not in candidates:
        raise AssertionError(f"{name}: {LOSSES}, with which the others are compared, has wrong gradients")
    if (nbytes := _dense_operand(one.sizes, batches.sequences * batches.length)) > MAX_RAGGED_DOT_NBYTES:
        print(f"{name}: {RAGGED_DOT} writes operands of {nbytes / 2**30:.1f} GiB, and is not measured", flush=True)
        del candidates[RAGGED_DOT]
    one.restart(TIMED_LR)
    alone = measure_alone(one, candidates)
    one.params = one.grads = one.moments = None
    print(f"{name}: experts alone, us:", ", ".join(f"{of} {found.us:,.0f}" for of, found in alone.experts.items()),
          f"; the largest group of the first layer has {alone.largest_group} times the mean", flush=True)  # fmt: skip
    if RAGGED_DOT in candidates and alone.experts[RAGGED_DOT].us > MUCH_SLOWER * alone.experts[LOSSES].us:
        print(f"{name}: {RAGGED_DOT} is not measured in the whole model", flush=True)
        del candidates[RAGGED_DOT]
    training = Training(model, _layers(name, model, one, candidates), batches, one.attention)
    del one
    gc.collect()
    training.compile(candidates)
    want = _losses(training, LOSSES)
    for candidate in list(candidates):
        try:
            found = want if candidate == LOSSES else _losses(training, candidate)
            errors[candidate] = {**errors[candidate], "loss": check.losses_error(candidate, found, want)}
        except Exception:
            failed(f"{name}: losses of {candidate} in JAX", failures)
            del candidates[candidate]
    print(f"{name}: losses of the first steps {[round(loss, 4) for loss in want]}", flush=True)
    training.restart(TIMED_LR)
    steps: dict[str, Step] = {of: (partial(training.step, of), _norm_end) for of in candidates}
    timed = training_steps(steps, energy.counter() if jax.default_backend() == "gpu" else None)
    print_rates(name, timed, batches.tokens)
    measured = {}
    for candidate in timed:
        us, found = timed[candidate].sample.us, parts_jax.step_parts(training, candidate)
        parts_us, experts = with_idle(found.us, us), alone.experts[candidate]
        peak = training.peak_nbytes(candidate) if jax.default_backend() == "gpu" else None
        measured[candidate] = Measured(
            timed[candidate], parts_us, experts, alone.dense[candidate], peak, errors[candidate]
        )
        whole = experts.us * training.sizes.layers * batches.micro_batches
        print_parts(f"{name}, {candidate}", parts_us, found.other, us, whole)
    sizes = Sizes(training.config, batches, 1, _weights(training), alone.largest_group)
    case = case_of(name, model, sizes, training.attention)
    yield from model_lines("jax", case, sizes, measured, find_best(timed, BF16))


def lines(only: Sequence[str], models: Mapping[str, Model] = MODELS, batches: Batches = BATCHES) -> Iterator[Line]:
    """Check and measure the two models, or those named. Raises RuntimeError at the end if anything failed.

    models, batches: other than the defaults only in tests, on a CPU.
    """
    failures: list[str] = []
    for name in NAMES:
        if name in models and (not only or name in only):
            yield from guarded(name, jax_lines(name, models[name], batches, failures), failures)
            gc.collect()
    if failures:
        raise RuntimeError("models: " + "; ".join(failures))
