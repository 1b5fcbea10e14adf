"""Sizes, schedule and command line of both training scripts.

`python -m examples.train_jax` and `torchrun ... -m examples.train_torch` take the same flags and build
the same `Config`, so two runs with the same flags differ only in the framework.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoint import step_folders

RECIPES = {"bf16": "bf16", "mxfp8": "mxfp8_wgrad_with_hp"}  # --precision -> mxep recipe of the experts
LOG_NAME = "log.jsonl"


@dataclass(frozen=True, slots=True)
class Config:
    """A byte-level decoder-only transformer with a Mixture of Experts in every layer, and its training.

    `dim` and `hidden_dim` are multiples of 32, the MXFP8 block. `batch_size` is the number of sequences per
    step over all ranks. `steps` is the length of the cosine schedule.
    """

    vocab_size: int = 256
    dim: int = 128
    num_layers: int = 2
    num_heads: int = 4
    hidden_dim: int = 128
    num_experts: int = 8
    top_k: int = 2
    seq_len: int = 128
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    steps: int = 120
    batch_size: int = 32
    warmup_steps: int = 20
    peak_lr: float = 1.5e-3
    final_lr: float = 1.5e-4
    beta1: float = 0.9
    beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    aux_loss_weight: float = 1e-2

    log_every: int = 10
    eval_every: int = 40
    eval_sequences: int = 128
    seed: int = 0

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


PRESETS = {
    "small": Config(),
    "tiny": Config(
        dim=32, hidden_dim=32, num_heads=2, seq_len=32, steps=60, batch_size=8, warmup_steps=5,
        log_every=1, eval_every=20, eval_sequences=16,
    ),
}  # fmt: skip


def learning_rates(config: Config) -> np.ndarray:
    """The learning rate of every step, (steps,) float32: linear warm-up, then cosine decay to `final_lr`.

    >>> learning_rates(Config(steps=4, warmup_steps=2, peak_lr=1.0, final_lr=0.0)).round(2).tolist()
    [0.5, 1.0, 1.0, 0.5]
    """
    step = np.arange(config.steps)
    warm = (step + 1) / max(config.warmup_steps, 1)
    progress = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    cosine = config.final_lr + 0.5 * (config.peak_lr - config.final_lr) * (1 + np.cos(math.pi * progress))
    return np.where(step < config.warmup_steps, config.peak_lr * warm, cosine).astype(np.float32)


def rope_tables(config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of rotary embeddings (RoFormer, arXiv 2104.09864), each (seq_len, head_dim / 2) float32."""
    half = config.head_dim // 2
    angles = np.outer(np.arange(config.seq_len), config.rope_base ** (-np.arange(half) / half))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def is_expert(name: str) -> bool:
    """True for expert weights, which are sharded over the ranks along their first dim."""
    return ".experts." in name


def is_decayed(shape: Sequence[int]) -> bool:
    """True for matrices. Norm gains are vectors and get no weight decay."""
    return len(shape) > 1


def parse_args(prog: str, argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, Config]:
    """Parse the command line of both scripts. Raises SystemExit with the reason on a bad flag."""
    parser = argparse.ArgumentParser(prog=prog, description="Train a small byte-level MoE language model.")
    parser.add_argument("--precision", choices=tuple(RECIPES), default="mxfp8", help="precision of the experts")
    parser.add_argument("--ep", type=int, default=1, metavar="N", help="number of expert-parallel ranks")
    parser.add_argument("--data", type=Path, help="text file or folder of text files (default: the standard library)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of log.jsonl and checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the last complete checkpoint in --out")
    parser.add_argument("--init-from", type=Path, metavar="CKPT", help="start from the weights of this checkpoint")
    parser.add_argument("--preset", choices=tuple(PRESETS), default="small")
    for flag in ("steps", "seed", "log-every", "eval-every"):
        parser.add_argument(f"--{flag}", type=int, metavar="N")
    args = parser.parse_args(argv)

    changes = {name: getattr(args, name) for name in ("steps", "seed", "log_every", "eval_every")}
    config = replace(PRESETS[args.preset], **{name: value for name, value in changes.items() if value is not None})
    for name, low in (("steps", 0), ("seed", 0), ("log_every", 1), ("eval_every", 1)):
        if getattr(config, name) < low:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(config, name)}; allowed: at least {low}")
    if args.ep < 1 or any(n % args.ep for n in (config.num_experts, config.batch_size, config.eval_sequences)):
        parser.error(
            f"--ep: got {args.ep}; allowed: divisors of {config.num_experts} experts, "
            f"{config.batch_size} training and {config.eval_sequences} held-out sequences"
        )
    file = next((path for path in (args.out, *args.out.parents) if path.exists() and not path.is_dir()), None)
    if file:
        parser.error(f"--out: got {args.out}, but {file} is a file; allowed: a folder or a new path")
    if ((args.out / LOG_NAME).exists() or step_folders(args.out)) and not args.resume:
        parser.error(f"--out: {args.out} already holds a run; pass --resume to continue it, or another folder")
    if args.resume and args.init_from:
        parser.error("--init-from: not together with --resume, which loads its own weights")
    return args, config


def describe(config: Config, **extra: Any) -> dict[str, Any]:
    """The config as JSON values, for the log and the checkpoint."""
    return asdict(config) | extra
