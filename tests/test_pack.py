"""pack_kv and pack_kv_fp8, bit for bit."""

from functools import partial

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_same_bits, assert_same_fp8, bits, native_only

import jax_mla
from jax_mla import pack_kv, pack_kv_fp8

OPERATION = "pack_kv"
FLOATS = ("bfloat16", "float16", "float32")
FP8 = ("float8_e4m3fn", "float8_e4m3fnuz")


def compiled(function, implementation, **static):
    return jax.jit(partial(function, implementation=implementation, **static))


def all_inputs(dtype, shape):
    """All 65,536 values of a 16-bit dtype, again and again; every 65,537th fp32 value."""
    if dtype == "float32":
        return np.resize(np.arange(0, 2**32, 65537, dtype=np.uint32), shape).view(np.float32)
    return np.resize(np.arange(65536, dtype=np.uint16), shape).view(cases.dtype(dtype))


def every_code(dtype, heads=3):
    """kv_up [1024, heads, 256] and k_pe [1024, 64] with `all_inputs`: nope parts, values and rope keys each see all."""
    tokens = 1024
    kv_up, k_pe = all_inputs(dtype, (tokens, heads, 256)), all_inputs(dtype, (tokens, 64))
    rolled = np.roll(kv_up[:512], 128, axis=-1)  # rows of the same codes again, whose other half the nope part has
    kv_up = np.concatenate([kv_up[:512], rolled])
    if dtype != "float32":
        for seen in (kv_up[..., :128], kv_up[..., 128:], k_pe):
            assert np.unique(seen.copy().view(np.uint16)).size == 65536
    return kv_up, k_pe


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("gathered", [False, True], ids=["rope", "gathered_rows"])
def test_keys(gathered, dtype, implementation):
    """Every bit of the nope part and of the rope key, from [T, 64] and from gathered latent rows [T, 576]."""
    heads = 3
    kv_up, rope = every_code(dtype, heads)
    tokens = len(kv_up)
    rows = np.concatenate([all_inputs(dtype, (tokens, 512))[:, ::-1], rope], axis=-1)
    k_pe = rows if gathered else rope
    k = np.asarray(compiled(pack_kv, implementation)(kv_up, k_pe))
    assert k.shape == (tokens, heads, 192) and k.dtype == cases.dtype(dtype)
    np.testing.assert_array_equal(bits(k[..., :128].copy()), bits(kv_up[..., :128].copy()))
    for h in range(heads):
        np.testing.assert_array_equal(bits(k[:, h, 128:].copy()), bits(rows[:, 512:].copy()))


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("dtype", FLOATS)
def test_fp8_rope_key_is_dequantised(dtype, fp8, implementation):
    """An fp8 k_pe is multiplied by its k_scale and cast; all 256 values."""
    rows = np.resize(np.arange(256, dtype=np.uint8), (8, 576)).view(cases.dtype(fp8))
    kv_up = np.zeros((8, 5, 256), cases.dtype(dtype))
    run = compiled(pack_kv, implementation)
    for scale in (None, 1.0, 0.3):
        k = np.asarray(run(kv_up, rows, k_scale=None if scale is None else np.float32(scale)))
        want = (rows[:, 512:].astype(np.float32) * np.float32(scale or 1)).astype(cases.dtype(dtype))
        for h in range(5):
            np.testing.assert_array_equal(k[:, h, 128:].astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("dtype", FLOATS)
def test_fp8_casts_over_all_inputs(dtype, fp8, saturate, implementation):
    """The bits of astype over all 65,536 inputs, the sign of a NaN aside; with saturate, clamped instead of NaN.

    Of nope keys, rope keys and values each.
    """
    kv_up, k_pe = every_code(dtype, heads=2)
    k, v = compiled(pack_kv_fp8, implementation, dtype=cases.dtype(fp8), saturate=saturate)(kv_up, k_pe)
    largest = float(ml_dtypes.finfo(cases.dtype(fp8)).max)

    def cast(x):
        x = x.astype(np.float32)
        x = np.clip(x, -largest, largest) if saturate else x
        return np.asarray(jax.jit(lambda x: x.astype(cases.dtype(fp8)))(x))

    k, v = np.asarray(k), np.asarray(v)
    assert_same_fp8(k[..., :128], cast(kv_up[..., :128]))
    assert_same_fp8(k[:, 1, 128:], cast(k_pe))
    assert_same_fp8(v, cast(kv_up[..., 128:]))


def test_boundaries_of_e4m3(implementation):
    """bf16 464 rounds to 448; 480, 1000 and inf are NaN."""
    kv_up = np.resize(np.float32([464, 480, 1000, np.inf, -464, -480]), (1, 1, 256)).astype(ml_dtypes.bfloat16)
    want = np.resize(np.uint8([0x7E, 0x7F, 0x7F, 0x7F, 0xFE, 0xFF]), 256)
    k, v = compiled(pack_kv_fp8, implementation)(kv_up, np.zeros((1, 64), ml_dtypes.bfloat16))
    got = np.concatenate([np.asarray(k)[0, 0, :128], np.asarray(v)[0, 0]])
    assert_same_fp8(got, want.view(ml_dtypes.float8_e4m3fn))


@pytest.mark.parametrize("fp8", FP8)
def test_fp8_rope_key_passes_byte_for_byte(fp8, implementation):
    """Where no scale changes it, an fp8 k_pe keeps its bytes; a k_scale or packed_k_scale other than 1 is applied."""
    k_pe = np.resize(np.arange(256, dtype=np.uint8), (4, 64)).view(cases.dtype(fp8))
    kv_up = np.ones((4, 2, 256), ml_dtypes.bfloat16)
    run = compiled(pack_kv_fp8, implementation, dtype=cases.dtype(fp8))
    for scales in ({}, {"k_scale": np.float32(1)}, {"k_scale": np.float32(1), "packed_k_scale": np.float32(1)}):
        k, _ = run(kv_up, k_pe, **scales)
        if scales:
            assert_same_fp8(np.asarray(k)[:, 1, 128:], k_pe)
        else:
            np.testing.assert_array_equal(bits(k)[:, 1, 128:], bits(k_pe))
    for scales, factor in (
        ({"k_scale": np.float32(2)}, 2),
        ({"packed_k_scale": np.float32(4)}, 0.25),
        ({"k_scale": np.float32(2), "packed_k_scale": np.float32(2)}, 1),
    ):
        k, _ = run(kv_up, k_pe, **scales)
        want = (k_pe.astype(np.float32) * np.float32(factor)).astype(cases.dtype(fp8))
        assert_same_fp8(np.asarray(k)[:, 0, 128:], want)


def test_other_fp8_format_is_converted(implementation):
    """A rope key of the other e4m3 goes through its value, not its bytes."""
    k_pe = np.resize(np.arange(256, dtype=np.uint8), (4, 64)).view(ml_dtypes.float8_e4m3fnuz)
    k, _ = compiled(pack_kv_fp8, implementation)(np.ones((4, 2, 256), ml_dtypes.bfloat16), k_pe)
    assert_same_fp8(np.asarray(k)[:, 1, 128:], k_pe.astype(np.float32).astype(ml_dtypes.float8_e4m3fn))


def test_packed_scales(implementation):
    """Stored are key / packed_k_scale and value / packed_v_scale."""
    rng = np.random.default_rng(0)
    kv_up = rng.standard_normal((7, 3, 256)).astype(ml_dtypes.bfloat16)
    k_pe = rng.standard_normal((7, 64)).astype(ml_dtypes.bfloat16)
    run = compiled(pack_kv_fp8, implementation)
    k, v = run(kv_up, k_pe, packed_k_scale=np.float32(0.5), packed_v_scale=np.float32(0.125))
    want = np.concatenate([kv_up[..., :128], np.repeat(k_pe[:, None], 3, axis=1)], axis=-1).astype(np.float32)
    assert_same_fp8(np.asarray(k), (want / np.float32(0.5)).astype(ml_dtypes.float8_e4m3fn))
    want_v = (kv_up[..., 128:].astype(np.float32) / np.float32(0.125)).astype(ml_dtypes.float8_e4m3fn)
    assert_same_fp8(np.asarray(v), want_v)


ORDER = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]  # of a tile's tokens


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("tokens", [1, 15, 16, 33, 304])
@pytest.mark.parametrize("dtype", FLOATS)
def test_values_for_the_kernel(dtype, tokens, saturate, implementation):
    """The plain values' bytes in tiles of 16 tokens, each column with its tokens in order; zeros behind the last."""
    kv_up, k_pe = all_inputs(dtype, (tokens, 5, 256)), all_inputs(dtype, (tokens, 64))
    scale = np.float32(0.3)
    run = compiled(pack_kv_fp8, implementation, saturate=saturate)
    k, v = run(kv_up, k_pe, packed_v_scale=scale)
    same_k, packed = compiled(pack_kv_fp8, implementation, saturate=saturate, values="kernel")(
        kv_up, k_pe, packed_v_scale=scale
    )
    assert isinstance(packed, jax_mla.KernelValues) and packed.tokens == tokens
    assert_same_fp8(same_k, k)
    tiles = -(-tokens // 16)
    want = np.zeros((tiles * 16, 5, 128), ml_dtypes.float8_e4m3fn)
    want[:tokens] = v
    want = want.reshape(tiles, 16, 5, 128)[:, ORDER].transpose(0, 2, 3, 1)
    assert packed.tiles.shape == (tiles, 5, 128, 16) and packed.tiles.dtype == "float8_e4m3fn"
    assert_same_fp8(packed.tiles, want)
    assert_same_fp8(jax_mla.reference.untile_values(packed.tiles, tokens), v)


def test_no_tokens(implementation):
    kv_up, k_pe = np.zeros((0, 3, 256), np.float32), np.zeros((0, 64), np.float32)
    assert pack_kv(kv_up, k_pe, implementation=implementation).shape == (0, 3, 192)
    k, v = pack_kv_fp8(kv_up, k_pe, implementation=implementation)
    assert k.shape == (0, 3, 192) and v.shape == (0, 3, 128)
    _, v = pack_kv_fp8(kv_up, k_pe, values="kernel", implementation=implementation)
    assert v.tiles.shape == (0, 3, 128, 16) and v.tokens == 0


def test_native_and_xla_agree_bit_for_bit():
    """Random inputs, no scales: the best implementation and XLA give the same bytes."""
    rng = np.random.default_rng(1)
    kv_up, rows = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((33, 24, 256), (33, 576)))
    best, xla = (jax_mla.pack_kv(kv_up, rows, implementation=i) for i in (None, "xla"))
    np.testing.assert_array_equal(bits(best), bits(xla))


