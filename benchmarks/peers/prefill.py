"""Prefill by FlashAttention-3, and by cuDNN through PyTorch, over JAX's memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import fa3 as _fa3
from .replay import Replay, Shared


def over_queries(name: str, queries: list[torch.Tensor], shared: Shared, call: Callable[..., Any]) -> Replay:
    """A run's calls, each with its own queries. call: a query tensor -> out [T, H, 128]."""
    return Replay(name, [functools.partial(call, q) for q in queries], shared)


def fa3(inputs: Any, dtype: str) -> Replay:
    """In fp8 it takes queries, keys and values alike."""
    if dtype == "mixed":
        raise NotImplementedError("it multiplies values in the dtype of the keys")
    cell, shared, no = inputs.cell, Shared(), None
    queries = [shared(q) for q in inputs.q]
    k, v = shared(inputs.k), shared(inputs.kv_up)[..., 128:]
    if dtype == "fp8":
        queries, k, v = ([x.contiguous().to(torch.float8_e4m3fn) for x in xs] for xs in (queries, [k], [v]))
        k, v = k[0], v[0]
    cu_q, cu_k = shared(inputs.cu_q_lens), shared(inputs.cu_kv_lens)

    def call(q: torch.Tensor) -> torch.Tensor:
        return _fa3.OPS.fwd(
            q, k, v, no, no, no, no, cu_q, cu_k, no, no, no, cell.queries, cell.keys, no, no, no,
            no, no, no,  # rotary
            no, no, no,  # scales
            192**-0.5, cell.causal, -1, -1, 0.0, True, no, 0, no, 0, no,
            1, 0, no,  # context parallelism
        )[0]  # fmt: skip

    return over_queries("fa3", queries, shared, call)


def cudnn(inputs: Any, dtype: str) -> Replay:
    """Equal lengths alone, causal to the top left: the same where a sequence attends to itself."""
    cell, shared = inputs.cell, Shared()
    if dtype != "bf16":
        raise NotImplementedError(f"PyTorch has no attention in {dtype}")
    if cell.causal and cell.queries != cell.keys:
        raise NotImplementedError("causal to the top left alone")

    def by_heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (cell.batch, -1)).transpose(1, 2)

    k, v = by_heads(shared(inputs.k)), by_heads(shared(inputs.kv_up)[..., 128:])

    def call(q: torch.Tensor) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(
                by_heads(q), k, v, is_causal=cell.causal, scale=192**-0.5
            )
        return out.transpose(1, 2).flatten(0, 1)

    return over_queries("cudnn", [shared(q) for q in inputs.q], shared, call)
