"""The block's three entries, prompts, decode and both at once, and the projections around their attention."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_mla.cache import update_cache
from jax_mla.context import ContextPlan
from jax_mla.decode import DecodePlan
from jax_mla.layer.attend import attend_absorbed, attend_chosen, attend_prompts, einsum, rms_norm
from jax_mla.layer.config import LayerConfig
from jax_mla.layer.params import LayerParams
from jax_mla.layer.widths import LATENT, NOPE, ROPE


def prefill(
    params: LayerParams,
    config: LayerConfig,
    x: jax.Array,
    cache: jax.Array,
    slot_mapping: jax.Array,
    cu_q_lens: jax.Array,
    *,
    positions: jax.Array | None = None,
    page_table: jax.Array | None = None,
    context: ContextPlan | None = None,
    layer: ArrayLike | None = None,
    k_scale: jax.Array | None = None,
    axis_name: str | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The block over prompts: writes their latents to the cache, attends through up-projected keys and values.

    A prompt may be the next part of a longer one, or follow a prefix that is cached: with `context`, its tokens attend
    to what the cache already holds too.

    Args:
      params: from ``absorb``.
      config: static.
      x: [T, M], the prompts' normalised hidden states one after another, in the parameters' dtype.
      cache: [pages, P, 576] or [layers, pages, P, 576]; donate it, and it is updated in place.
      slot_mapping: [T] int32, where each token's latent goes (``slots``); -1 for padding.
      cu_q_lens: [B + 1] int32, prompt b is x[cu_q_lens[b]:cu_q_lens[b + 1]]; rows past the last are padding, y is 0.
      positions: int32 of x's leading shape, each token's place in its sequence; needed where ``config.rope`` is set.
      page_table: [B, max_pages] int32, needed with ``context``.
      context: from ``plan_context``, of the tokens that the cache held of each prompt before this call; None: of none.
        One serves every layer of a step.
      layer: of a stacked cache; an int or a traced int32 scalar.
      k_scale: of an fp8 cache.
      axis_name: under ``shard_map``, the mesh axis that holds the other heads: y is then summed over it.
      implementation: of ``mla_prefill``; the other operations take their best.

    Returns:
      y [T, M] in x's dtype (this device's share of the sum over devices where ``axis_name`` is None), and the cache.

    Raises:
      ValueError: ``positions`` or ``page_table`` is missing; or as the operations above, while tracing.
    """
    kv_c, k_pe = _kv_latent(params, config, x, positions)
    cache = update_cache(cache, kv_c, k_pe, slot_mapping, layer=layer, k_scale=k_scale)
    attended = attend_prompts(
        params,
        config,
        _query(params, config, x, positions),
        kv_c,
        k_pe,
        cache,
        page_table,
        cu_q_lens,
        context,
        layer=layer,
        k_scale=k_scale,
        implementation=implementation,
    )
    return _output(params, x, attended, axis_name), cache


