"""Commands that end with their ranks."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.training.ranks import run

ROOT = Path(__file__).parents[2]
RANK = """
import os, sys, time
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename(file.name, sys.argv[1])
time.sleep(600)
"""
# Of a process that runs in the background or under nohup, children ignore SIGINT or SIGHUP.
CALLER = """
import signal
from examples.training import ranks
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
ranks.run({command}, capture={capture})
"""


def test_status_and_output(capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", "import os; os.write(2, os.environ['TEXT'].encode()); os._exit(3)"]
    assert run(command, {"TEXT": "a"}) == (3, "a")
    assert capfd.readouterr() == ("", "")
    assert run(command, {"TEXT": "b"}, capture=False) == (3, "")
    assert capfd.readouterr() == ("", "b")


@pytest.mark.parametrize(
    ("number", "capture"), [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGHUP, False)]
)
def test_a_signal_ends_the_ranks(number: signal.Signals, capture: bool, tmp_path: Path) -> None:
    """torchrun's ranks are in sessions of their own: they outlived a torchrun that was killed, on their GPUs."""
    file, script = tmp_path / "pid", tmp_path / "rank.py"
    script.write_text(RANK)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(script), str(file)]
    program = CALLER.format(command=launcher, capture=capture)
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True) as caller:
        until = time.monotonic() + 60
        while not file.exists():
            assert caller.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        caller.send_signal(number)
        _, errors = caller.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert not Path("/proc", file.read_text()).exists()
