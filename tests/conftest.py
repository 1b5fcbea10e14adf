"""Settings that must precede all imports, and the check of the number of skips."""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

from .ranks.fixture import start_ranks, templates  # noqa: F401 -- fixtures

# Expert parallelism in JAX runs on four CPU devices of one process. JAX reads the flag once, at its start.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

# The same examples in every run, so that a failure is reproducible.
settings.register_profile("mxep", derandomize=True, deadline=None, max_examples=25, database=None)
settings.load_profile("mxep")

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.language import core
    from triton.runtime import interpreter

    # Half of the interpreter's time is work without an effect. An overflow is computed for an assertion that only a
    # debug build has:
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)

    # A launch replaces the functions of `triton.language`. Each call of a function in a kernel does it again, and
    # replaces the functions of its `core`, which are never restored: once is enough.
    def call(self, *args, **kwargs):
        if core.is_builtin(core.load):
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


def pytest_collection_finish() -> None:
    """Modules and thousands of tests live until the end: a garbage collection, a second of visits, leaves them out."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def older_objects_are_left_out_of_collections() -> None:
    """So do the programs that JAX and torch have compiled for the files before."""
    gc.freeze()


EXPECTED_SKIPS = Path(__file__).with_name("expected_skips.txt")


def expected_skips(mode: str) -> int:
    lines = (line.split("#")[0].split() for line in EXPECTED_SKIPS.read_text().splitlines())
    return {line[0]: int(line[1]) for line in lines if line}[mode]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With CI=true (a run of all tests), fail when the number of skips differs from the table."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") != "true" or reporter is None or session.exitstatus != pytest.ExitCode.OK:
        return
    mode = "interpreter" if os.environ.get("TRITON_INTERPRET") == "1" else "normal"
    skipped, expected = len(reporter.stats.get("skipped", [])), expected_skips(mode)
    if skipped != expected:
        reporter.write_line(
            f"\n{skipped} tests were skipped; {EXPECTED_SKIPS.name} has {expected} in {mode} mode", red=True
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
