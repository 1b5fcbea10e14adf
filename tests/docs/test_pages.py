"""The programs of the README, of the pages of docs/ and of the notebooks run, on a CPU, with small sizes.

A program is a block of code in a tab or outside; of guides/jax.md and of a notebook all blocks are one. The programs of
a framework run one after the other in one process, each with its own names. PyTorch: as the only rank of a group. JAX:
with the four devices that guides/jax.md makes, which is first.
"""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FRONTENDS = ("torch_frontend", "jax_frontend")
ONE_PROGRAM = ("docs/guides/jax.md", "examples/quickstart/torch.ipynb", "examples/quickstart/jax.ipynb")
PAGES = (
    *ONE_PROGRAM,
    "README.md",
    "docs/api/scale_layouts.md",
    "docs/concepts/mxfp8.md",
    "docs/concepts/pipeline.md",
    "docs/determinism.md",
    "docs/getting-started/quick_start.md",
    "docs/getting-started/quick_start_ep.md",
    "docs/guides/choose_exchange.md",
    "docs/guides/choose_recipe.md",
    "docs/guides/linear.md",
    "docs/guides/lora.md",
    "docs/guides/memory.md",
    "docs/guides/metrics.md",
    "docs/guides/routing.md",
    "docs/migrate/megatron.md",
    "docs/migrate/ragged_dot.md",
    "docs/migrate/transformer_engine.md",
)
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
# A thread of Gloo outlives its group, and can abort Python's finalization: the process ends before it.
RUN = """
import json, os, sys, warnings
for page, program in json.load(sys.stdin):
    print(page, file=sys.stderr)
    with warnings.catch_warnings():
        if page == "docs/guides/jax.md":
            warnings.simplefilter("error", UserWarning)
        exec(compile(program, page, "exec"), {"__name__": "__main__"})
    if "torch" in sys.modules:
        import torch
        torch.set_default_device(None)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
sys.stdout.flush()
os._exit(0)
"""


def programs(page: str) -> list[str]:
    """The programs of a page, for a CPU and with small sizes."""
    text = (ROOT / page).read_text()
    if page.endswith(".ipynb"):
        code = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        # JAX makes its devices once.
        return ["\n".join(map("".join, code)).replace('jax.config.update("jax_num_cpu_devices", 4)', "")]
    small = text.replace("16384, 2048, 768, 128", "64, 64, 32, 8").replace('"cuda"', '"cpu"')
    blocks = [textwrap.dedent(code) for _, code in BLOCK.findall(small)]
    return ["\n".join(blocks)] if page in ONE_PROGRAM else blocks


def test_every_program_is_of_one_framework() -> None:
    found = {page: programs(page) for page in PAGES}
    assert all(sum(frontend in code for frontend in FRONTENDS) == 1 for codes in found.values() for code in codes)
    numbers = {page: len(found[f"docs/{page}.md"]) for page in ("concepts/pipeline", "guides/routing")}
    assert (numbers, len(found["README.md"])) == ({"concepts/pipeline": 4, "guides/routing": 4}, 2)
    assert all(found[page][0].count("assert ") >= 5 for page in ONE_PROGRAM)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_the_programs_run(frontend: str, tmp_path: Path) -> None:
    """In one process: to import a framework takes longer than all programs. They write to tmp_path."""
    found = [(page, program) for page in PAGES for program in programs(page) if frontend in program]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    # With the other flags of `make test` programs compile in half of the time.
    flags = " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag)
    env = os.environ | ranks | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [sys.executable, "-c", RUN], input=json.dumps(found), capture_output=True, text=True, check=False, timeout=300,
        env=env | {"OMP_NUM_THREADS": "1"}, cwd=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    # Of the notebook.
    ((first, last),) = re.findall(r"^first ([\d.]+) last ([\d.]+)$", ran.stdout, re.MULTILINE)
    assert float(last) < 0.5 * float(first)
