"""MXFP8 arithmetic inside Triton kernels, on bits.

    amax bits --scale_byte--> E8M0 --inverse_scale--> 2^-e --*--> f32_to_e4m3 --> q
    q --e4m3_to_f32--*--e8m0_to_f32-- sf = exact value

Every step is an integer operation or one correctly rounded multiplication, so that a GPU, the interpreter and the C++
kernels write the same bytes. HW_CAST selects the hardware's conversions. The interpreter converts f32 to E4M3 and to
bf16 wrongly and has no bf16 arithmetic, hence the integer versions. The multiplications rely on subnormals: Triton
emits `mul.f32` without `.ftz`, and the cross-compilation test checks the PTX for it.
"""

import triton
import triton.language as tl

from .formats import BLOCK, EXP2_COEFFICIENTS, LOG2E, Rounding

BLOCK_MX: tl.constexpr = tl.constexpr(BLOCK)
RCEIL: tl.constexpr = tl.constexpr(int(Rounding.RCEIL))

F32_INF: tl.constexpr = tl.constexpr(0x7F800000)
F32_NAN: tl.constexpr = tl.constexpr(0x7FC00000)
F32_MIN_SCALE: tl.constexpr = tl.constexpr(0x00400000)
"""2^-127, the smallest E8M0 value: an fp32 subnormal."""
MINUS_LOG2E: tl.constexpr = tl.constexpr(-LOG2E)
C1, C2, C3, C4, C5 = map(tl.constexpr, EXP2_COEFFICIENTS)
MAGIC: tl.constexpr = tl.constexpr(12583039.0)
"""1.5 * 2^23 + 127. Adding it to a value in [-127, 0] leaves the nearest integer plus 127 in the low bits."""


@triton.jit
def to_f32(x):
    """bf16 or f32 -> f32 with the same value: bf16 is the upper half of f32."""
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def f32_to_bf16(x, HW_CAST: tl.constexpr):
    """f32 -> bf16, to nearest even; NaN -> 0x7FC0."""
    if HW_CAST:
        bits = x.to(tl.bfloat16).to(tl.uint16, bitcast=True)
    else:
        wide = x.to(tl.uint32, bitcast=True)
        bits = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).to(tl.uint16)
    bits = tl.where(x == x, bits, 0x7FC0).to(tl.uint16)
    return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def fma(a, b, c, HW_CAST: tl.constexpr):
    """a * b + c, rounded once.

    The interpreter computes it in fp64: the product is exact, the sum is rounded twice. Double rounding differs from a
    true fma in about one case in 2^29; the tests cover every gate of SwiGLU.
    """
    if HW_CAST:
        return tl.fma(a, b, c)
    else:
        return (a.to(tl.float64) * b.to(tl.float64) + c).to(tl.float32)


@triton.jit
def reciprocal(x, HW_CAST: tl.constexpr):
    """1 / x, correctly rounded, for x in [1, 2] or NaN.

    The hardware's approximation is within an ulp, and one Newton step with fma rounds it correctly. These are the steps
    of `rcp.rn` without its test for subnormals, which do not occur here.
    """
    if HW_CAST:
        near = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
        return tl.fma(near, tl.fma(-x, near, tl.full(x.shape, 1.0, tl.float32)), near)
    else:
        return 1.0 / x


@triton.jit
def exp_minus(a, HW_CAST: tl.constexpr):
    """e^-a of a >= 0 as 2^(-a log2 e), the same bits everywhere; below 2^-126 it is 0. Of NaN it is 0 or NaN."""
    y = tl.maximum(a * MINUS_LOG2E, -127.0)
    m = y + MAGIC
    f = y - (m - MAGIC)
    p = tl.full(f.shape, C5, tl.float32)
    p = fma(p, f, tl.full(f.shape, C4, tl.float32), HW_CAST)
    p = fma(p, f, tl.full(f.shape, C3, tl.float32), HW_CAST)
    p = fma(p, f, tl.full(f.shape, C2, tl.float32), HW_CAST)
    p = fma(p, f, tl.full(f.shape, C1, tl.float32), HW_CAST)
    p = fma(p, f, tl.full(f.shape, 1.0, tl.float32), HW_CAST)
    return p * (m.to(tl.uint32, bitcast=True) << 23).to(tl.float32, bitcast=True)


@triton.jit
def sigmoid(g, HW_CAST: tl.constexpr):
    """1 / (1 + e^-g) through t = e^-|g|, the same bits everywhere."""
    t = exp_minus(tl.abs(g), HW_CAST)
    r = reciprocal(1.0 + t, HW_CAST)
    return tl.where(g < 0, t * r, r)


