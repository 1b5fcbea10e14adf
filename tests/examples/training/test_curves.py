"""The log survives a kill. The check of the curves fails where it must."""

import json
from pathlib import Path

import pytest

from examples.training.config import LOG_NAME, PRESETS, describe
from examples.training.plot_curves import main
from examples.training.runlog import RunLog, read_log
from examples.training.throughput import flops_per_token

TINY = PRESETS["tiny"]


def write_run(folder: Path, train: dict[int, float], held_out: dict[int, float], **changed: object) -> None:
    framework, _, recipe = folder.name.partition("-")
    header = describe(TINY, framework=framework, recipe=recipe, ep=2, device="cpu", train_bytes=900, held_out_bytes=100)
    log = RunLog(folder, TINY, 0, header | changed, write=True)
    for step, loss in train.items():
        log.train(step, {"loss": loss})
    for step, loss in held_out.items():
        log.eval(step, loss)
    log.close()


FOUR = ("torch-bf16", "torch-mxfp8", "jax-bf16", "jax-mxfp8")


def write_four_runs(root: Path, changed: str = "", factor: float = 1.0) -> None:
    for name in FOUR:
        scale = factor if name == changed else 1.0
        write_run(root / name, {0: 5.5, 10: 3.0 * scale, 11: 2.9}, {0: 5.5, 12: 2.5 * scale})


def exit_code(root: Path, *flags: str) -> int | str | None:
    with pytest.raises(SystemExit) as exit:
        main([str(root), *flags])
    return exit.value.code


def test_a_resumed_log_keeps_the_records_up_to_the_checkpoint(tmp_path):
    write_run(tmp_path, {s: float(s) for s in range(6)}, {0: 5.5, 4: 5.0})
    with (tmp_path / LOG_NAME).open("a") as file:
        file.write('{"kind": "train", "st')  # killed in the middle of a line
    log = RunLog(tmp_path, TINY, 4, {"framework": "jax", "device": "cpu", "ep": 1}, write=True)
    log.train(4, {"loss": 40.0})
    log.close()
    records = read_log(tmp_path)
    assert records[0] == {"kind": "run", "framework": "jax", "device": "cpu", "ep": 1}
    assert [(r["kind"], r["step"], r["loss"]) for r in records[1:]] == [
        *(("train", s, float(s)) for s in range(4)),
        ("eval", 0, 5.5),
        ("eval", 4, 5.0),
        ("train", 4, 40.0),
    ]


def test_a_rank_that_does_not_write_leaves_no_file(tmp_path):
    log = RunLog(tmp_path, TINY, 0, {"device": "cpu", "ep": 1}, write=False)
    log.step()
    log.train(0, {"loss": 1.0})
    log.eval(0, 1.0)
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_equal_curves_pass_and_are_drawn(tmp_path, capsys):
    write_four_runs(tmp_path)
    assert exit_code(tmp_path) == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count(": ok") == 6


def test_a_limit_other_than_the_default(tmp_path):
    write_four_runs(tmp_path, "torch-bf16", 1.05)
    assert [exit_code(tmp_path, "--limit", limit) for limit in ("0.06", "0.04", "1.0")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("changed", "factor", "code"),
    [
        ("torch-bf16", 1.0069, 0),
        ("torch-bf16", 1.0071, 1),
        ("jax-mxfp8", 0.992, 1),
        ("jax-bf16", float("nan"), 1),
    ],
)
def test_curves_that_differ_by_more_than_the_limit_fail(tmp_path, changed, factor, code):
    write_four_runs(tmp_path, changed, factor)
    assert exit_code(tmp_path) == code


def test_held_out_mxfp8_against_bf16_is_checked(tmp_path, capsys):
    for name in FOUR:
        write_run(tmp_path / name, {0: 5.5}, {12: 2.5 if name.endswith("bf16") else 2.53})
    assert exit_code(tmp_path) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert [line.split(",")[:2] for line in failed] == [
        ["mxfp8 against bf16", " torch"],
        ["mxfp8 against bf16", " jax"],
    ]


def test_a_third_recipe_is_compared_too(tmp_path, capsys):
    write_four_runs(tmp_path)
    write_run(tmp_path / "torch-fp8_rowwise", {0: 5.5, 10: 3.0, 11: 2.9}, {0: 5.5, 12: 2.5})
    assert "jax-fp8_rowwise" in str(exit_code(tmp_path))
    write_run(tmp_path / "jax-fp8_rowwise", {0: 5.5, 10: 3.0, 11: 2.9}, {0: 5.5, 12: 2.53})
    assert exit_code(tmp_path) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert [line.partition("  ")[0] for line in failed] == [
        "torch against jax, fp8_rowwise, eval",
        "fp8_rowwise against bf16, jax, eval",
    ]


def test_a_record_of_a_gpu_has_its_work_and_its_memory(tmp_path, capsys):
    for device in ("NVIDIA H200", "another GPU"):
        log = RunLog(tmp_path / device, TINY, 0, {"device": device, "ep": 2}, write=True)
        log.step()
        log.train(0, {"loss": 5.5}, peak_nbytes=3 * 2**30)
        log.close()
    known, unknown = (read_log(tmp_path / device)[1] for device in ("NVIDIA H200", "another GPU"))
    assert known["peak_gib"] == unknown["peak_gib"] == 3.0
    assert known["tflops"] == pytest.approx(known["tokens_per_s"] * flops_per_token(TINY) / 2 / 1e12, abs=0.05)
    assert "of_bf16_peak" in known
    assert "of_bf16_peak" not in unknown
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        "NVIDIA H200: step 0: loss 5.5000",
        "another GPU: step 0: loss 5.5000",
    ]
    assert "% of the bf16 peak), at most 3.0 GiB" in lines[0]


def test_missing_or_unequal_runs_are_an_error(tmp_path):
    assert "torch-bf16" in str(exit_code(tmp_path))
    write_four_runs(tmp_path)
    lines = (tmp_path / "jax-bf16" / LOG_NAME).read_text().splitlines(keepends=True)
    (tmp_path / "jax-bf16" / LOG_NAME).write_text("".join(x for x in lines if json.loads(x).get("step") != 10))
    assert "different train steps" in str(exit_code(tmp_path))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"framework": "torch"}, "log.jsonl has framework torch, expected jax"),
        ({"recipe": "bf16"}, "log.jsonl has recipe bf16, expected mxfp8"),
        ({"seed": 3}, "are runs of different configs: seed=0 and 3"),
        ({"train_bytes": 800}, "are runs of different configs: train_bytes=900 and 800"),
        ({"kind": "train"}, "does not begin with a run record"),
    ],
)
def test_a_log_of_another_run_is_an_error(tmp_path, changed, message):
    write_four_runs(tmp_path)
    write_run(tmp_path / "jax-mxfp8", {0: 5.5, 10: 3.0, 11: 2.9}, {0: 5.5, 12: 2.5}, **changed)
    error = str(exit_code(tmp_path))
    assert message in error
    assert "jax-mxfp8" in error


def test_the_ranks_and_the_device_may_differ(tmp_path):
    write_four_runs(tmp_path)
    write_run(tmp_path / "jax-mxfp8", {0: 5.5, 10: 3.0, 11: 2.9}, {0: 5.5, 12: 2.5}, ep=1, device="NVIDIA H200")
    assert exit_code(tmp_path) == 0


def test_an_empty_log_is_an_error(tmp_path):
    write_four_runs(tmp_path)
    (tmp_path / "torch-bf16" / LOG_NAME).write_text("")
    assert "does not begin with a run record" in str(exit_code(tmp_path))
