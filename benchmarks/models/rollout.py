"""python -m benchmarks.models.rollout: the experts of a generator, forwards of few tokens with weights quantized once.

    tokens --chosen experts, sorted--> rows, ends --grouped_swiglu_ffn, no_grad--> y     mxfp8 | bf16 | plain bf16
                                                                                          eager | in a CUDA graph

Every result is compared before it is timed: y with the bytes of a training forward of all tokens, and with plain bf16.
All programs of a size run back to back, alternating in one process. *Floor*: the bytes of the chosen experts' weights,
of recipe `mxfp8`, at 4.2 TB/s. About three minutes on an H200.
"""

import argparse
import gc
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from mxep.torch_frontend import grouped_swiglu_ffn, quantize_weights
from mxep.torch_frontend.products.weights import QuantizedWeights
from torch import Tensor

from ..cases.error_check import sqnr_db
from ..cases.moe_layer import MIN_SQNR_DB, RECIPE, layer_inputs
from ..cases.shapes import H200, TINY, MoELayer
from ..clocks import device_timing
from ..gpu_moe_layer import captured
from ..peers.moe_layer import Weights, plain_experts

TOKENS = (1, 8, 32, 256)
HBM_BYTES_PER_US = 4.2e6
QUANTIZED, BF16, PLAIN = "mxfp8", "bf16", "plain bf16"


class Chosen(NamedTuple):
    """rows (T k, D) by expert, of the choices `order` (T k,); ends (E,)."""

    rows: Tensor
    order: Tensor
    ends: Tensor


def rows_of(x: Tensor, choice: Tensor, num_experts: int) -> Chosen:
    """x (T, D), choice (T, k) -> its rows."""
    chosen = choice.flatten()
    order = torch.argsort(chosen, stable=True)
    ends = torch.bincount(chosen, minlength=num_experts).cumsum(0).to(torch.int32)
    return Chosen(x[order // choice.shape[1]], order, ends)


def by_choice(y: Tensor, order: Tensor) -> Tensor:
    """The rows of y in the order of tokens and choices."""
    return torch.empty_like(y).index_copy_(0, order, y)


def programs(
    chosen: Chosen, weights: Weights, quantized: list[QuantizedWeights]
) -> dict[str, Callable[[], tuple[Tensor]]]:
    """By name: a forward without gradients."""
    rows, _, ends = chosen

    def run(forward: Callable[[], Tensor]) -> tuple[Tensor]:
        with torch.no_grad():
            return (forward(),)

    ours = partial(grouped_swiglu_ffn, rows, group_ends=ends)
    forwards = {
        QUANTIZED: partial(ours, *quantized, recipe=RECIPE),
        BF16: partial(ours, *weights[1:], recipe="bf16"),
        PLAIN: partial(plain_experts, rows, weights, ends),
    }
    return {name: partial(run, forward) for name, forward in forwards.items()}


def floor_us(shape: MoELayer, ends: Tensor) -> float:
    """Folded weights of the experts that have rows: a byte per value."""
    experts = int((torch.diff(ends, prepend=ends.new_zeros(1)) > 0).sum())
    return 3 * experts * shape.dim * shape.hidden_dim / HBM_BYTES_PER_US


def measure(shape: MoELayer, device: str) -> None:
    """Print the lines of a size. Raises AssertionError for other bytes than of training, or for a result too far from
    bf16."""
    inputs = layer_inputs(shape._replace(tokens=max(TOKENS)), device)
    x, weights = inputs.x.detach(), inputs.weights
    generator = torch.Generator().manual_seed(0)
    choice = torch.rand(len(x), shape.num_experts, generator=generator).topk(shape.top_k).indices.to(device)
    of_all = rows_of(x, choice, shape.num_experts)
    trained = grouped_swiglu_ffn(of_all.rows, *weights[1:], of_all.ends, recipe=RECIPE).detach()
    trained = by_choice(trained, of_all.order)
    quantized = [quantize_weights(w.detach(), RECIPE) for w in weights[1:]]
    end = device_timing.torch_end(device)
    for tokens in TOKENS:
        chosen = rows_of(x[:tokens], choice[:tokens], shape.num_experts)
        runs = programs(chosen, weights, quantized)
        (y,), (plain,) = runs[QUANTIZED](), runs[PLAIN]()
        if not torch.equal(by_choice(y, chosen.order), trained[: len(y)]):
            raise AssertionError(f"rollout {tuple(shape)}, {tokens} tokens: got other bytes than the training forward")
        db = sqnr_db([y], [plain], chosen.ends)
        if db < MIN_SQNR_DB:
            raise AssertionError(f"rollout {tuple(shape)}, {tokens} tokens: {db} dB; expected {MIN_SQNR_DB} or more")
        steps = {f"eager {name}": run for name, run in runs.items()}
        if device == "cuda":
            steps |= {f"graph {name}": captured(run)[0] for name, run in runs.items()}
        samples = device_timing.in_a_row({name: (step, end) for name, step in steps.items()})
        for how in dict.fromkeys(name.split()[0] for name in steps):
            ours = samples[f"{how} {QUANTIZED}"]
            peers = {name: samples[f"{how} {name}"].us for name in (BF16, PLAIN)}
            print(
                f"{tuple(shape[1:])!s:21} {tokens:3} tokens, {how}: {ours.us:7.1f} us, floor "
                f"{floor_us(shape, chosen.ends):6.1f}, n {ours.n}, spread {ours.spread:.0%}, "
                + ", ".join(f"{name} {us:7.1f} us ({us / ours.us:.2f}x)" for name, us in peers.items())
                + f", {db:.1f} dB",
                flush=True,
            )


def main() -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.models.rollout", description=__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for shape in H200.moe_layers if device == "cuda" else TINY.moe_layers:
        measure(shape, device)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
