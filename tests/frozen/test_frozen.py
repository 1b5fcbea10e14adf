"""tests/frozen: the definition of a difference, and the hashes stored for every machine, which hold for this tree."""

import doctest
import re
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from mxep.core_kernels.fold import plan as fold
from mxep.core_kernels.quantize import plan as quantize
from mxep.core_kernels.registry import OPS

from benchmarks.cases.shapes import TINY

from ..compare import BF16
from ..gpu.cases import CASES
from ..kernels.cross_compile.test_cross_compile import bf16, compile_plan, mx
from . import __main__ as command
from . import hashes, holds_for, jobs, records, worker
from .hashes import digits_of
from .records import INPUTS, Case, Record, compare
from .sources import large, layers_jax, layers_torch, ops, ptx, ranks_jax, ranks_torch, sass
from .sources.layers import LAYERS, RANKED

# --- hashes ------------------------------------------------------------------------------------------------


def test_a_byte_a_dtype_or_a_shape_changes_the_hash_and_the_bits_of_a_nan_do_not() -> None:
    for dtype in (np.uint8, np.int32, np.float32, BF16):
        x = np.arange(600, dtype=np.float32).astype(dtype).reshape(20, 30)
        changed = x.copy()
        changed.view(np.uint8)[7, 3] ^= 1
        assert len({digits_of(x), digits_of(changed), digits_of(x.reshape(30, 20)), digits_of(x, x)}) == 4
    nan = [np.array([1, bits, 2], np.uint16).view(BF16) for bits in (0x7FC0, 0xFFC1, 0x7F80, 0xFF80)]
    one, other, infinity, minus = map(digits_of, nan)
    assert one == other
    assert len({one, infinity, minus}) == 3


def test_chunks_do_not_change_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.array([*range(100), np.nan], np.float32)
    whole = digits_of(x)
    monkeypatch.setattr("tests.frozen.hashes._CHUNK", 7)
    assert digits_of(x) == whole


# --- outputs -----------------------------------------------------------------------------------------------

A, B, C = ({INPUTS: "1", "out": digit} for digit in "abc")


def test_outputs_are_compared_by_name() -> None:
    assert compare({"x": A, "y": B}, {"x": A, "y": B}) == ([], [])
    assert compare({"x": A, "y": B}, {"x": B, "y": A}).differ == ["x: out differ", "y: out differ"]
    assert compare({"x": A, "y": B}, {"x": A}).differ == ["y: gone"]
    assert compare({"x": A}, {"x": A, "y": B}).differ == ["y: new"]
    assert compare({"x": A, "y": B}, {"x": A, "z": B}) == ([], ["y -> z"])
    assert compare({"x": A}, {"x": A | {INPUTS: "2", "out": "c"}}).differ[0].startswith("x: other inputs")
    assert compare({"x": A}, {"x": {"error": "ValueError: no"}}).differ == ["x: raises ValueError: no"]


def test_one_changed_byte_of_an_op_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    case, name = CASES["fold_rows"], "torch fold_rows"
    before = {name: ops.entry("torch", case)}
    real = type(case).torch

    def spoiled(self, *inputs, m=96):
        qf, row_sf = real(self, *inputs, m=m)
        if m == 96:
            qf[5, 9] ^= 1
        return qf, row_sf

    monkeypatch.setattr(type(case), "torch", spoiled)
    assert compare(before, {name: ops.entry("torch", case)}).differ == ["torch fold_rows: qf differ"]


def test_rows_past_the_last_end_are_left_out() -> None:
    case = CASES["grouped_mm_fold"]
    inputs = case.inputs(1)
    end = int(inputs[-1][-1])
    (out,) = case.torch(*inputs)
    (cut,) = ops.up_to_the_last_end(OPS["grouped_mm_fold"], inputs, (out,), {})
    assert 0 < end < len(out)
    assert digits_of(cut) == digits_of(out[:end])
    (packed,) = CASES["quantize_row_packed"].torch(out)
    assert ops.up_to_the_last_end(OPS["quantize_row_packed"], (out,), (packed,), {})[0] is packed


