"""Runs the cases on a backend, and finds the rules that its quantizers obey."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..cases import Arrays, Case
from ..combine.oracle import combine_bwd
from ..formats import BLOCK, Rounding
from ..oracle_math import Array
from ..swiglu.oracle import swiglu
from . import check, rules
from .backend import MODE, Backend, LackingError
from .blocks import Blocks
from .cases import CONFORMANCE
from .check import Definition
from .compare import DifferentError
from .definitions import DEFINITIONS
from .report import Ran, Report, found_rules, show_block

Options = Mapping[str, Any]
Quantized = tuple[Array, Array, Array]
"""x (..., K), q (..., K), sf (..., K/32)."""


def _row(x: Array, q: Array, sf: Array) -> list[Quantized]:
    return [(x, q, sf)]


def _packed(x: Array, packed: Array) -> list[Quantized]:
    return [(x, packed[..., : x.shape[-1]], packed[..., x.shape[-1] :])]


def _col(x: Array, q_t: Array, sf_t: Array) -> list[Quantized]:
    return [(np.swapaxes(x, -1, -2), q_t, sf_t)]


def _hidden(given: Arrays, options: Options) -> Array:
    """h of SwiGLU, in bf16."""
    gate, up, prob = given
    return swiglu(gate, up, prob, **{name: value for name, value in options.items() if name not in MODE})


QUANTIZED: dict[str, Callable[[Arrays, Options, Arrays], list[Quantized]]] = {
    "quantize_row": lambda given, options, got: _row(*given, *got),
    "quantize_row_packed": lambda given, options, got: _packed(*given, *got),
    "quantize_col": lambda given, options, got: _col(*given, *got),
    "quantize_both": lambda given, options, got: _row(*given, *got[:2]) + _col(*given, *got[2:]),
    "swiglu_row": lambda given, options, got: _row(_hidden(given, options), *got),
    "swiglu_col": lambda given, options, got: _col(_hidden(given, options), *got),
    "combine_bwd_row": lambda given, options, got: _row(combine_bwd(*given)[0], got[0], got[1]),
}
"""Ops whose outputs are blocks -> the blocks of a call's inputs, options and outputs."""

RULE = {
    "quantize_": "scales, elements, infinity and NaN as in the table of rules",
    "dequantize": "E4M3 value * 2^(scale byte - 127), rounded once; a scale byte of 255 makes a block NaN",
    "block_scales": "scale c of row 32 a + b of a tile is its byte 16 b + 4 a + c; padding is 0",
    "unblock_scales": "scale c of row 32 a + b of a tile is its byte 16 b + 4 a + c; rows past the last end are zeros",
    "permute_": "row row_map[i] bit for bit, zeros where it is -1",
    "combine": "an fp32 sum from +0 in ascending k; every product and every sum rounds; a slot of -1 adds nothing",
    "grouped_": "|got - exact| <= 2^-23 k sum|a||b| and one rounding; zeros past the last end",
    "swiglu_ffn": f"at least {check.FFN_DB} dB for each expert, exact bytes where each sum has one term",
    "swiglu": "silu(gate) * up * prob, each fp32 operation rounded, h rounded to bf16, then quantized",
}
"""First letters of ops -> what the definition says."""


def to_blocks(quantized: list[Quantized]) -> Blocks:
    """All blocks of 32, one after the other."""
    parts = [(x.astype(np.float32).reshape(-1, BLOCK), q.reshape(-1, BLOCK), sf.reshape(-1)) for x, q, sf in quantized]
    return Blocks(*map(np.concatenate, zip(*parts, strict=True)))


def digest(outputs: Sequence[Array]) -> str:
    """Of all bytes of a call's outputs."""
    return hashlib.sha1(b"".join(np.ascontiguousarray(x).tobytes() for x in outputs)).hexdigest()[:10]


