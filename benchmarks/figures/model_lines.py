"""The lines of a model's training steps: every candidate against the fastest bf16 one, the same from torch and JAX."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..cases.error_check import Error
from ..cases.models.parts import ceiling
from ..cases.models.sizes import Model, experts_of
from ..cases.models.training import Batches
from ..clocks.timing import Sample
from ..clocks.training_steps import Steps
from .results import Line


class Measured(NamedTuple):
    """A candidate. parts_us: of a step; experts, dense: the experts and the dense layers of one layer alone, forward
    and backward; dense None: bf16 in every candidate; peak: bytes, None without a GPU."""

    steps: Steps
    parts_us: Mapping[str, float]
    experts: Sample
    dense: Sample | None
    peak: int | None
    error: Error


class Sizes(NamedTuple):
    """Of the measured model. batches: of a GPU; weights: that a token is multiplied by."""

    config: Any
    batches: Batches
    gpus: int
    weights: int
    largest_group: float

    @property
    def flops(self) -> int:
        """Of an optimizer step: 6 per token and weight of a product; of the experts' weights the chosen ones. Without
        the products of queries, keys and values."""
        return 6 * self.weights * self.batches.tokens * self.gpus


def case_of(name: str, model: Model, sizes: Sizes, attention: str) -> dict[str, object]:
    """attention: its implementation."""
    batches = sizes.batches
    return {
        "model": name, "gpus": sizes.gpus, "layers": sizes.config.num_hidden_layers, "of_layers": model.layers,
        "experts": experts_of(sizes.config), "of_experts": model.experts, "sequences": batches.sequences,
        "length": batches.length, "micro_batches": batches.micro_batches, "moments": "bf16",
        "attention": attention,
    }  # fmt: skip


def find_best(timed: Mapping[str, Steps], bf16: Sequence[str]) -> str:
    """The fastest of the candidates in bf16."""
    return min((of for of in bf16 if of in timed), key=lambda of: timed[of].sample.us)


def print_rates(name: str, timed: Mapping[str, Steps], tokens: int) -> None:
    """tokens: of a step of all GPUs."""
    rates = (f"{of} {tokens / found.sample.us * 1e6:,.0f}" for of, found in timed.items())
    print(f"{name}: tokens/s: {', '.join(rates)}", flush=True)


def print_parts(what: str, parts_us: Mapping[str, float], other: Mapping[str, float], us: float, alone: float) -> None:
    """other: kernels of the part "other"; alone: the time of the experts alone, times layers and micro-batches."""
    shares = ", ".join(f"{part} {of_part / us:.1%}" for part, of_part in parts_us.items() if of_part)
    print(f"{what}: {shares}; experts alone {alone / us:.1%}")
    print("  other, us:", ", ".join(f"{kernel[:60]} {spent:.0f}" for kernel, spent in other.items()), flush=True)


def with_idle(parts_us: Mapping[str, float], us: float) -> dict[str, float]:
    """idle: the rest of the timed step."""
    return {**parts_us, "idle": round(max(float(us) - sum(parts_us.values()), 0.0), 1)}


def model_lines(
    frontend: str, case: Mapping[str, object], sizes: Sizes, measured: Mapping[str, Measured], best: str
) -> Iterator[Line]:
    """The line of every candidate but `best`."""
    theirs = measured[best]
    for candidate, ours in measured.items():
        if candidate == best:
            continue
        ratio, dense = theirs.experts.us / ours.experts.us, None
        if ours.dense is not None and theirs.dense is not None:
            dense = theirs.dense.us / ours.dense.us
        sample = ours.steps.sample
        yield Line(
            op="model_step",
            frontend=frontend,
            case={**case, "candidate": candidate, "peer_is": best},
            us=sample.us,
            spread=sample.spread,
            n=sample.n,
            nbytes=0,
            flops=sizes.flops,
            of_roof=None,
            roof=None,
            peer="best_bf16",
            peer_us=theirs.steps.sample.us,
            ratio=round(theirs.steps.sample.us / sample.us, 3),
            peak_nbytes=ours.peak,
            error=ours.error,
            peer_peak_nbytes=theirs.peak,
            joules=ours.steps.joules,
            peer_joules=theirs.steps.joules,
            parts_us=ours.parts_us,
            peer_parts_us=theirs.parts_us,
            experts_ratio=round(ratio, 3),
            dense_ratio=None if dense is None else round(dense, 3),
            ceiling=ceiling(theirs.parts_us, ratio, 1.0 if dense is None else dense),
            largest_group=sizes.largest_group,
        )
