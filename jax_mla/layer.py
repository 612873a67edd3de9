"""Kimi-K3's MLA block as pure functions over a pytree of parameters.

The attention of one layer as it is served: queries and keys through RMS-normalised latents, no rotation (the 64 rope
columns are there, and are used as they come), softmax scale ``192 ** -0.5``, a sigmoid gate on the attention's output,
then the output projection. Decode runs absorbed: ``W_UK`` moves the query into the latent space, where the cache is
read as it is, and ``W_UV`` brings the result back (DeepSeek-V2, arXiv:2405.04434, section 2.1; the gate is that of
arXiv:2505.06708).

    config = LayerConfig(devices=4)                      # Kimi-K3's geometry, 24 of 96 heads here
    params = absorb(load_layer("checkpoint", 3, config, rank=0), config)
    y, cache = prefill(params, config, x, cache, slot_mapping, cu_q_lens, layer=0)
    y, cache = decode(params, config, x, cache, page_table, kv_lens, slot_mapping, layer=0)
    y, cache = mixed(params, config, x, cache, page_table, kv_lens, slot_mapping, cu_q_lens, decodes=8, layer=0)

Everything is traceable, so that a model jits its whole step, with the cache donated. The blocks of several layers run
in a Python loop, or in a ``lax.scan`` over stacked parameters and ``jnp.arange(layers)``, the stacked cache its carry.

Letters: B sequences, Q queries a sequence, T tokens, H heads of this device, M hidden size, C q_lora_rank.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_mla.cache import update_cache
from jax_mla.context import ContextPlan, mla_context
from jax_mla.decode import DecodePlan, mla_decode
from jax_mla.pack import pack_kv
from jax_mla.prefill import mla_prefill

LATENT = 512  # kv_lora_rank
ROPE = 64  # qk_rope_head_dim
NOPE = 128  # qk_nope_head_dim
VALUE = 128  # v_head_dim
HEAD_DIM = NOPE + ROPE
SCALE = HEAD_DIM**-0.5

# The published weights that are cut by heads, and the axis on which the heads lie; a device has the others whole.
HEAD_AXIS = {"q_b_proj": 0, "kv_b_proj": 0, "g_proj": 0, "o_proj": 1}


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """Geometry of one MLA block; the defaults are Kimi-K3's on one device. Hashable: a static argument of ``jax.jit``.

    Attributes:
      hidden_size: M.
      num_heads: query heads of the model, over all devices.
      devices: tensor-parallel devices; each holds ``num_heads // devices`` heads.
      q_lora_rank: C, width of the query latent.
      rms_norm_eps: of both latent norms.
    """

    hidden_size: int = 7168
    num_heads: int = 96
    devices: int = 1
    q_lora_rank: int = 1536
    rms_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "devices", "q_lora_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it has to be at least 1")
        if self.num_heads % self.devices:
            raise ValueError(f"num_heads is {self.num_heads}, which {self.devices} devices cannot share evenly")

    @property
    def heads(self) -> int:
        """H, the heads of one device."""
        return self.num_heads // self.devices

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """One device's part of each weight as published: a projection is [out, in], and out counts heads first."""
        return {
            "q_a_proj": (self.q_lora_rank, self.hidden_size),
            "q_a_layernorm": (self.q_lora_rank,),
            "q_b_proj": (self.heads * HEAD_DIM, self.q_lora_rank),
            "kv_a_proj_with_mqa": (LATENT + ROPE, self.hidden_size),
            "kv_a_layernorm": (LATENT,),
            "kv_b_proj": (self.heads * (NOPE + VALUE), LATENT),
            "g_proj": (self.heads * VALUE, self.hidden_size),
            "o_proj": (self.hidden_size, self.heads * VALUE),
        }


class LayerParams(NamedTuple):
    """One device's parameters, ready to serve. ``jax.tree.map(lambda *p: jnp.stack(p), *layers)`` stacks layers.

    The contracted axes come last, as published; XLA's CPU backend multiplies batches of bf16 matrices in another order
    with bf16 sums, or not at all.
    """

    q_a_proj: jax.Array  # [C, M]
    q_a_layernorm: jax.Array  # [C]
    q_b_proj: jax.Array  # [H, 192, C]
    kv_a_proj_with_mqa: jax.Array  # [576, M]
    kv_a_layernorm: jax.Array  # [512]
    w_kv_b: jax.Array  # [512, H, 256]: key, then value; prefill's up-projection, and the operand of mla_context
    w_uk: jax.Array  # [H, 512, 128]: nope query to latent, the keys' up-projection absorbed
    w_uv: jax.Array  # [H, 128, 512]: attended latent to value
    g_proj: jax.Array  # [H, 128, M]
    o_proj: jax.Array  # [M, H, 128]


