"""mxep.conformance: a backend that breaks one rule is reported with that rule, and one that breaks none agrees."""

import doctest
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from mxep import conformance
from mxep.core_kernels import oracle_math
from mxep.core_kernels.cases import seeded
from mxep.core_kernels.conformance import backend, check, rules, runner, table
from mxep.core_kernels.conformance.blocks import Blocks
from mxep.core_kernels.conformance.cases import CONFORMANCE, TABLES
from mxep.core_kernels.conformance.definitions import DEFINITIONS
from mxep.core_kernels.formats import Rounding
from mxep.core_kernels.quantize import oracle
from mxep.core_kernels.quantize.cases import MATRICES

from . import backends

Array = np.ndarray
Pair = tuple[Array, Array]


def report(only: str = "quantize_row-", **marks: object) -> conformance.Report:
    """Of a module with these functions and claims."""
    module = ModuleType("mine")
    vars(module).update(marks)
    return conformance.run(conformance.of_module("mine", module), only)


def changed(change: Callable[[Array, Array, Array], object], rounding: str = "rceil") -> Callable[[Array], Pair]:
    """quantize_row with change(x, q, sf), of blocks (B, 32) and scales (B,), which it writes to."""

    def quantize_row(x: Array) -> Pair:
        q, sf = (np.array(part, order="C") for part in oracle.quantize_row(x, rounding))
        change(x.astype(np.float32).reshape(-1, 32), q.reshape(-1, 32), sf.reshape(-1))
        return q, sf

    return quantize_row


def flip_a_bit(x: Array, q: Array, sf: Array) -> None:
    if len(q) == 320:  # (64, 160)
        q[7, 3] ^= 1


def do_not_saturate(x: Array, q: Array, sf: Array) -> None:
    with np.errstate(all="ignore"):
        beyond = np.abs(x / oracle_math.e8m0_value(sf)[:, None]) > 464
    q[beyond & (sf < 255)[:, None]] |= 0x7F


def keep_signs_of_nan(x: Array, q: Array, sf: Array) -> None:
    q[(sf == 255)[:, None] & np.signbit(x)] |= 0x80


def ignore_nan(x: Array, q: Array, sf: Array) -> None:
    """As a maximum that returns the other operand."""
    nan = np.isnan(x)
    others = np.where(nan, np.float32(0), x)
    some = nan.any(-1)
    q[some], sf[some] = oracle.quantize_blocks(others[some], "rceil", False)
    q[nan] = 0x7F


def start_at_byte_1(x: Array, q: Array, sf: Array) -> None:
    amax = np.abs(x).max(-1)
    sf[(amax > 0) & (sf == 0)] = 1


def truncate(x: Array, q: Array, sf: Array) -> None:
    with np.errstate(all="ignore"):
        scaled = x.astype(np.float64) / oracle_math.e8m0_value(sf)[:, None]
        low = oracle_math.E4M3_VALUES[q] > np.abs(scaled)
    q[low & (q < 0x7F) & (q > 0)] -= 1


MUTANTS: dict[str, tuple[Callable[[Array], Pair], str, str]] = {
    "a bit": (changed(flip_a_bit), "elements", "no rule holds for all blocks"),
    "FLOOR": (lambda x: oracle.quantize_row(x, "floor"), "scale", "FLOOR, where the definition has: RCEIL"),
    "satfinite": (
        lambda x: oracle.quantize_row(x, "rceil", True),
        "infinity",
        "byte 254, saturated, where the definition has: NaN block",
    ),
    "signs of NaN": (
        changed(keep_signs_of_nan),
        "NaN",
        "NaN block, elements with their sign or byte 255, elements of any bytes, where the definition has: NaN block",
    ),
    "a NaN is ignored": (
        changed(ignore_nan),
        "NaN",
        "scale without the NaN, which is 0x7F, where the definition has: NaN block",
    ),
    "byte 1": (
        changed(start_at_byte_1),
        "small blocks",
        "same rounding, down to byte 1, where the definition has: same rounding, down to byte 0",
    ),
    "positive zeros": (
        changed(lambda x, q, sf: q.__setitem__(q == 0x80, 0)),
        "sign of zero",
        "positive, where the definition has: kept",
    ),
    "zeros": (
        changed(lambda x, q, sf: sf.__setitem__(np.abs(x).max(-1) == 0, 127)),
        "zeros",
        "byte 127, where the definition has: byte 0",
    ),
    "toward zero": (changed(truncate), "elements", "no rule holds for all blocks"),
}
"""Name -> a quantizer that claims RCEIL, the aspect that it breaks, and why."""


