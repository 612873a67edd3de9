"""The MLA block of DeepSeek-V2, V3, V3.2 and of Kimi-K2, Kimi-Linear, Kimi-K3, as pure functions over parameters.

The attention of one layer as it is served: keys and values through an RMS-normalised latent, queries through one of
their own or not; the 64 rope columns rotated, with YaRN or without, or used as they come; a sigmoid gate on the output
or none; then the output projection. ``LayerConfig`` says which. Decode runs absorbed: ``W_UK`` moves the query into the
latent space, where the cache is read as it is, and ``W_UV`` brings the result back (DeepSeek-V2, arXiv:2405.04434,
section 2.1; the gate is that of arXiv:2505.06708). DeepSeek-V3.2's layers attend to slots that an indexer chose: its
choice comes as ``decode``'s ``indices``::

    config = LayerConfig.from_json("checkpoint", devices=4)   # Kimi-K3: 24 of 96 heads here
    params = absorb(load_layer("checkpoint", 3, config, rank=0), config)
    y, cache = prefill(params, config, x, cache, slot_mapping, cu_q_lens, layer=0)
    y, cache = decode(params, config, x, cache, page_table, kv_lens, slot_mapping, layer=0)
    y, cache = mixed(params, config, x, cache, page_table, kv_lens, slot_mapping, cu_q_lens, decodes=8, layer=0)

Where ``config.rope`` is set, all three take ``positions`` too. Everything is traceable, so that a model jits its whole
step, with the cache donated. The blocks of several layers run in a Python loop, or in a ``lax.scan`` over stacked
parameters and ``jnp.arange(layers)``, the stacked cache its carry.

Letters: B sequences, Q queries a sequence, T tokens, H heads of this device, M hidden size, C q_lora_rank.
"""

from jax_mla.layer.attend import rms_norm
from jax_mla.layer.block import decode, mixed, prefill, query_latent
from jax_mla.layer.config import HEAD_AXIS, LayerConfig
from jax_mla.layer.params import LayerParams, absorb, init_weights, partition_specs
from jax_mla.layer.rope import Rope, Yarn
from jax_mla.layer.widths import HEAD_DIM, LATENT, NOPE, ROPE, VALUE

__all__ = [
    "HEAD_AXIS",
    "HEAD_DIM",
    "LATENT",
    "NOPE",
    "ROPE",
    "VALUE",
    "LayerConfig",
    "LayerParams",
    "Rope",
    "Yarn",
    "absorb",
    "decode",
    "init_weights",
    "mixed",
    "partition_specs",
    "prefill",
    "query_latent",
    "rms_norm",
]
