"""The flags that both training scripts take."""

from dataclasses import fields

import pytest

from examples.training.config import PRESETS, Config
from examples.training.flags import SIZES, parse_args, parser

TINY = PRESETS["tiny"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--out"),
        (["--out", "x", "--recipe", "fp4"], "'bf16', 'mxfp8'"),
        (["--out", "x", "--ep", "3"], "--ep: got 3; allowed: divisors of 8 experts"),
        (["--out", "x", "--ep", "0"], "--ep: got 0"),
        (["--out", "x", "--steps", "-1"], "--steps: got -1; allowed: at least 0"),
        (["--out", "x", "--log-every", "0"], "--log-every: got 0; allowed: at least 1"),
        (["--out", "x", "--batch-size", "0"], "--batch-size: got 0; allowed: at least 1"),
        (["--out", "x", "--dim", "48"], "--dim: got 48; allowed: multiples of 32"),
        (["--out", "x", "--hidden-dim", "100"], "--hidden-dim: got 100; allowed: multiples of 32"),
        (
            ["--out", "x", "--num-heads", "3"],
            "--num-heads: got 3; allowed: numbers that divide dim 128 into heads",
        ),
        (["--out", "x", "--top-k", "9"], "--top-k: got 9; allowed: 1 to 8 experts"),
        (["--out", "x", "--num-experts", "513"], "--num-experts: got 513; allowed: 1 to 512"),
        (["--out", "x", "--num-experts", "64", "--top-k", "33"], "--top-k: got 33; allowed: 1 to 32 experts"),
        (["--out", "x", "--batch-size", "6", "--ep", "4"], "--ep: got 4; allowed: divisors of 8 experts, 6 training"),
        (["--out", "x", "--device", "tpu"], "'cpu', 'gpu'"),
        (["--out", "x", "--dense-dtype", "float16"], "'float32', 'bfloat16'"),
        (["--out", "x", "--resume", "--init-from", "y"], "--init-from: not together with --resume"),
    ],
)
def test_an_error_names_the_bad_flag(flags, message, capsys):
    with pytest.raises(SystemExit) as exit:
        parse_args(parser("prog"), flags)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("existing", "refused"),
    [("step-000005/", True), ("log.jsonl", True), ("notes/", False), ("lock", False), ("step-000005.partial/", False)],
)
def test_a_folder_with_a_run_needs_resume(tmp_path, capsys, existing, refused):
    (tmp_path / existing).mkdir() if existing.endswith("/") else (tmp_path / existing).touch()
    parse_args(parser("prog"), ["--out", str(tmp_path), "--resume"])
    if not refused:
        parse_args(parser("prog"), ["--out", str(tmp_path)])
        return
    with pytest.raises(SystemExit):
        parse_args(parser("prog"), ["--out", str(tmp_path)])
    assert f"--out: {tmp_path} already holds a run; pass --resume" in capsys.readouterr().err


@pytest.mark.parametrize("below", ["file", "file/run"])
@pytest.mark.parametrize("resume", [(), ("--resume",)])
def test_out_must_not_be_a_file(tmp_path, capsys, below, resume):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        parse_args(parser("prog"), ["--out", str(tmp_path / below), *resume])
    assert f"--out: got {tmp_path / below}, but {tmp_path / 'file'} is a file" in capsys.readouterr().err


def test_flags_change_the_preset():
    flags = ["--out", "x", "--preset", "tiny", "--steps", "7", "--seed", "3", "--log-every", "2", "--eval-every", "5"]
    args, config = parse_args(parser("prog"), flags)
    assert (args.recipe, args.ep, args.resume, args.data, args.device) == (
        "mxfp8_wgrad_with_hp", 1, False, None, None,
    )  # fmt: skip
    assert (config.steps, config.seed, config.log_every, config.eval_every) == (7, 3, 2, 5)
    assert config.dim == TINY.dim


def test_every_size_has_a_flag():
    numbers = {field.name: 7 for field in fields(Config) if field.type in ("int", "int | None", int, int | None)}
    del numbers["vocab_size"]  # bytes
    assert numbers.keys() == SIZES.keys()
    numbers |= {"dim": 64, "hidden_dim": 96, "num_heads": 4, "top_k": 2}
    given = [text for name, n in numbers.items() for text in (f"--{name.replace('_', '-')}", str(n))]
    _, config = parse_args(parser("prog"), ["--out", "x", *given, "--dense-dtype", "bfloat16"])
    assert {name: getattr(config, name) for name in numbers} == numbers
    assert config.dense_dtype == "bfloat16"
