"""mla_prefill: ragged attention with keys of 192 and values of 128."""

import dataclasses
from functools import partial

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from helpers import assert_same_bits, native_only, served, served_or_refused
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_mla import (
    KernelValues,
    _ffi,
    capabilities,
    explain,
    merge_states,
    mla_prefill,
    override_capabilities,
    reference,
)

OPERATION = "mla_prefill"
SCALE = 192**-0.5
CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])


def compiled(implementation, **static):
    return jax.jit(partial(mla_prefill, scale=SCALE, implementation=implementation, **static))


def ragged(q_lens, kv_lens):
    return tuple(np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (q_lens, kv_lens))


def operands(tokens, stored, heads, dtype="bfloat16", seed=0):
    """q [T, H, 192], k [S, H, 192], and the up-projection [S, H, 256] whose second half is v."""
    rng = np.random.default_rng(seed)
    shapes = (tokens, heads, 192), (stored, heads, 192), (stored, heads, 256)
    return tuple(rng.standard_normal(shape, np.float32).astype(cases.dtype(dtype)) for shape in shapes)


def values(kv_up):
    return np.ascontiguousarray(kv_up[..., 128:])


@CAUSAL
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("heads", [1, 12, 24])
def test_against_the_oracle(heads, dtype, causal, implementation):
    """Requests longer than, as long as and shorter than their keys, and of one token."""
    cu = ragged((70, 1, 30, 5), (70, 40, 100, 2))
    q, k, kv_up = operands(106, 212, heads, dtype)
    if not served(OPERATION, implementation, dtype, dtype):
        with served_or_refused(OPERATION, implementation, dtype, dtype):
            compiled(implementation, causal=causal)(q, k, values(kv_up), *cu)
        return
    got = compiled(implementation, causal=causal)(q, k, values(kv_up), *cu)
    assert got[0].dtype == dtype and got[1].dtype == "float32"
    truth = oracle.prefill(q, k, values(kv_up), *cu, causal=causal, scale=SCALE)
    oracle.assert_attention(got, truth, cases.TOLERANCES[dtype])


@CAUSAL
def test_random_ragged_batches(causal, implementation):
    """One compiled program over many batches; what no request owns is NaN.

    Of the field's failures: a request with queries and no keys; NaN in V past the used length.
    """
    rng = np.random.default_rng(1)
    q, k, kv_up = operands(60, 90, 4)
    run = compiled(implementation, causal=causal)
    for trial in range(12):
        q_lens, kv_lens = rng.integers(0, 12, 5), rng.integers(0, 18, 5)
        kv_lens[trial % 5] = 0
        cu_q, cu_kv = ragged(q_lens, kv_lens)
        q2, k2, v2 = q.copy(), k.copy(), values(kv_up)
        q2[cu_q[-1] :], k2[cu_kv[-1] :], v2[cu_kv[-1] :] = np.nan, np.nan, np.nan
        truth = oracle.prefill(q2, k2, v2, cu_q, cu_kv, causal=causal, scale=SCALE)
        oracle.assert_attention(run(q2, k2, v2, cu_q, cu_kv), truth, 1e-2)


def test_value_offset_reads_the_up_projection_in_place(implementation):
    """v may be the whole up-projection [S, H, 256] with value_offset=128: the same bits, NaN in the rest unread."""
    cu = ragged((20, 9), (25, 9))
    q, k, kv_up = operands(29, 34, 6)
    poisoned = kv_up.copy()
    poisoned[..., :128] = np.nan
    sliced = compiled(implementation, causal=True)(q, k, values(kv_up), *cu)
    whole = compiled(implementation, causal=True, value_offset=128)(q, k, poisoned, *cu)
    assert_same_bits(sliced, whole)


def in_parts(stored, heads, dtype="bfloat16", nope_width=256, rope_width=64, seed=7):
    """Whole keys, and the same ones as the pair (nope, k_pe), with NaN in what is no part of them."""
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((stored, heads, 192), np.float32).astype(cases.dtype(dtype))
    k[..., 128:] = k[:, :1, 128:]
    nope, k_pe = np.full((stored, heads, nope_width), np.nan, k.dtype), np.full((stored, rope_width), np.nan, k.dtype)
    nope[..., :128], k_pe[:, -64:] = k[..., :128], k[:, 0, 128:]
    return k, (nope, k_pe)


