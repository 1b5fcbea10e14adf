"""Sizes and schedule of both training scripts; flags.py has their command line.

Both scripts build the same `Config` from the same flags, so two such runs differ only in the framework.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

LOG_NAME = "log.jsonl"
DENSE_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Config:
    """A byte-level decoder-only transformer with a Mixture of Experts in every layer, and its training.

    dim, hidden_dim: multiples of 32, the MXFP8 block. batch_size: sequences per step over all ranks.
    dense_dtype: of all activations, and of the dense weights inside products. Weights, gradients and moments are fp32.
    steps: where the run ends. schedule_steps: where the cosine of the learning rate ends, None at `steps`.
    checkpoint_every: steps between checkpoints, None with every evaluation, 0 none.
    """

    vocab_size: int = 256
    dim: int = 128
    num_layers: int = 2
    num_heads: int = 4
    hidden_dim: int = 128
    num_experts: int = 8
    top_k: int = 2
    seq_len: int = 128
    dense_dtype: str = "float32"
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    steps: int = 60
    schedule_steps: int | None = None
    batch_size: int = 32
    warmup_steps: int = 10
    peak_lr: float = 1.5e-3
    final_lr: float = 1.5e-4
    beta1: float = 0.9
    beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    aux_loss_weight: float = 1e-2

    log_every: int = 5
    eval_every: int = 20
    checkpoint_every: int | None = None
    eval_sequences: int = 128
    seed: int = 0

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def schedule_length(self) -> int:
        return self.steps if self.schedule_steps is None else self.schedule_steps


# The memory of "h200" on one GPU of 139 GiB (149 GB), of which a third stays free, in GB:
#
#   weights      8 layers x (attention 4 D D + router E D + experts 3 E D F) = 0.98e9, of which a token uses 0.19e9;
#                weight, gradient and two moments in fp32: 16 bytes each                                        15.7
#   saved        40 D bytes per token and layer in PyTorch: attention 16 D (input, qkv, rotated q and k, output),
#                norms and residuals 6 D, router 4 D (fp32), experts 14 D (top-2 rows: input, gate, up, output);
#                98304 tokens, 8 layers. JAX saves fp32 values of the norms too, 50 D: 60.4                     48.3
#   quantized    the experts along their second orientation, 1 byte per weight                                   0.9
#   temporaries  about ten arrays of 196608 rows of D, bf16 or fp32, of a layer's backward                        8
#   sum          73 in PyTorch, 85 in JAX
#
# An estimate: every line of a run on a GPU has the measured peak. "curves" is small enough for 500 steps of several
# recipes within minutes: 0.22e9 weights, 0.04e9 per token.
PRESETS = {
    "small": Config(),
    "tiny": Config(
        dim=32, hidden_dim=32, num_heads=2, seq_len=32, steps=60, batch_size=8, warmup_steps=5,
        log_every=1, eval_every=20, eval_sequences=16,
    ),
    "curves": Config(
        dim=1024, num_layers=4, num_heads=8, hidden_dim=1024, num_experts=16, top_k=2, seq_len=512,
        dense_dtype="bfloat16", steps=500, batch_size=32, warmup_steps=50, peak_lr=1e-3, final_lr=1e-4,
        log_every=10, eval_every=100, checkpoint_every=500,
    ),
    "h200": Config(
        dim=1536, num_layers=8, num_heads=12, hidden_dim=1536, num_experts=16, top_k=2, seq_len=2048,
        dense_dtype="bfloat16", steps=500, batch_size=48, warmup_steps=50, peak_lr=4e-4, final_lr=4e-5,
        log_every=10, eval_every=100, checkpoint_every=500, eval_sequences=96,
    ),
}  # fmt: skip


def learning_rates(config: Config) -> np.ndarray:
    """The learning rate of every step, (steps,) float32: linear warm-up, cosine decay to `final_lr`, then that rate.

    >>> learning_rates(Config(steps=4, warmup_steps=2, peak_lr=1.0, final_lr=0.0)).round(2).tolist()
    [0.5, 1.0, 1.0, 0.5]
    """
    step = np.arange(config.steps)
    warm = (step + 1) / max(config.warmup_steps, 1)
    decay_steps = max(config.schedule_length - config.warmup_steps, 1)
    progress = np.minimum((step - config.warmup_steps) / decay_steps, 1)
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


def describe(config: Config, **extra: Any) -> dict[str, Any]:
    """The config as JSON values, for the log and the checkpoint."""
    return asdict(config) | {"schedule_steps": config.schedule_length} | extra