def decode(
    params: LayerParams,
    config: LayerConfig,
    x: jax.Array,
    cache: jax.Array,
    page_table: jax.Array | None,
    kv_lens: jax.Array | None,
    slot_mapping: jax.Array,
    *,
    positions: jax.Array | None = None,
    indices: jax.Array | None = None,
    topk_lens: jax.Array | None = None,
    layer: ArrayLike | None = None,
    plan: DecodePlan | None = None,
    cu_q_lens: jax.Array | None = None,
    max_q_len: int | None = None,
    k_scale: jax.Array | None = None,
    axis_name: str | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The block over the newest tokens of each sequence: writes their latents, then attends in the latent space.

    Args:
      params: from ``absorb``.
      config: static.
      x: [B, Q, M] normalised hidden states in the parameters' dtype; or [T, M] with ``cu_q_lens`` and ``max_q_len``.
      cache: [pages, P, 576] or [layers, pages, P, 576]; donate it, and it is updated in place.
      page_table: [B, max_pages] int32.
      kv_lens: [B] int32, cached tokens of each sequence, those of this call included.
      slot_mapping: int32 of x's leading shape, where each token's latent goes; -1 for padding.
      positions: int32 of x's leading shape, each token's place in its sequence; needed where ``config.rope`` is set.
      indices: [.., K] int32 beside x's leading shape: the slots that each token attends to, its own included where it
        shall see itself, as an indexer chose them (DeepSeek-V3.2); -1 is none. x is then [B, Q, M] or [T, M], parts of
        prompts too, and ``page_table`` and ``kv_lens`` are not looked at and may be None.
      topk_lens: int32 of x's leading shape: only that many of each token's ``indices`` count.
      layer: of a stacked cache; an int or a traced int32 scalar.
      plan: from ``plan_decode``; one serves every layer of a step.
      cu_q_lens, max_q_len: ragged queries, as in ``mla_decode``.
      k_scale: of an fp8 cache.
      axis_name: under ``shard_map``, the mesh axis that holds the other heads: y is then summed over it.
      implementation: of ``mla_decode`` or ``mla_sparse_decode``; the other operations take their best.

    Returns:
      y of x's shape and dtype (this device's share of the sum over devices where ``axis_name`` is None), and the cache.

    Raises:
      ValueError: ``positions`` is missing; an argument of the dense decode beside ``indices``, or one of the sparse
        decode without; or as the operations, while tracing.
    """
    kv_c, k_pe = _kv_latent(params, config, x, positions)
    cache = update_cache(
        cache,
        kv_c.reshape(-1, LATENT),
        k_pe.reshape(-1, ROPE),
        slot_mapping.reshape(-1),
        layer=layer,
        k_scale=k_scale,
    )
    attended = _attend_newest(
        params,
        config,
        _query(params, config, x, positions),
        cache,
        page_table,
        kv_lens,
        indices=indices,
        topk_lens=topk_lens,
        plan=plan,
        cu_q_lens=cu_q_lens,
        max_q_len=max_q_len,
        layer=layer,
        k_scale=k_scale,
        implementation=implementation,
    )
    return _output(params, x, attended, axis_name), cache


def mixed(
    params: LayerParams,
    config: LayerConfig,
    x: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array | None,
    slot_mapping: jax.Array,
    cu_q_lens: jax.Array,
    *,
    decodes: int,
    q_len: int = 1,
    positions: jax.Array | None = None,
    indices: jax.Array | None = None,
    topk_lens: jax.Array | None = None,
    context: ContextPlan | None = None,
    layer: ArrayLike | None = None,
    plan: DecodePlan | None = None,
    k_scale: jax.Array | None = None,
    axis_name: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The block over a batch of both kinds, sequences that decode, then prompts; all tokens share the projections.

    Args:
      params: from ``absorb``.
      config: static.
      x: [decodes * q_len + T, M] normalised hidden states in the parameters' dtype: the newest ``q_len`` tokens of each
        decoding sequence, then the tokens of the prompts.
      cache: [pages, P, 576] or [layers, pages, P, 576]; donate it, and it is updated in place.
      page_table: [decodes + B, max_pages] int32.
      kv_lens: [decodes] int32, cached tokens of each decoding sequence, those of this call included; 0 for padding.
      slot_mapping: int32 of x's leading size, where each token's latent goes; -1 for padding.
      cu_q_lens: [B + 1] int32, prompt b is x[decodes * q_len:][cu_q_lens[b]:cu_q_lens[b + 1]].
      decodes, q_len: static.
      positions: int32 of x's leading shape, each token's place in its sequence; needed where ``config.rope`` is set.
      indices: [decodes * q_len, K] int32: the slots that each token of the decoding sequences attends to, as in
        ``decode``; ``kv_lens`` is then not looked at and may be None. Prompts see all tokens before them: of
        DeepSeek-V3.2 those up to the indexer's top-k; longer ones go to ``decode`` with slots of their own.
      topk_lens: [decodes * q_len] int32: only that many of each token's ``indices`` count.
      context: of the prompts, as in ``prefill``.
      layer: of a stacked cache; an int or a traced int32 scalar.
      plan: from ``plan_decode`` of the decoding sequences; one serves every layer of a step.
      k_scale: of an fp8 cache.
      axis_name: under ``shard_map``, the mesh axis that holds the other heads: y is then summed over it.

    Returns:
      y of x's shape and dtype (this device's share of the sum over devices where ``axis_name`` is None), and the cache.

    Raises:
      ValueError: ``positions`` is missing; ``plan`` beside ``indices``, or ``topk_lens`` without; or as the operations,
        while tracing.
    """
    kv_c, k_pe = _kv_latent(params, config, x, positions)
    cache = update_cache(cache, kv_c, k_pe, slot_mapping, layer=layer, k_scale=k_scale)
    q = _query(params, config, x, positions)
    first = decodes * q_len
    newest = q[:first] if indices is not None else q[:first].reshape(decodes, q_len, *q.shape[1:])
    decoded = _attend_newest(
        params,
        config,
        newest,
        cache,
        page_table[:decodes],
        kv_lens,
        indices=indices,
        topk_lens=topk_lens,
        plan=plan,
        layer=layer,
        k_scale=k_scale,
    )
    prompts = attend_prompts(
        params,
        config,
        q[first:],
        kv_c[first:],
        k_pe[first:],
        cache,
        page_table[decodes:],
        cu_q_lens,
        context,
        layer=layer,
        k_scale=k_scale,
    )
    attended = jnp.concatenate([decoded.reshape(first, *prompts.shape[1:]), prompts])
    return _output(params, x, attended, axis_name), cache