def mapped_inputs(tokens):
    """Of three calls, kv_up [3, tokens, 2, 256] and k_pe [3, tokens, 64] in bf16."""
    rng = np.random.default_rng(2)
    shapes = (3, tokens, 2, 256), (3, tokens, 64)
    return tuple(rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in shapes)


@pytest.mark.parametrize("mapped", ["kv_up", "k_pe", "both"])
def test_vmap(mapped, implementation):
    """The bits of the calls one by one; what is not mapped is shared."""
    kv_up, k_pe = mapped_inputs(5)
    axes = (None if mapped == "k_pe" else 0, None if mapped == "kv_up" else 0)
    operands = tuple(x if axis == 0 else x[0] for x, axis in zip((kv_up, k_pe), axes, strict=True))
    keys = partial(pack_kv, implementation=implementation)
    casts = partial(pack_kv_fp8, packed_k_scale=0.5, packed_v_scale=0.25, implementation=implementation)
    got = jax.jit(jax.vmap(keys, in_axes=axes))(*operands), *jax.jit(jax.vmap(casts, in_axes=axes))(*operands)
    for i in range(3):
        each = tuple(x[i] if axis == 0 else x for x, axis in zip(operands, axes, strict=True))
        assert_same_bits((x[i] for x in got), (keys(*each), *casts(*each)))


