"""A cell's operands, random on the device, and the truth in float64."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mla import dispatch, reference
from jax_mla.bench.cells import DTYPES, WIDTH, Cell

SCALE = 192**-0.5
POISONED_PAGES = 2  # of NaN, owned by no sequence; padding of the page table points at them


@dataclasses.dataclass(frozen=True)
class Inputs:
    """q [B, Q, H, 576], cache [copies, pages, P, 576], page_table [B, max_pages], kv_lens [B].

    Each copy of the cache has values of its own. Pages are scattered; those that no sequence owns hold NaN. scales:
    q_scale and k_scale where the cell's dtypes are fp8, else empty. calls: how often a contestant goes to work in a
    run, over copy i % copies in call i.
    """

    cell: Cell
    calls: int
    q: jax.Array
    cache: jax.Array
    page_table: jax.Array
    kv_lens: jax.Array
    scales: dict[str, jax.Array]

    @property
    def scale(self) -> float:
        return SCALE

    @property
    def copies(self) -> int:
        return self.cache.shape[0]

    @property
    def operands(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        return self.q, self.cache, self.page_table, self.kv_lens


def scales(cell: Cell) -> dict[str, Any]:
    """fp8 data's scales, no powers of two, so that leaving one out shows."""
    values = {"q_scale": 1.2, "k_scale": 0.7}
    kinds = zip(values.items(), DTYPES[cell.dtype], strict=True)
    return {name: np.float32(value) for (name, value), dtype in kinds if jnp.dtype(dtype).itemsize == 1}


def abstract(cell: Cell, copies: int, calls: int) -> Inputs:
    """Shapes and dtypes alone."""
    q_dtype, cache_dtype = DTYPES[cell.dtype]
    table, pages = _page_table(cell)
    return Inputs(
        cell,
        calls,
        jax.ShapeDtypeStruct((cell.batch, cell.queries, cell.heads, WIDTH), q_dtype),
        jax.ShapeDtypeStruct((copies, pages, cell.page_size, WIDTH), cache_dtype),
        jax.ShapeDtypeStruct(table.shape, jnp.int32),
        jax.ShapeDtypeStruct((cell.batch,), jnp.int32),
        {name: jax.ShapeDtypeStruct((), jnp.float32) for name in scales(cell)},
    )


def _page_table(cell: Cell) -> tuple[np.ndarray, int]:
    """Page ids in random order, with the number of pages."""
    counts = -(-cell.kv_lens // cell.page_size)
    pages = int(counts.sum()) + POISONED_PAGES
    ids = np.random.default_rng(1).permutation(pages).astype(np.int32)
    table = np.full((cell.batch, counts.max()), ids[-1], np.int32)
    table[np.arange(counts.max()) < counts[:, None]] = ids[:-POISONED_PAGES]
    return table, pages


def random_arrays(shapes: Inputs) -> Any:
    """Jitted: poisoned page ids -> q and cache."""

    def fill(poisoned: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys = jax.random.split(jax.random.key(0, impl="rbg"))
        q, cache = (
            jax.random.normal(key, x.shape, jnp.bfloat16).astype(x.dtype)
            for key, x in zip(keys, (shapes.q, shapes.cache), strict=True)
        )
        is_poisoned = (jnp.arange(cache.shape[1]) == poisoned[:, None]).any(0)
        return q, jnp.where(is_poisoned[:, None, None], jnp.asarray(jnp.nan, cache.dtype), cache)

    return jax.jit(fill)


def make(shapes: Inputs, fill: Any) -> Inputs:
    """The arrays; `fill` is random_arrays, compiled or not."""
    table, pages = _page_table(shapes.cell)
    poisoned = np.setdiff1d(np.arange(pages, dtype=np.int32), _owned(shapes.cell, table))
    q, cache = fill(jnp.asarray(poisoned))
    return dataclasses.replace(
        shapes,
        q=q,
        cache=cache,
        page_table=jnp.asarray(table),
        kv_lens=jnp.asarray(shapes.cell.kv_lens),
        scales={name: jnp.asarray(value) for name, value in scales(shapes.cell).items()},
    )


def _owned(cell: Cell, table: np.ndarray) -> np.ndarray:
    counts = -(-cell.kv_lens // cell.page_size)
    return table[np.arange(table.shape[1]) < counts[:, None]]


def lower_truth(shapes: Inputs) -> jax.stages.Lowered:
    """The reference in float64 over the first copy of the cache: its compiled form gives out [B, Q, H, 512]."""
    # XLA would try many algorithms for each product, which takes longer than the products.
    options = {"xla_gpu_autotune_level": 0} if dispatch.default_platform() == "cuda" else {}
    run = functools.partial(reference.mla_decode, scale=SCALE, compute_dtype=jnp.float64, out_dtype=jnp.float64)
    with jax.enable_x64(True):
        jitted = jax.jit(lambda *arrays, **scales: run(*arrays, layer=0, **scales)[0], compiler_options=options)
        return jitted.lower(*shapes.operands, **shapes.scales)


def relative_error(out: Any, exact: np.ndarray) -> float:
    """Norm of the difference over the norm."""
    return float(np.linalg.norm(np.asarray(out).astype(np.float64) - exact) / np.linalg.norm(exact))
