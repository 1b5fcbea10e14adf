"""MoE layers of small sizes that both frontends run on a CPU. It imports no framework.

LAYERS   name -> Layer          on one process: recipes x prob_in, and options of the layer
RANKED   name -> RankedLayer    on two ranks, of 40 and 56 tokens in PyTorch, of 48 each in JAX

Arrays are taken from tests/conformance/layer/layers.py and tests/routed_layers.py.
"""

from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
from mxep.core_kernels.cases import BF16, Array, seeded
from mxep.core_kernels.policy.deduplicate import Deduplicate
from mxep.core_kernels.policy.prob_in import ProbIn
from mxep.core_kernels.policy.recipe import Recipe
from mxep.core_kernels.policy.router import SharedExpert
from mxep.core_kernels.swiglu.activation import SwiGLU

from ... import replicas, routed_layers
from ...conformance.layer import layers as conformance
from ...layer_options import layer_options
from ..hashes import digits_of

RANKS = 2


@dataclass(frozen=True)
class Layer:
    """x, dy (T, D). parameters: by the names of PyTorch's layer, selection_bias among them.

    options: as `layer_options` takes them, besides those that follow from the parameters. recompute: the backward
    computes again what the experts saved. chosen: experts (T, top_k) int32 and weights float32 in the router's place,
    or none.
    """

    x: Array
    dy: Array
    parameters: dict[str, Array]
    top_k: int
    recipe: Recipe
    options: dict[str, Any] = field(default_factory=dict)
    recompute: bool = False
    chosen: tuple[Array, ...] = ()

    @property
    def sizes(self) -> tuple[int, int, int]:
        """dim, hidden_dim, num_experts."""
        num_experts, hidden_dim, dim = self.parameters["experts.w1"].shape
        return dim, hidden_dim, num_experts

    @property
    def arguments(self) -> dict[str, Any]:
        """Of both frontends' layers besides sizes; some follow from the parameters."""
        of, shared = self.parameters, self.parameters.get("shared_expert.w1")
        return layer_options(
            self.top_k,
            "router.bias" in of,
            selection_bias="selection_bias" in of,
            bias="experts.b1" in of,
            shared=None if shared is None else SharedExpert(shared.shape[1], gate="shared_gate.weight" in of),
            recipe=self.recipe,
            **self.options,
        )

    @property
    def digits(self) -> str:
        return digits_of(self.x, self.dy, *self.parameters.values(), *self.chosen)

    def plus(self, shapes: dict[str, tuple[int, ...]], **options: Any) -> "Layer":
        """With more parameters, of these shapes, and options."""
        drawn = {n: seeded(n).standard_normal(shape).astype(np.float32) / 4 for n, shape in shapes.items()}
        return replace(self, parameters=self.parameters | drawn, options=self.options | options)

    def in_bf16(self) -> "Layer":
        parameters = {name: value.astype(BF16) for name, value in self.parameters.items()}
        return replace(self, x=self.x.astype(BF16), dy=self.dy.astype(BF16), parameters=parameters)


def _of_conformance(name: str, run: str, **options: Any) -> Layer:
    case = conformance.LAYERS[name]
    parameters = {f"experts.{w}": case.params[w] for w in ("w1", "w3", "w2")} | {"router.weight": case.params["router"]}
    options = {"score_func": case.score, "normalize": case.normalize, "prob_in": case.prob_in} | options
    return Layer(case.x, case.dy, parameters, case.top_k, conformance.RUNS[run], options)


def _by_caller(layer: Layer) -> Layer:
    rng, tokens, (_, _, num_experts) = seeded("by the caller"), len(layer.x), layer.sizes
    experts = rng.permuted(np.tile(np.arange(num_experts, dtype=np.int32), (tokens, 1)), axis=1)[:, : layer.top_k]
    return replace(layer, chosen=(experts, rng.random(experts.shape, np.float32)))


