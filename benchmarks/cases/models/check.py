"""Whether the candidates train alike: gradients of one layer, and losses of the first steps of the whole model.

With one layer every candidate chooses the same experts for a token: no rounding of an earlier layer changes a choice.
The reference is transformers' own implementation, `grouped_mm`. Biases are left out: it sums their gradients in bf16,
and a bias of keys has no gradient but rounding errors.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..error_check import Error, sqnr_db
from .training import Training

# The worst gradient of one layer of the five models on a CPU, at hidden sizes 64 and 512: recipe bf16 42.2 dB, mxfp8
# 21.9, both of a router. On an H200 at Mixtral's sizes, in JAX: recipe bf16 36.2 dB, of the embedding. Less 3 of the
# lesser: a router's gradient is a small difference, and a GPU sums in another order.
# mxfp8_dense, in JAX: 20.9 of a router and 18.3 of Qwen3's norm of keys, less 5: dense layers before the router can
# change a choice.
MIN_GRADIENT_DB = {"recipe_bf16": 33.2, "mxfp8": 18.9, "mxfp8_dense": 13.3}
# Relative to the reference's loss; measured on a CPU with two layers: 0.00006 at most; on an H200 with seven layers of
# Mixtral 0.0013 in the second step, whose loss is far from a minimum. Twice that.
MAX_LOSS_DIFFERENCE = 0.0026
CHECKED_STEPS = 3
CHECKED_LR = 1e-6
"""AdamW's first steps move every weight by this much, whatever its gradient. With 1e-4 a model of Mixtral's sizes
diverges: losses 11.2, 16.2, 19.4; with 1e-5 they are 11.2, 9.2, 10.4, and differ by up to 0.5%, of Qwen3 by 1%."""


def gradients(training: Training, implementation: str) -> dict[str, Tensor]:
    """Of the first micro-batch, by parameter; the training starts again."""
    training.restart(CHECKED_LR)
    training.use(implementation)
    training.accumulate(micro_batches=1)
    named = ((name, p.grad) for name, p in training.model.named_parameters() if "bias" not in name)
    found = {name: gradient for name, gradient in named if gradient is not None}
    training.optimizer.zero_grad()
    return found


def gradients_error(name: str, got: Mapping[str, Tensor], want: Mapping[str, Tensor], rows: Tensor) -> Error:
    """The least SQNR of all gradients. rows: of each expert. Raises AssertionError below the limit of the candidate."""
    if got.keys() != want.keys():
        raise AssertionError(f"{name}: got gradients of {sorted(got)}, expected {sorted(want)}")
    ends = torch.cumsum(rows, 0)  # a product of no rows: torch does not define the gradient
    db = {parameter: sqnr_db([got[parameter]], [value], ends) for parameter, value in want.items()}
    least = min(db, key=lambda parameter: db[parameter])
    if not db[least] >= MIN_GRADIENT_DB[name]:
        raise AssertionError(f"{name}: {least}: {db[least]} dB; expected {MIN_GRADIENT_DB[name]} or more")
    return {"grade": "gradient_sqnr_db", "sqnr_db": db[least], "of": least}


def losses(training: Training, implementation: str) -> list[float]:
    """Of the first steps, from the first weights."""
    training.restart(CHECKED_LR)
    training.use(implementation)
    return [float(training.step()) for _ in range(CHECKED_STEPS)]


def losses_error(name: str, got: Sequence[float], want: Sequence[float]) -> float:
    """The largest difference of a step's losses, relative to the reference's. Raises AssertionError above the limit."""
    difference = max(abs(a - b) / b for a, b in zip(got, want, strict=True))
    print(f"{name}: losses {got}, the reference's {want}", flush=True)
    if not difference <= MAX_LOSS_DIFFERENCE:
        raise AssertionError(
            f"{name}: losses {got}, the reference's {want}; expected {MAX_LOSS_DIFFERENCE:.2%} at most"
        )
    return float(f"{difference:.2g}")
