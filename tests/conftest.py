"""Settings that must precede all imports, and the check of the number of skips."""

import gc
import math
import os
from pathlib import Path

import pytest
from hypothesis import settings

from .ranks.fixture import start_ranks, template  # noqa: F401 -- fixtures

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

    # A value is given a new type, with its text, and a new tuple for its shape, with a type and a text of its own. Here
    # types of the same elements and shape have the same parts, and a tuple has no text: a third of the time.
    new_type, parts = core.block_type.__init__, {}
    of_scalars = core.constexpr(1), core.tuple([])

    def block_type(self, element_ty, shape):
        key = element_ty.name, *[size.value if isinstance(size, core.constexpr) else size for size in shape]
        if key not in parts:
            new_type(self, element_ty, shape)
            sizes = core.constexpr(math.prod(self.shape)), core.tuple([core.constexpr(size) for size in self.shape])
            parts[key] = {**vars(self), "sizes_of_values": sizes}
        vars(self).update(parts[key])

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.sizes_of_values if type.is_block() else of_scalars

    def tuple_type(self, types, fields=None):
        self.types, self.fields, self.name = types, fields or [""] * len(types), ""

    core.tuple_type.__init__ = tuple_type
    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


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