class Runner:
    """One run of a backend. A function with one rule is called with all blocks first, which find its rule."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.report = backend, Report(backend.name, dict(backend.versions), backend.source)
        self._modes: dict[str, dict[str, Any]] = {}
        self._blocks: dict[str, dict[tuple[Rounding, bool], list[tuple[str, Quantized]]]] = {}

    def mode(self, op: str) -> dict[str, Any]:
        """The options of a mode that a function lacks: as claimed, or as most blocks obey."""
        fixed = self.backend.fixed(op)
        if fixed and op not in self._modes:
            claimed = dict(self.backend.mode)
            if not set(fixed) <= claimed.keys():
                claimed = self._detect(op) | claimed
            known = {"rounding": Rounding.RCEIL, "satfinite": False} | claimed
            self._modes[op] = {name: known[name] for name in fixed}
        return self._modes.get(op, {})

    def outputs(self, of: Definition) -> tuple[Any, ...]:
        """Of a case, in the mode of its function. Raises LackingError as of `Backend.call`."""
        return self.backend.call(of.case, of.arrays, self.mode(of.case.op))

    def _plain_cases(self, op: str) -> dict[str, Case]:
        """The cases of the default mode, whatever rule the function has."""
        default = {"rounding": Rounding.RCEIL, "satfinite": False}
        return {
            name: case
            for name, case in CONFORMANCE.items()
            if case.op == op and default == {key: case.options_of().get(key, value) for key, value in default.items()}
        }

    def _detect(self, op: str) -> dict[str, Any]:
        """The mode by the blocks; {} for an op without any."""
        quantized: list[Quantized] = []
        for case in self._plain_cases(op).values() if op in QUANTIZED else ():
            try:
                of = Definition(case)
                got = self.backend.call(case, of.arrays, dict(zip(MODE, (Rounding.RCEIL, False), strict=True)))
                check.require_types(got, of.want)
            except (Exception, SystemExit):  # which the case itself reports
                continue
            quantized += QUANTIZED[op](of.arrays, case.options_of(), got)
        if not quantized:
            return {}
        verdicts = rules.judge(to_blocks(quantized), ("scale", "infinity"))
        scale = next(iter(verdicts["scale"].obeyed), verdicts["scale"].best)
        rounding = Rounding.FLOOR if scale.startswith(("FLOOR", "EVEN")) else Rounding.RCEIL
        return {"rounding": rounding, "satfinite": verdicts["infinity"].best == "byte 254, saturated"}

    def run(self, name: str, case: Case) -> None:
        """Compare one case and note the result."""
        ran, of = self.report.ops.setdefault(case.op, Ran()), Definition(case)
        try:
            got = self.outputs(of)
        except LackingError as error:
            ran.skipped[name] = str(error)
            return
        except (Exception, SystemExit) as error:  # a function may end its process where it lacks a device
            ran.differ[name] = f"raised {type(error).__name__}: {error}"
            return
        self._keep(name, of, got)
        ran.digests[name] = digest(got)
        try:
            self.require(of, got)
        except AssertionError as error:
            ran.differ[name] = str(error)
        else:
            ran.agree.append(name)

    def _keep(self, name: str, of: Definition, got: tuple[Any, ...]) -> None:
        """Keep the blocks of a case for `find_rules`."""
        case, arrays, want = of.case, of.arrays, of.want
        if case.op not in QUANTIZED:
            return
        options = self._asked(case)
        mode = mode_of(options)
        if [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want]:
            blocks = self._blocks.setdefault(case.op, {}).setdefault((mode["rounding"], mode["satfinite"]), [])
            blocks += [(name, part) for part in QUANTIZED[case.op](arrays, options, got)]

    def require(self, of: Definition, got: Any) -> None:
        """Raise AssertionError, with the first differing block in bits, unless got is as defined."""
        try:
            check.as_defined(self.backend, of, got)
        except AssertionError as error:
            raise AssertionError(
                self.explain(of, tuple(got) if isinstance(got, tuple | list) else (got,), error)
            ) from None

    def explain(self, of: Definition, got: tuple[Any, ...], error: AssertionError) -> str:
        """The first differing block in bits, with the rule that it breaks."""
        case, arrays, want = of.case, of.arrays, of.want
        rule = next((text for start, text in RULE.items() if case.op.startswith(start)), "the bytes of the definition")
        message = f"{error}\nrule: {rule}"
        if case.op not in QUANTIZED or not isinstance(error, DifferentError) or not error.index:
            return message
        options = self._asked(case)
        found, expected = (to_blocks(QUANTIZED[case.op](arrays, options, outputs)) for outputs in (got, want))
        differ = (found.sf != expected.sf) | (found.q != expected.q).any(-1)
        return show_block(found, expected, int(np.argmax(differ)), **mode_of(options)) if differ.any() else message

    def _asked(self, case: Case) -> dict[str, Any]:
        return {**self.mode(case.op), **case.options_of()}

    def find_rules(self, op: str) -> None:
        """Judge the blocks of the cases that ran, under each mode of an op."""
        for (rounding, satfinite), named in self._blocks.get(op, {}).items():
            key = op if len(self._blocks[op]) == 1 else f"{op}, {rounding.name}{', satfinite' * satfinite}"
            claimed = set(self.backend.fixed(op)) <= self.backend.mode.keys()
            origin = [(name, sf.size) for name, (_, _, sf) in named]
            blocks = to_blocks([part for _, part in named])
            self.report.rules[key] = found_rules(blocks, origin, rounding, satfinite, claimed)


def mode_of(options: Options) -> dict[str, Any]:
    return {"rounding": Rounding(options.get("rounding", 0)), "satfinite": bool(options.get("satfinite", False))}


def run(backend: Backend, only: str = "") -> Report:
    """Run the cases of a backend's ops.

    Args:
        backend: of `load` or `of_module`.
        only: a part of the names of cases that run; all by default.

    Returns:
        The report. `Report.agrees` is whether no case differs; what the backend lacks is in `skipped` and `lacking`.

    Example:
        >>> from mxep.conformance import load, run
        >>> report = run(load("mxep.core_kernels.quantize.oracle"), "dequantize-")
        >>> report.agrees, len(report.ops["dequantize"].agree)
        (True, 5)
    """
    runner = Runner(backend)
    offered = [op for op in DEFINITIONS if op in backend.ops]
    chosen = {name: case for name, case in CONFORMANCE.items() if case.op in offered and only in name}
    for name, case in chosen.items():
        runner.run(name, case)
    for op in dict.fromkeys(case.op for case in chosen.values()):
        runner.find_rules(op)
    table = {case.op for case in CONFORMANCE.values()}
    runner.report.lacking, runner.report.without_cases = sorted(table - set(offered)), sorted(set(offered) - table)
    return runner.report