@pytest.mark.parametrize("name", MUTANTS)
def test_the_broken_rule_is_reported(name: str) -> None:
    quantize_row, aspect, why = MUTANTS[name]
    found = report(quantize_row=quantize_row, ROUNDING="rceil", SATFINITE=False)
    assert not found.agrees
    broken = found.rules["quantize_row"].broken
    assert broken[aspect].splitlines()[0] == why
    (message, *_) = (text for text in found.ops["quantize_row"].differ.values() if f"rule of {aspect}: " in text)
    assert re.search(r"^block \d+: amax 0x[0-9a-f]{8} ", message)
    assert re.search(r"(scale +|element +\d+  )[01]{8}.*, expected [01]{8}", message)
    assert why in conformance.show(found)


def test_elements_that_do_not_saturate_are_reported() -> None:
    """FLOOR has them; RCEIL has none beyond the range."""
    quantize_row = changed(do_not_saturate, "floor")
    found = report(quantize_row=quantize_row, ROUNDING="floor", SATFINITE=False)
    assert found.rules["quantize_row"].broken["overflow"] == "NaN, where the definition has: saturates"
    assert found.ops["quantize_row"].differ
    assert not report("-rceil", quantize_row=changed(do_not_saturate)).ops["quantize_row"].differ


@pytest.mark.parametrize("satfinite", [False, True])
@pytest.mark.parametrize("rounding", list(Rounding))
def test_the_rule_of_a_function_without_options_is_found(rounding: Rounding, satfinite: bool) -> None:
    found = report(quantize_row=lambda x: oracle.quantize_row(x, rounding, satfinite))
    ran, rule = found.ops["quantize_row"], found.rules["quantize_row"]
    assert found.agrees
    assert (len(ran.agree), len(ran.skipped)) == (28, 84)
    assert (rule.rounding, rule.satfinite, rule.broken) == (rounding.name, satfinite, {})
    assert rule.verdicts["scale"] == rounding.name
    other = "FLOOR" if rounding is Rounding.RCEIL else "RCEIL"
    assert {f"a case of another rule than {rounding.name}{', satfinite' * satfinite}"} == set(ran.skipped.values())
    assert f"scale: {other}" not in conformance.show(found)


def test_a_mixture_shows_the_first_block_that_breaks_each_rule() -> None:
    def quantize_row(x: Array) -> Pair:
        parts = [oracle.quantize_row(x, rounding) for rounding in Rounding]
        odd = np.arange(x.shape[-2])[:, None] % 2 == 1
        return tuple(np.where(odd, floor, rceil) for rceil, floor in zip(*parts, strict=True))  # type: ignore[return]

    why = report(quantize_row=quantize_row).rules["quantize_row"].broken["scale"]
    assert why.startswith("no rule holds for all blocks\n")
    for rule in Rounding:
        shown = rf"{rule.name}: \d+ of \d+ blocks, first broken by\n  quantize_row-\S+, block \d+: amax 0x[0-9a-f]{{8}}"
        assert re.search(shown, why), why