def partition_specs(axis_name: str) -> LayerParams:
    """How parameters of all heads are split over a mesh axis: ``in_specs`` of ``shard_map`` beside ``axis_name``."""
    whole, heads_first, heads_second = PartitionSpec(), PartitionSpec(axis_name), PartitionSpec(None, axis_name)
    return LayerParams(
        q_a_proj=whole,
        q_a_layernorm=whole,
        q_b_proj=heads_first,
        kv_a_proj_with_mqa=whole,
        kv_a_layernorm=whole,
        w_kv_b=heads_second,
        w_uk=heads_first,
        w_uv=heads_first,
        g_proj=heads_first,
        o_proj=heads_second,
    )


def init_weights(key: jax.Array, config: LayerConfig, dtype: DTypeLike = jnp.bfloat16) -> dict[str, jax.Array]:
    """Random weights of one device, named and shaped as published: what ``absorb`` and ``write_checkpoint`` take.

    Projections are normal with variance 1 / in, so that activations keep their size; norms scatter around 1.
    """
    weights = {}
    for name, shape in config.weight_shapes.items():
        key, draw = jax.random.split(key)
        noise = jax.random.normal(draw, shape, jnp.float32)
        weights[name] = (noise * shape[1] ** -0.5 if len(shape) == 2 else 1 + 0.1 * noise).astype(dtype)
    return weights


def absorb(weights: Mapping[str, ArrayLike], config: LayerConfig, dtype: DTypeLike = jnp.bfloat16) -> LayerParams:
    """Serving parameters from published weights: run once, at load time.

    Splits ``kv_b_proj`` into ``W_UK`` and ``W_UV``, and keeps it whole for prefill.

    Args:
      weights: one device's weights (``checkpoint.load_layer`` or ``init_weights``), shapes ``config.weight_shapes``.
      config: the layer's geometry.
      dtype: of the parameters; activations have to come in the same.

    Raises:
      ValueError: a weight is missing or has another shape.
    """
    expected = config.weight_shapes
    if missing := expected.keys() - weights.keys():
        raise ValueError(f"weights lack {', '.join(sorted(missing))}; a layer needs {', '.join(expected)}")
    arrays = {name: jnp.asarray(weights[name], dtype) for name in expected}
    for name, shape in expected.items():
        if arrays[name].shape != shape:
            raise ValueError(f"weights[{name!r}] has shape {arrays[name].shape}; expected {shape} for {config}")
    heads = config.heads
    kv_b = arrays["kv_b_proj"].reshape(heads, NOPE + VALUE, LATENT)
    return LayerParams(
        q_a_proj=arrays["q_a_proj"],
        q_a_layernorm=arrays["q_a_layernorm"],
        q_b_proj=arrays["q_b_proj"].reshape(heads, HEAD_DIM, config.q_lora_rank),
        kv_a_proj_with_mqa=arrays["kv_a_proj_with_mqa"],
        kv_a_layernorm=arrays["kv_a_layernorm"],
        w_kv_b=kv_b.transpose(2, 0, 1),
        w_uk=kv_b[:, :NOPE].transpose(0, 2, 1),
        w_uv=kv_b[:, NOPE:],
        g_proj=arrays["g_proj"].reshape(heads, VALUE, config.hidden_size),
        o_proj=arrays["o_proj"].reshape(config.hidden_size, heads, VALUE),
    )


def prefill(
    params: LayerParams,
    config: LayerConfig,
    x: jax.Array,
    cache: jax.Array,
    slot_mapping: jax.Array,
    cu_q_lens: jax.Array,
    *,
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
      page_table: [B, max_pages] int32, needed with ``context``.
      context: from ``plan_context``, of the tokens that the cache held of each prompt before this call; None: of none.
        One serves every layer of a step.
      layer: of a stacked cache; an int or a traced int32 scalar.
      k_scale: of an fp8 cache.
      axis_name: under ``shard_map``, the mesh axis that holds the other heads: y is then summed over it.
      implementation: of ``mla_prefill``; the other operations take their best.

    Returns:
      y [T, M] in x's dtype (this device's share of the sum over devices where ``axis_name`` is None), and the cache.
    """
    kv_c, k_pe = _kv_latent(params, config, x)
    cache = update_cache(cache, kv_c, k_pe, slot_mapping, layer=layer, k_scale=k_scale)
    attended = _attend_prompts(
        params,
        _query(params, config, x),
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
    page_table: jax.Array,
    kv_lens: jax.Array,
    slot_mapping: jax.Array,
    *,
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
      layer: of a stacked cache; an int or a traced int32 scalar.
      plan: from ``plan_decode``; one serves every layer of a step.
      cu_q_lens, max_q_len: ragged queries, as in ``mla_decode``.
      k_scale: of an fp8 cache.
      axis_name: under ``shard_map``, the mesh axis that holds the other heads: y is then summed over it.
      implementation: of ``mla_decode``; the other operations take their best.

    Returns:
      y of x's shape and dtype (this device's share of the sum over devices where ``axis_name`` is None), and the cache.
    """
    kv_c, k_pe = _kv_latent(params, config, x)
    cache = update_cache(
        cache,
        kv_c.reshape(-1, LATENT),
        k_pe.reshape(-1, ROPE),
        slot_mapping.reshape(-1),
        layer=layer,
        k_scale=k_scale,
    )
    attended = _attend_absorbed(
        params,
        _query(params, config, x),
        cache,
        page_table,
        kv_lens,
        cu_q_lens=cu_q_lens,
        max_q_len=max_q_len,
        layer=layer,
        k_scale=k_scale,
        plan=plan,
        implementation=implementation,
    )
    return _output(params, x, attended, axis_name), cache


