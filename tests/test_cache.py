"""The cache's life: allocation, slots, updates, copies of pages."""

from functools import partial

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from helpers import assert_same_fp8, bits, on_gpu, served_or_refused

import jax_mla
from jax_mla import allocate_cache, copy_pages, slots, update_cache

OPERATION = "update_cache"
PAGES, PAGE_SIZE = 5, 4
SLOTS = PAGES * PAGE_SIZE
FLOATS = ("bfloat16", "float16", "float32")
FP8 = ("float8_e4m3fn", "float8_e4m3fnuz")
PAIRS = [(d, d) for d in FLOATS] + [(i, o) for i in FLOATS for o in (*FP8, cases.DS_MLA)]
kernel_or_refusal = partial(served_or_refused, OPERATION)


def compiled(implementation, **static):
    return jax.jit(partial(update_cache, implementation=implementation, **static))


def expected(cache, rows, slot_mapping, layer=0):
    """The cache after writing encoded rows one after the other."""
    want = np.array(cache)
    flat = want.reshape(want.shape[0] if want.ndim == 4 else 1, -1, want.shape[-1])
    if 0 <= layer < len(flat):
        for row, slot in zip(rows, slot_mapping, strict=True):
            if 0 <= slot < flat.shape[1]:
                flat[layer, slot] = row
    return want


def tokens(rng, count, dtype):
    kv_c = rng.standard_normal((count, 512), np.float32).astype(cases.dtype(dtype))
    k_pe = rng.standard_normal((count, 64), np.float32).astype(cases.dtype(dtype))
    return kv_c, k_pe


def stored(kv_c, k_pe, cache_dtype, scale=None):
    rows = np.concatenate([kv_c, k_pe], axis=-1).astype(np.float32)
    return cases.encode(rows if scale is None else rows / np.float32(scale), cache_dtype)


def assert_same(got, want, cache_dtype, implementation):
    """Bit for bit, but where XLA on a GPU does not round the scales' division correctly."""
    if cache_dtype == cases.DS_MLA and implementation == "xla" and on_gpu():
        assert_same_ds_mla(got, want)
    else:
        np.testing.assert_array_equal(bits(got), bits(want))


def assert_same_ds_mla(got, want):
    """The same but for the last bit of a scale, and codes next to each other where that decided the rounding."""
    got, want = (np.asarray(x).reshape(-1, 656) for x in (got, want))
    np.testing.assert_array_equal(got[:, 528:], want[:, 528:])
    scales = [np.ascontiguousarray(x[:, 512:528]).view(np.float32) for x in (got, want)]
    np.testing.assert_array_max_ulp(*(np.where(np.isnan(s), 0, s) for s in scales), maxulp=2)
    np.testing.assert_array_equal(*map(np.isnan, scales))
    apart = np.abs(got[:, :512].astype(int) - want[:, :512])
    assert apart.max() <= 1 and np.mean(apart) < 0.01