@pytest.mark.parametrize("rounding", list(Rounding))
def test_every_byte_of_a_block_is_judged(rounding: Rounding) -> None:
    """In blocks of every kind, a flipped bit of an element or of the scale breaks a rule, and no other byte does."""
    x = np.concatenate([value.astype(np.float32).reshape(-1, 32) for value in MATRICES.values()])
    q, sf = (np.array(part) for part in oracle.quantize_row(x, rounding))
    blocks = Blocks(x, q, sf[:, 0])
    rng, aspects = seeded("bits"), rules.aspects(rounding.name)
    kinds = [np.flatnonzero(of.judged(blocks).reshape(len(x), -1).any(-1)) for of in aspects.values()]
    for kind in kinds:
        for block in rng.choice(kind, 4) if len(kind) else ():
            one = Blocks(x[block : block + 1], q[block : block + 1].copy(), sf[block].copy())
            assert not rules.broken_aspect(one, 0, rounding, False)
            at, bit = rng.integers(0, 33), np.uint8(1 << rng.integers(0, 8))
            changed = one.sf if at == 32 else one.q[0, at : at + 1]
            changed ^= bit
            assert rules.broken_aspect(one, 0, rounding, False), (x[block], at, bit)
    assert sum(len(kind) > 0 for kind in kinds) == len(kinds) - (rounding is Rounding.RCEIL)  # without an overflow
    assert rules.as_defined(rounding, False).keys() == aspects.keys()


def test_a_missing_option_and_a_missing_call_are_skipped_and_listed() -> None:
    def dequantize(q: Array, sf: Array) -> Array:
        if q.ndim == 3:
            raise NotImplementedError("two dims alone")
        return oracle.dequantize(q, sf)

    found = report("dequantize", dequantize=dequantize)
    ran = found.ops["dequantize"]
    assert found.agrees
    assert ran.agree == ["dequantize-every_byte_pair-bfloat16"]
    assert set(ran.skipped.values()) == {"no option out_dtype='float32'"}
    assert "quantize_row" in found.lacking
    assert "no function: quantize_row, quantize_col" in conformance.show(found)
    found = report("dequantize", dequantize=lambda q, sf, out_dtype="bfloat16": _raise(NotImplementedError("not yet")))
    assert set(found.ops["dequantize"].skipped.values()) == {"not yet"}


def _raise(error: Exception) -> None:
    raise error


def test_an_exception_and_a_wrong_type_are_differences() -> None:
    found = report("permute_rows-", permute_rows=lambda x, row_map: _raise(IndexError("beyond")))
    assert set(found.ops["permute_rows"].differ.values()) == {"raised IndexError: beyond"}
    found = report("dequantize", dequantize=lambda q, sf: oracle.dequantize(q, sf, "float32"))
    (message,) = found.ops["dequantize"].differ.values()
    assert message.splitlines()[0] == "returns float32[256, 256], expected bfloat16[256, 256]"


@pytest.mark.parametrize("options", [{}, {"ROUNDING": "rceil"}], ids=["the rule is found", "the rule is claimed"])
def test_a_function_that_ends_the_process_differs(options: dict[str, str]) -> None:
    found = report("quantize_row-normal-", quantize_row=lambda x: sys.exit(3), **options)
    assert found.ops["quantize_row"].differ["quantize_row-normal-rceil"] == "raised SystemExit: 3"
    assert not found.agrees


def test_a_wrong_nan_of_a_product_is_shown_with_its_case_and_index() -> None:
    def grouped_mm_mx(*arrays: Array, out_dtype: str = "bfloat16") -> Array:
        out = DEFINITIONS["grouped_mm_mx"](*arrays, out_dtype)
        return np.where(np.isnan(out), out.dtype.type(0), out)

    shown = conformance.show(report("grouped_mm_mx-nan_and_inf", grouped_mm_mx=grouped_mm_mx))
    assert "\ngrouped_mm_mx differs first in grouped_mm_mx-nan_and_inf_in_one_row-bfloat16\n" in shown
    first = r"\n  64 of 4096 values differ in NaN or infinity, the first at \(3, 0\): 0, expected nan\n"
    assert re.search(first, shown), shown


