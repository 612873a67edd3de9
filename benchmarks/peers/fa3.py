"""FlashAttention-3 (github.com/Dao-AILab/flash-attention) as vLLM builds it: decode, queries in two parts.

Keys are the rope columns of the cache, values its latent columns, both read in place. The schedule is made once.
"""

from __future__ import annotations

import importlib
import lzma
import os
import pathlib
import shutil
import tempfile
from typing import Any

import torch

from .replay import Replay, Shared, over_copies

LATENT, ROPE = 512, 64


def _load() -> Any:
    library = os.environ.get("FA3_LIBRARY")
    if library is None:
        importlib.import_module("vllm.vllm_flash_attn._vllm_fa3_C")
    elif library.endswith(".xz"):
        with tempfile.TemporaryDirectory() as folder:
            unpacked = pathlib.Path(folder) / pathlib.Path(library).stem
            with lzma.open(library) as packed, unpacked.open("wb") as target:
                shutil.copyfileobj(packed, target)
            torch.ops.load_library(unpacked)  # stays loaded when its file is gone
    else:
        torch.ops.load_library(library)
    return torch.ops._vllm_fa3_C


OPS = _load()


def make(inputs: Any) -> Replay:
    cell = inputs.cell
    if cell.dtype not in ("bf16", "fp16"):
        raise NotImplementedError(f"it takes the latent part apart in bf16 and fp16, not in {cell.dtype}")
    shared = Shared()
    q, table, kv_lens = (shared(x) for x in (inputs.q, inputs.page_table, inputs.kv_lens))
    q = q.flatten(0, 1)
    caches = shared(inputs.cache).unsqueeze(3)  # [copies, pages, P, 1, 576]: one head of keys
    cu_q_lens = torch.arange(0, len(q) + 1, cell.queries, dtype=torch.int32, device=q.device)
    longest = int(kv_lens.max())
    no = None
    schedule = OPS.get_scheduler_metadata(
        cell.batch, cell.queries, longest, cell.heads, 1, ROPE, LATENT, q.dtype, kv_lens, cu_q_lens, no, no, no, no,
        cell.page_size, 0, True, -1, -1, False, 0, no, 0,
    )  # fmt: skip

    def call(i: int) -> torch.Tensor:
        keys, values = caches[i][..., LATENT:], caches[i][..., :LATENT]
        return OPS.fwd(
            q[..., LATENT:], keys, values, no, no, q[..., :LATENT], no,
            cu_q_lens, no, no, no, kv_lens, cell.queries, longest, table, no, no,
            no, no, no,  # rotary
            no, no, no,  # scales
            inputs.scale, True, -1, -1, 0.0, True, schedule, 0, no, 0, no,
            1, 0, no,  # context parallelism
        )[0]  # fmt: skip

    return over_copies("fa3", inputs, shared, call)