@pytest.mark.parametrize("input_dtype, cache_dtype", PAIRS)
def test_writes_its_slots_and_nothing_else(input_dtype, cache_dtype, implementation):
    """Bit for bit, into a cache full of NaN: -1 and slots out of range are skipped, of duplicates the last wins."""
    rng = np.random.default_rng(0)
    kv_c, k_pe = tokens(rng, 9, input_dtype)
    cache = cases.poisoned_cache((PAGES, PAGE_SIZE), cache_dtype)
    run = compiled(implementation)
    mappings = [
        [3, 0, -1, 19, 20, 7, 3, -5, 1],
        [2**31 - 1, -(2**31), SLOTS, 5, 5, 5, 5, 5, 5],
        [-1] * 9,
        list(range(9)),
        [4, 4, 4, 6, 6, 4, 4, 6, 18],
    ]
    with kernel_or_refusal(implementation, input_dtype, cache_dtype):
        for mapping in np.array(mappings, np.int32):
            got = run(cache, kv_c, k_pe, mapping)
            assert_same(got, expected(cache, stored(kv_c, k_pe, cache_dtype), mapping), cache_dtype, implementation)


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float8_e4m3fn", cases.DS_MLA])
def test_layer_of_a_stacked_cache(cache_dtype, implementation):
    """One layer is written; a layer out of range writes nothing."""
    kv_c, k_pe = tokens(np.random.default_rng(1), 3, "bfloat16")
    cache = cases.poisoned_cache((3, PAGES, PAGE_SIZE), cache_dtype)
    mapping = np.array([1, 19, 6], np.int32)
    run = compiled(implementation)
    with kernel_or_refusal(implementation, "bfloat16", cache_dtype):
        for layer in (0, 1, 2, -1, 3, 2**31 - 1, -(2**31)):
            want = expected(cache, stored(kv_c, k_pe, cache_dtype), mapping, layer)
            got = run(cache, kv_c, k_pe, mapping, layer=np.int32(layer))
            assert_same(got, want, cache_dtype, implementation)


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 5000])
def test_many_tokens_with_duplicates(count, implementation):
    """However many tokens: of duplicates the last wins, whole, each time."""
    rng = np.random.default_rng(count)
    pages = 64
    kv_c, k_pe = tokens(rng, count, "bfloat16")
    cache = cases.poisoned_cache((pages, 16), "bfloat16")
    run = compiled(implementation)
    rows = stored(kv_c, k_pe, "bfloat16")
    for high in (3, pages * 16 + 50):
        mapping = rng.integers(-2, high, count).astype(np.int32)
        want = bits(expected(cache, rows, mapping))
        for _ in range(3):
            np.testing.assert_array_equal(bits(run(cache, kv_c, k_pe, mapping)), want)


@pytest.mark.parametrize("cache_dtype", FP8)
def test_fp8_scales(cache_dtype, implementation):
    """What is stored is value / k_scale: a scalar, or one a layer; None is 1."""
    kv_c, k_pe = tokens(np.random.default_rng(2), 4, "bfloat16")
    mapping = np.array([2, 9, 0, 17], np.int32)
    flat, stacked = (cases.poisoned_cache((*lead, PAGES, PAGE_SIZE), cache_dtype) for lead in ((), (2,)))
    run = compiled(implementation)
    with kernel_or_refusal(implementation, "bfloat16", cache_dtype):
        for scale in (0.25, 2.0):  # powers of two: exact, however an implementation divides
            want = expected(flat, stored(kv_c, k_pe, cache_dtype, scale), mapping)
            np.testing.assert_array_equal(bits(run(flat, kv_c, k_pe, mapping, k_scale=np.float32(scale))), bits(want))
        scales = np.array([0.5, 4.0], np.float32)
        want = expected(stacked, stored(kv_c, k_pe, cache_dtype, 4.0), mapping, 1)
        np.testing.assert_array_equal(
            bits(run(stacked, kv_c, k_pe, mapping, layer=np.int32(1), k_scale=scales)), bits(want)
        )
        got = np.asarray(run(flat, kv_c, k_pe, mapping, k_scale=np.float32(0.37))).reshape(SLOTS, 576)[mapping]
        want = stored(kv_c, k_pe, cache_dtype, 0.37)
        assert (bits(got) != bits(want)).mean() < 1e-3  # a quotient beside a rounding boundary may fall on either side
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=2**-3, atol=2**-9)


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("cache_dtype", FP8)
@pytest.mark.parametrize("input_dtype", ["bfloat16", "float16"])
def test_fp8_casts_over_all_inputs(input_dtype, cache_dtype, saturate, implementation):
    """All 65,536 inputs: the bits of astype, the sign of a NaN aside; with saturate, clamped instead of NaN."""
    inputs = np.arange(65536, dtype=np.uint16).view(cases.dtype(input_dtype))
    rows = np.resize(inputs, (128, 576))
    cache = np.zeros((2, 64, 576), cases.dtype(cache_dtype))
    run = compiled(implementation, saturate=saturate)
    with kernel_or_refusal(implementation, input_dtype, cache_dtype):
        got = run(cache, rows[:, :512], rows[:, 512:], np.arange(128, dtype=np.int32))
        values = rows.astype(np.float32)
        if saturate:
            largest = float(ml_dtypes.finfo(cache.dtype).max)
            values = np.clip(values, -largest, largest)
        want = np.asarray(jax.jit(lambda x: x.astype(cache.dtype))(values))
        assert_same_fp8(np.asarray(got).reshape(128, 576), want)


