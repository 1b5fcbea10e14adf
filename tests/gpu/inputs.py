"""Inputs of ops for the GPU tests: make(rng, m) returns CPU tensors of m rows.

They contain rows past the last group, padding, empty slots and an empty group: parts that a kernel could skip. numpy
draws them, so that they are the same with every version of torch and on every CPU.
"""

from collections.abc import Callable

import numpy as np
import torch
from mxep.core_kernels.swiglu.folded.plan_bwd import FEW_CHAINS
from mxep.torch_frontend import ops as torch_ops
from torch import Tensor

K, N, GROUPS = 160, 64, 3

Tensors = tuple[Tensor, ...]
Rng = np.random.Generator


def normal(rng: Rng, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, np.float32))


def uniform(rng: Rng, *shape: int) -> Tensor:
    """From 0 to 1."""
    return torch.from_numpy(rng.random(shape, np.float32))


def integers(rng: Rng, low: int, high: int, *shape: int) -> Tensor:
    """int64, from low to high - 1."""
    return torch.from_numpy(rng.integers(low, high, shape))


def permutation(rng: Rng, n: int) -> Tensor:
    return torch.from_numpy(rng.permutation(n))


def exp2(x: Tensor) -> Tensor:
    """Computed in fp64: its last bit, which differs between CPUs, does not reach the fp32 result."""
    return torch.exp2(x.double()).float()


