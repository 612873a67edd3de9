"""Full keys for prefill from the up-projection and the rope key that all heads share, optionally in fp8."""

import jax
import jax.numpy as jnp

from jax_mla.reference.attend import NOPE, ROPE, cast, divide, is_fp8, multiply

VALUE_TILE = 16  # tokens


def _keys(nope: jax.Array, rope: jax.Array) -> jax.Array:
    """[T, H, 192] of nope [T, H, 128] and rope [T, 64], as integers: XLA's CPU would flush subnormal bf16 to zero."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[nope.dtype.itemsize]
    nope_bits, rope_bits = (jax.lax.bitcast_convert_type(part, unsigned) for part in (nope, rope))
    rope_bits = jnp.broadcast_to(rope_bits[:, None, :], (*nope.shape[:2], ROPE))
    return jax.lax.bitcast_convert_type(jnp.concatenate([nope_bits, rope_bits], axis=-1), nope.dtype)


def tile_values(v: jax.Array) -> jax.Array:
    """v [S, H, 128] in tiles of 16 tokens [ceil(S / 16), H, 128, 16]: position 4q + 2b + c has token 8b + 2q + c."""
    tokens, heads, width = v.shape
    tiles = -(-tokens // VALUE_TILE)
    bits = jax.lax.bitcast_convert_type(v, jnp.uint8)
    bits = jnp.pad(bits, ((0, tiles * VALUE_TILE - tokens), (0, 0), (0, 0))).reshape(tiles, 2, 4, 2, heads, width)
    bits = bits.transpose(0, 4, 5, 2, 1, 3).reshape(tiles, heads, width, VALUE_TILE)
    return jax.lax.bitcast_convert_type(bits, v.dtype)


def untile_values(tiles: jax.Array, tokens: int) -> jax.Array:
    """The v [S, H, 128] of `tile_values`, of which S is `tokens`."""
    count, heads, width, _ = tiles.shape
    bits = jax.lax.bitcast_convert_type(tiles, jnp.uint8).reshape(count, heads, width, 4, 2, 2)
    bits = bits.transpose(0, 4, 3, 5, 1, 2).reshape(count * VALUE_TILE, heads, width)[:tokens]
    return jax.lax.bitcast_convert_type(bits, tiles.dtype)


def pack_kv(kv_up: jax.Array, k_pe: jax.Array, *, k_scale: jax.Array | None = None) -> jax.Array:
    """Keys [T, H, 192] in the dtype of `kv_up` [T, H, 256]: its nope part beside the rope key, which is dequantised."""
    rope = k_pe[:, -ROPE:]  # all of it, or the end of gathered rows
    if k_scale is not None:
        rope = multiply(rope.astype(jnp.float32), k_scale)
    return _keys(kv_up[..., :NOPE], rope.astype(kv_up.dtype))


def pack_kv_fp8(
    kv_up: jax.Array,
    k_pe: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    packed_k_scale: jax.Array | None = None,
    packed_v_scale: jax.Array | None = None,
    dtype=jnp.float8_e4m3fn,
    saturate: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """k [T, H, 192] and v [T, H, 128] in fp8; what is stored is the value divided by its `packed_` scale.

    An fp8 `k_pe` without scales passes through byte for byte; with them it is dequantised and cast, which for scales
    of 1 gives the same bytes.
    """

    def quantise(values: jax.Array, scale: jax.Array | None) -> jax.Array:
        values = values if scale is None else divide(values.astype(jnp.float32), scale)
        return cast(values, dtype, saturate)

    rope = k_pe[:, -ROPE:]  # all of it, or the end of gathered rows
    if k_scale is not None:
        rope = multiply(rope.astype(jnp.float32), k_scale)
    elif is_fp8(rope.dtype) and (packed_k_scale is not None or rope.dtype != dtype):
        rope = rope.astype(jnp.float32)
    rope = rope if rope.dtype == dtype else quantise(rope, packed_k_scale)
    k = _keys(quantise(kv_up[..., :NOPE], packed_k_scale), rope)
    return k, quantise(kv_up[..., NOPE:], packed_v_scale)