@triton.jit
def scale_byte(amax, rounding: tl.constexpr, satfinite: tl.constexpr):
    """Bits of a block's fp32 amax (int32, sign clear) -> its E8M0 byte, as int32."""
    byte = (amax >> 23) - 8
    if rounding == RCEIL:
        # 448 = 1.75 * 2^8, so that amax / 448 exceeds a power of two where the mantissa exceeds 1.75. The contract
        # uses the fp32 quotient: just above 2^-127 it is a subnormal, which rounds down for one value of amax.
        byte += ((amax & 0x7FFFFF) > 0x600000).to(tl.int32)
        byte = tl.where(amax == 0x04600001, 0, byte)
    byte = tl.where(amax < F32_INF, tl.maximum(byte, 0), 255)
    if satfinite:
        byte = tl.where(amax == F32_INF, 254, byte)
    return byte


@triton.jit
def inverse_scale(byte):
    """E8M0 byte (int32) -> f32 2^(127 - byte); 255 -> NaN."""
    bits = tl.where(byte == 254, F32_MIN_SCALE, (254 - byte) << 23)
    return tl.where(byte == 255, F32_NAN, bits).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_to_f32(sf):
    """E8M0 bytes -> f32 2^(byte - 127); 255 -> NaN."""
    byte = sf.to(tl.int32)
    bits = tl.where(byte == 0, F32_MIN_SCALE, byte << 23)
    return tl.where(byte == 255, F32_NAN, bits).to(tl.float32, bitcast=True)


@triton.jit
def f32_to_e4m3(x, HW_CAST: tl.constexpr):
    """f32 -> E4M3 bytes: to nearest even, +-448 beyond the range, NaN -> 0x7F."""
    if HW_CAST:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        sign = (bits >> 24) & 0x80
        # Add half of the last kept bit (less one, plus that bit: ties to even) and change the exponent's bias
        # from 127 to 7. 0x43E00000 is 448.
        capped = tl.minimum(magnitude, 0x43E00000)
        normal = ((capped + 0x7FFFF + ((capped >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 E4M3 has a spacing of 2^-9, the spacing of fp32 near 2^14 (0x46800000).
        shifted = capped.to(tl.float32, bitcast=True) + 16384.0
        subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
        q = tl.where(magnitude < 0x3C800000, subnormal, normal) | sign
        return tl.where(magnitude > F32_INF, 0x7F, q).to(tl.uint8)


@triton.jit
def e4m3_to_f32(q, HW_CAST: tl.constexpr):
    """E4M3 bytes -> f32, exact."""
    if HW_CAST:
        return q.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        byte = q.to(tl.int32)
        # E4M3's bits in the fields of fp32 are the value times 2^-120, subnormals included.
        bits = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
        return tl.where((byte & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def quantize_blocks(x, axis: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr, HW_CAST: tl.constexpr):
    """f32 blocks -> E4M3 bytes of the same shape and E8M0 bytes without `axis`: one scale for all values along it.

    Magnitudes order as their bits do, and NaN is above infinity: the integer maximum is an amax that propagates NaN.
    """
    amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis)
    byte = scale_byte(amax, rounding, satfinite)
    q = f32_to_e4m3(x * tl.expand_dims(inverse_scale(byte), axis), HW_CAST)
    return q, byte.to(tl.uint8)


@triton.jit
def dequantize_blocks(q, sf, HW_CAST: tl.constexpr):
    """E4M3 bytes (..., 32) and E8M0 bytes (...) -> f32; every NaN is 0x7FC00000."""
    x = e4m3_to_f32(q, HW_CAST) * tl.expand_dims(e8m0_to_f32(sf), -1)
    return tl.where(x == x, x, float("nan"))


@triton.jit
def dequantize_operand(q, sf, HW_CAST: tl.constexpr):
    """E4M3 bytes (..., 32) and E8M0 bytes (...) -> operand of `tl.dot`: bf16, in the interpreter f32.

    bf16 represents every product of an element and a scale in its range, 2^-133 to below 2^128: 2^-9 times a scale
    below 2^-124 rounds, 448 times a scale above 2^119 overflows. The interpreter is exact for these too.
    """
    if HW_CAST:
        byte = sf.to(tl.uint16)
        bits = tl.where(byte == 255, 0x7FC0, tl.where(byte == 0, 0x0040, byte << 7)).to(tl.uint16)
        scale = bits.to(tl.bfloat16, bitcast=True)
        return q.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16) * tl.expand_dims(scale, -1)
    else:
        return dequantize_blocks(q, sf, HW_CAST)
