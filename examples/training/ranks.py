"""The end of a program with one process per rank, and of a program that starts it."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence


def run(command: Sequence[str], env: Mapping[str, str] | None = None, capture: bool = True) -> tuple[int, str]:
    """Exit status and output of a command, which ends with its ranks when this process is interrupted or terminated.

    The ranks of torchrun are in sessions of their own: torchrun alone ends them, after one signal that it survives.
    Without `capture` the command prints to the streams of this process.
    """
    # A terminal that is closed sends SIGHUP to this process alone. Where it is ignored, as by nohup, it stays so.
    ends = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, signal.default_int_handler) for number in ends}
    pipe, merged = (subprocess.PIPE, subprocess.STDOUT) if capture else (None, None)
    try:
        with subprocess.Popen(
            command, env=env, stdout=pipe, stderr=merged, text=True, start_new_session=True
        ) as process:
            try:
                output, _ = process.communicate()
            except KeyboardInterrupt:
                process.terminate()
                process.communicate()
                raise
            return process.returncode, output or ""
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave() -> None:
    """Wait for all ranks and leave the process group. With Gloo the process ends here, with status 0."""
    import torch.distributed as dist  # here: a program that starts ranks of JAX needs no torch

    # Not `get_backend`, which does not know the backend of a group that `init_device_mesh` has made.
    gloo = "nccl" not in str(dist.get_backend_config())
    dist.barrier()  # a rank that ends while another still sends to it ends the other too
    if gloo:
        end_process()
    dist.destroy_process_group()


def end_process() -> None:
    """Exit without Python's finalization, with status 0.

    A thread of Gloo frees the tensors of a collective after its end, and a thread that takes the GIL during
    finalization aborts the process. These threads outlive destroy_process_group, because torch's caches keep the group.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
