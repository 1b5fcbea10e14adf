"""Schedule, initial weights, their names, and the flags of both training scripts."""

import numpy as np
import pytest

from examples.config import PRESETS, Config, is_decayed, is_expert, learning_rates, parse_args, rope_tables
from examples.model_torch import Transformer
from examples.weights import initial_weights, weight_shapes

TINY = PRESETS["tiny"]


def test_learning_rates_warm_up_and_decay_along_a_cosine():
    rates = learning_rates(Config(steps=14, warmup_steps=4, peak_lr=1.0, final_lr=0.2))
    np.testing.assert_allclose(rates[:5], [0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[9] == pytest.approx(0.6)  # middle of the cosine
    assert rates[-1] == pytest.approx(0.2 + 0.4 * (1 + np.cos(0.9 * np.pi)))
    assert (np.diff(rates[4:]) < 0).all()


def test_rope_is_a_rotation_by_position():
    cos, sin = rope_tables(TINY)
    assert cos.shape == sin.shape == (TINY.seq_len, TINY.head_dim // 2)
    np.testing.assert_allclose(cos[:, 0] + 1j * sin[:, 0], np.exp(1j * np.arange(TINY.seq_len)), atol=1e-6)
    np.testing.assert_allclose(cos**2 + sin**2, 1, atol=1e-6)


def test_names_and_shapes_match_the_torch_model():
    model = Transformer(TINY, "bf16")
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == weight_shapes(TINY)
    assert set(model.state_dict()) == set(weight_shapes(TINY))


def test_initial_weights_depend_on_the_seed_alone():
    config = PRESETS["small"]
    weights, again = initial_weights(config), initial_weights(config)
    assert all(np.array_equal(weights[n], again[n]) for n in weights)
    assert weights["blocks.0.attn.qkv.weight"].std() == pytest.approx(config.dim**-0.5, rel=0.02)
    assert weights["embed.weight"].std() == pytest.approx(1, rel=0.02)
    assert weights["head.weight"].std() == pytest.approx(0.02, rel=0.02)
    assert (weights["norm.weight"] == 1).all()
    assert not np.array_equal(weights["head.weight"], initial_weights(Config(seed=1))["head.weight"])


def test_experts_are_sharded_and_matrices_are_decayed():
    shapes = weight_shapes(TINY)
    assert {n.rsplit(".", 1)[-1] for n in shapes if is_expert(n)} == {"w1", "w2", "w3"}
    assert {n for n, shape in shapes.items() if not is_decayed(shape)} == {n for n in shapes if "norm" in n}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--out"),
        (["--out", "x", "--precision", "fp4"], "'bf16', 'mxfp8'"),
        (["--out", "x", "--ep", "3"], "--ep: got 3; allowed: divisors of 8 experts"),
        (["--out", "x", "--ep", "0"], "--ep: got 0"),
        (["--out", "x", "--steps", "-1"], "--steps: got -1; allowed: at least 0"),
        (["--out", "x", "--log-every", "0"], "--log-every: got 0; allowed: at least 1"),
        (["--out", "x", "--resume", "--init-from", "y"], "--init-from: not together with --resume"),
    ],
)
def test_an_error_names_the_bad_flag(flags, message, capsys):
    with pytest.raises(SystemExit) as exit:
        parse_args("prog", flags)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("existing", "refused"),
    [("step-000005/", True), ("log.jsonl", True), ("notes/", False), ("step-000005.partial/", False)],
)
def test_a_folder_with_a_run_needs_resume(tmp_path, capsys, existing, refused):
    (tmp_path / existing).mkdir() if existing.endswith("/") else (tmp_path / existing).touch()
    parse_args("prog", ["--out", str(tmp_path), "--resume"])
    if not refused:
        parse_args("prog", ["--out", str(tmp_path)])
        return
    with pytest.raises(SystemExit):
        parse_args("prog", ["--out", str(tmp_path)])
    assert f"--out: {tmp_path} already holds a run; pass --resume" in capsys.readouterr().err


@pytest.mark.parametrize("below", ["file", "file/run"])
@pytest.mark.parametrize("resume", [(), ("--resume",)])
def test_out_must_not_be_a_file(tmp_path, capsys, below, resume):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        parse_args("prog", ["--out", str(tmp_path / below), *resume])
    assert f"--out: got {tmp_path / below}, but {tmp_path / 'file'} is a file" in capsys.readouterr().err


def test_flags_change_the_preset():
    flags = ["--out", "x", "--preset", "tiny", "--steps", "7", "--seed", "3", "--log-every", "2", "--eval-every", "5"]
    args, config = parse_args("prog", flags)
    assert (args.precision, args.ep, args.resume, args.data) == ("mxfp8", 1, False, None)
    assert (config.steps, config.seed, config.log_every, config.eval_every) == (7, 3, 2, 5)
    assert config.dim == TINY.dim
