"""The training loop of both frameworks.

    start (weights, moments, step) -> [ batch(step) -> update -> log | every eval_every: held-out loss, checkpoint ]

`train_torch.Trainer` and `train_jax.Trainer` implement the protocol `Trainer`.
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
    """A model and its AdamW moments, sharded over the ranks."""

    def __init__(self, config: Config, precision: str, ep: int, start: Checkpoint) -> None: ...

    @property
    def is_writer(self) -> bool:
        """True in the one process that writes the log and the checkpoints."""
        ...

    def step(self, step: int, batch: np.ndarray) -> Mapping[str, SupportsFloat]:
        """Train on one global batch. Returns loss, aux_loss and grad_norm, computed before the update."""
        ...

    def evaluate(self, text: Text) -> float:
        """Mean loss over the held-out windows."""
        ...

    def state(self, step: int) -> Checkpoint:
        """Unsharded weights and moments after `step` updates. Collective: every process calls it."""
        ...


def train(framework: str, args: Namespace, config: Config, trainer_type: type[Trainer]) -> None:
    """Train from the flags to the last checkpoint. Exits with the reason on bad input."""
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
    """The state at step 0: the weights of --init-from or the initial weights, and zero moments."""
    weights = load_weights(args.init_from, weight_shapes(config)) if args.init_from else initial_weights(config)
    zeros = {name: np.zeros_like(array) for name, array in weights.items()}
    return Checkpoint(0, weights, zeros, zeros)