def _attend_newest(
    params: LayerParams,
    config: LayerConfig,
    q: jax.Array,
    cache: jax.Array,
    page_table: jax.Array | None,
    kv_lens: jax.Array | None,
    *,
    indices: jax.Array | None,
    topk_lens: jax.Array | None,
    plan: DecodePlan | None,
    cu_q_lens: jax.Array | None = None,
    max_q_len: int | None = None,
    **options,
) -> jax.Array:
    """q [.., H, 192] over its sequence's tokens, or over the slots that each token names -> [.., H, 128]."""
    dense = {"plan": plan, "cu_q_lens": cu_q_lens, "max_q_len": max_q_len}
    if indices is None:
        if topk_lens is not None:
            raise ValueError("topk_lens is given without indices; expected None")
        return attend_absorbed(params, config, q, cache, page_table, kv_lens, **dense, **options)
    for name, value in dense.items():
        if value is not None:
            raise ValueError(f"{name} is given beside indices; expected None, since each token names its own slots")
    return attend_chosen(params, config, q, cache, indices, topk_lens=topk_lens, **options)


def query_latent(params: LayerParams, config: LayerConfig, x: jax.Array) -> jax.Array:
    """x [.., M] -> the normalised query latent [.., C]: what DeepSeek-V3.2's indexer scores with. XLA computes it once.

    Raises ValueError where queries have no latent.
    """
    if config.q_lora_rank is None:
        raise ValueError("config.q_lora_rank is None: queries have no latent; expected a rank")
    return rms_norm(einsum("...m,cm->...c", x, params.q_a_proj), params.q_a_layernorm, config.rms_norm_eps)


def _query(params: LayerParams, config: LayerConfig, x: jax.Array, positions: jax.Array | None) -> jax.Array:
    """[.., M] -> [.., H, 192]: nope, then rope."""
    latent = x if config.q_lora_rank is None else query_latent(params, config, x)
    q = einsum("...c,hdc->...hd", latent, params.q_b_proj)
    if config.rope is None:
        return q
    return jnp.concatenate([q[..., :NOPE], config.rope.rotate(q[..., NOPE:], positions[..., None])], axis=-1)


def _kv_latent(
    params: LayerParams, config: LayerConfig, x: jax.Array, positions: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """[.., M] -> what the cache holds: the normalised latent [.., 512], and the rope key [.., 64], rotated or not."""
    if config.rope is not None and (positions is None or positions.shape != x.shape[:-1]):
        found = "None" if positions is None else list(positions.shape)
        raise ValueError(
            f"positions is {found}; expected int32 of shape {list(x.shape[:-1])}, since config.rope is set"
        )
    joint = einsum("...m,dm->...d", x, params.kv_a_proj_with_mqa)
    kv_c = rms_norm(joint[..., :LATENT], params.kv_a_layernorm, config.rms_norm_eps)
    k_pe = joint[..., LATENT:]
    return kv_c, k_pe if config.rope is None else config.rope.rotate(k_pe, positions)


def _output(params: LayerParams, x: jax.Array, attended: jax.Array, axis_name: str | None) -> jax.Array:
    """Gate, where there is one, and project: attended [.., H, 128] -> [.., M]."""
    if params.g_proj is not None:
        gate = jnp.einsum("...m,hvm->...hv", x, params.g_proj, preferred_element_type=jnp.float32)
        attended = (attended.astype(jnp.float32) * jax.nn.sigmoid(gate)).astype(x.dtype)
    y = einsum("...hv,mhv->...m", attended, params.o_proj)
    return y if axis_name is None else jax.lax.psum(y, axis_name)
