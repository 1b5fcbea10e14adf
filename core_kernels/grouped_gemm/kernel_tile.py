"""Tiles of matrix products inside Triton kernels: loads, products and stores that the grouped kernels share.

    memory --load_tile--> operands --dot_mx, dot_bf16--> sums --store_tile--> memory
           --load_scales-->  scales --^

TCGEN05, on sm_100: the tensor core multiplies E4M3 by its scales itself (tcgen05.mma kind::mxf8f6f4.block_scale) and
keeps the sums in tensor memory; operands and scales reach it past the registers. Elsewhere operands are dequantized and
then multiplied. Loads, masks and stores are the same code on both.
"""

import triton
import triton.language as tl

from ..mx_math import BLOCK_MX, dequantize_operand, f32_to_bf16, to_f32

PIECE: tl.constexpr = tl.constexpr(64)


@triton.jit
def load_tile(x, row, in_rows, c0, c_end, PITCH, BLOCK_C: tl.constexpr):
    """BLOCK_C columns from c0 on of rows PITCH apart; zeros where a row or column is outside."""
    c = c0 + tl.arange(0, BLOCK_C)
    return tl.load(x + row[:, None] * PITCH + c[None, :], mask=in_rows[:, None] & (c < c_end)[None, :], other=0.0)


@triton.jit
def load_scales(
    sf, first, r0, r_end, c0, c_end, PITCH, BLOCKED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """(BLOCK_R, BLOCK_C / 32) scales of rows first + r0 on and columns c0 on; zeros from r_end and c_end on.

    Masked as the elements are: a NaN scale makes NaN of a zero. BLOCKED gathers tiles of 128 x 4 scales as
    scale_layout draws them, one after the other: so they lie in shared memory as tcgen05.cp takes them on, and the
    product of one step runs while the next is loaded.
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
    """What is loaded as E4M3 reaches the tensor core past the registers; bytes would turn into E4M3 in them."""
    return x.to(tl.pointer_type(tl.float8e4nv), bitcast=True) if TCGEN05 else x


@triton.jit
def _fenced(acc, step):
    """acc, behind a fence between the copies to shared memory and the tensor core that reads it.

    cp.async writes through the generic proxy and tcgen05 reads through the async one. Triton 3.6 leaves the fence
    out: triton-lang/triton#9610, and pytorch/pytorch#181248 for wrong results on a B200. A statement of its own is
    moved away from the product when the loop is pipelined, so whether the product adds to acc or starts anew hangs on
    the fence's result, which is always 0; `step` is new in every round and keeps it inside of the loop.
    """
    zero = tl.inline_asm_elementwise(
        "fence.proxy.async.shared::cta; mov.b32 $0, 0;", "=r,r", [step], tl.int32, is_pure=True, pack=1
    )
    if zero != 0:
        acc = tl.zeros_like(acc)
    return acc


@triton.jit
def dot_bf16(a, b, acc, step, HW_CAST: tl.constexpr, TCGEN05: tl.constexpr):
    """acc + a b; the interpreter has no bf16 arithmetic."""
    if not HW_CAST:
        a, b = to_f32(a), to_f32(b)
    elif TCGEN05:
        acc = _fenced(acc, step)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def dot_mx(a, a_sf, b, b_sf, acc, step, HW_CAST: tl.constexpr, TCGEN05: tl.constexpr):
    """acc + a b^T of E4M3 bytes (R, C) and (S, C) and E8M0 bytes (R, C / 32) and (S, C / 32).

    The interpreter has no `dot_scaled`, so there the dequantizing branch runs; a test lends it one for the other.
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
    """fp32 sums as out's dtype, NaN unless they are `whole`; nothing where a row or column is outside.

    TCGEN05: in pieces of 64 columns. The others wait in tensor memory, and registers do not spill.
    """
    if TCGEN05 and value.shape[1] > PIECE:
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
