"""What only a new process shows: rows that another one saved load, and threads of the C++ ops are torch's to say, by
`torch.set_num_threads`, and one in a DataLoader's worker.

Threads stay once they were made, and a fork of this process would have JAX's.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mxep.torch_frontend import MXTensor, ops
from mxep.torch_frontend.products.gathered_rows import gathered_rows

SCRIPT = """
import json, os, sys
import torch
from mxep.torch_frontend import MXTensor, ops
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
lengths = [len(list(DataLoader(Rows(), num_workers=n, timeout=60 * n))) for n in (0, 1)]

found = torch.load(sys.argv[1])
parts = [found["packed"].q, found["packed"].sf]
one_buffer = len({part.untyped_storage().data_ptr() for part in parts}) == 1
torch.save({name: (type(mx) is MXTensor, mx.q, mx.sf, mx.orig_dtype) for name, mx in found.items()}, sys.argv[2])
print(json.dumps({"threads": counts[1:], "lengths": lengths, "one_buffer": one_buffer}))
"""


def saved() -> dict[str, MXTensor]:
    """Rows of a map are saved as rows."""
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    row_map = torch.tensor([2, -1, 0], dtype=torch.int32)
    gathered = gathered_rows(ops.quantize_row_packed(x, 0), row_map, torch.bfloat16)
    return {
        "plain": MXTensor.quantize(x.float(), "floor"), "packed": MXTensor.quantize(x, packed=True),
        "gathered": gathered,
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    torch.save(saved(), folder / "saved")
    command = [sys.executable, "-c", SCRIPT, folder / "saved", folder / "loaded"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_an_op_has_as_many_threads_as_torch_says_and_runs_in_a_forked_worker(found: dict[str, Any]) -> None:
    assert (found["threads"], found["lengths"]) == ([0, 2], [2, 2])


def test_saved_rows_load(found: dict[str, Any], folder: Path) -> None:
    """With weights_only=True, which is the default of torch.load."""
    assert found["one_buffer"]
    want = saved()
    for name, (is_ours, q, sf, orig_dtype) in torch.load(folder / "loaded").items():
        assert is_ours
        assert torch.equal(q, want[name].q)
        assert torch.equal(sf, want[name].sf)
        assert orig_dtype == want[name].orig_dtype