def test_vmap_nested_and_along_another_axis(implementation):
    """Two levels, the inner one along the heads' neighbour; gathered latent rows in fp8, and one scale for all."""
    rng = np.random.default_rng(3)
    kv_up = rng.standard_normal((2, 5, 3, 4, 256)).astype(np.float16)  # mapped axes 0 and 2
    rows = rng.standard_normal((2, 3, 5, 576)).astype(ml_dtypes.float8_e4m3fn)
    run = partial(pack_kv, k_scale=np.float32(2), implementation=implementation)
    got = jax.jit(jax.vmap(jax.vmap(run, in_axes=(1, 0), out_axes=1)))(kv_up, rows)
    for i in range(2):
        for j in range(3):
            assert_same_bits([got[i, :, j]], [run(kv_up[i, :, j], rows[i, j])])


@pytest.mark.parametrize("tokens", [16, 21])
def test_vmap_of_values_for_the_kernel(tokens, implementation):
    """Each call's values begin with a tile, and zeros stand behind each call's last."""
    kv_up, k_pe = mapped_inputs(tokens)
    run = partial(pack_kv_fp8, values="kernel", packed_v_scale=0.5, implementation=implementation)
    k, v = jax.jit(jax.vmap(run))(kv_up, k_pe)
    assert v.tokens == tokens and v.tiles.shape == (3, -(-tokens // 16), 2, 128, 16)
    for i in range(3):
        want_k, want_v = run(kv_up[i], k_pe[i])
        assert_same_bits((k[i], v.tiles[i]), (want_k, want_v.tiles))


@native_only
@pytest.mark.parametrize("name", ["k_scale", "packed_k_scale", "packed_v_scale"])
def test_vmap_over_scales_is_refused(name, implementation):
    kv_up, k_pe = mapped_inputs(5)
    k_pe = k_pe.astype(ml_dtypes.float8_e4m3fn)
    scales = np.ones(3, np.float32)
    with pytest.raises(NotImplementedError, match=f"vmap of pack_kv_fp8 over .*{name}.*: a scale is one a call"):
        jax.vmap(lambda s: pack_kv_fp8(kv_up[0], k_pe[0], **{name: s}, implementation=implementation))(scales)
    if name == "k_scale":
        with pytest.raises(NotImplementedError, match="vmap of pack_kv over k_scale: a scale is one a call"):
            jax.vmap(lambda s: pack_kv(kv_up[0], k_pe[0], k_scale=s, implementation=implementation))(scales)


@pytest.mark.parametrize("mode", ["grad", "grad of jit", "jvp"])
@pytest.mark.parametrize("function", [pack_kv, pack_kv_fp8], ids=["pack_kv", "pack_kv_fp8"])
def test_derivative_is_refused(function, mode, implementation):
    """By XLA too: it copies keys as integers, through which a derivative would be zero without a word."""
    kv_up, k_pe = (jnp.asarray(x[0]) for x in mapped_inputs(5))

    def loss(kv_up, k_pe):
        packed = function(kv_up, k_pe, implementation=implementation)
        return sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(packed))

    with pytest.raises(NotImplementedError, match=f"{function.__name__} has no derivative: it serves inference"):
        if mode == "jvp":
            jax.jvp(loss, (kv_up, k_pe), (kv_up, k_pe))
        else:
            jax.grad(loss if mode == "grad" else jax.jit(loss), argnums=1)(kv_up, k_pe)