@pytest.mark.parametrize(
    ("error", "marks", "message"),
    [
        (
            ValueError,
            {"OPS": {"quantize_rows": oracle.quantize_row, "dequantize": oracle.dequantize}},
            "OPS: got 'quantize_rows'; allowed: block_scales, .*, quantize_row, .*; rename or remove it",
        ),
        (
            TypeError,
            {"OPS": {"dequantize": None}},
            r"OPS\['dequantize'\]: got NoneType; allowed: a function",
        ),
        (TypeError, {"SATFINITE": "False"}, "SATFINITE: got 'False'; allowed: True or False"),
        (TypeError, {"SATFINITE": 1}, "SATFINITE: got 1; allowed: True or False"),
    ],
    ids=["a name", "no function", "a text", "a number"],
)
def test_a_wrong_mark_is_refused(error: type[Exception], marks: dict[str, object], message: str) -> None:
    with pytest.raises(error, match=f"^mxep.conformance: {message}$"):
        report(quantize_row=oracle.quantize_row, **marks)


def test_a_run_without_a_block_obeys_no_rule() -> None:
    found = report("quantize_row-zero_rows-rceil", quantize_row=lambda x: oracle.quantize_row(x))
    assert found.agrees
    assert "no block was judged" in conformance.show(found)


def test_an_output_that_is_no_array_is_a_difference() -> None:
    found = report("dequantize", dequantize=lambda q, sf: [oracle.dequantize(q, sf).tolist()])
    (message,) = found.ops["dequantize"].differ.values()
    assert message == "raised TypeError: dequantize: output 0: got builtins.list; allowed: a numpy array"


def test_a_function_may_write_to_its_inputs() -> None:
    def quantize_row(x: Array) -> Pair:
        q, sf = oracle.quantize_row(x)
        x[...] = 0
        return q, sf

    assert report(quantize_row=quantize_row).agrees
    assert report(quantize_row=lambda x: oracle.quantize_row(x)).agrees


def test_another_op_shows_its_rule() -> None:
    def combine(rows: Array, slots: Array, probs: Array, out_dtype: str = "bfloat16") -> Array:
        out = np.array(DEFINITIONS["combine"](rows, slots, probs, out_dtype))
        if out.size:
            out.view(f"u{out.itemsize}")[-1, -1] ^= 1
        return out

    message = report("combine-top_1-float32", combine=combine).ops["combine"].differ["combine-top_1-float32"]
    assert re.search(r"1 of 4480 values differ, the first at \(69, 63\): 0x[0-9a-f]{8} .*, expected 0x", message)
    assert "rule: an fp32 sum from +0 in ascending k" in message


@pytest.mark.parametrize("name", ["swiglu_ffn-one_term", "swiglu_ffn-normal"])
def test_a_feed_forward_with_a_wrong_scale_differs(name: str) -> None:
    """A FLOOR scale in place of RCEIL is far below the threshold, and changes the exact bytes."""
    from mxep.core_kernels.reference import ffn

    def floor(*arrays: Array) -> Array:
        return ffn.swiglu_ffn(*arrays, ffn.Precision("mx", True, "floor"))

    assert report(name, swiglu_ffn=DEFINITIONS["swiglu_ffn"]).agrees
    assert not report(name, swiglu_ffn=floor).agrees


def test_the_oracles_agree_with_the_first_case_of_every_op() -> None:
    backend = conformance.Backend("definition", DEFINITIONS)
    first = {case.op: name for name, case in reversed(CONFORMANCE.items())}
    assert first.keys() - {"swiglu_ffn"} < backends.KERNEL_OPS.keys()
    for name in first.values():
        of = check.Definition(CONFORMANCE[name])
        check.as_defined(backend, of, backend.call(of.case, of.arrays, {}))
    assert set(table.DOCUMENTED) <= first.keys()
    assert len(CONFORMANCE) == 3 + sum(len(getattr(module, "CONFORMANCE", {})) for module in TABLES)


