"""Merging attention over parts of the keys by their log-sum-exps, and the attention sink."""

import jax
import jax.numpy as jnp


def merge_states(
    out_a: jax.Array,
    lse_a: jax.Array,
    out_b: jax.Array,
    lse_b: jax.Array,
    *,
    compute_dtype=jnp.float32,
    out_dtype=None,
) -> tuple[jax.Array, jax.Array]:
    """Attention over the union of two disjoint sets of keys, from out [..., W] and natural-log lse [...] over each.

    A side whose lse is -inf, +inf or NaN is empty, whatever its out holds; two empty sides give an empty row.
    """
    out_dtype = out_a.dtype if out_dtype is None else out_dtype
    lse_a, lse_b = lse_a.astype(compute_dtype), lse_b.astype(compute_dtype)
    full_a, full_b = jnp.isfinite(lse_a), jnp.isfinite(lse_b)
    empty = ~(full_a | full_b)
    highest = jnp.maximum(jnp.where(full_a, lse_a, -jnp.inf), jnp.where(full_b, lse_b, -jnp.inf))
    shift = jnp.where(empty, 0.0, highest)
    # Inside the exponentials too, or the derivative of an empty side would be NaN.
    weight_a = jnp.where(full_a, jnp.exp(jnp.where(full_a, lse_a, shift) - shift), 0.0)
    weight_b = jnp.where(full_b, jnp.exp(jnp.where(full_b, lse_b, shift) - shift), 0.0)
    total = jnp.where(empty, 1.0, weight_a + weight_b)
    part_a = jnp.where(full_a[..., None], out_a.astype(compute_dtype), 0.0) * (weight_a / total)[..., None]
    part_b = jnp.where(full_b[..., None], out_b.astype(compute_dtype), 0.0) * (weight_b / total)[..., None]
    return (part_a + part_b).astype(out_dtype), jnp.where(empty, -jnp.inf, jnp.log(total) + shift)


def apply_sink(out: jax.Array, lse: jax.Array, sink: jax.Array, *, compute_dtype=None) -> jax.Array:
    """out [..., H, W] as if a key of logit `sink` [H] and value 0 had been among the keys; an empty row stays empty.

    Apply it once, after all merging: it leaves lse alone.
    """
    compute_dtype = jnp.promote_types(out.dtype, jnp.float32) if compute_dtype is None else compute_dtype
    empty = ~jnp.isfinite(lse)
    share = jax.nn.sigmoid(jnp.where(empty, 0.0, lse).astype(compute_dtype) - sink.astype(compute_dtype))
    scaled = out.astype(compute_dtype) * share[..., None]
    return jnp.where(empty[..., None], 0.0, scaled).astype(out.dtype)