def mixed(
    params: LayerParams,
    config: LayerConfig,
    x: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    slot_mapping: jax.Array,
    cu_q_lens: jax.Array,
    *,
    decodes: int,
    q_len: int = 1,
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
      context: of the prompts, as in ``prefill``.
      layer: of a stacked cache; an int or a traced int32 scalar.
      plan: from ``plan_decode`` of the decoding sequences; one serves every layer of a step.
      k_scale: of an fp8 cache.
      axis_name: under ``shard_map``, the mesh axis that holds the other heads: y is then summed over it.

    Returns:
      y of x's shape and dtype (this device's share of the sum over devices where ``axis_name`` is None), and the cache.
    """
    kv_c, k_pe = _kv_latent(params, config, x)
    cache = update_cache(cache, kv_c, k_pe, slot_mapping, layer=layer, k_scale=k_scale)
    q = _query(params, config, x)
    first = decodes * q_len
    decoded = _attend_absorbed(
        params,
        q[:first].reshape(decodes, q_len, *q.shape[1:]),
        cache,
        page_table[:decodes],
        kv_lens,
        layer=layer,
        k_scale=k_scale,
        plan=plan,
    )
    prompts = _attend_prompts(
        params,
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
    attended = jnp.concatenate([decoded.reshape(first, *decoded.shape[2:]), prompts])
    return _output(params, x, attended, axis_name), cache


def _attend_absorbed(
    params: LayerParams, q: jax.Array, cache: jax.Array, page_table: jax.Array, kv_lens: jax.Array, **options
) -> jax.Array:
    """q [.., H, 192] over the cache, in the latent space -> [.., H, 128]."""
    q_latent = _einsum("...hn,hln->...hl", q[..., :NOPE], params.w_uk)
    latent, _ = mla_decode((q_latent, q[..., NOPE:]), cache, page_table, kv_lens, scale=SCALE, **options)
    return _einsum("...hl,hvl->...hv", latent, params.w_uv)


def _attend_prompts(
    params: LayerParams,
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
    kv_up = _einsum("tl,lhd->thd", kv_c, params.w_kv_b)
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
            scale=SCALE,
            layer=layer,
            k_scale=k_scale,
            carry=(jnp.zeros((*q.shape[:2], VALUE)), jnp.full(q.shape[:2], -jnp.inf, jnp.float32)),
        )
    attended, _ = mla_prefill(
        q,
        pack_kv(kv_up, k_pe),
        kv_up,
        cu_q_lens,
        cu_q_lens,
        causal=True,
        scale=SCALE,
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


def _einsum(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, weight, preferred_element_type=jnp.float32).astype(x.dtype)


def _query(params: LayerParams, config: LayerConfig, x: jax.Array) -> jax.Array:
    """[.., M] -> [.., H, 192]: nope, then rope."""
    latent = rms_norm(_einsum("...m,cm->...c", x, params.q_a_proj), params.q_a_layernorm, config.rms_norm_eps)
    return _einsum("...c,hdc->...hd", latent, params.q_b_proj)


def _kv_latent(params: LayerParams, config: LayerConfig, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[.., M] -> what the cache holds: the latent [.., 512], normalised, and the rope key [.., 64], as it comes."""
    joint = _einsum("...m,dm->...d", x, params.kv_a_proj_with_mqa)
    return rms_norm(joint[..., :LATENT], params.kv_a_layernorm, config.rms_norm_eps), joint[..., LATENT:]


def _output(params: LayerParams, x: jax.Array, attended: jax.Array, axis_name: str | None) -> jax.Array:
    """Gate and project: attended [.., H, 128] -> [.., M]."""
    gate = jnp.einsum("...m,hvm->...hv", x, params.g_proj, preferred_element_type=jnp.float32)
    gated = (attended.astype(jnp.float32) * jax.nn.sigmoid(gate)).astype(x.dtype)
    y = _einsum("...hv,mhv->...m", gated, params.o_proj)
    return y if axis_name is None else jax.lax.psum(y, axis_name)
