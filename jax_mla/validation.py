"""Eager checks of what only the device knows: page ids, lengths, slots, indices."""

from __future__ import annotations

import jax
import numpy as np

from jax_mla import _checks
from jax_mla.reference import ContextPlan


def validate(
    cache: jax.Array,
    *,
    page_table: jax.Array | None = None,
    kv_lens: jax.Array | None = None,
    cu_q_lens: jax.Array | None = None,
    max_q_len: int | None = None,
    num_tokens: int | None = None,
    slot_mapping: jax.Array | None = None,
    indices: jax.Array | None = None,
    context: ContextPlan | None = None,
    layer: int | jax.Array | None = None,
) -> None:
    """Raises ValueError where an array holds what the kernels would mask; each is checked if it is given.

    A kernel never reads or writes out of bounds: a token on a page out of range is masked, a slot out of range is
    skipped. That hides mistakes, and this reports them. It copies the arrays to the host, so call it eagerly, in
    tests and while debugging.

    cache: [pages, P, width], or [layers, pages, P, width] with layer. page_table [B, max_pages] and kv_lens [B]: every
    length is 0 or more, fits its row of the table, and lies on pages of the cache. cu_q_lens [B + 1]: starts at 0,
    does not fall, ends within num_tokens, no more than max_q_len a sequence, and (with kv_lens) no more queries than
    cached tokens. slot_mapping [T]: -1, or a slot of the cache, none twice. indices [.., K]: -1, or a slot of the
    cache. context: has room for all chunks that its contexts take.
    """
    given = (cache, page_table, kv_lens, cu_q_lens, slot_mapping, indices, layer, getattr(context, "num_chunks", None))
    if any(isinstance(x, jax.core.Tracer) for x in given):
        raise ValueError("validate reads values; call it eagerly, outside jit")
    cache, layer = _checks.cache(cache, layer)
    pages, page_size = cache.shape[-3:-1]
    num_slots = pages * page_size
    if layer is not None and not 0 <= int(layer) < cache.shape[0]:
        raise ValueError(f"layer is {int(layer)}; cache has {cache.shape[0]} layers")
    table = None if page_table is None else np.asarray(_checks.int32("page_table", page_table, ("B", "max_pages")))
    lens = None if kv_lens is None else np.asarray(_checks.int32("kv_lens", kv_lens, ("B",)))
    if lens is not None:
        _no("kv_lens", lens, lens < 0, "expected 0 or more")
    if table is not None and lens is not None:
        if len(table) != len(lens):
            raise ValueError(f"page_table has {len(table)} rows and kv_lens {len(lens)}; expected the same")
        capacity = table.shape[1] * page_size
        _no("kv_lens", lens, lens > capacity, f"page_table holds {capacity} tokens a sequence")
        used = np.arange(table.shape[1])[None, :] * page_size < lens[:, None]
        _no("page_table", table, used & ((table < 0) | (table >= pages)), f"cache has {pages} pages")
    elif table is not None:
        _no("page_table", table, (table < -1) | (table >= pages), f"cache has {pages} pages")
    if cu_q_lens is not None:
        _check_queries(np.asarray(_checks.int32("cu_q_lens", cu_q_lens, ("B + 1",))), lens, max_q_len, num_tokens)
    if slot_mapping is not None:
        slot = np.asarray(_checks.int32("slot_mapping", slot_mapping, ("T",)))
        _no("slot_mapping", slot, (slot < -1) | (slot >= num_slots), f"cache has {num_slots} slots")
        written = slot[slot >= 0]
        values, counts = np.unique(written, return_counts=True)
        if (counts > 1).any():
            twice = values[counts > 1][0]
            raise ValueError(f"slot_mapping writes slot {twice} more than once; expected distinct slots")
    if indices is not None:
        chosen = np.asarray(_checks.array("indices", indices))
        _no("indices", chosen, (chosen < -1) | (chosen >= num_slots), f"cache has {num_slots} slots")
    if context is not None and context.num_chunks > context.max_chunks:
        raise ValueError(f"context has room for {context.max_chunks} chunks and takes {context.num_chunks}")


def _check_queries(cu: np.ndarray, lens: np.ndarray | None, max_q_len: int | None, num_tokens: int | None) -> None:
    if cu[0] != 0:
        raise ValueError(f"cu_q_lens starts at {cu[0]}; expected 0")
    counts = np.diff(cu.astype(np.int64))
    _no("cu_q_lens", cu[1:], counts < 0, "expected it not to fall")
    if num_tokens is not None and cu[-1] > num_tokens:
        raise ValueError(f"cu_q_lens ends at {cu[-1]}; q has {num_tokens} tokens")
    if max_q_len is not None:
        _no("cu_q_lens", counts, counts > max_q_len, f"max_q_len is {max_q_len}")
    if lens is not None:
        if len(lens) != len(counts):
            raise ValueError(f"cu_q_lens is for {len(counts)} sequences and kv_lens has {len(lens)}; expected the same")
        _no("cu_q_lens", counts, (counts > lens) & (lens > 0), "more query tokens than kv_lens counts")


def _no(name: str, values: np.ndarray, wrong: np.ndarray, why: str) -> None:
    """Raises for the first wrong value, with its place."""
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(f"{name}[{', '.join(map(str, place))}] is {values[place]}; {why}")
