"""fold_rows_stepped: exact bytes. grouped_mm_fold_stepped: the error bound, the sums of Hopper, the bytes of other
products, and the dB of outlier channels."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from mxep.core_kernels import oracle_math
from mxep.core_kernels.fold import oracle_stepped as oracle
from mxep.core_kernels.formats import BLOCK, STAGE
from mxep.core_kernels.grouped_gemm import oracle_sm90, oracle_stepped
from mxep.core_kernels.quantize import oracle as quantize_oracle

from . import check
from .backends import INTERPRETER
from .cases import BF16, GEMMS, RAGGED_GEMMS, seeded
from .fp8_sums import KINDS
from .fp8_sums import operands as codes_of_kind
from .test_fold import every_shift

Ops = Mapping[str, Callable]
Array = np.ndarray
Stepped = tuple[Array, Array, Array, Array]
needs = pytest.mark.needs
out_dtypes = pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])

# --- the fold -------------------------------------------------------------------------------------------


def scales(*shape: int, low: int = 0, high: int = 256) -> Array:
    return seeded(f"scales {shape} {low}").integers(low, high, shape, np.uint8)


def same_fold(ops: Ops, q: Array, sf: Array) -> None:
    check.same_bytes(ops["fold_rows_stepped"](q, sf), oracle.fold_rows_stepped(q, sf))


def test_fold_every_element_by_every_shift(ops: Ops) -> None:
    same_fold(ops, *every_shift())


@pytest.mark.parametrize(("low", "high"), [(0, 256), (110, 140), (124, 128), (0, 12), (240, 256)])
@pytest.mark.parametrize(
    "shape", [(0, 64), (1, 32), (37, 544), (32, 256), (2, 33, 224), (3, 0, 64), (0, 5, 32)], ids=str
)
def test_shapes(ops: Ops, shape: tuple[int, ...], low: int, high: int) -> None:
    same_fold(ops, scales(*shape), scales(*shape[:-1], shape[-1] // BLOCK, low=low, high=high))


def test_blocks_apart_of_several_words(ops: Ops) -> None:
    """1024 of K are a word. One block of a row differs, at either end of a word and within."""
    k = 2 * 1024 + 96
    sf = np.full((2, 70, k // BLOCK), 120, np.uint8)
    for i, block in enumerate((0, 1, 3, 4, 7, 15, 16, 27, 28, 30, 31, 32, 33, 62, 63, 64, 65, 66)):
        sf[i % 2, 4 * i, block] = 140
    same_fold(ops, np.full((2, 70, k), 0x38, np.uint8), sf)


def test_a_scale_by_its_distance_to_that_of_the_row(ops: Ops) -> None:
    """11 octaves below have the scale of the row. Beyond, and above it, blocks keep theirs, and their codes, but for
    those more than 44 octaves below."""
    row = 100
    near = [*range(row - 14, row + 1), *range(row + 10, row + 13)]
    far = [row - 90, row - 60, row - 45, row - 44, row - 43, row + 43, row + 44, 0, 255]
    sf = np.concatenate([np.full(64, row), near, far])
    sf = np.concatenate([sf, np.full(-len(sf) % 4, row)]).astype(np.uint8)[None]
    q = np.full((1, sf.size * BLOCK), 0x38, np.uint8)
    qf, row_sf, step_sf, apart = ops["fold_rows_stepped"](q, sf)
    below, above = [-14, -13, -12] + [0] * 12, [10, 11, 12]
    wanted = [*below, *above, -44, -44, -44, -44, -43, 43, 44, 0, 0]
    np.testing.assert_array_equal(step_sf[64 : 64 + len(wanted), 0].astype(int) - row, wanted)
    np.testing.assert_array_equal(row_sf, row)
    bits = np.unpackbits(apart.astype("<i4").view(np.uint8), bitorder="little")
    np.testing.assert_array_equal(bits[64 : 64 + len(wanted)], np.array(wanted) != 0)
    assert bits.sum() == np.count_nonzero(wanted)
    shift = sf[0].astype(int) - step_sf[:, 0]
    finite = sf[0] != 255
    np.testing.assert_array_equal(qf[0, ::BLOCK][finite], oracle_math.to_e4m3(np.ldexp(1.0, shift[finite])))
    assert (qf[0, ::BLOCK][~finite] == 0x7F).all()
    assert shift[finite].max() == 0


def test_the_scale_of_a_row_is_at_most_nine_octaves_above_its_lower_median(ops: Ops) -> None:
    """Zero and NaN blocks have no part in it. But no block is more than 44 octaves above it."""
    rows = [
        ([50] * 8 + [59] * 7, 59),
        ([50] * 8 + [60] * 7, 50),
        ([50] * 7 + [60] * 8, 60),  # the median is the larger one
        ([50, 51, 58, 60] + [0, 255] * 5 + [0], 60),  # between 51 and 58 the lower one
        ([0] * 15, 0),
        ([255] * 7 + [0] * 7 + [60], 60),
        ([250] * 8 + [254] * 7, 254),
        ([1] * 15, 1),
        ([50] * 14 + [94], 50),
        ([50] * 14 + [95], 51),
        ([50] * 13 + [58, 103], 59),
        ([1] * 14 + [254], 210),
    ]
    sf = np.uint8([blocks for blocks, _ in rows])
    sf = np.concatenate([sf, np.full((len(rows), 1), 255, np.uint8)], 1)[:, seeded("order of blocks").permutation(16)]
    _, row_sf, step_sf, _ = ops["fold_rows_stepped"](np.zeros((len(rows), 512), np.uint8), sf)
    np.testing.assert_array_equal(row_sf, [scale for _, scale in rows])
    left_out = sf % 255 == 0
    np.testing.assert_array_equal(step_sf.T[left_out], np.repeat(row_sf, left_out.sum(1)))


def test_ordinary_rows_are_folded_rows(ops: Ops) -> None:
    x = seeded("ordinary").standard_normal((40, 544)).astype(BF16)
    q, sf = quantize_oracle.quantize_row(x)
    qf, row_sf, step_sf, apart = ops["fold_rows_stepped"](q, sf)
    check.same_bytes((qf, row_sf), ops["fold_rows"](q, sf))
    assert (step_sf == row_sf).all()
    assert not apart.any()


def test_a_row_does_not_depend_on_others(ops: Ops) -> None:
    q, sf = every_shift()
    order = seeded("order").permutation(len(q))
    qf, row_sf, step_sf, _ = ops["fold_rows_stepped"](q, sf)
    moved = ops["fold_rows_stepped"](q[order], sf[order])
    check.same_bytes(moved[:3], (qf[order], row_sf[order], np.ascontiguousarray(step_sf[:, order])))


# --- the product ----------------------------------------------------------------------------------------


def stepped(x: Array) -> Stepped:
    return oracle.fold_rows_stepped(*quantize_oracle.quantize_row(x))


def with_scales(qf: Array, row_sf: Array, sf: Array) -> Stepped:
    """Codes qf (..., M, K) with the scales of rows (..., M) and of blocks (..., M, K/32)."""
    return qf, row_sf, np.ascontiguousarray(np.swapaxes(sf, -1, -2)), oracle.blocks_apart(row_sf, sf)


def within_the_bound(
    backend: str, got: Array, lhs: Stepped, rhs: Stepped, ends: Array, chain: float | None = None
) -> None:
    values = [oracle_stepped.stepped_values(*of[::2]) for of in (lhs, rhs)]
    exact = oracle_stepped.grouped_mm_fold_stepped(*lhs, *rhs, ends, "float64")
    magnitude = oracle_stepped.m_grouped(*map(np.abs, values), ends, "float64")
    chain = check.fp8_chain(backend) if chain is None else chain
    check.gemm_bound(got, exact, magnitude, lhs[0].shape[-1], chain)
    check.fp8_sums(backend, "grouped_mm_fold_stepped", got, *lhs, *rhs, ends)


M_GROUPED = GEMMS | RAGGED_GEMMS


@needs("grouped_mm_fold_stepped")
@out_dtypes
@pytest.mark.parametrize("name", M_GROUPED)
def test_grouped_mm_fold_stepped(backend: str, ops: Ops, name: str, out_dtype: str) -> None:
    case = M_GROUPED[name]
    lhs, rhs = stepped(case.lhs), stepped(case.rhs_t)
    got = ops["grouped_mm_fold_stepped"](*lhs, *rhs, case.group_ends, out_dtype=out_dtype)
    assert got.dtype == oracle_math.DTYPES[out_dtype]
    within_the_bound(backend, got, lhs, rhs, case.group_ends)
    assert (got[case.group_ends[-1] :] == 0).all()


def courses(rng: np.random.Generator, kind: str, *shape: int) -> tuple[Array, Array]:
    """Scale bytes of rows (..., M) around 120, and of blocks (..., M, B). Apart: none; some of some rows; three of all;
    any of any row; all of a row from one on."""
    row = (120 + rng.integers(-3, 4, shape[:-1])).astype(np.uint8)
    sf = np.broadcast_to(row[..., None], shape).astype(int)
    if kind == "some":
        sf += np.where(rng.random(shape) < 0.01, rng.integers(-24, 25, shape), 0)
    if kind == "three_of_all":
        sf[..., 2] += 13
        sf[..., 5:7] -= 20
    if kind == "opposite":  # the factor of both operands together is 1
        sf[..., 2:4] += 12 if len(shape) == 2 else -12
    if kind == "any":
        sf += rng.integers(-15, 16, shape)
    if kind == "late":
        sf[..., 5:] += 8
    return row, sf.astype(np.uint8)


COURSES = ["none", "some", "three_of_all", "opposite", "any", "late"]
OF_ONE = [kind for kind in COURSES if kind not in ("none", "opposite")]
BOTH = [(kind, kind) for kind in COURSES] + [(kind, "none") for kind in OF_ONE] + [("none", kind) for kind in OF_ONE]


@needs("grouped_mm_fold_stepped")
@pytest.mark.parametrize(("of_rows", "of_cols"), [("any", "any")] if INTERPRETER else BOTH)
@pytest.mark.parametrize("first", [140] if INTERPRETER else [44, 140])
def test_blocks_apart(backend: str, ops: Ops, of_rows: str, of_cols: str, first: int) -> None:
    """Rows and columns of several tiles; 44 rows and 136 columns are in one tile of 128 x 256, 140 rows in two of
    256 x 128. K ends within a stage. NaN in rows past the last end reaches nothing."""
    rng, m, n, k, ends = seeded(f"courses {of_rows} {of_cols}"), 300, 136, 416, np.int32([first, first, 290])
    a, b = codes_of_kind("normal", m, 3 * n, k)
    lhs = with_scales(a, *courses(rng, of_rows, m, k // BLOCK))
    rhs = with_scales(b.reshape(3, n, k), *courses(rng, of_cols, 3, n, k // BLOCK))
    lhs[0][290:] = 0x7F
    got = ops["grouped_mm_fold_stepped"](*lhs, *rhs, ends, out_dtype="float32")
    within_the_bound(backend, got, lhs, rhs, ends)
    assert (got[290:] == 0).all()


def cut_sums(name: str) -> tuple[Stepped, Stepped, Array]:
    """Codes that tell the cuts of a tensor core apart, with blocks apart, and group ends."""
    rng, m, n, k, ends = seeded(f"cuts {name}"), 70, 24, 288, np.int32([30, 70])
    a, b = codes_of_kind(name, m, 2 * n, k)
    lhs = with_scales(a, *courses(rng, "any", m, k // BLOCK))
    return lhs, with_scales(b.reshape(2, n, k), *courses(rng, "some", 2, n, k // BLOCK)), ends


def test_the_model_of_hopper_has_subnormals_of_e4m3_as_normal_numbers_in_bf16() -> None:
    """Five sums of an H100. With the exponent that a subnormal has in FP8, each is one unit less."""
    lhs, rhs, ends = cut_sums("subnormal")
    sums = oracle_sm90.grouped_mm_fold_stepped(*lhs, *rhs, ends, "float32")
    wanted = {(11, 14): 1022957746, (30, 11): 972464620, (55, 4): 980898734, (55, 20): 963060520, (63, 11): 981146684}
    assert {at: int(sums.view(np.uint32)[at]) for at in wanted} == wanted


@needs("grouped_mm_fold_stepped")
@pytest.mark.parametrize("name", ["wide"] if INTERPRETER else KINDS)
def test_sums_with_blocks_apart(backend: str, ops: Ops, name: str) -> None:
    """Codes that tell the cuts of a tensor core apart. On a GPU the sums are those of oracle_sm90 to the bit."""
    lhs, rhs, ends = cut_sums(name)
    got = ops["grouped_mm_fold_stepped"](*lhs, *rhs, ends, out_dtype="float32")
    if check.fp8_chain(backend):
        check.fp8_sums(backend, "grouped_mm_fold_stepped", got, *lhs, *rhs, ends)
    else:
        within_the_bound(backend, got, lhs, rhs, ends)


@needs("grouped_mm_fold_stepped", "grouped_mm_fold")
@out_dtypes
def test_without_blocks_apart_it_is_the_folded_product(ops: Ops, out_dtype: str) -> None:
    a, b = codes_of_kind("normal", 90, 48, 544)
    rows, cols, ends = scales(90, low=100, high=140), scales(2, 24, low=100, high=140), np.int32([33, 80])
    lhs = with_scales(a, rows, np.repeat(rows[:, None], 17, 1))
    rhs = with_scales(b.reshape(2, 24, 544), cols, np.repeat(cols[..., None], 17, 2))
    got = ops["grouped_mm_fold_stepped"](*lhs, *rhs, ends, out_dtype=out_dtype)
    if INTERPRETER:  # the Triton kernel adds every 32 terms
        within_the_bound("triton", got, lhs, rhs, ends)
    else:
        check.same_bytes(got, ops["grouped_mm_fold"](lhs[0], rows, rhs[0], cols, ends, out_dtype=out_dtype))


@needs("grouped_mm_fold_stepped")
@pytest.mark.parametrize("kind", ["some", "any"])
def test_a_row_of_a_product_does_not_depend_on_others(ops: Ops, kind: str) -> None:
    """Rows in another order, and columns, have the same bytes: what else a tile holds changes nothing."""
    rng, m, n, k = seeded("neighbours"), 150, 72, 416
    a, b = codes_of_kind("wide", m, n, k)
    of_rows, of_cols = courses(rng, kind, m, k // BLOCK), courses(rng, "some", n, k // BLOCK)
    rows, cols, ends = rng.permutation(m), rng.permutation(n), np.int32([m])

    def product(i: Array, j: Array) -> Array:
        lhs = with_scales(a[i], *(sf[i] for sf in of_rows))
        rhs = with_scales(b[j][None], *(sf[j][None] for sf in of_cols))
        return ops["grouped_mm_fold_stepped"](*lhs, *rhs, ends)

    got, moved = product(np.arange(m), np.arange(n)), product(rows, cols)
    check.same_bytes(moved, np.ascontiguousarray(got[rows][:, cols]))


@needs("grouped_mm_fold_stepped")
@pytest.mark.parametrize("octaves", [3, 40, 90])
def test_opposite_scales_are_exact(ops: Ops, octaves: int) -> None:
    """Ones under powers of two that differ in every block, in opposite directions for rows and columns."""
    rng, blocks = seeded("exact"), 2 * STAGE // BLOCK
    up = rng.integers(0, octaves, (1, blocks)) * rng.choice([-1, 1], (1, blocks)) // 2
    rows, cols = (np.broadcast_to(127 + sign * up, (8, blocks)).astype(np.uint8) for sign in (1, -1))
    ones = np.full((8, blocks * BLOCK), 0x38, np.uint8)
    one = np.full(8, 127, np.uint8)
    lhs, rhs = with_scales(ones, one, rows), with_scales(ones[None], one[None], cols[None])
    got = ops["grouped_mm_fold_stepped"](*lhs, *rhs, np.int32([8]), out_dtype="float32")
    check.same_bytes(got, np.full((8, 8), blocks * BLOCK, np.float32))


@needs("grouped_mm_fold_stepped")
def test_every_block_counts_once_with_its_factor(ops: Ops) -> None:
    """Ones, with one or two blocks apart in each row and column: at either end of a stage and of the 1024 terms of a
    word, and where rows and columns meet. All sums are exact."""
    m, n, blocks = (40, 24, 68) if INTERPRETER else (300, 136, 68)
    places = np.array([0, 3, 4, 17, 28, 31, 32, 35, 62, 63, 64, 67])
    row, col = (np.zeros((size, blocks), int) for size in (m, n))
    row[np.arange(m), places[np.arange(m) % 12]] = 8
    row[np.arange(m), places[np.arange(m) // 7 % 12]] = -4
    col[np.arange(n), places[np.arange(n) // 3 % 12]] = -6
    ends = np.int32([m // 3, m // 3, m - 10])
    lhs, rhs = (
        with_scales(
            np.full((*power.shape[:-1], blocks * BLOCK), 0x38, np.uint8),
            np.full(power.shape[:-1], 127, np.uint8),
            (127 + power).astype(np.uint8),
        )
        for power in (row, np.broadcast_to(col, (3, *col.shape)))
    )
    got = ops["grouped_mm_fold_stepped"](*lhs, *rhs, ends, out_dtype="float32")
    wanted = BLOCK * np.ldexp(1.0, row) @ np.ldexp(1.0, col).T
    wanted[m - 10 :] = 0
    check.same_bytes(got, wanted.astype(np.float32))


@pytest.mark.parametrize("octaves", [6, 8, 11, 12, 14, 16, 24, 40])
def test_channels_of_large_activations_and_small_weights(octaves: int) -> None:
    """32 of 1024 channels. The product folded by row is at 28.0, 21.4, 10.6 and 0 dB from full precision at 2^12 to
    2^24. Stepped it is where MXFP8 is, measured 28.4 dB, less 0.3."""
    rng, ends = seeded("outliers"), np.int32([64])
    x, w = rng.standard_normal((64, 1024)), rng.standard_normal((1, 64, 1024))
    x[:, 352:384] *= 2.0**octaves
    w[..., 352:384] *= 2.0**-octaves
    x, w = x.astype(BF16), w.astype(BF16)
    full = x.astype(np.float64) @ w[0].astype(np.float64).T
    lhs, rhs = stepped(x), stepped(w)
    assert check.sqnr_db(oracle_stepped.grouped_mm_fold_stepped(*lhs, *rhs, ends, "float64"), full) >= 28.1
    assert lhs[3].tolist() == [[1 << 11 if octaves > 8 else 0]] * 2
    assert (lhs[0] != 0).mean() > 0.99


def test_ordinary_rows_have_one_scale() -> None:
    """As `grouped_mm_fold` needs. Normal values, products of two, and rows of many sizes."""
    rng = seeded("ordinary")
    normal, other = rng.standard_normal((2, 256, 2048))
    for x in (normal, normal * other, normal * np.exp2(rng.integers(-20, 20, (256, 1)))):
        assert not stepped(x.astype(BF16))[3].any()


@needs("grouped_mm_fold_stepped")
def test_a_nan_block_is_nan_in_its_row_or_column(ops: Ops) -> None:
    x, w = seeded("nan").standard_normal((2, 40, 256)).astype(BF16)
    x[3, 70], w[5, 200] = np.nan, np.nan
    got = ops["grouped_mm_fold_stepped"](*stepped(x), *stepped(w[None]), np.int32([40]), out_dtype="float32")
    nan = np.zeros((40, 40), bool)
    nan[3], nan[:, 5] = True, True
    np.testing.assert_array_equal(np.isnan(got), nan)
