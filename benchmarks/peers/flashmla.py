"""FlashMLA's dense decode (github.com/deepseek-ai/FlashMLA): bf16, and fp8 queries over an fp8 cache.

Its split of the work is made once, by the first call, and captured calls reuse it: what is timed is decode and the
reduction, as for jax_mla with a plan.
"""

from __future__ import annotations

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