@pytest.mark.parametrize("power_of_two_scales", [False, True])
def test_ds_mla_scales(power_of_two_scales, implementation):
    """max(amax, 1e-4) / 448 of each 128 values, or that rounded up to a power of two; NaN and inf are stored as NaN."""
    rng = np.random.default_rng(3)
    kv_c, k_pe = tokens(rng, 6, "bfloat16")
    kv_c *= np.exp2(rng.integers(-20, 20, (6, 1))).astype(kv_c.dtype)
    kv_c[1, :128], kv_c[2, 3], kv_c[3, 200], kv_c[4, 130] = 0, np.inf, np.nan, -np.inf
    cache = cases.poisoned_cache((PAGES, PAGE_SIZE), cases.DS_MLA)
    run = compiled(implementation, power_of_two_scales=power_of_two_scales)
    with kernel_or_refusal(implementation, "bfloat16", cases.DS_MLA):
        check_ds_mla_rows(run(cache, kv_c, k_pe, np.arange(6, dtype=np.int32)), kv_c, k_pe, power_of_two_scales)


def check_ds_mla_rows(cache, kv_c, k_pe, power_of_two_scales):
    """The first six slots hold kv_c and k_pe."""
    got = np.asarray(cache).reshape(SLOTS, 656)[:6]
    scales = np.ascontiguousarray(got[:, 512:528]).view(np.float32)
    groups = kv_c.astype(np.float32).reshape(6, 4, 128)
    amax = np.where(np.isfinite(groups), np.abs(groups), 0).max(axis=-1)
    want = np.maximum(amax, np.float32(1e-4)) / np.float32(448)
    if power_of_two_scales:
        want = np.exp2(np.ceil(np.log2(want)))
    np.testing.assert_allclose(scales, want, rtol=1e-7)
    values = oracle.dequantise(got[:, None])[0, :, 0, :512]
    finite = np.isfinite(kv_c.astype(np.float32))
    np.testing.assert_array_equal(np.isfinite(values), finite)
    size = np.repeat(want, 128, axis=-1) * 448
    assert np.all(np.abs(values - kv_c.astype(float))[finite] <= (size / 16)[finite])
    np.testing.assert_array_equal(np.ascontiguousarray(got[:, 528:]).view(np.uint16), k_pe.view(np.uint16))


def test_no_tokens_and_no_slots(implementation):
    cache = cases.poisoned_cache((PAGES, PAGE_SIZE), "bfloat16")
    nothing = [np.zeros(s, cache.dtype) for s in [(0, 512), (0, 64)]]
    got = update_cache(cache, *nothing, np.zeros(0, np.int32), implementation=implementation)
    np.testing.assert_array_equal(bits(got), bits(cache))
    one = [np.zeros(s, cache.dtype) for s in [(1, 512), (1, 64)]]
    empty = np.zeros((0, 64, 576), cache.dtype)
    assert update_cache(empty, *one, np.zeros(1, np.int32), implementation=implementation).shape == empty.shape


def test_write_then_decode(implementation):
    """Tokens written through slots() are what mla_decode reads, for every layout."""
    rng = np.random.default_rng(4)
    table = np.array([[3, 1], [0, 4]], np.int32)
    lengths = np.array([7, 5], np.int32)
    q = rng.standard_normal((2, 1, 4, 576)).astype(ml_dtypes.bfloat16)
    run = compiled(implementation)
    for kind in ("bfloat16", "float8_e4m3fn", cases.DS_MLA):
        cache = cases.poisoned_cache((PAGES, PAGE_SIZE), kind)
        with kernel_or_refusal(implementation, "bfloat16", kind):
            for position in range(7):
                kv_c, k_pe = tokens(rng, 2, "bfloat16")
                positions = np.where(position < lengths, position, -1).astype(np.int32)
                cache = run(cache, kv_c, k_pe, slots(table, positions, PAGE_SIZE))
            args = q, np.asarray(cache), table, lengths
            got = jax_mla.mla_decode(*args, scale=cases.SCALE, implementation="xla")
            oracle.assert_attention(got, oracle.decode(*args, scale=cases.SCALE), 1e-2)


