"""The programs of examples/integrations on a CPU: the Trainer with and without adapters, the products, Slurm lines."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from examples.integrations import grouped_gemm, hf_trainer, rollout
from examples.training import config, flags, torch_fsdp_ep, train_jax

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "integrations"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(FOLDER / script), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)


ADAPTERS = importlib.util.find_spec("peft") is not None


def test_adapters_need_peft(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        hf_trainer.parse_args(["--out", "unused", "--lora"])
    assert "--lora: peft is not installed; allowed: after `pip install peft`" in capsys.readouterr().err


@pytest.mark.parametrize("adapters", [(), ("--lora",)] if ADAPTERS else [()])
def test_the_trainer_saves_and_loads(adapters: tuple[str, ...], tmp_path: Path) -> None:
    ran = run("hf_trainer.py", "--out", str(tmp_path), "--steps", "4", "--length", "32", *adapters)
    assert ran.returncode == 0, ran.stderr
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", ran.stdout)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    (saved,) = re.findall(r"trained ([\d.]+), loaded again ([\d.]+)", ran.stdout)
    assert saved[0] == saved[1]
    stored = tmp_path / "base" if adapters else tmp_path
    untold = AutoModelForCausalLM.from_pretrained(stored)
    assert untold.config._experts_implementation == "grouped_mm"  # as the program's docstring warns


SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 32,
}


@pytest.mark.parametrize("config_", [LlamaConfig(**SMALL), Llama4TextConfig(**SMALL, num_local_experts=2)])
def test_a_model_whose_experts_stay_as_they_are(config_: PretrainedConfig, tmp_path: Path) -> None:
    """They trained without MXFP8, and without a message."""
    AutoModelForCausalLM.from_config(config_).save_pretrained(tmp_path)
    message = f"--model: got model_type '{config_.model_type}', without experts that take a recipe; .*`convert_moe`"
    with pytest.raises(SystemExit, match=message):
        hf_trainer.load(tmp_path, "mxfp8")


def test_a_checkpoint_with_a_tokenizer(tmp_path: Path) -> None:
    """In bf16 on a CPU. The saved folder has all that the next run needs."""
    words = Tokenizer(WordLevel({"[UNK]": 0, "import": 1, "def": 2, "return": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "0")
    hf_trainer.load(None, "mxfp8").save_pretrained(tmp_path / "0")
    flags = "--steps", "1", "--length", "32", "--bf16"
    ran = run("hf_trainer.py", "--model", str(tmp_path / "0"), "--out", str(tmp_path / "1"), *flags)
    assert ran.returncode == 0, ran.stderr
    (saved,) = re.findall(r"trained ([\d.]+), loaded again ([\d.]+)", ran.stdout)
    assert saved[0] == saved[1]
    assert AutoTokenizer.from_pretrained(tmp_path / "1")("def x import").input_ids == [2, 0, 1]


@pytest.mark.parametrize("config_", [Qwen3MoeConfig(), MixtralConfig()], ids=["empty", "raises"])
def test_a_checkpoint_without_a_tokenizer(config_: PretrainedConfig, tmp_path: Path) -> None:
    """Without its files one class of transformers has no vocabulary, and another raises."""
    config_.save_pretrained(tmp_path)
    args = hf_trainer.parse_args(["--out", "unused", "--model", str(tmp_path)])
    words = re.escape(f"--model: got {tmp_path}, without a tokenizer that transformers loads; allowed: ")
    with pytest.raises(SystemExit, match=words):
        hf_trainer.tokens_of(args)


def test_a_short_text(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("a" * 127)
    with pytest.raises(SystemExit, match="--data: got 127 tokens; allowed: at least --length 128"):
        hf_trainer.main(["--out", str(tmp_path / "out"), "--data", str(text)])


@pytest.mark.parametrize(
    ("main", "flags", "message"),
    [
        (hf_trainer.main, ["--length", "0"], "--length: got 0; allowed: at least 2"),
        (hf_trainer.main, ["--data", "missing"], "--data: got missing; allowed: a text file"),
        (grouped_gemm.main, ["--repeats", "0"], "--repeats: got 0; allowed: at least 1"),
        (grouped_gemm.main, ["--groups", "0"], "--groups: got 0; allowed: at least 1"),
        (grouped_gemm.main, ["--k", "48"], "--k: got 48; allowed: multiples of 32"),
    ],
)
def test_bad_flags(
    main: Callable[[list[str]], None], flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*flags, *(["--out", "unused"] if main is hf_trainer.main else [])])
    assert message in capsys.readouterr().err


def test_rollout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole sequences: the program asserts equal bits. With a KV cache the layer of experts does not differ."""
    rollout.main(["--out", str(tmp_path), "--steps", "5"])
    printed = capsys.readouterr().out
    assert "40 log-probabilities are equal to the training forward, bit for bit" in printed
    (largest,) = re.findall(r"^KV cache: .* is ([\d.e+-]+)$", printed, re.MULTILINE)
    assert float(largest) < 1e-5  # measured: 6.6e-7
    rows = {name: int(n) for name, n in re.findall(r"^(\w+) +(\d+) of 48", printed, re.MULTILINE)}
    assert len(rows) == 8
    assert {rows[name] for name in ("norm1", "norm2", "moe", "log_softmax")} == {0}


def test_the_products(capsys: pytest.CaptureFixture[str]) -> None:
    grouped_gemm.main(["--repeats", "1"])
    rows = re.findall(r"^(\w+, \w+) +([\d.]+) +([\d.]+) +([\d.]+)", capsys.readouterr().out, re.MULTILINE)
    decibels = {name: min(map(float, values)) for name, *values in rows}
    # Measured: 55.6, 55.6 and 28.4 dB. Less 1.
    assert decibels["torch, bf16"] > 54.6
    assert decibels["mxep, bf16"] > 54.6
    assert 27.4 < decibels["mxep, mxfp8"] < 40


def command_of(script: str, program: str) -> list[str]:
    """The arguments of a program in a script of Slurm."""
    text = (FOLDER / "slurm" / script).read_text()
    assert "# NOT TESTED" in text
    subprocess.run(["bash", "-n", FOLDER / "slurm" / script], check=True)
    (line,) = [line for line in text.replace("\\\n", " ").splitlines() if line.startswith("srun")]
    return shlex.split(line.split(program)[1].rstrip("'").replace("$SLURM_NNODES", "2").replace("$SLURM_PROCID", "1"))


def test_the_flags_of_the_slurm_scripts() -> None:
    """Two hosts of eight GPUs. Nothing of Slurm runs."""
    args = torch_fsdp_ep.parse_args(command_of("torch.sbatch", "torch_fsdp_ep.py"), "cuda", 16)
    assert (args.ep, args.batch % 16) == (8, 0)
    parser = flags.parser(train_jax.PROG)
    train_jax.add_option_flags(parser)
    train_jax.add_process_flags(parser)
    args, sizes = flags.parse_args(parser, command_of("jax.sbatch", "examples.training.train_jax"))
    train_jax.check_groups(parser, args, sizes)
    assert (args.dp * args.ep, args.num_processes, args.process_id) == (16, 2, 1)
    assert isinstance(sizes, config.Config)
