"""Runs of several recipes in both frameworks, one after the other, then the plot and its checks.

    make train        on a CPU: torch (torchrun, 2 processes) and jax (one process, 2 devices), 60 steps each
    make train-gpu    on one GPU: every recipe, 500 steps each

All runs start from the same weights and train on the same batches. Flags that are not listed go to every run. A run of
an earlier call is deleted when the new one has begun to train; until then it is in DIR/NAME.before.
"""

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mxep.core_kernels.policy.recipe import RECIPES

from . import plot_curves
from .checkpoint import load_weights
from .config import LOG_NAME
from .data import Text
from .flags import DEFAULT_RECIPE, parse_args, parser
from .lock import move_run
from .plot_curves import FRAMEWORKS, REFERENCE
from .ranks import run
from .runlog import read_log
from .weights import weight_shapes


def main(argv: Sequence[str] | None = None) -> None:
    own = argparse.ArgumentParser(
        prog="examples.training.train_all", description="Train in both frameworks and several recipes."
    )
    own.add_argument("--out", type=Path, required=True, metavar="DIR", help="one folder per run, and curves.png")
    own.add_argument("--resume", action="store_true", help="continue existing runs instead of starting over")
    own.add_argument("--ep", type=int, default=2, metavar="N", help="ranks of every run")
    own.add_argument("--recipes", nargs="+", choices=tuple(RECIPES), default=(REFERENCE, DEFAULT_RECIPE))
    own.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=FRAMEWORKS, help="both are compared")
    own.add_argument("--limit", type=float, default=plot_curves.LIMIT, metavar="SHARE", help="of `plot_curves`")
    args, flags = own.parse_known_args(argv)
    plot_curves.check_limit(own, args.limit)
    flags += ["--resume"] if args.resume else []
    # Before a run is deleted or trained. DIR/new is no run: the folder of an existing run would be refused.
    check_flags(args.frameworks, ["--ep", str(args.ep), "--out", str(args.out / "new"), *flags])
    failed = []
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ep), "-m")
    for framework in args.frameworks:
        for recipe in args.recipes:
            out = args.out / f"{framework}-{recipe}"
            before = out.with_name(f"{out.name}.before")
            if not args.resume and (out / LOG_NAME).exists():
                shutil.rmtree(before, ignore_errors=True)
                try:
                    move_run(out, before)
                except ValueError as error:
                    sys.exit(f"train_all: error: {error}")
            launcher = torchrun if framework == "torch" else ()
            command = [sys.executable, "-m", *launcher, f"examples.training.train_{framework}", "--ep", str(args.ep)]
            start = time.perf_counter()
            # One thread per rank is torchrun's default; torchrun warns if the variable is not set.
            status, _ = run(
                [*command, "--recipe", recipe, "--out", str(out), *flags],
                env=os.environ | {"OMP_NUM_THREADS": "1"} if framework == "torch" else None,
                capture=False,
            )
            if before.exists():
                if not (out / LOG_NAME).exists():  # it did not begin, for want of a GPU perhaps
                    move_run(before, out)
                shutil.rmtree(before)
            if status:
                failed.append(out.name)
                continue
            print(f"{out.name}: {time.perf_counter() - start:.0f} s{speed(out)}", flush=True)
    if failed:
        sys.exit(f"train_all: error: failed: {', '.join(failed)}")
    if set(args.frameworks) == set(FRAMEWORKS) and REFERENCE in args.recipes:
        plot_curves.main([str(args.out), "--limit", str(args.limit)])
    else:
        print(f"no curves: the comparison needs {' and '.join(FRAMEWORKS)}, and {REFERENCE}")


def check_flags(frameworks: Sequence[str], flags: Sequence[str]) -> None:
    """Exit on flags, a text or weights that a run of these frameworks refuses."""
    for framework in frameworks:
        if framework == "torch":
            args, config = parse_args(parser("examples.training.train_torch"), flags)
        else:
            from .train_jax import read_flags  # imports JAX, which runs of PyTorch do not need

            args, config = read_flags(flags)
        try:
            Text.load(args.data, config)
            if args.init_from:
                load_weights(args.init_from, weight_shapes(config))
        except ValueError as error:
            sys.exit(f"train_all: error: {error}")


def speed(out: Path) -> str:
    """The speed of a run on a GPU, as a median over its records without the first, whose step compiles kernels."""
    records = [r for r in read_log(out) if r["kind"] == "train" and "tflops" in r][1:]
    if not records:
        return ""
    tokens_per_s, tflops = (statistics.median(r[key] for r in records) for key in ("tokens_per_s", "tflops"))
    shares = [r["of_bf16_peak"] for r in records if "of_bf16_peak" in r]
    share = f" ({statistics.median(shares):.1%} of the bf16 peak)" if shares else ""
    return f", {tokens_per_s:.0f} tokens/s, {tflops:.1f} TF/s per GPU{share}, at most {records[-1]['peak_gib']} GiB"


if __name__ == "__main__":
    main()