def test_a_case_that_raises_has_the_error_for_an_entry(capsys: pytest.CaptureFixture) -> None:
    assert worker.run(Case("cpu", lambda: {"out": digits_of(np.zeros(1, np.complex64))})) == {
        "error": "KeyError: 'complex64'"
    }
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the cases run on the GPU")
def test_the_hashes_of_ops_hold_on_every_machine() -> None:
    """Only PyTorch, which compiles nothing; `make frozen` has the others. After a change on purpose: `make freeze`."""
    stored = records.stored("cpu")
    assert stored
    assert stored.cases.keys() == {
        name for of in map(ops.cases, ("torch", "jax")) for name, case in of.items() if case.record == "cpu"
    }
    found = {name: worker.run(case) for name, case in ops.cases("torch").items() if case.record == "cpu"}
    assert compare(records.named(stored.cases, ["torch "]), found) == ([], [])


def test_a_layer_and_its_ranks_have_the_outputs_of_both_frontends() -> None:
    layer = layers_torch.entry(LAYERS["mxfp8 swiglu"])
    assert {"y", "counts", "aux_loss", "x", "router.weight", "experts.w1", "experts.w2", "experts.w3"} < layer.keys()
    assert layers_jax.tree(LAYERS["shared gate"])["shared_gate"].shape == (1, 64)
    for name, layer in LAYERS.items():
        assert layers_jax.config(layer).num_experts == len(layer.parameters["router.weight"]), name
    assert ranks_torch.cases().keys() == {f"torch ranks {name}" for name in RANKED}
    assert ranks_jax.cases().keys() >= {f"jax ranks {name}" for name, ranked in RANKED.items() if ranked.in_jax}


def test_large_layers_on_a_cpu() -> None:
    """The program of the GPU, at a small size."""
    names = {f"{frontend} layer 4096x2048x768x128x8 mxfp8" for frontend in ("torch", "jax")}
    assert names <= large.cases().keys()
    run = partial(large.entry, shape=TINY.moe_layers[0], recipe="mxfp8", device="cpu")
    in_torch, in_jax = run("torch"), run("jax")
    assert in_torch.keys() == {INPUTS, "y", "x", "router", "w1", "w3", "w2"}
    assert in_torch[INPUTS] == in_jax[INPUTS]
    assert in_torch == run("torch")


# --- machine code ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What cuobjdump prints for two kernels, in the form that it has for a library."""
    path, found = tmp_path_factory.mktemp("cubins") / "kernel.cubin", {}
    launches = {"row": (quantize.quantize_row, (bf16(1, 32),)), "fold": (fold.fold_rows, mx(1, 32))}
    for name, (op, types) in launches.items():
        path.write_bytes(compile_plan(op, types, "sm_90", {}).asm["cubin"])
        found[name] = [f"\narch = sm_90a\n{sass.dump(option, path)}" for option in sass.OPTIONS]
    return found


def test_instructions_count_and_the_name_of_their_kernel_does_not(dumps: dict[str, list[str]]) -> None:
    row, renamed = dumps["row"], [text.replace("row_kernel", "another") for text in dumps["row"]]
    unnamed = partial(compare, by_name=False)
    found = sass.entries(*row)
    assert list(found) == ["sm_90a row_kernel"]
    assert unnamed(found, sass.entries(*renamed)) == ([], ["sm_90a row_kernel -> sm_90a another"])
    assert unnamed(found, sass.entries(*dumps["fold"])).differ
    assert unnamed(found, sass.entries(row[0], row[1].replace("STACK:0", "STACK:8"))).differ


TEXT = """
arch = sm_90a
\t\tFunction : f
        /*0000*/     LDC R1, c[0x0][0x28] ;    /* 0x00000a00ff017b82 */
                                               /* 0x000fe20000000800 */
        /*0010*/     BRA 0x10 ;                /* 0xfffffffc00fc7947 */
                                               /* 0x000fc0000383ffff */
"""


def test_an_instruction_changes_the_hash_and_its_address_does_not() -> None:
    def entry(text: str, usage: str = "REG:8") -> dict[str, str]:
        ((target, _), code) = sass.kernels(text)[0]
        return sass.entry(target, code, [usage])

    assert entry(TEXT) == entry(TEXT.replace("/*0010*/", "/*0110*/").replace("0x10 ;", "0x110 ;"))
    assert entry(TEXT) == entry(TEXT.replace("Function : f", "Function : g"))
    assert entry(TEXT) != entry(TEXT.replace("0xfffffffc00fc7947", "0xfffffffd00fc7947"))
    assert entry(TEXT) != entry(TEXT.replace("0x000fe20000000800", "0x000fe40000000800")), "its scheduling"
    assert entry(TEXT) != entry(TEXT.replace("sm_90a", "sm_100a"))
    assert entry(TEXT) != entry(TEXT, "REG:9")


