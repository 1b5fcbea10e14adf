"""Fine-tune a model of Hugging Face transformers with its `Trainer`, the experts in MXFP8; save it, and load it again.

    python examples/integrations/hf_trainer.py --out runs/hf              # a small Qwen3-MoE of random weights
    python examples/integrations/hf_trainer.py --out runs/hf --lora       # adapters of the experts, by PEFT
    python examples/integrations/hf_trainer.py --out runs/hf --model DIR --data TEXT --lora --bf16 --lr 1e-4

`register_experts` makes a recipe an experts implementation of transformers, by the recipe's name. The modules, the
names of parameters and the checkpoints stay the model's own.

`save_pretrained` does not store the implementation. Whoever loads the model registers and names it again, as `load`
does; otherwise transformers runs its own `grouped_mm`. Needs `pip install 'mxep[transformers]' accelerate`, and `peft`
for --lora.
"""

import argparse
import importlib.util
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from mxep.core_kernels.policy.recipe import RECIPES
from mxep.torch_frontend.integrations.transformers import register_experts
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Trainer, TrainingArguments

PROG = "hf_trainer.py"
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "moe_intermediate_size": 96,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
}


class Windows(Dataset[dict[str, Tensor]]):
    """The tokens of a text, cut into rows of equal length."""

    def __init__(self, tokens: Tensor, length: int) -> None:
        self.rows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def tokens_of(args: argparse.Namespace) -> tuple[Any, Tensor]:
    """The model's tokenizer and the text's tokens; None and bytes for the small model, which has none."""
    path = args.data or Path(sysconfig.get_path("stdlib")) / "argparse.py"
    if args.model is None:
        return None, torch.tensor(list(path.read_bytes()))
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    except (OSError, ValueError):
        tokenizer = ()
    if len(tokenizer) < 2:  # of a class of transformers that does not raise without its files
        sys.exit(
            f"{PROG}: error: --model: got {args.model}, without a tokenizer that transformers loads; "
            "allowed: a folder with tokenizer.json, or a name on the hub"
        )
    return tokenizer, torch.tensor(tokenizer(path.read_text()).input_ids)


def load(model: str | Path | None, recipe: str) -> Any:
    """The model with its experts in the recipe: a checkpoint, of this program too, or a small one of random weights."""
    register_experts(recipe)
    if model is None:
        return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**TINY), experts_implementation=recipe)
    loaded = AutoModelForCausalLM.from_pretrained(model, experts_implementation=recipe)
    # transformers ignores the setting for other models. Its decorator gives the attribute to experts that it reaches.
    if not any(hasattr(module, "is_concatenated") for module in loaded.modules()):
        sys.exit(
            f"{PROG}: error: --model: got model_type {loaded.config.model_type!r}, without experts that take a recipe; "
            "allowed: models of `register_experts`; `convert_moe` converts others with experts, such as Llama 4 "
            "(docs/guides/transformers.md)"
        )
    return loaded


def with_adapters(model: nn.Module, rank: int) -> Any:
    """Freeze the model and add low-rank adapters of the experts' weights, by PEFT.

    A model of transformers has the experts of a layer as two parameters, not as linear layers: PEFT's
    `target_parameters` adapts them, `target_modules` cannot. Each forward adds the low-rank product to the weights.
    """
    from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]

    names = [
        name for name, _ in model.named_parameters() if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=[], target_parameters=names)
    return get_peft_model(model, config)


def loss_of(model: Any, row: Tensor, bf16: bool) -> float:
    """The loss of one row, without gradients. bf16: in autocast, as the Trainer runs the model that it trains."""
    model.eval()
    row = row[None].to(model.device)
    with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
        return model(input_ids=row, labels=row).loss.item()


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    flags = argparse.ArgumentParser(prog=PROG, description="transformers' Trainer, experts in MXFP8.")
    flags.add_argument("--out", type=Path, required=True, help="folder of the trained model, or of its adapters")
    flags.add_argument("--model", help="a checkpoint of transformers (default: a small Qwen3-MoE of random weights)")
    flags.add_argument("--data", type=Path, metavar="FILE", help="text (default: one file of the standard library)")
    flags.add_argument("--recipe", choices=tuple(RECIPES), default="mxfp8")
    flags.add_argument("--lora", action="store_true", help="train low-rank adapters of the experts alone")
    flags.add_argument("--rank", type=int, default=8, metavar="N", help="of the adapters (default: 8)")
    flags.add_argument("--bf16", action="store_true", help="bf16 autocast; the experts' products are the same")
    flags.add_argument("--length", type=int, default=128, metavar="N", help="tokens of a row (default: 128)")
    flags.add_argument("--batch", type=int, default=8, metavar="N", help="rows of a step and GPU (default: 8)")
    flags.add_argument("--steps", type=int, default=20, metavar="N")
    flags.add_argument("--lr", type=float, default=1e-2)
    args = flags.parse_args(argv)
    for name, low in {"rank": 1, "length": 2, "batch": 1, "steps": 1}.items():
        if getattr(args, name) < low:
            flags.error(f"--{name}: got {getattr(args, name)}; allowed: at least {low}")
    if args.data and not args.data.is_file():
        flags.error(f"--data: got {args.data}; allowed: a text file")
    if args.lora and importlib.util.find_spec("peft") is None:
        flags.error("--lora: peft is not installed; allowed: after `pip install peft`")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    torch.manual_seed(0)
    model, (tokenizer, tokens) = load(args.model, args.recipe), tokens_of(args)
    rows = Windows(tokens, args.length)
    if not rows.rows.numel():
        sys.exit(f"{PROG}: error: --data: got {len(tokens)} tokens; allowed: at least --length {args.length}")
    if args.lora:
        if args.model is None:  # adapters need the weights that they adapt
            args.model = args.out / "base"
            model.save_pretrained(args.model)
        model = with_adapters(model, args.rank)
        model.print_trainable_parameters()
    options: dict[str, Any] = {"max_steps": args.steps, "learning_rate": args.lr, "bf16": args.bf16}
    options |= {"per_device_train_batch_size": args.batch, "logging_steps": max(1, args.steps // 10)}
    options |= {"report_to": [], "save_strategy": "no", "use_cpu": not torch.cuda.is_available()}
    Trainer(model, TrainingArguments(str(args.out), **options), train_dataset=rows).train()

    model.save_pretrained(args.out)
    if tokenizer is not None:
        tokenizer.save_pretrained(args.out)
    if args.lora:
        from peft import PeftModel  # pyright: ignore[reportMissingImports]

        again: Any = PeftModel.from_pretrained(load(args.model, args.recipe), args.out)
    else:
        again = load(args.out, args.recipe)
    again = again.to(model.device)
    row = rows[0]["input_ids"]
    print(f"loss of the first row: trained {loss_of(model, row, args.bf16):.6f}", end=", ")
    print(f"loaded again {loss_of(again, row, args.bf16):.6f}")


if __name__ == "__main__":
    main()
