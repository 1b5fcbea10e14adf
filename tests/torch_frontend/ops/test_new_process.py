"""Threads of the C++ ops are torch's to say: `torch.set_num_threads`, and one in a DataLoader's worker.

In a fresh process: threads stay once they were made, and a fork of this one would have JAX's.
"""

import subprocess
import sys

SCRIPT = """
import os
import torch
from mxep.torch_frontend import ops
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return ops.quantize_row(torch.ones(1024, 1024))[1]

torch.set_num_threads(1)
x = torch.ones(2048, 2048)
counts = [len(os.listdir("/proc/self/task"))]
for threads in (1, 3):
    torch.set_num_threads(threads)
    ops.quantize_row(x)
    counts.append(len(os.listdir("/proc/self/task")) - counts[0])
print(*counts[1:])
print(*(len(list(DataLoader(Rows(), num_workers=n, timeout=60 * n))) for n in (0, 1)))
"""


def test_an_op_has_as_many_threads_as_torch_says_and_runs_in_a_forked_worker() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=90)
    assert run.stdout.split("\n") == ["0 2", "2 2", ""], run.stderr
