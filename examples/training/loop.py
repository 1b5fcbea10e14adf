"""The training loop of both frameworks.

    start (weights, moments, step) -> [ batch(step) -> update | every log_every: log
                                        every eval_every: held-out loss | every checkpoint_every: checkpoint ]

The host waits for a GPU where it logs, evaluates and saves, and nowhere else. `train_torch.Trainer` and
`train_jax.Trainer` implement the protocol `Trainer`.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Protocol, SupportsFloat

import numpy as np

from .checkpoint import Checkpoint, load_checkpoint, load_weights, save_checkpoint
from .config import Config, describe
from .data import Text
from .runlog import RunLog
from .weights import initial_weights, weight_shapes


class Trainer(Protocol):
    """A model and its AdamW moments, sharded over the ranks. device: "cpu" or "gpu"."""

    def __init__(self, config: Config, recipe: str, ep: int, start: Checkpoint, device: str) -> None: ...

    @property
    def is_writer(self) -> bool:
        """True in the one process that writes the log and the checkpoints."""
        ...

    @property
    def device_name(self) -> str:
        """The name of the GPU, or "cpu"."""
        ...

    def peak_nbytes(self) -> int:
        """The most memory of this process's first GPU that was in use; 0 on a CPU."""
        ...

    def step(self, step: int, batch: np.ndarray) -> Mapping[str, SupportsFloat]:
        """Train on one global batch. Returns loss, aux_loss and grad_norm, computed before the update; and what else a
        framework tells, such as imbalance and dead_experts."""
        ...

    def evaluate(self, text: Text) -> float:
        """Mean loss over the held-out windows."""
        ...

    def state(self, step: int) -> Checkpoint | None:
        """Unsharded weights and moments after `step` updates, None if another process writes them.

        Collective: every process calls it."""
        ...


def train(
    framework: str,
    args: Namespace,
    config: Config,
    trainer_type: Callable[..., Trainer],
    load: Callable[..., Checkpoint | None] = load_checkpoint,
    save: Callable[..., object] = save_checkpoint,
) -> None:
    """Train from the flags to the last checkpoint. Exits with the reason on bad input. load, save: of checkpoints."""
    try:
        text = Text.load(args.data, config)
        run = describe(config, recipe=args.recipe, train_bytes=len(text.train), held_out_bytes=len(text.held_out))
        found = load(args.out, run) if args.resume else None
        start = found or first_checkpoint(args, config)
    except ValueError as error:
        sys.exit(f"{framework}: error: {error}")
    trainer = trainer_type(config, args.recipe, args.ep, start, args.device)
    if args.resume and found is None and trainer.is_writer:
        print(f"{framework}: no checkpoint in {args.out}, starting at step 0", file=sys.stderr)
    first_step = start.step
    del found, start  # the trainer has copies
    header = {"framework": framework, "device": trainer.device_name, "ep": args.ep, **run}
    log = RunLog(args.out, config, first_step, header, trainer.is_writer)
    if not first_step:
        log.eval(0, trainer.evaluate(text))
        log.restart_clock()
    checkpoint_every = config.eval_every if config.checkpoint_every is None else config.checkpoint_every
    for step in range(first_step, config.steps):
        values = trainer.step(step, text.batch(step))
        log.step()
        done, is_last = step + 1, step + 1 == config.steps
        if step % config.log_every == 0 or is_last:
            log.train(step, {name: float(value) for name, value in values.items()}, trainer.peak_nbytes())
        if done % config.eval_every == 0 or is_last:
            log.eval(done, trainer.evaluate(text))
            log.restart_clock()
        if checkpoint_every and (done % checkpoint_every == 0 or is_last):
            state = trainer.state(done)
            if state is not None:
                try:
                    save(args.out, state, run)
                except OSError as error:
                    sys.exit(f"{framework}: error: {error}")
            log.restart_clock()
    log.close()


def first_checkpoint(args: Namespace, config: Config) -> Checkpoint:
    """The state at step 0: the weights of --init-from or the initial weights, and zero moments."""
    weights = load_weights(args.init_from, weight_shapes(config)) if args.init_from else initial_weights(config)
    zeros = {name: np.zeros(array.shape, array.dtype) for name, array in weights.items()}
    return Checkpoint(0, weights, zeros, zeros)