@pytest.mark.parametrize("module", [backend, runner], ids=lambda module: module.__name__)
def test_its_examples_run(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert (result.failed, result.attempted > 0) == (0, True)


BACKEND = """
from mxep.core_kernels.quantize import oracle
from mxep.core_kernels.quantize.cases import MATRICES
def quantize_row(x):
    return oracle.quantize_row(x, {rounding!r})
{claim}
"""


def test_the_command(tmp_path: Path) -> None:
    def ran(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "mxep.conformance", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    (tmp_path / "good.py").write_text(BACKEND.format(rounding="floor", claim=""))
    (tmp_path / "wrong.py").write_text(BACKEND.format(rounding="floor", claim="ROUNDING, SATFINITE = 'rceil', False"))
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "text.py").write_text("def quantize_row(x) return x")
    (tmp_path / "names.py").write_text("OPS = ['quantize_row']")
    (tmp_path / "ends.py").write_text("raise SystemExit(0)")
    (tmp_path / "typo.py").write_text("OPS = {'quantize_rows': print}")
    (tmp_path / "claim.py").write_text(BACKEND.format(rounding="floor", claim="SATFINITE = 'False'"))
    (tmp_path / "leaves.py").write_text("import sys\ndef dequantize(q, sf): sys.exit(3)")
    (tmp_path / "without.py").write_text("def quantize_squares(x, rounding=0): pass")
    good, wrong, empty = ran("good", "--json", "good.json"), ran("wrong"), ran("empty")
    assert (good.returncode, wrong.returncode, empty.returncode, ran("absent").returncode) == (0, 1, 2, 2)
    assert re.search(r"^quantize_row +28 +0 +84$", good.stdout, re.MULTILINE)
    stored = json.loads((tmp_path / "good.json").read_text())
    assert len(stored["ops"]["quantize_row"]["agree"]) == 28
    assert "scale: FLOOR, where the definition has: RCEIL" in wrong.stdout
    assert "mxep.conformance: backend: got 'empty' without a function of an op; allowed: " in empty.stderr
    for arguments, message in (
        (["text"], "SyntaxError: "),
        (["names"], "mxep.conformance: OPS: got list; allowed: a dict of functions by name"),
        (["ends"], "SystemExit: 0"),
        (["typo"], "mxep.conformance: OPS: got 'quantize_rows'; allowed: "),
        (["claim"], "mxep.conformance: SATFINITE: got 'False'; allowed: True or False"),
        (["./good"], "mxep.conformance: backend: got './good'; allowed: a dotted name"),
        (["good", "--json", "no/good.json"], "--json: got no/good.json; allowed: a file in a folder that exists"),
        (["good", "--json", "."], "--json: got .; allowed: a file in a folder that exists"),
    ):
        found = ran(*arguments)
        assert (found.returncode, "Traceback" in found.stderr) == (2, False), found.stderr
        assert message in found.stderr
    found = ran("leaves")
    assert (found.returncode, "raised SystemExit: 3" in found.stdout) == (1, True), found.stderr
    for arguments in (["good", "-k", "no_such"], ["without"]):
        found = ran(*arguments)
        assert (found.returncode, found.stdout.splitlines()[-1]) == (2, "No case ran."), found.stdout
    assert "no case of: quantize_squares" in found.stdout


def test_the_plugin_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(BACKEND.format(rounding="floor", claim="ROUNDING, SATFINITE = 'rceil', False"))
    plugin = "mxep.core_kernels.conformance.pytest_plugin"
    (tmp_path / "test_mxep.py").write_text(f"from {plugin} import test_case\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        plugin,
        "-k",
        "row-normal-",
        "test_mxep.py",
    ]
    ran = subprocess.run(
        [*command, "--mxep-backend", "wrong"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "1 failed, 3 skipped" in ran.stdout.splitlines()[-1], ran.stdout
    assert "breaks the rule of scale: RCEIL: the smallest power of two >= fp32(amax / 448)" in ran.stdout
    none = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "--mxep-backend: got none" in none.stderr + none.stdout
