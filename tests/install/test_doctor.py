"""`python -m mxep.doctor`: on this machine, and on machines that it is told of."""

import doctest
import json
import os
import re
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import mxep
import pytest
from mxep import doctor
from mxep.core_kernels.registry import OPS
from mxep.torch_frontend.integrations import torchtitan, transformers

from benchmarks.cases.shapes import H200
from benchmarks.figures import results
from benchmarks.figures.tables import table_moe_layer
from benchmarks.layer_bytes import bytes_per_weight


def test_examples() -> None:
    found = doctest.testmod(doctor)
    assert found.attempted
    assert not found.failed


def test_here_every_op_runs() -> None:
    run = subprocess.run([sys.executable, "-m", "mxep.doctor"], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith(f"mxep {mxep.__version__}, Python ")
    assert mxep.__version__ == metadata.version("mxep")
    assert run.stdout.endswith("\nNothing is wrong.\n")
    words = run.stdout.replace(",", "").split()
    for op in OPS:
        assert words.count(op) == 2, op  # PyTorch and JAX


def test_the_rows_from_which_mxfp8_gains_are_those_of_the_stored_lines() -> None:
    """If this fails, the layers were measured again: write the new number here and in choose_recipe.md."""
    rows = [row for row in results.newest("h200") if row["op"] == "moe_layer_fwd_bwd"]
    assert table_moe_layer.rows_to_gain(rows) == doctor.ROWS_TO_GAIN
    assert {f"{row['hardware']}, commit {row['commit'][:7]}" for row in rows} == {f"1x NVIDIA {doctor.MEASURED_ON}"}
    smallest = min(H200.moe_layers, key=lambda shape: shape.tokens * shape.top_k / shape.num_experts)
    measured = bytes_per_weight(smallest)
    moved = bytes_per_weight(smallest, gathered=True), measured / 2, measured / 4
    computed = [table_moe_layer.rows_to_gain(rows, nbytes - measured) for nbytes in moved]
    assert computed == list(doctor.COMPUTED_ROWS.values())
    page = (Path(__file__).parents[2] / "docs" / "guides" / "choose_recipe.md").read_text()
    assert f"fewer than about {doctor.ROWS_TO_GAIN} rows per expert" in page
    assert all(f"| {n} |" in page for n in (doctor.ROWS_TO_GAIN, *computed))


def test_a_reader_that_has_gone() -> None:
    """As `| head` does: the report ends without a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run([sys.executable, "-u", "-m", "mxep.doctor"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (run.returncode, run.stderr) == (-signal.SIGPIPE, "")


def test_the_tested_versions_are_those_of_the_constraints() -> None:
    """The pinned release is one that `TESTED` names, and so are the releases that the adapters allow."""
    text = (Path(__file__).parents[2] / "constraints.txt").read_text()
    pinned = dict(line.split("==") for line in text.splitlines() if "==" in line)
    named = set(doctor.TESTED) & set(pinned)
    assert named == set(doctor.TESTED)
    for package in named:
        releases = re.split(" to |, ", doctor.TESTED[package])
        assert any(f"{pinned[package]}.".startswith(f"{release}.") for release in releases), package
    first, last = (".".join(map(str, release)) for release in transformers.TESTED)
    assert doctor.TESTED["transformers"] == f"{first} to {last}"
    assert doctor.TESTED["torchtitan"] == torchtitan.TESTED


def report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, versions: dict[str, str],
           answers: dict[str, Any]) -> tuple[int, str]:  # fmt: skip
    """The report where these packages are installed and the frontends answer so: facts, or a line of stderr."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess:
        answer = next(answer for name, answer in answers.items() if f"{name}_facts" in command[-1])
        failed = isinstance(answer, str)
        return subprocess.CompletedProcess(command, int(failed), "" if failed else json.dumps(answer), str(answer))

    monkeypatch.setattr(doctor, "_version", lambda package: versions.get(package, ""))
    monkeypatch.setattr(doctor.subprocess, "run", run)
    status = doctor.main()
    return status, capsys.readouterr().out


ALL = {"numpy": "2.3.5", "ml_dtypes": "0.6.0", "triton": "3.6.0"}


def test_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gpu = {
        "quantize_row": ["triton, sm_90", {"cuda": "allowed: triton; this build has no CUDA kernel for it"}],
        "swiglu_row": ["cuda, sm_90", {}],
        "quantize_both_fold": ["quantize_row, swiglu_row", {}],
    }
    facts = {"devices": {"cuda:0 NVIDIA H200, sm_90": gpu}, "note": ""}
    status, text = report(monkeypatch, capsys, versions=ALL | {"torch": "2.11.0"}, answers={"torch": facts})
    assert (status, text.splitlines()[-1]) == (0, "Nothing is wrong.")
    for line in (
        "PyTorch on cuda:0 NVIDIA H200, sm_90",
        "  1 op in Triton, sm_90: quantize_row",
        "  1 op in CUDA C++, sm_90: swiglu_row",
        "  1 op composed of other ops: quantize_both_fold",
        "JAX: not installed; `pip install 'mxep[jax]'`",
    ):
        assert line in text.splitlines()


def test_what_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"devices": {"cuda:0 Old, sm_75": {"route": ["", {"triton": "allowed: sm_89, sm_90"}]}}, "note": ""}
    status, text = report(
        monkeypatch, capsys, versions=ALL | {"torch": "2.10.0", "jax": "0.9.1", "torchtitan": "0.3.1"},
        answers={"torch": facts, "jax": "Traceback\nImportError: no libdevice"},
    )  # fmt: skip
    assert status == 1
    assert text.split("Wrong:\n")[1].splitlines() == [
        "- torch 2.10.0: mxep asks for >=2.11; `pip install 'torch>=2.11'`",
        "- jax 0.9.1: mxep asks for >=0.10.2; `pip install 'jax>=0.10.2'`",
        "- torchtitan 0.3.1: mxep asks for ==0.3.0; `pip install 'torchtitan==0.3.0'`",
        "- PyTorch on cuda:0 Old, sm_75: 1 of 1 ops do not run, route among them",
        "- JAX: ImportError: no libdevice",
    ]
    assert "  1 op does not run (triton: allowed: sm_89, sm_90): route" in text.splitlines()


