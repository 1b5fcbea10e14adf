"""Tiles of matrix products inside Triton kernels: loads, products and stores of the grouped kernels.

    memory --load_tile--> operands --dot_mx, dot_bf16--> sums --store_tile--> memory
           --load_scales-->  scales --^

TCGEN05 means sm_100: the tensor core multiplies E4M3 by its scales (tcgen05.mma kind::mxf8f6f4.block_scale) and
accumulates in tensor memory; operands and scales bypass the registers. Other architectures dequantize the operands and
multiply the results. Loads, masks and stores are the same code for both.
"""

import triton
import triton.language as tl

from ...mx_math import BLOCK_MX, dequantize_operand, f32_to_bf16, to_f32

STORE_COLUMNS: tl.constexpr = tl.constexpr(64)


@triton.jit
def load_tile(x, row, in_rows, c0, c_end, PITCH, BLOCK_C: tl.constexpr):
    """BLOCK_C columns from c0 on of rows PITCH apart; zeros outside."""
    c = c0 + tl.arange(0, BLOCK_C)
    return tl.load(x + row[:, None] * PITCH + c[None, :], mask=in_rows[:, None] & (c < c_end)[None, :], other=0.0)


@triton.jit
def load_scales(
    sf, first, r0, r_end, c0, c_end, PITCH, BLOCKED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """(BLOCK_R, BLOCK_C / 32) scales of rows first + r0 on and columns c0 on; zeros from r_end and c_end on.

    Scales have the masks of the elements, since a NaN scale times zero is NaN. BLOCKED loads consecutive tiles of
    128 x 4 scales in the order that scale_layout/plan.py draws. tcgen05.cp reads this order from shared memory, so that
    the product of one step overlaps the loads of the next.
    """
    ACROSS: tl.constexpr = BLOCK_C // 128
    s0 = c0 // BLOCK_MX
    if BLOCKED:
        i = tl.arange(0, BLOCK_R * BLOCK_C // BLOCK_MX)[None, :]
        r, s = r0 + i // (512 * ACROSS) * 128 + i // 4 % 4 * 32 + i // 16 % 32, s0 + i // 512 % ACROSS * 4 + i % 4
    else:
        r, s = (r0 + tl.arange(0, BLOCK_R))[:, None], (s0 + tl.arange(0, BLOCK_C // BLOCK_MX))[None, :]
    inside = (r < r_end) & (s < c_end // BLOCK_MX)
    scales = tl.load(sf + (first + r.to(tl.int64)) * (PITCH // BLOCK_MX) + s, mask=inside, other=0)
    if BLOCKED:
        scales = tl.trans(tl.reshape(scales, (BLOCK_R // 128, ACROSS, 32, 4, 4)), 0, 3, 2, 1, 4)
        scales = tl.reshape(scales, (BLOCK_R, BLOCK_C // BLOCK_MX))
    return scales


@triton.jit
def e4m3_pointer(x, TCGEN05: tl.constexpr):
    """A pointer to E4M3 values if TCGEN05: loads of E4M3 bypass the registers, loads of bytes do not."""
    return x.to(tl.pointer_type(tl.float8e4nv), bitcast=True) if TCGEN05 else x


@triton.jit
def _fenced(acc, step):
    """acc, ordered after a fence between the copies to shared memory and the reads of the tensor core.

    cp.async writes through the generic proxy and tcgen05 reads through the async one. Triton 3.6 omits the fence:
    triton-lang/triton#9610, and pytorch/pytorch#181248 for wrong results on a B200. Pipelining moves a separate
    statement away from the product. The fence therefore returns a value, always 0, that selects whether the product
    adds to acc or starts from zero. The operand `step` changes per iteration and keeps the fence inside the loop. It
    differs between all products of a kernel: the compiler merges fences of equal ones.
    """
    zero = tl.inline_asm_elementwise(
        "fence.proxy.async.shared::cta; mov.b32 $0, 0;", "=r,r", [step], tl.int32, is_pure=True, pack=1
    )
    if zero != 0:
        acc = tl.zeros_like(acc)
    return acc


@triton.jit
def dot_bf16(a, b, acc, step, HW_CAST: tl.constexpr, TCGEN05: tl.constexpr):
    """acc + a b. The interpreter has no bf16 arithmetic and multiplies in fp32."""
    if not HW_CAST:
        a, b = to_f32(a), to_f32(b)
    elif TCGEN05:
        acc = _fenced(acc, step)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def dot_mx(a, a_sf, b, b_sf, acc, step, HW_CAST: tl.constexpr, TCGEN05: tl.constexpr):
    """acc + a b^T of E4M3 bytes (R, C) and (S, C) and E8M0 bytes (R, C / 32) and (S, C / 32).

    The interpreter has no `dot_scaled` and runs the dequantizing branch; a test emulates `dot_scaled` for the other.
    """
    if TCGEN05:
        if HW_CAST:
            acc = _fenced(acc, step)
        return tl.dot_scaled(a, a_sf, "e4m3", tl.trans(b), b_sf, "e4m3", acc)
    else:
        BLOCKS: tl.constexpr = a.shape[1] // BLOCK_MX
        a_blocks = tl.reshape(a, (a.shape[0], BLOCKS, BLOCK_MX))
        a_values = tl.reshape(dequantize_operand(a_blocks, a_sf, HW_CAST), a.shape)
        b_blocks = tl.reshape(b, (b.shape[0], BLOCKS, BLOCK_MX))
        b_values = tl.reshape(dequantize_operand(b_blocks, b_sf, HW_CAST), b.shape)
        return tl.dot(a_values, tl.trans(b_values), acc, input_precision="ieee")


@triton.jit
def store_tile(out, row, in_rows, c0, c_end, PITCH, value, whole, HW_CAST: tl.constexpr, TCGEN05: tl.constexpr):
    """Store fp32 sums as out's dtype; NaN if not `whole`. Rows and columns outside are not written.

    TCGEN05: 64 columns at a time. The other columns stay in tensor memory, so that registers do not spill.
    """
    if TCGEN05 and value.shape[1] > STORE_COLUMNS:
        HALF: tl.constexpr = value.shape[1] // 2
        left, right = tl.split(tl.permute(tl.reshape(value, (value.shape[0], 2, HALF)), (0, 2, 1)))
        store_tile(out, row, in_rows, c0, c_end, PITCH, left, whole, HW_CAST, TCGEN05)
        store_tile(out, row, in_rows, c0 + HALF, c_end, PITCH, right, whole, HW_CAST, TCGEN05)
    else:
        value = tl.where(whole, value, float("nan"))
        if out.dtype.element_ty == tl.bfloat16:
            value = f32_to_bf16(value, HW_CAST)
        c = c0 + tl.arange(0, value.shape[1])
        tl.store(out + row[:, None] * PITCH + c[None, :], value, mask=in_rows[:, None] & (c < c_end)[None, :])
