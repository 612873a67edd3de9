"""Attention of a layer's queries: absorbed over the cache, over chosen slots, and over whole keys of prompts."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_mla.context import ContextPlan, mla_context
from jax_mla.decode import mla_decode
from jax_mla.layer.config import LayerConfig
from jax_mla.layer.params import LayerParams
from jax_mla.layer.widths import NOPE, VALUE
from jax_mla.prefill import mla_prefill
from jax_mla.sparse import mla_sparse_decode


def attend_absorbed(
    params: LayerParams,
    config: LayerConfig,
    q: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    **options,
) -> jax.Array:
    """q [.., H, 192] over the cache, in the latent space -> [.., H, 128]."""
    latent, _ = mla_decode(_absorbed(params, q), cache, page_table, kv_lens, scale=config.scale, **options)
    return einsum("...hl,hvl->...hv", latent, params.w_uv)


def attend_chosen(
    params: LayerParams, config: LayerConfig, q: jax.Array, cache: jax.Array, indices: jax.Array, **options
) -> jax.Array:
    """q [.., H, 192] over the slots indices [.., K], in the latent space -> [.., H, 128]."""
    latent, _ = mla_sparse_decode(_absorbed(params, q), cache, indices, scale=config.scale, **options)
    return einsum("...hl,hvl->...hv", latent, params.w_uv)


def _absorbed(params: LayerParams, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    return einsum("...hn,hln->...hl", q[..., :NOPE], params.w_uk), q[..., NOPE:]


def attend_prompts(
    params: LayerParams,
    config: LayerConfig,
    q: jax.Array,
    kv_c: jax.Array,
    k_pe: jax.Array,
    cache: jax.Array,
    page_table: jax.Array | None,
    cu_q_lens: jax.Array,
    context: ContextPlan | None,
    *,
    layer: ArrayLike | None,
    k_scale: jax.Array | None,
    implementation: str | None = None,
) -> jax.Array:
    """q [T, H, 192] over keys and values of their own prompts, causally, and over the cached context -> [T, H, 128]."""
    kv_up = einsum("tl,lhd->thd", kv_c, params.w_kv_b)
    carry = None
    if context is not None:
        if page_table is None:
            raise ValueError("context is given without page_table; expected [B, max_pages] int32 beside it")
        carry = mla_context(
            q,
            cache,
            page_table,
            context,
            params.w_kv_b,
            cu_q_lens=cu_q_lens,
            scale=config.scale,
            layer=layer,
            k_scale=k_scale,
            carry=(jnp.zeros((*q.shape[:2], VALUE)), jnp.full(q.shape[:2], -jnp.inf, jnp.float32)),
        )
    attended, _ = mla_prefill(
        q,
        (kv_up, k_pe),
        kv_up,
        cu_q_lens,
        cu_q_lens,
        causal=True,
        scale=config.scale,
        value_offset=NOPE,
        carry=carry,
        implementation=implementation,
    )
    return attended.astype(q.dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last axis, in fp32, rounded once to x's dtype."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * inverse * weight.astype(jnp.float32)).astype(x.dtype)


def einsum(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, weight, preferred_element_type=jnp.float32).astype(x.dtype)
