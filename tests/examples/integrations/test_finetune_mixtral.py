"""Mixtral in four stages: their logits and gradients compared, a run of two ranks, checkpoints, bad input."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import LlamaConfig, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

from examples.integrations import finetune_mixtral, mixtral

from ...compare import sqnr_db

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
CONFIG = {**mixtral.SIZES["tiny"], "num_hidden_layers": 1}
# Against stage 0, the worst of the logits and of all gradients. Measured: 40.7, 40.7 and 22.3 dB. Less 1.
FLOORS_DB = {1: 39.7, 2: 39.7, 3: 21.3}
IDS = torch.arange(2 * 64).view(2, 64) * 37 % 256


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # type: ignore[operator]


def outcome(stage: int, load: mixtral.Load | None = None) -> dict[str, Tensor]:
    """Logits, and the gradients that all stages have under one name; of the experts, under stage 0's."""
    model = mixtral.build(MixtralConfig(**CONFIG), stage, CPU, 1, 1, load or mixtral.random_weights(0, CPU))
    result = model(input_ids=IDS, labels=IDS, use_cache=False)
    result.loss.backward()
    found = {name.replace(".router.", ".gate."): whole(p.grad) for name, p in model.named_parameters()}
    prefix = "model.layers.0.mlp.experts."
    if stage:
        w1, w3, w2 = (found.pop(prefix + name) for name in ("w1", "w3", "w2"))
        found |= {prefix + "gate_up_proj": torch.cat([w1, w3], 1), prefix + "down_proj": w2}
    return found | {"logits": result.logits.detach()}


def test_the_stages_agree(group: None) -> None:
    want = outcome(0)
    for stage, floor_db in FLOORS_DB.items():
        got = outcome(stage)
        assert got.keys() == want.keys()
        decibels = {name: sqnr_db(got[name], want[name]) for name in want}
        assert min(decibels.values()) > floor_db, (stage, decibels)