def test_a_release_above_the_tested_ones_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"devices": {"cpu": {"route": ["cpp", {}]}}, "note": ""}
    versions = ALL | {"triton": "3.9.0", "numpy": "2.12.0", "torch": "2.11.0"}
    status, text = report(monkeypatch, capsys, versions=versions, answers={"torch": facts})
    assert status == 0
    assert text.split("Not tested:\n")[1].splitlines() == [
        "- numpy 2.12.0: tests ran with releases up to 2.5; if it fails, `pip install 'numpy==2.5.*'`",
        "- triton 3.9.0: tests ran with releases up to 3.6; if it fails, `pip install 'triton==3.6.*'`",
        "",
        "Nothing is wrong.",
    ]


def test_jax_on_a_cpu_needs_no_triton(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    versions = {name: version for name, version in ALL.items() if name != "triton"} | {"jax": "0.10.2"}
    facts = {"devices": {"cpu": {"route": ["cpp", {}]}}, "note": ""}
    status, text = report(monkeypatch, capsys, versions=versions, answers={"jax": facts})
    assert (status, text.splitlines()[-1]) == (0, "Nothing is wrong.")
    assert (
        "  triton        missing         >=3.6           3.6  for ops on a GPU; a CPU needs none" in text.splitlines()
    )


def test_without_a_framework(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = report(monkeypatch, capsys, versions=ALL, answers={})
    assert status == 1
    assert "- no frontend works: install PyTorch or JAX" in text
