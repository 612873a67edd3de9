"""FlashMLA (github.com/deepseek-ai/FlashMLA): dense decode in bf16, and of fp8 queries over an fp8 cache; attention
to chosen slots of fp8_ds_mla by its sparse decode, of bf16 by its sparse prefill.

Decode's split of the work is made once, by the first call, and captured calls reuse it: what is timed is decode and the
reduction, as for jax_mla with a plan.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import vllm._flashmla_extension_C  # noqa: F401  registers torch.ops._flashmla_extension_C
from vllm.third_party.flashmla import flash_mla_interface

from .replay import Replay, Shared, over_copies

LATENT, PAGE = 512, 64


def make(inputs: Any) -> Replay:
    cell = inputs.cell
    if cell.dtype not in ("bf16", "fp8"):
        raise NotImplementedError(f"its dense decode is timed in bf16 and fp8, not in {cell.dtype}")
    if cell.page_size != PAGE:
        raise NotImplementedError(f"it takes pages of {PAGE} tokens, not of {cell.page_size}")
    shared = Shared()
    q, table, kv_lens = (shared(x) for x in (inputs.q, inputs.page_table, inputs.kv_lens))
    caches = shared(inputs.cache).unsqueeze(3)  # [copies, pages, P, 1, 576]: one head of keys
    if cell.dtype == "bf16":
        call = _bf16(q, caches, table, kv_lens, inputs.scale)
    else:
        scales = [shared(inputs.scales[name]).reshape(1) for name in ("q_scale", "k_scale")]
        call = _fp8(q, caches, table, kv_lens, inputs.scale, scales)
    return over_copies("flashmla", inputs, shared, call)


def _bf16(q: torch.Tensor, caches: torch.Tensor, table: torch.Tensor, kv_lens: torch.Tensor, scale: float) -> Any:
    schedule, _ = flash_mla_interface.get_mla_metadata()

    def call(i: int) -> torch.Tensor:
        return flash_mla_interface.flash_mla_with_kvcache(
            q, caches[i], table, kv_lens, LATENT, schedule, softmax_scale=scale, causal=True
        )[0]

    return call


def _fp8(
    q: torch.Tensor,
    caches: torch.Tensor,
    table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    scales: list[torch.Tensor],
) -> Any:
    ops = torch.ops._flashmla_extension_C
    rows = q.shape[1] * q.shape[2]
    schedule, splits = ops.get_mla_decoding_metadata_dense_fp8(kv_lens, rows, 1)

    def call(i: int) -> torch.Tensor:
        return ops.fwd_kvcache_mla_fp8(q, caches[i], LATENT, kv_lens, table, scale, True, schedule, splits, *scales)[0]

    return call


def sparse(inputs: Any) -> Replay:
    """Of benchmarks/sparse.py: a call for each array of indices."""
    cell, shared = inputs.cell, Shared()
    if cell.heads not in (64, 128):
        raise NotImplementedError(f"it takes 64 and 128 heads, not {cell.heads}")
    if inputs.kind not in ("fp8_ds_mla", "bf16"):
        raise NotImplementedError(f"it takes chosen slots of fp8_ds_mla and bf16 caches, not of {inputs.kind}")
    q, cache = shared(inputs.q), shared(inputs.cache)
    if inputs.kind == "fp8_ds_mla":
        call = _sparse_decode(q, cache, cell, inputs.scale)
    else:
        call = _sparse_prefill(q, cache, inputs.scale)
    return Replay("flashmla", [functools.partial(call, shared(chosen)) for chosen in inputs.indices], shared)


def _sparse_decode(q: torch.Tensor, cache: torch.Tensor, cell: Any, scale: float) -> Any:
    schedule, _ = flash_mla_interface.get_mla_metadata()
    q, cache = q.unflatten(0, (cell.batch, cell.queries)), cache.unsqueeze(2)  # one head of keys

    def call(indices: torch.Tensor) -> torch.Tensor:
        out, _ = flash_mla_interface.flash_mla_with_kvcache(
            q, cache, None, None, LATENT, schedule, softmax_scale=scale, is_fp8_kvcache=True,
            indices=indices.unflatten(0, (cell.batch, cell.queries)),
        )  # fmt: skip
        return out.flatten(0, 1)

    return call


def _sparse_prefill(q: torch.Tensor, cache: torch.Tensor, scale: float) -> Any:
    tokens = cache.flatten(0, 1).unsqueeze(1)  # [slots, 1, 576]

    def call(indices: torch.Tensor) -> torch.Tensor:
        return flash_mla_interface.flash_mla_sparse_fwd(q, tokens, indices.unsqueeze(1), scale, LATENT)[0]

    return call
