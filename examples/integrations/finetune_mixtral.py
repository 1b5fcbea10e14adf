"""Fine-tune Mixtral in four stages and compare them; docs/guides/finetune_mixtral.md explains the stages.

    torchrun --standalone --nproc-per-node 2 -m examples.integrations.finetune_mixtral --size tiny  # on a CPU, Gloo
    torchrun --standalone --nproc-per-node 4 -m examples.integrations.finetune_mixtral --device gpu --size layer \\
        --ep-size 2
    torchrun --standalone --nproc-per-node 8 -m examples.integrations.finetune_mixtral --device gpu --model DIR \\
        --improvement 3

DIR is a folder with config.json, safetensors and a tokenizer, as from the hub. `--size` draws the weights of a model
from a seed: "tiny", or "layer", Mixtral 8x7B with as many layers as the devices' memory holds.
"""

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from mxep.torch_frontend import clip_grad_norm_
from transformers import AutoTokenizer, MixtralConfig

from ..training.data import library_files, text_files
from ..training.ranks import leave
from .mixtral import SEQUENCES, SIZES, STAGES, build, checkpoint_weights, layers_that_fit, random_weights, read_config

PROG = "examples.integrations.finetune_mixtral"
TEXT_NBYTES = 1 << 22
"""Of the text, its first bytes: enough for any run of this script, and quick to tokenize."""


class Row(NamedTuple):
    """A stage's line of the table. step_ms: the median. peak: bytes of this rank's device, 0 on a CPU."""

    stage: int
    step_ms: float
    tokens_per_s: float
    peak: int
    losses: list[float]


def tokens_of(args: argparse.Namespace) -> np.ndarray:
    """The text as tokens of the checkpoint's tokenizer, or as bytes."""
    files = library_files() if args.data is None else text_files(args.data)
    text = b""
    for file in files:
        text += file.read_bytes()
        if len(text) >= TEXT_NBYTES:
            break
    text = text[:TEXT_NBYTES]
    if args.model is None:
        tokens = np.frombuffer(text, np.uint8)
    else:
        tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
        tokens = np.array(tokenizer(text.decode(errors="replace")).input_ids)
    if len(tokens) <= args.max_seq_length:
        raise ValueError(f"--data: got {len(tokens)} tokens; allowed: more than --max-seq-length {args.max_seq_length}")
    if tokens.max() >= args.config.vocab_size:
        raise ValueError(f"--model: got token {tokens.max()}; allowed: ids below vocab_size {args.config.vocab_size}")
    return tokens


def run(stage: int, args: argparse.Namespace, tokens: np.ndarray, rank: int, ranks: int) -> Row:
    """Train a stage from the same weights on the same tokens as every other."""
    device = args.torch_device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    load = checkpoint_weights(args.files, device) if args.files else random_weights(args.seed, device)
    model = build(args.config, stage, device, args.ep_size, ranks, load)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
    times, losses = [], []
    for step in range(args.warmup_steps + args.train_steps):
        # Every rank draws the windows of all ranks and takes its own.
        generator = np.random.default_rng((args.seed, step))
        starts = generator.integers(0, len(tokens) - args.max_seq_length, (ranks, args.batch_size, 1))[rank]
        ids = torch.from_numpy(tokens[starts + np.arange(args.max_seq_length)].astype(np.int64)).to(device)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / (args.warmup_steps + 1))
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        losses.append(mean.item())  # waits for the device and for all ranks
        if step >= args.warmup_steps:
            times.append(time.perf_counter() - start)
        if rank == 0:
            print(f"stage {stage}, step {step}: loss {losses[-1]:.6f}, gradient norm {norm.item():.4f}", flush=True)
    seconds = statistics.median(times)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return Row(stage, 1000 * seconds, ranks * args.batch_size * args.max_seq_length / seconds, peak, losses)