def test_machine_code_is_compared_without_names() -> None:
    unnamed = partial(compare, by_name=False)
    assert unnamed({"f": A, "g": B}, {"f": A, "g": C}).differ == ["g: changed"]
    assert unnamed({"f": A, "g": A}, {"f": A}).differ == ["g: gone"]
    assert unnamed({"f": A}, {"f": A, "g": A}).differ == ["g: new"]
    assert unnamed({"f": A, "g": B}, {"h": A, "g": B}) == ([], ["f -> h"])
    assert unnamed({"f": A, "g": A}, {"h": A, "g": A}) == ([], ["f -> h"])
    assert unnamed({"f": A, "g": B}, {"g": A, "f": B}) == ([], ["f -> g", "g -> f"])


def test_names_and_places_in_the_source_are_no_part_of_ptx() -> None:
    text = compile_plan(quantize.quantize_row, (bf16(1, 32),), "sm_90", {}).asm["ptx"]
    moved = re.sub(r"\.loc\t(\d+) \d+", r".loc\t\1 7", text.replace("row_kernel", "f")).replace("kernel.py", "g.py")
    want = ptx.stripped(text)
    assert moved != text
    assert ptx.stripped(moved) == want
    assert not re.search(r"row_kernel|\.loc|\.file|debug|//", want)
    added = text.replace("\tret;", "\tbar.sync 0;\n\tret;")
    assert ptx.stripped(added) != want


@pytest.mark.parametrize("module", [hashes, holds_for, ptx], ids=lambda module: module.__name__)
def test_examples(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert (result.failed, result.attempted) == (0, 1)


# --- the command -------------------------------------------------------------------------------------------


def test_the_command_compares_stores_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    found = tmp_path / "found.json"

    def run(cases: records.Cases, *options: str, holds_for: str = "this") -> tuple[int, str]:
        records.write(found, {"cpu": Record(holds_for, cases)})
        return command.main([*options, "--found", str(found)]), capsys.readouterr().out

    assert run({"x": A}, "--compare") == (1, "cpu: no hashes are stored\n")
    assert run({"x": A, "y": B}, "--write")[0] == 0
    assert run({"x": A, "y": B}, "--compare") == (0, "cpu: 2 cases, all equal\n")
    assert run({"x": A, "y": C}, "--compare") == (1, "cpu: 2 cases, 1 differ\n    y: out differ\n")
    assert run({"x": A}, "--compare") == (1, "cpu: 1 cases, 1 differ\n    y: gone\n")
    assert run({"x": A}, "--compare", "-k", "x")[0] == 0
    code, text = run({}, "--compare", "-k", "z")
    assert (code, text.splitlines()[0]) == (1, "no case has 'z' in its name")
    code, text = run({"x": C}, "--compare", holds_for="another machine")
    assert (code, text) == (0, "cpu: not compared: the hashes hold for this; this is another machine\n")
    assert run({"y": C}, "--write", "-k", "y")[0] == 0
    assert run({"x": A, "y": C}, "--compare")[0] == 0
    assert run({"y": B}, "--write", "-k", "y", holds_for="another machine")[0] == 1
    code, text = run({"x": A, "y": {"error": "ValueError: no"}}, "--write")
    assert (code, text.splitlines()[0]) == (1, "cpu: y: not stored: raises ValueError: no")
    stored = records.stored("cpu")
    assert stored
    assert stored.cases == {"x": A}
    with pytest.raises(SystemExit, match="allowed: a commit that has tests/frozen"):
        command.main(["--compare", "--against", "v0.0.0"])
    with pytest.raises(SystemExit):
        command.main(["--write", "--against", "HEAD"])


def test_a_process_computes_its_share_and_a_failure_of_it_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    found, failures = jobs.run(("ptx",), ["sm_90 fold_g", "sm_90 sort_"], 1)
    assert (found["ptx"].keys(), failures) == ({"sm_90 fold_groups", "sm_90 sort_by_expert"}, [])
    assert all(entry.keys() == {"ptx", "shared"} for entry in found["ptx"].values())
    monkeypatch.setattr(jobs, "SOURCES", (jobs.Source("none", ("ptx",)),))
    assert "No module named 'tests.frozen.sources.none'" in jobs.run(("ptx",), [], 1)[1][0]
    with pytest.raises(SystemExit):
        command.main(["--compare", "--write"])
    assert "not allowed with" in capsys.readouterr().err
