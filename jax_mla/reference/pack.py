"""Full keys for prefill from the up-projection and the rope key that all heads share, optionally in fp8."""

import jax
import jax.numpy as jnp

from jax_mla.reference.attend import NOPE, ROPE, cast, divide, is_fp8, multiply


def _keys(nope: jax.Array, rope: jax.Array) -> jax.Array:
    """[T, H, 192] of nope [T, H, 128] and rope [T, 64], as integers: XLA's CPU would flush subnormal bf16 to zero."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[nope.dtype.itemsize]
    nope_bits, rope_bits = (jax.lax.bitcast_convert_type(part, unsigned) for part in (nope, rope))
    rope_bits = jnp.broadcast_to(rope_bits[:, None, :], (*nope.shape[:2], ROPE))
    return jax.lax.bitcast_convert_type(jnp.concatenate([nope_bits, rope_bits], axis=-1), nope.dtype)


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