@pytest.mark.leave_out("xla", "cpu*")  # would copy gigabytes; test_decode.py reads with the same address arithmetic
def test_addresses_past_two_to_the_31(implementation):
    """slot * 576 past 2^31 elements: the right slots are written."""
    pages = 2**31 // (64 * 576) + 10
    mapping = np.array([pages * 64 - 1, 5, pages * 64 - 77], np.int32)
    kv_c, k_pe = tokens(np.random.default_rng(5), 3, "bfloat16")
    cache = jnp.zeros((pages, 64, 576), "float8_e4m3fn")
    run = jax.jit(partial(update_cache, implementation=implementation), donate_argnums=0)
    cache = run(cache, kv_c, k_pe, mapping)
    got = np.asarray(cache.reshape(-1, 576)[jnp.asarray(mapping)])
    np.testing.assert_array_equal(bits(got), bits(stored(kv_c, k_pe, "float8_e4m3fn")))
    assert int(jnp.count_nonzero(cache[1:-2].view(jnp.uint8))) == 0


@pytest.mark.parametrize("layers", [None, 2])
@pytest.mark.parametrize("kind", [*FLOATS, *FP8, cases.DS_MLA])
def test_copy_pages(kind, layers):
    """Whole pages, in every layer; all are read before any is written; ids out of range are skipped."""
    rng = np.random.default_rng(6)
    lead = (layers,) if layers else ()
    cache = cases.encode(rng.standard_normal((*lead, PAGES, PAGE_SIZE, 576)), kind)
    source, target = np.array([[1, 2, 9, 3, 0, -1, 4], [3, 0, 1, 4, -1, 2, 5]], np.int32)
    want = cache.copy()
    for a, b in ((1, 3), (2, 0), (3, 4)):
        want[..., b, :, :] = cache[..., a, :, :]
    np.testing.assert_array_equal(bits(jax.jit(copy_pages)(cache, source, target)), bits(want))


def test_slots():
    """page * P + offset; -1 for a position or request without a page, and for one whose slot is past 2^31."""
    table = np.array([[7, 2, -1], [0, 2**30, 5]], np.int32)
    positions = np.array([[0, 3, 4, 8, 11, 12, -1], [0, 3, 4, 8, 11, 12, -1]], np.int32)
    want = [[28, 31, 8, -1, -1, -1, -1], [0, 3, -1, 20, 23, -1, -1]]
    np.testing.assert_array_equal(jax.jit(slots, static_argnums=2)(table, positions, 4), want)
    np.testing.assert_array_equal(slots(table, np.array([5, 9], np.int32), 4), [9, 21])
    request = np.array([1, 0, 2, -1, 1], np.int32)
    got = slots(table, np.array([9, 1, 0, 0, 12], np.int32), 4, request=request)
    np.testing.assert_array_equal(got, [21, 29, -1, -1, -1])


@pytest.mark.parametrize("dtype, width", [("bfloat16", 576), ("float32", 576), ("float8_e4m3fn", 576)])
def test_allocate_cache(dtype, width):
    assert allocate_cache(3, 16, dtype=dtype).shape == (3, 16, width)
    stacked = allocate_cache(3, dtype=dtype, layers=2)
    assert stacked.shape == (2, 3, 64, width) and stacked.dtype == dtype and not np.any(bits(stacked))


BYTES_A_TOKEN = {"bfloat16": 1152, "float16": 1152, "float32": 2304, "float8_e4m3fn": 576, "float8_e4m3fnuz": 576}


@pytest.mark.parametrize("dtype, token_bytes", [*BYTES_A_TOKEN.items(), (cases.DS_MLA, 656)])
def test_bytes_a_token(dtype, token_bytes):
    """Of every layout, as allocate_cache's description has them."""
    assert allocate_cache(3, 16, dtype=dtype, layers=2).nbytes == 2 * 3 * 16 * token_bytes
    assert str(token_bytes) in allocate_cache.__doc__


def test_allocate_ds_mla_cache():
    cache = allocate_cache(3, 16, dtype="fp8_ds_mla", layers=2)
    assert cache.shape == (2, 3, 16, 656) and cache.dtype == "uint8"
