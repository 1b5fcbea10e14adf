"""The command line of both training scripts, train_torch and train_jax."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mxep.core_kernels.policy.recipe import RECIPES
from mxep.core_kernels.router.plan import MOST_CHOSEN, MOST_EXPERTS

from .config import DENSE_DTYPES, PRESETS, Config
from .lock import check_new

DEFAULT_RECIPE = "mxfp8_wgrad_with_hp"
# Flags of Config's fields, with the least value of each.
SIZES = {
    "num_layers": 1, "dim": 32, "num_heads": 1, "hidden_dim": 32, "num_experts": 1, "top_k": 1, "seq_len": 1,
    "batch_size": 1, "steps": 0, "schedule_steps": 1, "warmup_steps": 0, "log_every": 1, "eval_every": 1,
    "checkpoint_every": 0, "eval_sequences": 1, "seed": 0,
}  # fmt: skip


def parser(prog: str) -> argparse.ArgumentParser:
    """The flags that both scripts take."""
    flags = argparse.ArgumentParser(prog=prog, description="Train a byte-level MoE language model.")
    flags.add_argument("--recipe", choices=tuple(RECIPES), default=DEFAULT_RECIPE, help="precision of the experts")
    flags.add_argument("--device", choices=("cpu", "gpu"), help="default: gpu where the framework finds one")
    flags.add_argument("--ep", type=int, default=1, metavar="N", help="number of expert-parallel ranks")
    flags.add_argument("--data", type=Path, help="text file or folder of text files (default: the standard library)")
    flags.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of log.jsonl and checkpoints")
    flags.add_argument("--resume", action="store_true", help="continue from the last complete checkpoint in --out")
    flags.add_argument("--init-from", type=Path, metavar="CKPT", help="start from the weights of this checkpoint")
    flags.add_argument("--preset", choices=tuple(PRESETS), default="small", help="sizes and schedule")
    changed = flags.add_argument_group("a size or a step count other than the preset's")
    for name in SIZES:
        changed.add_argument(_flag(name), type=int, metavar="N")
    changed.add_argument("--dense-dtype", choices=DENSE_DTYPES, help="of all activations and of dense products")
    return flags


def parse_args(flags: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, Config]:
    """Parse a command line. Raises SystemExit with the reason on a bad flag."""
    args = flags.parse_args(argv)
    changes = {name: getattr(args, name) for name in (*SIZES, "dense_dtype")}
    config = replace(PRESETS[args.preset], **{name: value for name, value in changes.items() if value is not None})
    for name, low in SIZES.items():
        value = changes[name]
        if value is not None and value < low:
            flags.error(f"{_flag(name)}: got {value}; allowed: at least {low}")
    most = min(config.num_experts, MOST_CHOSEN)
    for name, bad, allowed in (
        ("dim", config.dim % 32, "multiples of 32"),
        ("hidden_dim", config.hidden_dim % 32, "multiples of 32"),
        (
            "num_heads",
            config.dim % (2 * config.num_heads),
            f"numbers that divide dim {config.dim} into heads of an even size",
        ),
        ("num_experts", config.num_experts > MOST_EXPERTS, f"1 to {MOST_EXPERTS}"),
        ("top_k", config.top_k > most, f"1 to {most} experts"),
    ):
        if bad:
            flags.error(f"{_flag(name)}: got {getattr(config, name)}; allowed: {allowed}")
    if args.ep < 1 or any(n % args.ep for n in (config.num_experts, config.batch_size, config.eval_sequences)):
        flags.error(
            f"--ep: got {args.ep}; allowed: divisors of {config.num_experts} experts, "
            f"{config.batch_size} training and {config.eval_sequences} held-out sequences"
        )
    _check_folders(flags, args)
    return args, config


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_folders(flags: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    file = next((path for path in (args.out, *args.out.parents) if path.exists() and not path.is_dir()), None)
    if file:
        flags.error(f"--out: got {args.out}, but {file} is a file; allowed: a folder or a new path")
    try:
        check_new(args.out, args.resume)
    except ValueError as error:
        flags.error(str(error))
    if args.resume and args.init_from:
        flags.error("--init-from: not together with --resume, which loads its own weights")