def test_a_checkpoint_is_the_model_of_transformers(tmp_path: Path, group: None) -> None:
    """Every weight of a saved model is loaded under its name: the logits of stage 0 are the model's own."""
    folder = saved(tmp_path / "mixtral")
    config, files = mixtral.read_config(folder)
    model = mixtral.build(config, 0, CPU, 1, 1, mixtral.checkpoint_weights(files, CPU))
    theirs = MixtralForCausalLM.from_pretrained(folder).state_dict()
    ours = {name: whole(p) for name, p in model.state_dict().items()}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def saved(folder: Path) -> Path:
    torch.manual_seed(0)
    MixtralForCausalLM(MixtralConfig(**CONFIG)).save_pretrained(folder, max_shard_size="100KB")
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "import": 1, "def": 2, "return": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_two_ranks_print_the_table() -> None:
    """Stages 1 to 3 with experts on two ranks have the losses of stage 0, which has all experts on each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    sizes = ["--layers", "1", "--max-seq-length", "64", "--warmup-steps", "1", "--train-steps", "2"]
    command += ["-m", finetune_mixtral.PROG, *sizes]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    losses, norms = (
        [[float(x) for x in re.findall(rf"stage {stage}, .*{what} ([\d.]+)", result.stdout)] for stage in range(4)]
        for what in ("loss", "norm")
    )
    assert len(losses[0]) == 3
    # Measured: losses 8.6e-5, 8.6e-5 and 1.5e-3, gradient norms 2.7e-4, 2.7e-4 and 8.0e-3.
    for stage, of_loss, of_norm in ((1, 3e-4, 2e-3), (2, 3e-4, 2e-3), (3, 3e-3, 2e-2)):
        assert losses[stage] == pytest.approx(losses[0], rel=of_loss), losses
        assert norms[stage] == pytest.approx(norms[0], rel=of_norm), norms
    rows = re.findall(r"^\| (\d) \|.*\| - \| [\d.]+ \| [\d.]+ \| [\d.]+x \|$", result.stdout, re.MULTILINE)
    assert rows == ["0", "1", "2", "3"]


def test_the_text_as_tokens(tmp_path: Path) -> None:
    folder, text = saved(tmp_path / "mixtral"), tmp_path / "text"
    text.write_text("def import x return def")
    arguments = ["--data", str(text), "--max-seq-length", "4"]
    ids = finetune_mixtral.tokens_of(finetune_mixtral.parse_args([*arguments, "--model", str(folder)]))
    assert ids.tolist() == [2, 1, 0, 3, 2]
    assert finetune_mixtral.tokens_of(finetune_mixtral.parse_args(arguments)).tolist() == list(text.read_bytes())
    args = finetune_mixtral.parse_args([*arguments[:-1], "5", "--model", str(folder)])
    with pytest.raises(ValueError, match="--data: got 5 tokens; allowed: more than --max-seq-length 5"):
        finetune_mixtral.tokens_of(args)
    args.config.vocab_size, args.max_seq_length = 3, 4
    with pytest.raises(ValueError, match="--model: got token 3; allowed: ids below vocab_size 3"):
        finetune_mixtral.tokens_of(args)


def test_layers_that_fit() -> None:
    """Mixtral 8x7B has 1.46e9 weights a layer: 5.8 GB of four ranks' memory, and 3.6 GB for 8192 tokens."""
    fit = partial(mixtral.layers_that_fit, MixtralConfig())
    assert (fit(4, 8192, 141 * 10**9), fit(4, 32768, 141 * 10**9), fit(1, 8192, 10**9)) == (10, 4, 1)


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        finetune_mixtral.parse_args(arguments)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--improvement", "4"], "argument --improvement: invalid choice: '4'"),
        (["--ep-size", "4"], "--ep-size: got 4; allowed: divisors of 6 ranks and of 8 experts"),
        (["--ep-size", "3"], "--ep-size: got 3; allowed: divisors of 6 ranks and of 8 experts"),
        (["--ep-size", "0"], "--ep-size: got 0; allowed: at least 1"),
        (["--ep-size", "2", "--layers", "3"], "--layers: got 3; allowed: 1 to 2"),
        (["--ep-size", "2", "--train-steps", "0"], "--train-steps: got 0; allowed: at least 1"),
        (
            ["--ep-size", "2", "--device", "gpu"],
            "--device: got gpu for process 0; allowed: cpu, or one",
        ),
    ],
)
def test_bad_arguments(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert words in refused(arguments, capsys)


def test_bad_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(tmp_path / "mixtral")
    model = ["--model", str(folder)]

    def changed(**fields: object) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    assert finetune_mixtral.parse_args(model).config.num_hidden_layers == 1
    assert "not allowed with argument" in refused([*model, "--size", "tiny"], capsys)
    changed(hidden_act="gelu")
    assert "--model: got hidden_act = 'gelu'; allowed: 'silu'" in refused(model, capsys)
    changed(hidden_act="silu", intermediate_size=80)
    assert "got hidden_size 64, intermediate_size 80; allowed: multiples of 32" in refused(model, capsys)
    changed(intermediate_size=128)
    _, files = mixtral.read_config(folder)
    with pytest.raises(ValueError, match=r"w1.weight of shape \(96, 64\); allowed: \(128, 64\), by config.json"):
        mixtral.weight("model.layers.0.mlp.experts.w1", (8, 128, 64), mixtral.checkpoint_weights(files, CPU))
    changed(num_local_experts=9)
    assert "without model.layers.0.block_sparse_moe.experts.8.w1.weight; allowed: safetensors" in refused(model, capsys)
    changed(num_local_experts=8)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert "without model.layers.0.block_sparse_moe.gate.weight; allowed: safetensors" in refused(model, capsys)
    (folder / "tokenizer.json").unlink()
    assert "without tokenizer.json" in refused(model, capsys)
    LlamaConfig().save_pretrained(folder)
    (folder / "tokenizer.json").touch()
    assert "got model_type 'llama'; allowed: 'mixtral'" in refused(model, capsys)
    (folder / "config.json").unlink()
    assert "without config.json; allowed: a folder of a Mixtral checkpoint" in refused(model, capsys)
