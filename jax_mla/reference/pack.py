"""Full keys for prefill from the up-projection and the rope key that all heads share, optionally in fp8."""

import jax
import jax.numpy as jnp

from jax_mla.reference.attend import NOPE, ROPE, cast, divide, is_fp8, multiply


def _rope_key(k_pe: jax.Array, heads: int) -> jax.Array:
    """[T, 64], or the rope part of gathered rows [T, 576], for every head: [T, H, 64]."""
    rope = k_pe[:, -ROPE:]
    return jnp.broadcast_to(rope[:, None, :], (rope.shape[0], heads, ROPE))


def _beside(nope: jax.Array, rope: jax.Array) -> jax.Array:
    """The two parts of a key in one array, as integers: as bf16, XLA's CPU would flush subnormal numbers to zero."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[nope.dtype.itemsize]
    parts = [jax.lax.bitcast_convert_type(part, unsigned) for part in (nope, rope)]
    return jax.lax.bitcast_convert_type(jnp.concatenate(parts, axis=-1), nope.dtype)


def pack_kv(kv_up: jax.Array, k_pe: jax.Array, *, k_scale: jax.Array | None = None) -> jax.Array:
    """Keys [T, H, 192] in the dtype of `kv_up` [T, H, 256]: its nope part beside the rope key, which is dequantised."""
    rope = _rope_key(k_pe, kv_up.shape[1])
    if k_scale is not None:
        rope = multiply(rope.astype(jnp.float32), k_scale)
    return _beside(kv_up[..., :NOPE], rope.astype(kv_up.dtype))


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

    rope = _rope_key(k_pe, kv_up.shape[1])
    if k_scale is not None:
        rope = multiply(rope.astype(jnp.float32), k_scale)
    elif is_fp8(rope.dtype) and (packed_k_scale is not None or rope.dtype != dtype):
        rope = rope.astype(jnp.float32)
    rope = rope if rope.dtype == dtype else quantise(rope, packed_k_scale)
    k = _beside(quantise(kv_up[..., :NOPE], packed_k_scale), rope)
    return k, quantise(kv_up[..., NOPE:], packed_v_scale)
