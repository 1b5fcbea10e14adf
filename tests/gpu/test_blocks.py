"""Products large enough for blocks of 512 x 512 (core_kernels/grouped_gemm/schedule.cuh).

Every value has the bytes that the same product of 256 columns, which is computed in pairs of tiles, gives it.
"""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from mxep.torch_frontend import ops
from torch import Tensor
from torch.cuda.green_contexts import GreenContext
from torch.profiler import ProfilerActivity, profile

from .cases import DEVICE

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="only Hopper's products have blocks",
)

DEPTH, NARROW = 4096, 256
# An empty group, one of 32 rows, rows past whole blocks that are a row of tiles, a flat tile, both, and none.
ENDS = (3000, 3000, 3032, 12032, 12545, 13314, 14339, 14594, 16130)
ROWS = 16640
Outputs = tuple[Tensor, ...]


class Values:
    """Random codes and scales on the GPU."""

    def __init__(self) -> None:
        self.generator = torch.Generator(DEVICE).manual_seed(0)

    def codes(self, *shape: int) -> Tensor:
        x = torch.randn(shape, generator=self.generator, device=DEVICE)
        return x.mul_(60).to(torch.float8_e4m3fn).view(torch.uint8)

    def scales(self, *shape: int) -> Tensor:
        return torch.randint(110, 130, shape, generator=self.generator, device=DEVICE, dtype=torch.uint8)

    def floats(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=DEVICE) + 0.5

    def stepped(self, *shape: int) -> tuple[Tensor, ...]:
        """Rows of which one block in 300 is far larger or smaller, and one of all rows."""
        *rows, depth = shape
        far = torch.rand(*rows, depth // 32, generator=self.generator, device=DEVICE) < 1 / 300
        far[..., 70] = True
        sf = 120 + far * torch.randint(-24, 25, far.shape, generator=self.generator, device=DEVICE)
        return ops.fold_rows_stepped(self.codes(*shape), sf.to(torch.uint8))

    def increases(self, spans: int, width: int) -> Tensor:
        """Scales of spans that increase now and then, those of all groups alike."""
        up = torch.rand(spans, width, generator=self.generator, device=DEVICE) < 0.02
        return (110 + up.cumsum(0).clamp(max=15)).to(torch.uint8)


def poisoned(run: Callable[[], Tensor | Outputs]) -> Outputs:
    """The outputs of run(), in memory that held NaN before."""
    outs = run()
    outs = (outs,) if isinstance(outs, Tensor) else outs
    for out in outs:
        out.fill_(torch.nan)
    del outs, out
    again = run()
    return (again,) if isinstance(again, Tensor) else again


def kernels(run: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return sum(event.count for event in profiler.key_averages() if "folded_product" in event.key)


def m_grouped(op: str, columns: int) -> Callable[[slice], Outputs]:
    """run(columns): the product with those columns of the weights."""
    values, groups = Values(), len(ENDS)
    offs = torch.tensor(ENDS, dtype=torch.int32, device=DEVICE)
    depth = DEPTH // 2 if op == "grouped_mm_fold_sum" else DEPTH
    blockwise = op == "grouped_mm_blockwise"

    def rows() -> tuple[Tensor, Tensor]:
        return values.codes(ROWS, depth), values.floats(ROWS, depth // 128) if blockwise else values.scales(ROWS)

    def weights() -> tuple[Tensor, Tensor]:
        squares = (groups, columns // 128, depth // 128)
        return values.codes(groups, columns, depth), (
            values.floats(*squares) if blockwise else values.scales(groups, columns)
        )

    x, w, x2, w2, bias = rows(), weights(), rows(), weights(), values.floats(groups, columns)

    def run(part: slice) -> Outputs:
        squares = slice(part.start // 128, part.stop // 128)
        first, second = (
            (codes[:, part].contiguous(), scales[:, squares if blockwise else part].contiguous())
            for codes, scales in (w, w2)
        )
        more = {"grouped_mm_fold_sum": (*x2, *second), "grouped_mm_fold_pair": second}.get(op, ())
        if op == "grouped_mm_fold_bias":
            more = (bias[:, part].contiguous(),)
        return poisoned(lambda: getattr(ops, op)(*x, *first, *more, offs, "bfloat16"))

    return run


@pytest.mark.parametrize("op", [
    "grouped_mm_fold", "grouped_mm_fold_bias", "grouped_mm_fold_sum", "grouped_mm_fold_pair", "grouped_mm_blockwise",
])  # fmt: skip
def test_m_grouped(op: str) -> None:
    columns = 1280 if op == "grouped_mm_fold_pair" else 2560
    run = m_grouped(op, columns)
    got = run(slice(0, columns))
    assert kernels(lambda: run(slice(0, columns))) == 4, "two launches of two kernels"
    for at in range(0, columns, NARROW):
        part = slice(at, at + NARROW)
        for out, want in zip(got, run(part), strict=True):
            assert torch.equal(out[: ENDS[-1], part], want[: ENDS[-1]])
            assert out[ENDS[-1] :].eq(0).all()


def test_stepped() -> None:
    """Blocks apart in different stages of the tiles of a block."""
    values, offs = Values(), torch.tensor(ENDS, dtype=torch.int32, device=DEVICE)
    x, w = values.stepped(ROWS, DEPTH), values.stepped(len(ENDS), 2560, DEPTH)

    def run(part: slice) -> Outputs:
        words = slice(part.start // 32, part.stop // 32)
        parts = w[0][:, part], w[1][:, part], w[2][..., part], w[3][:, words]
        side = [of.contiguous() for of in parts]
        return poisoned(lambda: ops.grouped_mm_fold_stepped(*x, *side, offs, "bfloat16"))

    (got,) = run(slice(0, 2560))
    assert kernels(lambda: run(slice(0, 2560))) == 4, "two launches of two kernels"
    for at in range(0, 2560, NARROW):
        part = slice(at, at + NARROW)
        assert torch.equal(got[: ENDS[-1], part], run(part)[0][: ENDS[-1]])
    assert got[ENDS[-1] :].eq(0).all()


LONG, ALIKE, MANY = (10240, 0, 32, 30720, 5120, 7680, 10240, 2560), (8192,) * 8, (4128, 4064) * 33


@pytest.mark.parametrize("lengths", [LONG, ALIKE, MANY], ids=["long", "alike", "many"])
@pytest.mark.parametrize("op", ["grouped_wgrad_fold", "grouped_wgrad_fold_pair"])
def test_k_grouped(op: str, lengths: tuple[int, ...]) -> None:
    """Groups that differ much, that are alike, and more than are scheduled by their lengths."""
    values, tokens, both = Values(), sum(lengths), op.endswith("pair")
    offs = torch.tensor(lengths, device=DEVICE).cumsum(0).int()
    spans, rows, columns = tokens // 256 + len(lengths), 2048, 1024 if both else 2048
    first, second = ((values.codes(rows, tokens), values.increases(spans, rows)) for _ in range(2))
    b, b_sf = values.codes(columns, tokens), values.increases(spans, columns)

    def run(part: slice) -> Outputs:
        side = b[part].contiguous(), b_sf[:, part].contiguous()
        return poisoned(lambda: getattr(ops, op)(*first, *side, *(second if both else ()), offs, "bfloat16"))

    got = run(slice(0, columns))
    assert kernels(lambda: run(slice(0, columns))) == 4, "two launches of two kernels"
    for at in range(0, columns, NARROW):
        part = slice(at, at + NARROW)
        assert all(torch.equal(out[..., part], want) for out, want in zip(got, run(part), strict=True))


@pytest.mark.parametrize("sms", [8, 24, 56, 112])
def test_fewer_multiprocessors_give_the_same_bytes(sms: int) -> None:
    """As many clusters of eight as the SMs of a green context hold, if any, and pairs on the rest."""
    run, every = m_grouped("grouped_mm_fold", 2560), slice(0, 2560)
    want = run(every)
    torch.cuda.synchronize()
    context = GreenContext.create(num_sms=sms, device_id=torch.cuda.current_device())
    context.set_context()
    try:
        got = run(every)
        torch.cuda.current_stream().synchronize()
    finally:
        context.pop_context()
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_a_graph_replays_both_kernels_and_what_follows_waits_for_them() -> None:
    values = Values()
    offs = torch.tensor([9000, ROWS], dtype=torch.int32, device=DEVICE)
    x, w = [(values.codes(ROWS, DEPTH), values.scales(ROWS)) for _ in range(2)], values.codes(2, 2048, DEPTH)
    w_sf = values.scales(2, 2048)
    wanted = [ops.grouped_mm_fold(*of, w, w_sf, offs, "bfloat16").mul(2) for of in x]
    static = [part.clone() for part in x[0]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.grouped_mm_fold(*static, w, w_sf, offs, "bfloat16")
        doubled = out.mul(2)
    for turn in range(20):
        for old, new in zip(static, x[turn % 2], strict=True):
            old.copy_(new)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(doubled, wanted[turn % 2])


IN_JAX = """
import jax, jax.numpy as jnp, numpy as np
from mxep.jax_frontend import ops
keys = jax.random.split(jax.random.key(0), 4)
def codes(key, *shape):
    return jax.lax.bitcast_convert_type(jax.random.normal(key, shape).astype(jnp.float8_e4m3fn), jnp.uint8)

x, w = codes(keys[0], 16384, 4096), codes(keys[1], 2, 2048, 4096)
x_sf, w_sf = (jax.random.randint(k, s, 110, 130, jnp.uint8) for k, s in ((keys[2], (16384,)), (keys[3], (2, 2048))))
ends = jnp.array([9000, 16384], jnp.int32)

@jax.jit
def step(x, w, w_sf):
    out = ops.grouped_mm_fold(x, x_sf, w, w_sf, ends, "bfloat16")
    return out, jnp.maximum(out, 0), ops.quantize_row(out)

want = np.concatenate(
    [np.asarray(step(x, w[:, at : at + 256], w_sf[:, at : at + 256])[0]) for at in range(0, 2048, 256)], axis=1
)
for _ in range(8):
    out, positive, _ = step(x, w, w_sf)
    np.testing.assert_array_equal(np.asarray(out), want)
    np.testing.assert_array_equal(np.asarray(positive), np.maximum(want, 0))
"""


COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"


@pytest.mark.parametrize("flags", ["", COMMAND_BUFFERS])
def test_jax_runs_both_kernels_with_and_without_command_buffers(flags: str) -> None:
    env = os.environ | {"XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    ran = subprocess.run([sys.executable, "-c", IN_JAX], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