def _of_router(name: str) -> Layer:
    case = routed_layers.LAYERS[name]
    router, w1, w3, w2, shared = case.parameters
    parameters = {"router.weight": router, "experts.w1": w1, "experts.w3": w3, "experts.w2": w2}
    parameters |= {f"shared_expert.{w}": value for w, value in zip(("w1", "w3", "w2"), shared, strict=True)}
    parameters |= {"selection_bias": case.bias} if len(case.bias) else {}
    return Layer(case.x, case.dy, parameters, routed_layers.TOP_K, conformance.RUNS["mxfp8"], dict(case.options))


_PROB_IN = get_args(ProbIn)
_BIASES = {"experts.b1": (8, 96), "experts.b3": (8, 96), "experts.b2": (8, 64)}
_PLAIN = _of_conformance("softmax", "mxfp8")
_SWIGLU = _of_conformance("softmax", "mxfp8", prob_in="swiglu")
_GPT_OSS = SwiGLU(alpha=1.702, limit=1.5, offset=1.0)
LAYERS: dict[str, Layer] = {
    **{
        f"{run} {prob_in}": _of_conformance("softmax", run, prob_in=prob_in)
        for run in conformance.RUNS
        for prob_in in _PROB_IN
    },
    **{
        f"{run} bf16 parameters": _of_conformance("softmax", run, prob_in="swiglu").in_bf16()
        for run in ("bf16", "mxfp8", "mxfp8_folded")
    },
    **{
        name: _of_conformance(name, "mxfp8")
        for name in conformance.LAYERS
        if name not in ("softmax", "prob_in_swiglu", "sigmoid")
    },
    **{f"router {name}": _of_router(name) for name in routed_layers.LAYERS},
    "router bias": _PLAIN.plus({"router.bias": (8,)}),
    "router bias bf16 parameters": _PLAIN.plus({"router.bias": (8,)}).in_bf16(),
    "router force_balance": _SWIGLU.plus({}, force_balance=True),
    "shared gate": _of_router("of_chosen").plus({"shared_gate.weight": (1, 64)}),
    "shared gate bf16 parameters": _of_router("of_chosen").plus({"shared_gate.weight": (1, 64)}).in_bf16(),
    **{f"experts of the caller {prob_in}": _by_caller(_PLAIN.plus({}, prob_in=prob_in)) for prob_in in _PROB_IN},
    "biases swiglu": _SWIGLU.plus(_BIASES, activation=_GPT_OSS),
    "biases combine": _PLAIN.plus(_BIASES, activation=_GPT_OSS),
    "recompute swiglu": replace(_SWIGLU, recompute=True),
    "recompute combine": replace(_PLAIN, recompute=True),
}


@dataclass(frozen=True)
class RankedLayer:
    """in_jax: whether JAX has its options."""

    layer: Layer
    deduplicate: Deduplicate = None
    in_jax: bool = True


_HOWS: dict[str, Deduplicate] = {"once": "dispatch", "summed": "both"}
_ALL_TRANSFERS = replace(_PLAIN, recipe=replicas.RUNS["four MXFP8 all-to-alls"])
RANKED: dict[str, RankedLayer] = {
    **{
        f"{run} {prob_in}": RankedLayer(_of_conformance("softmax", run, prob_in=prob_in))
        for run in ("bf16", "mxfp8", "mxfp8_folded")
        for prob_in in _PROB_IN
    },
    **{run: RankedLayer(_of_conformance("softmax", run)) for run in ("mxfp8_wgrad_with_hp", "fp8_rowwise")},
    "empty rank": RankedLayer(_of_conformance("empty_rank", "mxfp8")),
    "all legs": RankedLayer(_ALL_TRANSFERS, in_jax=False),
    **{
        f"{run} {prob_in} {name}": RankedLayer(_of_conformance("softmax", run, prob_in=prob_in), how)
        for run in ("bf16", "mxfp8")
        for prob_in in ("combine", "swiglu")
        for name, how in _HOWS.items()
    },
}