def table(rows: Sequence[Row]) -> str:
    """One row per stage; a speed-up is relative to the first row."""
    lines = [
        "| stage | | ms / step | tokens/s | peak GiB | first loss | last loss | speed-up |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        peak = f"{row.peak / 2**30:.1f}" if row.peak else "-"
        figures = f"{row.step_ms:.1f} | {row.tokens_per_s:,.0f} | {peak} | {row.losses[0]:.4f} | {row.losses[-1]:.4f}"
        speed_up = rows[0].step_ms / row.step_ms
        lines.append(f"| {row.stage} | {STAGES[row.stage]} | {figures} | {speed_up:.2f}x |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(prog=PROG, description="Fine-tune Mixtral in four stages.")
    flags.add_argument("--improvement", choices=("0", "1", "2", "3", "all"), default="all", help="the stage")
    model = flags.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, metavar="DIR", help="folder of a Mixtral checkpoint")
    model.add_argument("--size", choices=tuple(SIZES), help="a model with random weights (default: tiny)")
    flags.add_argument("--layers", type=int, metavar="N", help="the first N layers; default: all, or those that fit")
    flags.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    flags.add_argument("--ep-size", type=int, metavar="N", help="ranks that share the experts; default: all")
    flags.add_argument("--batch-size", type=int, metavar="N", help="sequences of a rank; default: 2")
    flags.add_argument("--max-seq-length", type=int, metavar="N", help="default: 128 of tiny, else 4096")
    flags.add_argument("--warmup-steps", type=int, default=2, metavar="N", help="of the learning rate, not timed")
    flags.add_argument("--train-steps", type=int, default=5, metavar="N", help="timed steps after them")
    flags.add_argument("--lr", type=float, default=1e-4)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--data", type=Path, help="text file or folder (default: Python's standard library)")
    return flags


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments, with `config`, `files` and `torch_device`. Exits with the reason, before anything is built."""
    flags = parser()
    args = flags.parse_args(argv)
    ranks, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    size = args.size or ("layer" if args.model else "tiny")
    args.batch_size, args.max_seq_length = (
        default if given is None else given
        for given, default in zip((args.batch_size, args.max_seq_length), SEQUENCES[size], strict=True)
    )
    args.ep_size = ranks if args.ep_size is None else args.ep_size
    lows = {"batch_size": 1, "max_seq_length": 2, "warmup_steps": 0, "train_steps": 1, "ep_size": 1, "layers": 1}
    for name, low in lows.items():
        given = getattr(args, name)
        if given is not None and given < low:
            flags.error(f"--{name.replace('_', '-')}: got {given}; allowed: at least {low}")
    try:
        args.config, args.files = read_config(args.model) if args.model else (MixtralConfig(**SIZES[size]), {})
    except ValueError as error:
        flags.error(str(error))
    config = args.config
    experts = config.num_local_experts
    if ranks % args.ep_size or experts % args.ep_size:
        flags.error(f"--ep-size: got {args.ep_size}; allowed: divisors of {ranks} ranks and of {experts} experts")
    if config.hidden_size % 32 or config.intermediate_size % 32:
        got = f"hidden_size {config.hidden_size}, intermediate_size {config.intermediate_size}"
        flags.error(f"--model: got {got}; allowed: multiples of 32")
    rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if args.device == "gpu" and rank >= gpus:
        flags.error(f"--device: got gpu for process {rank}; allowed: cpu, or one of the {gpus} GPU(s) per process")
    args.torch_device = torch.device("cuda", rank) if args.device == "gpu" else torch.device("cpu")
    if args.layers is None and size == "layer" and not args.model:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local
        if args.device == "gpu":
            memory = torch.cuda.get_device_properties(rank).total_memory
        args.layers = layers_that_fit(config, ranks, args.batch_size * args.max_seq_length, memory)
    if args.layers is not None and args.layers > config.num_hidden_layers:
        flags.error(f"--layers: got {args.layers}; allowed: 1 to {config.num_hidden_layers}")
    config.num_hidden_layers = args.layers or config.num_hidden_layers
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)  # torchrun sets these
    try:
        tokens = tokens_of(args)
    except (OSError, ValueError) as error:
        sys.exit(f"{PROG}: error: {error}")
    if args.device == "gpu":
        torch.cuda.set_device(args.torch_device)
    dist.init_process_group("nccl" if args.device == "gpu" else "gloo")
    rank, ranks, config = dist.get_rank(), dist.get_world_size(), args.config
    if rank == 0:
        sizes = f"{config.num_hidden_layers} layers, dim {config.hidden_size}, hidden {config.intermediate_size}"
        experts = f"{config.num_local_experts} experts, {config.num_experts_per_tok} per token"
        print(f"Mixtral: {sizes}, {experts}; {args.batch_size} x {args.max_seq_length} tokens a rank")
        print(f"{ranks} rank(s) on {args.device}: ep {args.ep_size}, dp {ranks // args.ep_size}", flush=True)
    rows = []
    for stage in range(4) if args.improvement == "all" else [int(args.improvement)]:
        rows.append(run(stage, args, tokens, rank, ranks))
        gc.collect()
        if args.device == "gpu":
            torch.cuda.empty_cache()
    if rank == 0:
        print(table(rows), flush=True)
    leave()


if __name__ == "__main__":
    main()
