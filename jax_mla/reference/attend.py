"""The softmax at the heart of every attention here, and the rules for dtypes and scales that they share."""

import jax
import jax.numpy as jnp

LATENT = 512  # L
ROPE = 64  # R
WIDTH = LATENT + ROPE  # D
NOPE = 128  # nope part of an up-projected key, and the width of a value


def einsum(equation: str, *operands: jax.Array) -> jax.Array:
    """``jnp.einsum`` that keeps fp32 operands in fp32 on devices whose default is to round them to TF32."""
    return jnp.einsum(equation, *operands, precision=jax.lax.Precision.HIGHEST)


def is_fp8(dtype) -> bool:
    return jnp.dtype(dtype) in (jnp.float8_e4m3fn, jnp.float8_e4m3fnuz)


def result_dtype(q_dtype, out_dtype=None) -> jnp.dtype:
    """The dtype of ``out``: that of the queries, bf16 for fp8 queries, unless the caller asks for another."""
    if out_dtype is not None:
        return jnp.dtype(out_dtype)
    return jnp.dtype(jnp.bfloat16 if is_fp8(q_dtype) else q_dtype)


def multiply(values: jax.Array, scale: jax.Array | float | None) -> jax.Array:
    return values if scale is None else values * jnp.asarray(scale, values.dtype)


def divide(values: jax.Array, scale: jax.Array | float | None) -> jax.Array:
    """``values / scale``, correctly rounded: XLA would multiply with the reciprocal of a scalar."""
    if scale is None:
        return values
    divisor = jnp.broadcast_to(jnp.asarray(scale, values.dtype), values.shape)
    return values / jax.lax.optimization_barrier(divisor)


def cast(values: jax.Array, dtype, saturate: bool = False) -> jax.Array:
    """``values.astype(dtype)``; with ``saturate``, fp8 clamps to its largest finite value where it would give NaN."""
    if saturate and is_fp8(dtype):
        largest = float(jnp.finfo(dtype).max)
        values = jnp.clip(values, -largest, largest)  # a NaN stays one
    return values.astype(dtype)


def attend(
    equation: str, scores: jax.Array, visible: jax.Array, values: jax.Array, unusable: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Softmax over the last axis of ``scores`` where ``visible``, times ``values``, and the natural-log normaliser.

    ``equation`` contracts weights shaped as ``scores`` with ``values``. ``unusable`` marks, in a shape that broadcasts
    with ``scores``, the values that are not finite throughout: a row that sees one of them is NaN, all others are as
    if it were not there. A row that sees nothing has ``out`` 0 and ``lse`` -inf.
    """
    scores = jnp.where(visible, scores, -jnp.inf)
    highest = jnp.max(scores, axis=-1, initial=-jnp.inf)
    shift = jnp.where(highest == -jnp.inf, 0.0, highest)
    weights = jnp.exp(scores - shift[..., None])
    total = jnp.sum(weights, axis=-1)
    empty = total == 0
    divisor = jnp.where(empty, 1.0, total)
    out = einsum(equation, weights, jnp.where(jnp.isfinite(values), values, 0.0)) / divisor[..., None]
    out = jnp.where(jnp.any(visible & unusable, axis=-1)[..., None], jnp.nan, out)
    lse = jnp.where(empty, -jnp.inf, jnp.log(divisor) + shift)
    return out, lse


def varying_like(x, *operands):
    """`x`, typed as varying over the shard_map axes that any operand varies over: what the start of a loop must be."""
    types = [jax.typeof(leaf) for leaf in jax.tree.leaves(operands) if hasattr(leaf, "dtype")]
    axes = sorted(set().union(*(getattr(t.manual_axis_type, "varying", ()) for t in types)))
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x


def request_of(tokens: jax.Array, cu_lens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The request that owns each token of a ragged batch, and the token's index in it; request -1 where none does."""
    batch = cu_lens.shape[0] - 1
    if batch == 0:
        return jnp.full_like(tokens, -1), jnp.zeros_like(tokens)
    request = jnp.searchsorted(cu_lens[1:], tokens, side="right", method="compare_all").astype(jnp.int32)
    nearest = jnp.minimum(request, batch - 1)
    index = tokens - cu_lens[nearest]
    owned = (request < batch) & (index >= 0)
    return jnp.where(owned, nearest, -1), index
