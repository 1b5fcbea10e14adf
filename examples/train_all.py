"""The four runs of `make train`, one after the other, then the plot and its checks.

    torch bf16, torch mxfp8 (torchrun, 2 processes)   jax bf16, jax mxfp8 (one process, 2 devices)

All runs start from the same weights and train on the same batches. A run uses two cores, one per rank.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import plot_curves
from .config import LOG_NAME, RECIPES

EP = 2
LAUNCH = {
    "torch": ("torch.distributed.run", "--standalone", "--nproc-per-node", str(EP), "-m", "examples.train_torch"),
    "jax": ("examples.train_jax",),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="examples.train_all", description="Train in both frameworks and both precisions."
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="one folder per run, and curves.png")
    parser.add_argument("--resume", action="store_true", help="continue existing runs instead of starting over")
    args, flags = parser.parse_known_args(argv)
    for framework, module in LAUNCH.items():
        for precision in RECIPES:
            out = args.out / f"{framework}-{precision}"
            if not args.resume and (out / LOG_NAME).exists():
                shutil.rmtree(out)
            command = [sys.executable, "-m", *module, "--ep", str(EP), "--precision", precision, "--out", str(out)]
            start = time.perf_counter()
            # One thread per rank is torchrun's default; torchrun warns if the variable is not set.
            subprocess.run(
                [*command, *(["--resume"] if args.resume else []), *flags],
                check=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"} if framework == "torch" else None,
            )
            print(f"{out.name}: {time.perf_counter() - start:.0f} s")
    plot_curves.main([str(args.out)])


if __name__ == "__main__":
    main()
