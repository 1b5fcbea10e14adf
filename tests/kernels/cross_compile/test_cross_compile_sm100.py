"""Machine code of Triton's products for Blackwell, sm_100: operands in shared memory, sums in tensor memory."""

import re

import pytest

from .test_cross_compile import CASES, MMA, compiled

BLOCK_SCALED = [name for name in CASES if name.startswith(("grouped_mm_mx", "grouped_wgrad_mx"))]
PRODUCTS = [name for name, case in CASES.items() if not MMA.keys().isdisjoint(case.instructions)]


@pytest.mark.parametrize("case_name", PRODUCTS)
def test_sm_100_fences_what_its_tensor_core_reads(case_name):
    """Between writes to shared memory and the tcgen05 instruction that reads them; Triton 3.6 omits it."""
    ptx = compiled(case_name, "sm_100").asm["ptx"]
    steps = re.findall(r"(cp\.async\.wait_group|st\.shared|fence\.proxy\.async|tcgen05\.(?:mma|cp))\b", ptx)
    reads = [i for i, step in enumerate(steps) if step.startswith("tcgen05")]
    assert reads
    for i in reads:
        before = next(step for step in reversed(steps[:i]) if not step.startswith("tcgen05"))
        assert before == "fence.proxy.async"


@pytest.mark.parametrize("case_name", BLOCK_SCALED)
def test_sm_100_has_room_for_a_tile(case_name):
    kernel = compiled(case_name, "sm_100")
    assert kernel.metadata.shared <= 227 * 1024
    assert kernel.metadata.tmem_size <= 512, "columns of tensor memory"


@pytest.mark.parametrize("case_name", BLOCK_SCALED)
def test_sm_100_operands_pass_the_registers_by(case_name):
    """Elements always; scales too if K is a multiple of 128, so that copies overlap products."""
    ttgir = compiled(case_name, "sm_100").asm["ttgir"]
    loop = ttgir[ttgir.index("scf.for") : ttgir.index("ttng.tmem_load")]
    assert "ttg.local_load" not in loop
    if case_name in ("grouped_mm_mx", "grouped_mm_mx f32"):
        assert loop.count("ttng.tmem_copy") == 2
        assert "tt.load" not in loop
