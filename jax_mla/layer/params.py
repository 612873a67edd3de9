"""Parameters of one MLA block on one device: as published, and as they are served."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_mla.layer.config import LayerConfig
from jax_mla.layer.widths import HEAD_DIM, LATENT, NOPE, VALUE


class LayerParams(NamedTuple):
    """One device's parameters, ready to serve. ``jax.tree.map(lambda *p: jnp.stack(p), *layers)`` stacks layers.

    The contracted axes come last, as published; XLA's CPU backend multiplies batches of bf16 matrices in another order
    with bf16 sums, or not at all. What a model does not have is None.
    """

    q_a_proj: jax.Array | None  # [C, M]
    q_a_layernorm: jax.Array | None  # [C]
    q_b_proj: jax.Array  # [H, 192, C]; without a query latent q_proj, [H, 192, M]
    kv_a_proj_with_mqa: jax.Array  # [576, M]
    kv_a_layernorm: jax.Array  # [512]
    w_kv_b: jax.Array  # [512, H, 256]: key, then value; prefill's up-projection, and the operand of mla_context
    w_uk: jax.Array  # [H, 512, 128]: nope query to latent, the keys' up-projection absorbed
    w_uv: jax.Array  # [H, 128, 512]: attended latent to value
    g_proj: jax.Array | None  # [H, 128, M]
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
    queries = arrays["q_proj"] if config.q_lora_rank is None else arrays["q_b_proj"]
    kv_b = arrays["kv_b_proj"].reshape(heads, NOPE + VALUE, LATENT)
    return LayerParams(
        q_a_proj=arrays.get("q_a_proj"),
        q_a_layernorm=arrays.get("q_a_layernorm"),
        q_b_proj=queries.reshape(heads, HEAD_DIM, queries.shape[1]),
        kv_a_proj_with_mqa=arrays["kv_a_proj_with_mqa"],
        kv_a_layernorm=arrays["kv_a_layernorm"],
        w_kv_b=kv_b.transpose(2, 0, 1),
        w_uk=kv_b[:, :NOPE].transpose(0, 2, 1),
        w_uv=kv_b[:, NOPE:],
        g_proj=arrays["g_proj"].reshape(heads, VALUE, config.hidden_size) if config.gate else None,
        o_proj=arrays["o_proj"].reshape(config.hidden_size, heads, VALUE),
    )