@CAUSAL
@pytest.mark.parametrize("rope_width", [64, 576])
@pytest.mark.parametrize("nope_width", [128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_keys_in_parts(dtype, nope_width, rope_width, causal, implementation):
    """The bits of whole keys, over several tiles and blocks; what is no part of a key is NaN, and so are unowned keys.

    Of the field's failures: a value read as a key, and a latent as a rope key.
    """
    cu = ragged((150, 1, 0, 70, 3), (300, 40, 20, 70, 0))
    q, _, kv_up = operands(224, 435, 3, dtype)
    k, pair = in_parts(435, 3, dtype, nope_width, rope_width)
    k[430:], pair[0][430:], pair[1][430:] = np.nan, np.nan, np.nan
    run = compiled(implementation, causal=causal)
    if not served(OPERATION, implementation, dtype, dtype):
        with served_or_refused(OPERATION, implementation, dtype, dtype):
            run(q, pair, values(kv_up), *cu)
        return
    got = run(q, pair, values(kv_up), *cu)
    assert_same_bits(got, run(q, k, values(kv_up), *cu))
    truth = oracle.prefill(q, k, values(kv_up), *cu, causal=causal, scale=SCALE)
    oracle.assert_attention(got, truth, cases.TOLERANCES[dtype])


@CAUSAL
def test_keys_and_values_of_one_up_projection(causal, implementation):
    """Both in place in one array, the rope keys in gathered latent rows; also merged into a carry, bit for bit."""
    cu = ragged((20, 9, 3), (25, 9, 0))
    q, _, kv_up = operands(32, 34, 6)
    k, (_, k_pe) = in_parts(34, 6, rope_width=576)
    kv_up[..., :128] = k[..., :128]
    run = compiled(implementation, causal=causal, value_offset=128)
    for options in ({}, {"carry": carry_of(32, 6)}):
        got = run(q, (kv_up, k_pe), kv_up, *cu, **options)
        assert_same_bits(got, run(q, k, kv_up, *cu, **options))


def test_nan_in_a_rope_key(implementation):
    """It reaches all heads of the rows that see it, and no other row."""
    cu = ragged((4, 6, 5), (4, 6, 5))
    q, _, kv_up = operands(15, 15, 3)
    k, (nope, k_pe) = in_parts(15, 3)
    truth = oracle.prefill(q, k, values(kv_up), *cu, causal=True, scale=SCALE)
    k_pe[6] = np.nan  # the third token of the second request
    out, lse = compiled(implementation, causal=True)(q, (nope, k_pe), values(kv_up), *cu)
    clean = np.array([0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14])
    oracle.assert_attention((out[clean], lse[clean]), tuple(x[clean] for x in truth), 1e-2)
    assert np.isnan(np.asarray(out[6:10], np.float32)).all()


@pytest.mark.leave_out("xla*", "cuda*", "rocm*")
@pytest.mark.parametrize("nope_width", [128, 256])
def test_keys_are_packed_where_a_row_takes_whole_ones(nope_width, implementation):
    """With the same bits, in the branch of the platform that asks for it."""
    cu = ragged((20, 9), (25, 9))
    q, _, kv_up = operands(29, 34, 6)
    k, pair = in_parts(34, 6, nope_width=nope_width)
    want = compiled(implementation, causal=True)(q, k, values(kv_up), *cu)
    for key_parts in (True, False):
        rows = [dataclasses.replace(row, key_parts=key_parts) for row in capabilities()]
        with override_capabilities(rows):
            run = compiled(implementation, causal=True)
            program = run.lower(q, pair, values(kv_up), *cu).compile()
        packs = not key_parts and nope_width == 256  # else one pass of XLA
        assert ('custom_call_target="jax_mla_pack_kv"' in program.as_text()) == packs
        assert_same_bits(program(q, pair, values(kv_up), *cu), want)


@native_only
def test_masked_keys_in_parts(implementation):
    """As whole ones, bit for bit, with NaN in the masked keys."""
    cu = ragged((60, 9), (90, 9))
    q, _, kv_up = operands(69, 99, 3)
    k, (nope, k_pe) = in_parts(99, 3)
    hidden = np.random.default_rng(5).random(99) < 0.4
    k[hidden], nope[hidden], k_pe[hidden] = np.nan, np.nan, np.nan
    mask = jnp.asarray(np.packbits(np.pad(~hidden, (0, -99 % 32)), bitorder="little").view(np.uint32))
    choice = explain(OPERATION, implementation=implementation, target=implementation.partition(":")[0])
    if not choice.row.key_parts:
        pytest.skip("takes whole keys alone")

    @jax.jit
    def run(*keys):
        return _ffi.prefill(
            q, *keys, values(kv_up), *map(jnp.asarray, cu), mask, (None,) * 3, None, value_offset=0, scale=SCALE,
            causal=False, variant=choice.variant, out_dtype=q.dtype,
        )  # fmt: skip

    assert_same_bits(run(jnp.asarray(nope), jnp.asarray(k_pe)), run(jnp.asarray(k), None))


@pytest.mark.parametrize("mapped", ["both", "nope", "k_pe"])
def test_vmap_over_keys_in_parts(mapped, implementation):
    cu = ragged((7, 3), (9, 5))
    q, _, kv_up = operands(12, 17, 2)
    (_, plain), (_, other) = in_parts(17, 2, rope_width=576), in_parts(17, 2, rope_width=576, seed=8)
    axes = {"both": (0, 0), "nope": (0, None), "k_pe": (None, 0)}[mapped]
    stacked = tuple(np.stack(xs) if axis == 0 else xs[0] for *xs, axis in zip(plain, other, axes, strict=True))

    def call(pair):
        return mla_prefill(
            jnp.asarray(q), pair, values(kv_up), *cu, causal=True, scale=SCALE, implementation=implementation
        )

    got = jax.jit(jax.vmap(call, in_axes=(axes,)))(stacked)
    for i in range(2):
        one = call(tuple(x[i] if axis == 0 else x for x, axis in zip(stacked, axes, strict=True)))
        for x, y in zip(got, one, strict=True):
            np.testing.assert_allclose(x[i].astype(jnp.float32), y.astype(jnp.float32), rtol=1e-2, atol=1e-2)


@pytest.mark.leave_out("cpu*", "cuda*", "rocm*")
def test_derivative_by_keys_in_parts(implementation):
    """Of XLA's implementation: as of whole keys, summed over the heads for the rope key; zero for what is not read."""
    cu = ragged((6,), (8,))
    q, _, kv_up = (jnp.asarray(x) for x in operands(6, 8, 2, "float32"))
    k, (nope, k_pe) = in_parts(8, 2, "float32", rope_width=576)
    pair = jnp.nan_to_num(nope), jnp.nan_to_num(k_pe)

    def loss(k):
        return compiled(implementation, causal=True)(q, k, values(kv_up), *cu)[0].sum()

    whole, (of_nope, of_k_pe) = jax.grad(loss)(jnp.asarray(k)), jax.grad(loss)(pair)
    np.testing.assert_allclose(of_nope[..., :128], whole[..., :128], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_k_pe[:, 512:], whole[..., 128:].sum(1), rtol=1e-5, atol=1e-6)
    assert not np.any(of_nope[..., 128:]) and not np.any(of_k_pe[:, :512]) and np.any(of_k_pe)


def test_nan_stays_with_its_request(implementation):
    """NaN among one request's keys and values, or in its later tokens, reaches no row that does not see it."""
    cu = ragged((4, 6, 5), (4, 6, 5))
    q, k, kv_up = operands(15, 15, 3)
    truth = oracle.prefill(q, k, values(kv_up), *cu, causal=True, scale=SCALE)
    k2, v2 = k.copy(), values(kv_up)
    k2[6], v2[6] = np.nan, np.nan  # the third token of the second request
    out, lse = compiled(implementation, causal=True)(q, k2, v2, *cu)
    clean = np.array([0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14])
    oracle.assert_attention((out[clean], lse[clean]), tuple(x[clean] for x in truth), 1e-2)
    assert np.isnan(np.asarray(out[6:10], np.float32)).all()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e4m3fnuz"])
def test_fp8_with_scales(dtype, implementation):
    """fp8 inputs carry q_scale, k_scale and v_scale, default 1; the result is bf16."""
    cu = ragged((20, 9), (25, 9))
    q, k, kv_up = operands(29, 34, 6, dtype)
    scales = {"q_scale": np.float32(1.5), "k_scale": np.float32(0.5), "v_scale": np.float32(3)}
    wide = [oracle.as_float(x) for x in (q, k, values(kv_up))]
    if not served(OPERATION, implementation, dtype, dtype):
        with served_or_refused(OPERATION, implementation, dtype, dtype):
            compiled(implementation, causal=True)(q, k, values(kv_up), *cu, **scales)
        return
    for given in (scales, {}):
        run = compiled(implementation, causal=True)
        got = run(q, k, values(kv_up), *cu, **given)
        assert got[0].dtype == "bfloat16"
        scaled = [x * float(s) for x, s in zip(wide, given.values() or (1, 1, 1), strict=True)]
        oracle.assert_attention(got, oracle.prefill(*scaled, *cu, causal=True, scale=SCALE), 4e-2)


# Hopper's products in e4m3 keep 14 bits of partial sums below 64, to 2^-8: eight times that may be lost on the way.
FP8_LSE = 1e-3 + SCALE / 32
MIXED = "float8_e4m3fn", "bfloat16"  # queries and keys, values
takes_mixed = pytest.mark.takes(*MIXED)


def scaled_truth(q, k, v, cu, scales, **static):
    """The oracle's result of fp8 operands multiplied with their scales."""
    q, k, v = (oracle.as_float(x) * scales.get(n, 1) for n, x in (("q_scale", q), ("k_scale", k), ("v_scale", v)))
    return oracle.prefill(q, k, v, *cu, scale=SCALE, **static)


@CAUSAL
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e4m3fnuz"])
def test_fp8_keys_with_bf16_values(kind, causal, implementation):
    """Values as they come from the up-projection, read in place; several tiles and blocks; NaN in what is not seen."""
    cu = ragged((250, 97, 30, 5), (700, 130, 30, 2))
    q, k, _ = operands(390, 870, 3, kind)
    kv_up = operands(390, 870, 3)[2]
    k[862:], kv_up[862:] = np.nan, np.nan
    kv_up[..., :128] = np.nan
    run = compiled(implementation, causal=causal, value_offset=128)
    if not served(OPERATION, implementation, kind, "bfloat16"):
        with served_or_refused(OPERATION, implementation, kind, "bfloat16"):
            run(q, k, kv_up, *cu)
        return
    for scales in ({}, {"q_scale": np.float32(1.5), "k_scale": np.float32(0.5)}, {"k_scale": np.float32(-1)}):
        got = run(q, k, kv_up, *cu, **scales)
        assert got[0].dtype == "bfloat16" and got[1].dtype == "float32"
        oracle.assert_attention(got, scaled_truth(q, k, values(kv_up), cu, scales, causal=causal), 1e-2, FP8_LSE)


@takes_mixed
def test_fp8_keys_merge_into_a_carry(implementation):
    cu = ragged((20, 9, 3), (25, 9, 0))
    q, k, _ = operands(32, 34, 6, MIXED[0])
    v = values(operands(32, 34, 6)[2])
    carry = carry_of(32, 6)
    merged = compiled(implementation, causal=True)(q, k, v, *cu, carry=carry)
    own = (jnp.asarray(x, jnp.float32) for x in scaled_truth(q, k, v, cu, {}, causal=True))
    want = merge_states(*map(jnp.asarray, carry), *own, implementation="xla")
    oracle.assert_attention(merged, tuple(np.asarray(x, np.float64) for x in want), 1e-2, FP8_LSE)
    np.testing.assert_array_equal(merged[0][29:], carry[0][29:])


@takes_mixed
def test_fp8_scales_of_any_sign(implementation):
    """The queries take the sign of the scale; a scale of 0 makes all keys alike."""
    cu = ragged((20, 9, 3), (25, 9, 0))
    q, k, _ = operands(32, 34, 6, MIXED[0])
    v = values(operands(32, 34, 6)[2])
    for scale, q_scale in ((0.0, None), (-SCALE, None), (-SCALE, -1.0), (SCALE, 0.0)):
        run = jax.jit(partial(mla_prefill, scale=scale, causal=True, implementation=implementation))
        factor = 1 if q_scale is None else q_scale
        truth = oracle.prefill(oracle.as_float(q) * factor, k, v, *cu, causal=True, scale=scale)
        oracle.assert_attention(run(q, k, v, *cu, q_scale=q_scale), truth, 1e-2, FP8_LSE)


@takes_mixed
def test_nan_in_fp8_keys(implementation):
    """It reaches the rows that see it, and no other."""
    cu = ragged((4, 6, 5), (4, 6, 5))
    q, k, _ = operands(15, 15, 3, MIXED[0])
    v = values(operands(15, 15, 3)[2])
    truth = scaled_truth(q, k, v, cu, {}, causal=True)
    k2 = k.copy()
    k2[6] = np.nan  # the third token of the second request
    out, lse = compiled(implementation, causal=True)(q, k2, v, *cu)
    clean = np.array([0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14])
    oracle.assert_attention((out[clean], lse[clean]), tuple(x[clean] for x in truth), 1e-2, FP8_LSE)
    assert np.isnan(np.asarray(out[6:10], np.float32)).all()


ALL_FP8 = "float8_e4m3fn", KernelValues.KIND
takes_kernel_values = pytest.mark.takes(*ALL_FP8)


def tiled(v):
    return KernelValues(reference.tile_values(v), v.shape[0])


@CAUSAL
def test_kernel_values(causal, implementation):
    """Values in the fp8 kernel's tiles; requests begin and end inside of them, and NaN is in what nobody sees.

    Weights are e4m3 then, which have three bits behind the first.
    """
    rng = np.random.default_rng(6)
    q, k, kv_up = operands(300, 600, 3, "float8_e4m3fn")
    run = compiled(implementation, causal=causal)
    if not served(OPERATION, implementation, *ALL_FP8):
        with served_or_refused(OPERATION, implementation, *ALL_FP8):
            run(q, k, tiled(values(kv_up)), *ragged((300,), (600,)))
        return
    scales = {"q_scale": np.float32(1.5), "k_scale": np.float32(0.5), "v_scale": np.float32(-3)}
    for trial in range(8):
        q_lens = rng.integers(0, 12, 5) if trial % 2 else rng.integers(30, 60, 5)
        kv_lens = rng.integers(0, 40, 5) if trial % 2 else rng.integers(60, 115, 5)
        kv_lens[trial % 5] = 0
        cu_q, cu_kv = (x + np.int32(trial) for x in ragged(q_lens, kv_lens))
        k2, v2 = k.copy(), values(kv_up)
        for x in (k2, v2):
            x[: cu_kv[0]], x[cu_kv[-1] :] = np.nan, np.nan
        given = scales if trial % 3 else {}
        got = run(q, k2, tiled(v2), cu_q, cu_kv, **given)
        assert got[0].dtype == "bfloat16"
        oracle.assert_attention(got, scaled_truth(q, k2, v2, (cu_q, cu_kv), given, causal=causal), 4e-2, FP8_LSE)


@takes_kernel_values
def test_nan_in_kernel_values(implementation):
    """It reaches the rows that see it, and no other; beside it in the tile lies another request."""
    cu = ragged((4, 6, 5), (4, 6, 5))
    q, k, kv_up = operands(15, 15, 3, "float8_e4m3fn")
    v = values(kv_up)
    truth = scaled_truth(q, k, v, cu, {}, causal=True)
    v[6] = np.nan  # the third token of the second request
    out, lse = compiled(implementation, causal=True)(q, k, tiled(v), *cu)
    clean = np.array([0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14])
    oracle.assert_attention((out[clean], lse[clean]), tuple(x[clean] for x in truth), 4e-2, FP8_LSE)
    assert np.isnan(np.asarray(out[6:10], np.float32)).all()


@takes_kernel_values
def test_kernel_values_under_vmap(implementation):
    """Tokens of a mapped call fill whole tiles, whatever their number."""
    cu = ragged((7, 3), (9, 5))
    q, k, kv_up = operands(12, 17, 2, "float8_e4m3fn")
    v = values(kv_up)
    stacked = tuple(np.stack([x, x[:, ::-1]]) for x in (q, k, v))
    tiles = jax.tree.map(lambda *x: jnp.stack(x), *(tiled(x) for x in stacked[2]))

    def call(q, k, v):
        return mla_prefill(q, k, v, *cu, causal=True, scale=SCALE, implementation=implementation)

    got = jax.jit(jax.vmap(call))(*stacked[:2], tiles)
    for i in range(2):
        one = call(stacked[0][i], stacked[1][i], tiled(stacked[2][i]))
        for x, y in zip(got, one, strict=True):
            np.testing.assert_allclose(x[i].astype(jnp.float32), y.astype(jnp.float32), rtol=4e-2, atol=4e-2)


@takes_kernel_values
@CAUSAL
def test_kernel_values_merge_into_a_carry(causal, implementation):
    cu = ragged((20, 9, 3), (25, 9, 0))
    q, k, kv_up = operands(32, 34, 6, "float8_e4m3fn")
    v, carry, scales = values(kv_up), carry_of(32, 6), {"v_scale": np.float32(2)}
    merged = compiled(implementation, causal=causal)(q, k, tiled(v), *cu, carry=carry, **scales)
    own = (jnp.asarray(x, jnp.float32) for x in scaled_truth(q, k, v, cu, scales, causal=causal))
    want = merge_states(*map(jnp.asarray, carry), *own, implementation="xla")
    oracle.assert_attention(merged, tuple(np.asarray(x, np.float64) for x in want), 4e-2, FP8_LSE)
    np.testing.assert_array_equal(merged[0][29:], carry[0][29:])


@CAUSAL
def test_carry_is_merged_into(causal, implementation):
    """carry=(out, lse) in fp32: as merging afterwards; an empty carry changes nothing, an empty result leaves it."""
    cu = ragged((20, 9, 3), (25, 9, 0))
    q, k, kv_up = operands(32, 34, 6)
    rng = np.random.default_rng(2)
    out, lse = rng.standard_normal((32, 6, 128)).astype(np.float32), rng.standard_normal((32, 6)).astype(np.float32)
    lse[3], out[3] = -np.inf, np.nan
    run = compiled(implementation, causal=causal)
    merged = run(q, k, values(kv_up), *cu, carry=(out, lse))
    assert merged[0].dtype == "float32"
    own = tuple(
        jnp.asarray(x, jnp.float32) for x in oracle.prefill(q, k, values(kv_up), *cu, causal=causal, scale=SCALE)
    )
    want = merge_states(jnp.asarray(out), jnp.asarray(lse), *own, implementation="xla")
    oracle.assert_attention(merged, tuple(np.asarray(x, np.float64) for x in want), 1e-2)
    np.testing.assert_array_equal(merged[0][29:], out[29:])
    np.testing.assert_array_equal(merged[1][29:], lse[29:])


@pytest.mark.parametrize("tokens, stored, batch", [(0, 5, 1), (5, 0, 1), (0, 0, 0), (3, 4, 0)])
def test_empty_shapes(tokens, stored, batch, implementation):
    q, k, kv_up = operands(tokens, stored, 4)
    cu_q, cu_kv = (np.array([0] + [n] * batch, np.int32) for n in (tokens, stored))
    out, lse = compiled(implementation, causal=False)(q, k, values(kv_up), cu_q, cu_kv)
    assert out.shape == (tokens, 4, 128) and lse.shape == (tokens, 4)
    if not stored or not batch:
        assert not np.any(np.asarray(out, np.float32)) and np.all(np.asarray(lse) == -np.inf)


@pytest.mark.takes("float32", "float32")
@CAUSAL
def test_merging_in_the_call_equals_merging_afterwards(causal, implementation):
    """Both merge in fp32: 1e-5 apart at most, in fp32 inputs."""
    cu = ragged((20, 9), (25, 9))
    q, k, kv_up = operands(29, 34, 6, "float32")
    rng = np.random.default_rng(3)
    state = rng.standard_normal((29, 6, 128)).astype(np.float32), rng.standard_normal((29, 6)).astype(np.float32)
    run = compiled(implementation, causal=causal)
    merged = run(q, k, values(kv_up), *cu, carry=state)
    want = merge_states(*state, *run(q, k, values(kv_up), *cu))
    oracle.assert_attention(merged, tuple(np.asarray(x, np.float64) for x in want), 1e-5, 1e-5)


@CAUSAL
@pytest.mark.parametrize("scale", [0.0, -0.05])
def test_scales_that_are_not_positive(scale, causal, implementation):
    """All keys alike, and the least alike ones first. Hopper's kernel masks by the sign: it says no, by its row."""
    cu = ragged((20, 9, 3), (25, 9, 0))
    q, k, kv_up = operands(32, 34, 6)
    run = jax.jit(partial(mla_prefill, scale=scale, causal=causal, implementation=implementation))
    rows = [row for row in capabilities() if row.operation == OPERATION and row.implementation == implementation]
    if rows and rows[0].positive_scale:
        with pytest.raises(NotImplementedError, match=f"for mla_prefill takes scale {scale}"):
            run(q, k, values(kv_up), *cu)
        return
    got = run(q, k, values(kv_up), *cu)
    oracle.assert_attention(got, oracle.prefill(q, k, values(kv_up), *cu, causal=causal, scale=scale), 1e-2)


@CAUSAL
def test_many_tiles_and_blocks(causal, implementation):
    """Requests whose queries and keys are several of the kernels' tiles and blocks, and end inside them."""
    cu = ragged((250, 97, 96), (700, 130, 96))
    q, k, kv_up = operands(443, 926, 2)
    got = compiled(implementation, causal=causal)(q, k, values(kv_up), *cu)
    oracle.assert_attention(got, oracle.prefill(q, k, values(kv_up), *cu, causal=causal, scale=SCALE), 1e-2)


def test_same_bits_each_time(implementation):
    """Fresh copies of the operands, at other addresses, too."""
    cu = ragged((250, 97), (300, 130))
    q, k, kv_up = operands(347, 430, 5)
    run = compiled(implementation, causal=True)
    first = run(q, k, values(kv_up), *cu)
    for _ in range(4):
        assert_same_bits(first, run(np.copy(q), np.copy(k), values(kv_up), *cu))


def carry_of(tokens, heads):
    rng = np.random.default_rng(4)
    out = rng.standard_normal((tokens, heads, 128)).astype(np.float32)
    return out, rng.standard_normal((tokens, heads)).astype(np.float32)


def test_without_donation_the_carry_stays(implementation):
    """Nothing that the caller holds changes: eagerly, under jit, and where the program needs the old carry too."""
    cu = ragged((20, 9), (25, 9))
    q, k, kv_up = operands(29, 34, 6)
    given = carry_of(29, 6)
    carry = tuple(map(jnp.asarray, given))
    run = partial(mla_prefill, causal=True, scale=SCALE, implementation=implementation)
    eager = run(q, k, values(kv_up), *cu, carry=carry)
    both = jax.jit(lambda carry: (run(q, k, values(kv_up), *cu, carry=carry), jax.tree.map(lambda x: x * 2, carry)))
    merged, twice = both(carry)
    assert_same_bits(carry, given)
    assert_same_bits(merged, eager)
    np.testing.assert_array_equal(twice[0], given[0] * 2)


@native_only
def test_a_donated_carry_is_updated_in_place(implementation):
    """Donated, and as the carry of a scan: no second buffer."""
    cu = ragged((300,), (300,))
    q, k, kv_up = operands(300, 300, 6)
    given = carry_of(300, 6)
    run = partial(mla_prefill, causal=True, scale=SCALE, implementation=implementation)

    def once(carry):
        return run(q, k, values(kv_up), *cu, carry=carry)

    def twice(carry):
        return jax.lax.scan(lambda carry, _: (once(carry), None), carry, length=2)[0]

    expected = once(given), once(once(given))
    for function, want in zip((once, twice), expected, strict=True):
        program = jax.jit(function, donate_argnums=0).lower(given).compile()
        memory = program.memory_analysis()
        nbytes = given[0].nbytes + given[1].nbytes
        assert memory.alias_size_in_bytes >= nbytes and memory.temp_size_in_bytes < given[0].nbytes
        carry = jax.jit(lambda x: jax.tree.map(jnp.copy, x))(given)  # XLA's own memory
        addresses = [x.unsafe_buffer_pointer() for x in carry]
        got = program(carry)
        assert [x.unsafe_buffer_pointer() for x in got] == addresses
        assert_same_bits(got, want)


@native_only
def test_masked_keys(implementation):
    """Keys whose bit is clear in the mask are seen by nobody, NaN in them neither."""
    cu = ragged((60, 9), (90, 9))
    q, k, kv_up = operands(69, 99, 3)
    v = values(kv_up)
    seen = np.random.default_rng(5).random(99) < 0.6
    seen[90:] = False  # a request without any
    mask = np.packbits(np.pad(seen, (0, -len(seen) % 32)), bitorder="little").view(np.uint32)
    kept = ragged((60, 9), (int(seen.sum()), 0))
    truth = oracle.prefill(q, k[seen], v[seen], *kept, causal=False, scale=SCALE)
    k, v = (np.where(seen[:, None, None], x, np.array(np.nan, x.dtype)) for x in (k, v))
    choice = explain(OPERATION, implementation=implementation, target=implementation.partition(":")[0])
    got = jax.jit(
        lambda q, k, v, *cu: _ffi.prefill(
            q, k, None, v, *cu, jnp.asarray(mask), (None,) * 3, None, value_offset=0, scale=SCALE, causal=False,
            variant=choice.variant, out_dtype=q.dtype,
        )
    )(q, k, v, *cu)  # fmt: skip
    oracle.assert_attention(got, truth, 1e-2)


def test_offsets_out_of_range(implementation):
    """Whatever the offsets hold, nothing outside the arrays is read or written, and good requests stay right."""
    q, k, kv_up = operands(30, 40, 2)
    run = compiled(implementation, causal=True)
    for cu_q, cu_kv in [
        ([0, 2**31 - 1], [0, 2**31 - 1]),
        ([-5, 30], [-9, 40]),
        ([0, 90, 20, -1], [70, 2, -(2**31), 9]),
    ]:
        out, lse = run(q, k, values(kv_up), np.array(cu_q, np.int32), np.array(cu_kv, np.int32))
        assert out.shape == (30, 2, 128) and lse.shape == (30, 2)
    cu_q, cu_kv = np.array([0, 20, 2**31 - 1], np.int32), np.array([0, 25, 2**31 - 1], np.int32)
    out, lse = run(q, k, values(kv_up), cu_q, cu_kv)
    truth = oracle.prefill(q[:20], k[:25], values(kv_up)[:25], *ragged((20,), (25,)), causal=True, scale=SCALE)
    oracle.assert_attention((out[:20], lse[:20]), truth, 1e-2)


@pytest.mark.parametrize("mapped", ["all", "q", "values", "offsets"])
def test_vmap(mapped, implementation):
    """A mapped axis becomes more sequences; what no sequence of a call owns stays apart. Nested too."""
    cu_q, cu_kv = ragged((7, 3), (9, 5))
    q, k, kv_up = operands(12, 17, 2)  # two query tokens and three keys of no sequence
    v = values(kv_up)
    plain = {"q": q, "k": k, "v": v, "cu_q_lens": cu_q, "cu_kv_lens": cu_kv, "carry": carry_of(12, 2)}
    other = {
        "q": -q,
        "k": -k,
        "v": v * 2,
        "cu_q_lens": cu_q + np.array([1, 0, 1], np.int32),
        "cu_kv_lens": cu_kv + np.array([2, 0, 1], np.int32),
        "carry": tuple(x * 2 for x in carry_of(12, 2)),
    }
    which = {"q": ["q"], "values": ["v"], "offsets": ["cu_q_lens", "cu_kv_lens"]}.get(mapped, list(plain))
    axes = {name: 0 if name in which else None for name in plain}
    stacked = {n: jax.tree.map(lambda a, b: np.stack([a, b, a]), plain[n], other[n]) for n in which}

    def call(q, k, v, cu_q_lens, cu_kv_lens, carry):
        return mla_prefill(
            q, k, v, cu_q_lens, cu_kv_lens, causal=True, scale=SCALE, carry=carry, implementation=implementation
        )

    run = jax.vmap(call, in_axes=tuple(axes.values()))
    got = jax.jit(run)(*(plain | stacked).values())
    nested = jax.vmap(run, in_axes=(0, *[None] * 5))(
        (plain | stacked)["q"][None], *list((plain | stacked).values())[1:]
    )
    for i in range(3):
        one = call(*(plain | {n: (plain, other, plain)[i][n] for n in which}).values())
        for x, y, z in zip(got, one, nested, strict=True):
            np.testing.assert_allclose(x[i], y, rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(z[0, i], y, rtol=1e-6, atol=1e-6)


def test_derivative_is_refused(implementation):
    """It serves inference, unless XLA's implementation is asked for by name."""
    cu = ragged((6,), (6,))
    q, k, kv_up = (jnp.asarray(x) for x in operands(6, 6, 2))

    def loss(q, implementation):
        out, lse = mla_prefill(
            q, k, kv_up, *cu, causal=True, scale=SCALE, value_offset=128, implementation=implementation
        )
        return out.sum() + lse.sum()

    if implementation == "xla":
        assert np.isfinite(jax.grad(loss)(q, "xla")).all()
    for name in [None, implementation] if implementation != "xla" else [None]:
        with pytest.raises(NotImplementedError, match="mla_prefill has no derivative: it serves inference"):
            jax.grad(loss)(q, name)
        with pytest.raises(NotImplementedError, match="mla_prefill has no derivative"):
            jax.jvp(partial(loss, implementation=name), (q,), (q,))


def two_devices():
    """A mesh of them over heads, or the test is skipped."""
    found = jax.devices(jax.config.jax_default_device.platform)
    if len(found) < 2:
        pytest.skip("needs 2 devices")
    return jax.make_mesh((2,), ("heads",), (AxisType.Auto,), devices=found[:2])


def assert_no_collective(run, *operands):
    text = run.lower(*operands).compile().as_text()
    assert "all-gather" not in text and "all-reduce" not in text


def test_heads_over_devices(implementation):
    """Inside shard_map, carry and all: no collective, and results typed as varying."""
    mesh = two_devices()
    cu = ragged((20, 9), (25, 9))
    q, k, kv_up = operands(29, 34, 6)
    carry = carry_of(29, 6)
    by_head = P(None, "heads")

    def call(q, k, v, carry):
        return mla_prefill(q, k, v, *cu, causal=True, scale=SCALE, carry=carry, implementation=implementation)

    options = {"mesh": mesh, "in_specs": by_head}
    run = jax.jit(jax.shard_map(call, out_specs=by_head, **options))
    got = run(q, k, values(kv_up), carry)
    for x, y in zip(got, call(q, k, values(kv_up), carry), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)
    assert_no_collective(run, q, k, values(kv_up), carry)
    with pytest.raises(ValueError, match="out_specs"):
        jax.shard_map(call, out_specs=P(), **options)(q, k, values(kv_up), carry)


def test_keys_in_parts_over_devices(implementation):
    """Nope parts and values sharded over heads, rope keys on every device: no collective."""
    mesh = two_devices()
    cu = ragged((20, 9), (25, 9))
    q, _, kv_up = operands(29, 34, 6)
    _, pair = in_parts(34, 6)

    def call(q, pair, v):
        return mla_prefill(q, pair, v, *cu, causal=True, scale=SCALE, implementation=implementation)

    by_head = P(None, "heads")
    specs = {"in_specs": (by_head, (by_head, P()), by_head), "out_specs": by_head}
    run = jax.jit(jax.shard_map(call, mesh=mesh, **specs))
    for x, y in zip(run(q, pair, values(kv_up)), call(q, pair, values(kv_up)), strict=True):
        np.testing.assert_allclose(x.astype(jnp.float32), y.astype(jnp.float32), rtol=1e-2, atol=1e-2)
    assert_no_collective(run, q, pair, values(kv_up))
