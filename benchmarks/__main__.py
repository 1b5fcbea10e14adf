"""`python -m benchmarks [gpu | linear | models | ep | ep_jax | fsdp] [--only NAME,...]`: measure, print, record.

cases --check, interleaved timing--> Line --> the terminal, with the bar of the figure
                                          '-> results/<hardware>.jsonl, of a named commit only
"""

import argparse
import os
import re
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

from examples.training.ranks import leave

from .cases.shapes import MoELayer, layer_named, of_layer
from .figures import results

# The module of a section is imported when it runs: importing JAX for a GPU takes its memory.
SECTIONS = ("gpu", "linear", "models", "ep", "ep_jax", "ep_alternating", "fsdp")
FRONTENDS = ("torch", "jax")
ROUTED = ("ep", "ep_jax", "ep_alternating")
ONE_GPU, RANKS = ("gpu", "linear", "models"), (*ROUTED, "fsdp")
BY_TORCHRUN = "RANK" in os.environ
TORCHRUN = ("ep", "fsdp", *(["models"] if BY_TORCHRUN else []))
"""Sections whose ranks are processes of torchrun."""


def _commit(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{40}", text):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: 40 hexadecimal digits")
    return text


def _names(text: str) -> list[str]:
    return text.split(",")


def _layer(text: str) -> MoELayer:
    try:
        return layer_named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _ranks(section: str) -> int:
    """The GPUs of a section."""
    if section in ("ep_jax", "ep_alternating"):
        return import_module(f".{section}", __package__).ranks()
    return int(os.environ.get("WORLD_SIZE", "1")) if section in TORCHRUN else 1


def _module(section: str, frontend: str) -> Any:
    steps = {"models": frontend, "fsdp": "fsdp"}
    return import_module(f".models.{steps[section]}_steps" if section in steps else f".{section}", __package__)


def unknown_names(only: Sequence[str], sections: Sequence[str], frontend: str = FRONTENDS[0]) -> str:
    """The error in the names of `--only`; "" if every name is one of the sections'."""
    known = {name for section in sections for name in _module(section, frontend).NAMES}
    unknown = ", ".join(sorted(set(only) - known))
    return f"got {unknown}; allowed in {', '.join(sections)}: {', '.join(sorted(known))}" if unknown else ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure, compare and record.")
    parser.add_argument(
        "sections",
        nargs="*",
        metavar="section",
        help=f"any of {', '.join(SECTIONS)}; default: gpu",
    )
    parser.add_argument(
        "--only",
        type=_names,
        default=[],
        metavar="NAME,NAME",
        help="only these ops, families or models; a wrong name lists all",
    )
    parser.add_argument(
        "--shape",
        type=_layer,
        metavar="NAME=N,...",
        help="one layer of your own, tokens=4096,dim=2048,hidden_dim=768,num_experts=128,top_k=8, instead of the "
        "shapes of the documents; recorded with --out alone",
    )
    parser.add_argument("--frontend", choices=FRONTENDS, help=f"of models; default: {FRONTENDS[0]}")
    parser.add_argument(
        "--routing", metavar="NAME", help="of ep, ep_jax, ep_alternating: balanced, one_expert or dirichlet"
    )
    parser.add_argument("--commit", type=_commit, help="the measured commit, for sources without git")
    parser.add_argument("--out", type=Path, help="append the lines here instead of benchmarks/results/<hardware>.jsonl")
    parser.add_argument("--no-record", action="store_true", help="print the figures, store none")
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"section: got {', '.join(sorted(unknown))}; allowed: {', '.join(SECTIONS)}")

    if args.shape and (fixed := set(args.sections) - {"gpu"}):
        parser.error(f"--shape: got section {', '.join(sorted(fixed))}; allowed: gpu")

    options = {} if args.routing is None else {"routing": args.routing}
    if options and (not args.sections or not set(args.sections) <= set(ROUTED)):
        got = ", ".join(args.sections) or "no section"
        parser.error(f"--routing: got {got}; allowed: {', '.join(ROUTED)}")

    if args.frontend and (other := set(args.sections or ["gpu"]) - {"models"}):
        parser.error(f"--frontend: got section {', '.join(sorted(other))}; allowed: models")

    if args.frontend == "jax" and BY_TORCHRUN:
        parser.error("--frontend: got jax by torchrun; allowed: python -m benchmarks models --frontend jax, on one GPU")
    if args.frontend == "jax":  # torch only compares gradients: layers fill one pool, without gaps
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # otherwise JAX takes torch's memory
    if "models" in args.sections:  # layers fill the memory: segments of fixed sizes would leave gaps
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    by_torchrun = [section for section in args.sections if section in TORCHRUN]
    if by_torchrun and os.environ.get("RANK", "0") != "0":  # torchrun's other processes only take part
        for section in by_torchrun:
            with redirect_stdout(StringIO()):
                list(_module(section, FRONTENDS[0]).lines(args.only, **options))
        leave()
        return
    gpu, sections, frontend = results.gpu_name(), args.sections or ["gpu"], args.frontend or FRONTENDS[0]
    if args.only and (wrong := unknown_names(args.only, sections, frontend)):
        parser.error(f"--only: {wrong}")
    for section in sections:
        if section in ONE_GPU and gpu is None:
            parser.error(f"section: got {section}; allowed: {', '.join(RANKS)}, this machine has no GPU")
        if section in ONE_GPU and not BY_TORCHRUN:  # one GPU: of several, JAX makes another one current than torch's
            os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
        hardware = f"{_ranks(section)}x {gpu}" if gpu else results.cpu_name()
        run = results.Run(hardware, args.commit or results.clean_commit())
        if args.out and run.commit is None:
            parser.error("--out: got a working tree without a commit; allowed: a clean tree, or --commit without git")
        name = results.file_name(gpu) + ("_ep" if section in RANKS else "")
        path = args.out or results.RESULTS / f"{name}.jsonl"
        print(f"\n{section}: {run.hardware}, {run.date}, commit {run.commit}, {run.versions}")
        print(results.row(results.HEADER))
        own = args.shape and not args.out
        recorded = run.commit is not None and not args.no_record and not own
        shapes = (of_layer(args.shape),) if args.shape else ()
        if recorded:
            path.parent.mkdir(parents=True, exist_ok=True)
        measured = False
        for line in _module(section, frontend).lines(args.only, *shapes, **options):
            measured = True
            print(results.row(results.cells(line)), flush=True)
            if recorded:
                results.record(run, line, path)
        if not measured:
            only = f"--only {','.join(args.only)}" if args.only else "all names"
            parser.error(f"{section}: got {only}, of which this machine measures nothing; allowed: other names")
        if recorded:
            print(f"recorded in {path}")
        elif args.no_record:
            print("not recorded: --no-record")
        elif own:
            print("not recorded: a shape of your own; --out FILE records it there")
        else:
            print("not recorded: the working tree differs from its commit; commit first, or pass --commit without git")
    if by_torchrun:
        leave()


if __name__ == "__main__":
    main()
