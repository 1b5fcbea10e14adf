"""torchtitan's trainer with the routed experts of this package or its own; docs/guides/torchtitan.md has the flags.

    torchrun --standalone --nproc-per-node 4 -m examples.integrations.train_torchtitan --assets runs/assets \\
      --training.steps 20 --parallelism.expert_parallel_degree 2 \\
      --override.imports mxep.torch_frontend.integrations.torchtitan.routed_experts

The script writes a tokenizer of bytes and a text into `--assets`, and passes every other argument on. By default it is
the debug model of DeepSeek-V3, on CPU ranks, for which torchtitan is not written: `use_cpu` is what that takes.

Needs `pip install 'mxep[torchtitan]'`, with the packages of torchtitan's trainer, such as torchdata.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch.distributed.fsdp import FSDPModule

from ..training.data import library_files
from ..training.ranks import end_process

PROG = "examples.integrations.train_torchtitan"
TEXT_NBYTES = 1 << 20


class CPU:
    """What torchtitan asks of a device's module."""

    set_device = staticmethod(torch.cpu.set_device)
    synchronize = staticmethod(torch.cpu.synchronize)

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def get_device_name(device: Any) -> str:
        return "CPU"

    @staticmethod
    def get_device_properties(device: Any) -> SimpleNamespace:
        return SimpleNamespace(total_memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))

    @staticmethod
    def memory_stats(device: Any) -> dict[str, int]:
        return {}  # torch counts no memory of a CPU

    @staticmethod
    def reset_peak_memory_stats() -> None:
        pass

    @staticmethod
    def empty_cache() -> None:
        pass


def use_cpu() -> str:
    """Before the first import of torchtitan, which asks for the device once. Returns the name of an override."""
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda device_type: CPU  # type: ignore[assignment]
    divide = FSDPModule.set_gradient_divide_factor

    def divide_after_sum(self: FSDPModule, factor: float) -> None:
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)  # Gloo has no reduction that multiplies

    FSDPModule.set_gradient_divide_factor = divide_after_sum
    from torchtitan.config import derive, override
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    def attention(config: FlexAttention.Config) -> ScaledDotProductAttention.Config:
        return derive(config, ScaledDotProductAttention.Config)  # flex attention has no backward on a CPU

    attention.__module__ = PROG  # where torchtitan looks, also if this script is __main__
    override(target=FlexAttention.Config)(attention)
    return f"{PROG}.attention"


def write_assets(folder: Path) -> None:
    """A tokenizer whose tokens are bytes, and the first MiB of Python's standard library, a file per line."""
    (folder / "text").mkdir(parents=True, exist_ok=True)
    tokens = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer: Any = Tokenizer(BPE(tokens, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    lines, size = [], 0
    for path in library_files():
        lines.append(json.dumps({"text": path.read_text(errors="replace")}))
        size += len(lines[-1])
        if size > TEXT_NBYTES:
            break
    (folder / "text" / "data.json").write_text("\n".join(lines))


def arguments(given: Sequence[str], assets: Path, *overrides: str) -> list[str]:
    """torchtitan's command line: missing defaults, then the given arguments, with more overrides in its list."""
    defaults = {
        "--module": ("deepseek_v3",),
        "--config": ("deepseek_v3_debugmodel",),
        "--hf_assets_path": (str(assets),),
        "--dataloader.dataset": ("c4_test",),  # a reader of JSON with a text in every line
        "--dataloader.dataset_path": (str(assets / "text"),),
        "--training.local_batch_size": ("1",),
        "--training.seq_len": ("128",),
        "--training.disable_cuda_graphs": (),  # with several ranks the splits of an all-to-all are on the host
        "--parallelism.spmd_backend": ("partial_dtensor",),
        "--debug.seed": ("0",),
        "--override.imports": overrides,
    }
    # --name=value is --name value. A value may have a = of its own.
    given = [part for w in given for part in (w.split("=", 1) if w.split("=")[0] in defaults else [w])]
    if "--override.imports" in given:
        place = given.index("--override.imports") + 1
        given[place:place] = overrides
    return [word for name, values in defaults.items() if name not in given for word in (name, *values)] + given


def cut(model_registry: Callable[..., Any], layers: int | None, *args: Any, **options: Any) -> Any:
    """A model of torchtitan's registry with its first layers alone; None is all."""
    spec = model_registry(*args, **options)
    spec.model.layers = spec.model.layers[:layers]
    return spec


def main(argv: Sequence[str] | None = None) -> None:
    flags = argparse.ArgumentParser(prog=PROG, description="torchtitan with these experts.")
    flags.add_argument("--assets", type=Path, required=True, metavar="DIR", help="folder of the tokenizer and the text")
    flags.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    flags.add_argument("--layers", type=int, metavar="N", help="the first N layers of a DeepSeek-V3; default: all")
    args, rest = flags.parse_known_args(argv)
    if args.layers is not None and args.layers < 1:
        flags.error(f"--layers: got {args.layers}; allowed: at least 1")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        write_assets(args.assets)
    overrides = [use_cpu()] if args.device == "cpu" else []
    from torchtitan import train
    from torchtitan.distributed import utils
    from torchtitan.models.deepseek_v3 import config_registry

    config_registry.model_registry = partial(cut, config_registry.model_registry, args.layers)
    if not hasattr(torch.distributed, "set_timeout"):  # torchtitan 0.3.0 is written for a torch after 2.13
        utils.set_pg_timeouts = lambda *args, **kwargs: None
    sys.argv[1:] = arguments(rest, args.assets, *overrides)
    train.main()
    if args.device == "cpu":
        end_process()


if __name__ == "__main__":
    main()
