"""The training loop, the same for both frameworks.

    start (weights, moments, step) -> [ batch(step) -> update -> log | every eval_every: held-out loss, checkpoint ]

`train_torch.Trainer` and `train_jax.Trainer` are the two ways to do what this file asks for.
"""

import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import Protocol, SupportsFloat

import numpy as np

from .checkpoint import Checkpoint, load_checkpoint, load_weights, save_checkpoint
from .config import Config, describe
from .data import Text
from .runlog import RunLog
from .weights import initial_weights, weight_shapes


class Trainer(Protocol):
    """Holds a model, AdamW's moments and the ranks they are spread over."""

    def __init__(self, config: Config, precision: str, ep: int, start: Checkpoint) -> None: ...

    @property
    def is_writer(self) -> bool:
        """Whether this process writes log and checkpoints; one of them does."""
        ...

    def step(self, step: int, batch: np.ndarray) -> Mapping[str, SupportsFloat]:
        """Train on a global batch. Returns loss, aux_loss, grad_norm before its update."""
        ...

    def evaluate(self, text: Text) -> float:
        """Mean loss over the held-out windows."""
        ...

    def state(self, step: int) -> Checkpoint:
        """Weights and moments after `step` updates, whole. Every process calls it."""
        ...


def train(framework: str, args: Namespace, config: Config, trainer_type: type[Trainer]) -> None:
    """Run a training from its flags to its last checkpoint. Exits with the reason on bad input."""
    try:
        text = Text.load(args.data, config)
        run = describe(config, precision=args.precision, train_bytes=len(text.train), held_out_bytes=len(text.held_out))
        found = load_checkpoint(args.out, run) if args.resume else None
        start = found or first_checkpoint(args, config)
    except ValueError as error:
        sys.exit(f"{framework}: error: {error}")
    trainer = trainer_type(config, args.precision, args.ep, start)
    if args.resume and found is None and trainer.is_writer:
        print(f"{framework}: no checkpoint in {args.out}, starting at step 0", file=sys.stderr)
    log = RunLog(args.out, config, start.step, {"framework": framework, "ep": args.ep, **run}, trainer.is_writer)
    if not start.step:
        log.eval(0, trainer.evaluate(text))
        log.restart_clock()
    for step in range(start.step, config.steps):
        values = trainer.step(step, text.batch(step))
        log.step()
        done = step + 1
        if step % config.log_every == 0 or done == config.steps:
            log.train(step, {name: float(value) for name, value in values.items()})
        if done % config.eval_every == 0 or done == config.steps:
            log.eval(done, trainer.evaluate(text))
            state = trainer.state(done)
            if trainer.is_writer:
                save_checkpoint(args.out, state, run)
            log.restart_clock()
    log.close()


def first_checkpoint(args: Namespace, config: Config) -> Checkpoint:
    """Step 0: the weights of --init-from, or fresh ones, and moments of zeros."""
    weights = load_weights(args.init_from, weight_shapes(config)) if args.init_from else initial_weights(config)
    zeros = {name: np.zeros_like(array) for name, array in weights.items()}
    return Checkpoint(0, weights, zeros, zeros)