def floats(rng: Rng, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal values; every row has its own magnitude. One in 500 is NaN, infinite, zero or subnormal in fp32."""
    x = normal(rng, *shape) * exp2(3 * normal(rng, *shape[:-1], 1))
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 2.0**-130, 0.0])
    chosen = special[integers(rng, 0, 5, *shape)]
    return torch.where(uniform(rng, *shape) < 0.002, chosen, x).to(dtype)


def finite(rng: Rng, *shape: int) -> Tensor:
    return normal(rng, *shape).bfloat16()


def matrix(rng: Rng, m: int) -> Tensors:
    return (floats(rng, m, K),)


def matrix_fp32(rng: Rng, m: int) -> Tensors:
    return (floats(rng, m, K, dtype=torch.float32),)


def experts(rng: Rng, m: int) -> Tensors:
    return (floats(rng, GROUPS, m, K),)


def matrices(rng: Rng, m: int) -> Tensors:
    return (floats(rng, m // 32, 32, K),)


def weight(rng: Rng, m: int) -> Tensors:
    """One matrix. It has rows if m is 0, too."""
    return (floats(rng, m + 32, K),)


def weights_beyond(rng: Rng, m: int) -> Tensors:
    """Two matrices of which some rows and columns need a larger scale after their first 256 values: many of the first,
    whose first rows are zeros, one row and one column of the second. Tiles of the CUDA kernel are partial."""
    x = finite(rng, 2, m + 32, 2 * K)
    heavy = uniform(rng, *x.shape[1:]) < 0.001
    x[0] = torch.where(heavy, 1e4 * x[0], x[0])
    x[0, : min(256, m)] = 0
    x[1, m // 2, 300] = 2.0**20
    x[1, m, 17] = -(2.0**12)
    return (x,)


def weights_sorted(rng: Rng, m: int) -> Tensors:
    """A matrix of which all rows need a larger scale after their first 256 values, and most columns if it is high."""
    x = finite(rng, m + 32, 2 * K).float()
    steps = torch.arange(x.shape[1])[None, :] / 16 + torch.arange(x.shape[0])[:, None] / 64
    return ((x * exp2(steps.clamp_max(100))).bfloat16(),)


def mx(rng: Rng, m: int) -> Tensors:
    return torch_ops.quantize_row(floats(rng, m, K))


def row_map(rng: Rng, m: int) -> Tensor:
    rows = torch.cat([permutation(rng, m), torch.full((9,), -1)])
    return rows[permutation(rng, len(rows))].int()


def rows_and_map(rng: Rng, m: int) -> Tensors:
    return floats(rng, m, K), row_map(rng, m)


def packed_and_map(rng: Rng, m: int) -> Tensors:
    return torch_ops.quantize_row_packed(floats(rng, m, K)), row_map(rng, m)


def route(rng: Rng, m: int, experts: int = 40) -> Tensors:
    return floats(rng, m, experts, dtype=torch.float32), normal(rng, experts)


def route_bf16(rng: Rng, m: int) -> Tensors:
    return floats(rng, m, 24), torch.empty(0)


def route_bwd(rng: Rng, m: int, dtype: torch.dtype = torch.float32) -> Tensors:
    logits = floats(rng, m, 40, dtype=dtype)
    ids = uniform(rng, m, 40).argsort(stable=True)[:, :5].int().contiguous()
    return normal(rng, m, 5), normal(rng, 40), logits, ids


def route_bwd_bf16(rng: Rng, m: int) -> Tensors:
    dweights, _, *others = route_bwd(rng, m, torch.bfloat16)
    return dweights, torch.empty(0), *others


def logits_bwd(rng: Rng, m: int, experts: int = 40) -> Tensors:
    return floats(rng, m, 2 * experts), floats(rng, experts, K), floats(rng, m, K)


def logits_bwd_alone(rng: Rng, m: int) -> Tensors:
    return *logits_bwd(rng, m, 6)[:2], torch.empty(0, dtype=torch.bfloat16)


def logits_bwd_of_many(rng: Rng, m: int) -> Tensors:
    return logits_bwd(rng, m, 300)


def expert_ids(rng: Rng, m: int) -> Tensors:
    return (torch.tensor([1, 4, 6, 8], dtype=torch.int32)[integers(rng, 0, 4, m)],)


def counts(rng: Rng, m: int) -> Tensors:
    """Token counts from two ranks for three experts; the last expert receives none."""
    pair = torch.tensor([0, 1, 3, 4])[integers(rng, 0, 4, m)]
    return (torch.bincount(pair, minlength=2 * GROUPS).int(),)


def sorted_slots(rng: Rng, m: int) -> Tensors:
    order, _, counts = torch_ops.sort_by_expert(*expert_ids(rng, m), 9)
    return counts, order, uniform(rng, m)


def group_ends(rng: Rng, m: int, multiple: int = 1) -> Tensor:
    """Ends of three groups. The second group is empty; the last may end before the last row."""
    first, last = sorted(integers(rng, 0, m // multiple + 1, 2).tolist())
    return torch.tensor([first, first, last], dtype=torch.int32) * multiple


def scales(rng: Rng, m: int) -> Tensors:
    return mx(rng, m)[1], group_ends(rng, m)


def blocked_scales(rng: Rng, m: int) -> Tensors:
    sf, ends = scales(rng, m)
    return torch_ops.block_scales(sf, ends), ends


def combine(rng: Rng, m: int) -> Tensors:
    """m tokens with two slots each. Some slots are empty, and some rows are padding."""
    _, rows, slots, _, probs = combine_bwd(rng, m)
    return rows, slots, probs


def combine_bwd(rng: Rng, m: int) -> Tensors:
    num_rows = 2 * m + 5
    slots = permutation(rng, num_rows)[: 2 * m]
    slots[uniform(rng, 2 * m) < 0.2] = -1
    order = torch.full((num_rows,), -1)
    order[slots[slots >= 0]] = torch.arange(2 * m)[slots >= 0]
    probs = uniform(rng, m, 2)
    return finite(rng, m, 72), finite(rng, num_rows, 72), slots.view(m, 2).int(), order.int(), probs


def combine_bwd_row(rng: Rng, m: int) -> Tensors:
    dy, rows, *maps = combine_bwd(rng, m)
    return dy[:, :64].contiguous(), rows[:, :64].contiguous(), *maps


def unweighted(make: Callable[[Rng, int], Tensors]) -> Callable[[Rng, int], Tensors]:
    return lambda rng, m: (*make(rng, m)[:-1], torch.empty(0))


def swiglu(rng: Rng, m: int) -> Tensors:
    return floats(rng, m, N), floats(rng, m, N), uniform(rng, m)


def swiglu_bwd(rng: Rng, m: int) -> Tensors:
    return floats(rng, m, N), *swiglu(rng, m)


def ends_of_chains(rng: Rng, m: int) -> Tensor:
    """Ends of as many groups as `swiglu_bwd_fold` takes with any number of rows. The last may end before them."""
    return integers(rng, 0, m // 32 + 1, FEW_CHAINS).sort().values.int() * 32


def swiglu_bwd_fold(rng: Rng, m: int) -> Tensors:
    return *swiglu_bwd(rng, m), ends_of_chains(rng, m)


def swiglu_bwd_fold_unweighted(rng: Rng, m: int) -> Tensors:
    return *unweighted(swiglu_bwd)(rng, m), ends_of_chains(rng, m)


def swiglu_bwd_fold_wide(rng: Rng, m: int) -> Tensors:
    """Eight tiles and a half; 69 groups, some of more than one span."""
    dh, gate, up = (floats(rng, m, 544) for _ in range(3))
    blocks = integers(rng, 0, 10, 69).cumsum(0).clamp(max=m // 32 - m // 256)
    return dh, gate, up, uniform(rng, m), blocks.int() * 32


def swiglu_bwd_fold_beyond(rng: Rng, m: int) -> Tensors:
    """Most rows of dgate and dup have a larger block beyond their first 256 values."""
    dh, gate, up = (finite(rng, m, 544) for _ in range(3))
    dh[:, 256:] *= exp2(integers(rng, 0, 9, m, 1))
    return dh, gate, up, uniform(rng, m), ends_of_chains(rng, m)


def grouped_mm_bf16(rng: Rng, m: int) -> Tensors:
    return finite(rng, m, K), finite(rng, GROUPS, N, K), group_ends(rng, m)


def grouped_mm_bf16_kn(rng: Rng, m: int) -> Tensors:
    lhs, rhs_t, ends = grouped_mm_bf16(rng, m)
    return lhs, rhs_t.mT.contiguous(), ends


def grouped_mm_bf16_kn_sum(rng: Rng, m: int) -> Tensors:
    *pair, ends = grouped_mm_bf16_kn(rng, m)
    return *pair, *grouped_mm_bf16_kn(rng, m)[:2], ends


def kn_of_many_tiles(rng: Rng, m: int) -> Tensors:
    """A contraction dim that is no multiple of a stage: a stage does not reach into the weights of the next group."""
    rhs = finite(rng, GROUPS, 200, 808)
    rhs[1:, :56] = torch.nan
    return finite(rng, m, 200), rhs, torch.full((3,), m - m // 8, dtype=torch.int32)


def ragged(rng: Rng, m: int) -> Tensor:
    """Unaligned ends. The first group has one row if m > 0."""
    return torch.tensor([min(m, 1), max(min(m, 1), m // 3), m - m // 8], dtype=torch.int32)


def mm_of_many_tiles(rng: Rng, m: int) -> Tensors:
    return finite(rng, m, 200), finite(rng, GROUPS, 808, 200), ragged(rng, m)


def wgrad_of_many_tiles(rng: Rng, m: int) -> Tensors:
    return finite(rng, m, 808), finite(rng, m, 328), ragged(rng, m)


def wgrad_t(rng: Rng, m: int) -> Tensors:
    return finite(rng, N, m), finite(rng, K, m), group_ends(rng, m)


def wgrad_t_of_many_tiles(rng: Rng, m: int) -> Tensors:
    return finite(rng, 808, m), finite(rng, 328, m), ragged(rng, m)


def grouped_mm_mx(rng: Rng, m: int) -> Tensors:
    lhs, rhs_t, ends = grouped_mm_bf16(rng, m)
    return *torch_ops.quantize_row(lhs), *torch_ops.quantize_row(rhs_t), ends


def grouped_wgrad_bf16(rng: Rng, m: int) -> Tensors:
    return finite(rng, m, N), finite(rng, m, K), group_ends(rng, m)


def grouped_wgrad_mx(rng: Rng, m: int) -> Tensors:
    lhs, rhs = finite(rng, m, N), finite(rng, m, K)
    return *torch_ops.quantize_col(lhs), *torch_ops.quantize_col(rhs), group_ends(rng, m, 32)


def grouped_mm_fold(rng: Rng, m: int) -> Tensors:
    lhs, rhs_t, ends = grouped_mm_bf16(rng, m)
    return *torch_ops.quantize_row_fold(lhs), *torch_ops.quantize_row_fold(rhs_t), ends


def grouped_mm_fold_bias(rng: Rng, m: int) -> Tensors:
    *operands, ends = grouped_mm_fold(rng, m)
    return *operands, normal(rng, GROUPS, N), ends


def grouped_mm_fold_sum(rng: Rng, m: int) -> Tensors:
    lhs, rhs_t = finite(rng, m, 2 * K), finite(rng, GROUPS, N, 2 * K)
    pairs = ((lhs[:, :K], rhs_t[..., :K]), (lhs[:, K:] * 2**60, rhs_t[..., K:] * 2**-60))
    return *(t for pair in pairs for x in pair for t in torch_ops.quantize_row_fold(x.contiguous())), group_ends(rng, m)


def grouped_mm_fold_pair(rng: Rng, m: int) -> Tensors:
    *operands, ends = grouped_mm_fold(rng, m)
    return *operands, *torch_ops.quantize_row_fold(finite(rng, GROUPS, N, K)), ends


def mm_pair_of_many_tiles(rng: Rng, m: int) -> Tensors:
    operands = finite(rng, m, 416), finite(rng, GROUPS, 808, 416), finite(rng, GROUPS, 808, 416)
    return *(t for x in operands for t in torch_ops.quantize_row_fold(x)), ragged(rng, m)


def grouped_mm_blockwise(rng: Rng, m: int) -> Tensors:
    lhs, rhs_t, ends = grouped_mm_bf16(rng, m)
    return *torch_ops.quantize_blockwise(lhs), *torch_ops.quantize_squares(rhs_t), ends


def blockwise_of_many_tiles(rng: Rng, m: int) -> Tensors:
    lhs, rhs_t = finite(rng, m, 416), finite(rng, GROUPS, 808, 416)
    return *torch_ops.quantize_blockwise(lhs), *torch_ops.quantize_squares(rhs_t), ragged(rng, m)


def groups(rng: Rng, m: int) -> Tensors:
    return *torch_ops.quantize_col(floats(rng, m, N)), group_ends(rng, m, 32)


def many_groups(rng: Rng, m: int) -> Tensors:
    """Groups of up to nine blocks, some empty: shorter and longer than a span. After them one group of most tokens."""
    q, sf = torch_ops.quantize_col(floats(rng, m, N))
    blocks = m // 32
    ends = integers(rng, 0, 10, 69).cumsum(0).clamp(max=blocks)
    ends = torch.cat([ends, ends[-1:].clamp(min=blocks - blocks // 8)])
    return q[:37].contiguous(), sf[:37].contiguous(), ends.int() * 32


def matrix_and_ends(rng: Rng, m: int) -> Tensors:
    return floats(rng, m, K), group_ends(rng, m, 32)


def mx_and_ends(rng: Rng, m: int) -> Tensors:
    return *mx(rng, m), group_ends(rng, m, 32)


def packed_map_and_ends(rng: Rng, m: int) -> Tensors:
    """Rows that begin at multiples of 4 bytes, and m of any of them or padding."""
    mapped = integers(rng, -1, max(m, 1), m).int()
    return torch_ops.quantize_row_packed(floats(rng, max(m, 1), 128)), mapped, group_ends(rng, m, 32)


def matrix_and_ends_fp32(rng: Rng, m: int) -> Tensors:
    return floats(rng, m, K, dtype=torch.float32), group_ends(rng, m, 32)


def grouped_wgrad_fold(rng: Rng, m: int) -> Tensors:
    lhs, rhs, ends = finite(rng, m, N), finite(rng, m, K), group_ends(rng, m, 32)
    return *by_group(lhs, ends), *by_group(rhs, ends), ends


def by_group(x: Tensor, ends: Tensor) -> Tensors:
    return torch_ops.fold_groups(*torch_ops.quantize_col(x), ends)


def grouped_wgrad_fold_pair(rng: Rng, m: int) -> Tensors:
    *operands, ends = grouped_wgrad_fold(rng, m)
    return *operands, *by_group(finite(rng, m, N), ends), ends


def wgrad_pair_of_many_tiles(rng: Rng, m: int) -> Tensors:
    ends, columns = group_ends(rng, m, 32), (808, 328, 808)
    return *(t for n in columns for t in by_group(finite(rng, m, n), ends)), ends
