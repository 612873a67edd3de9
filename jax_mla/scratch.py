"""The device memory that a decode call takes beside its operands and results, known from shapes before any call."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from jax_mla import _checks, _ffi
from jax_mla.decode import native_choice


@dataclasses.dataclass(frozen=True)
class DecodeScratch:
    """Shapes and dtypes of what `plan_decode` and `mla_decode` allocate for themselves.

    plan: items [max_items, 8], part_offsets [parts + 1] and tile_splits [B * row_tiles, 2], int32: a step has one.
    partials: out [max_partials, tile_rows, 512] and lse [max_partials, tile_rows], fp32: scratch of each call, whose
    memory XLA gives to the next call again.
    """

    plan: tuple[jax.ShapeDtypeStruct, ...]
    partials: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def bytes(self) -> int:
        """Of all arrays together, without the padding (to 256 bytes each on a GPU) that XLA adds."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in (*self.plan, *self.partials))


def decode_scratch(
    batch: int,
    *,
    num_heads: int,
    cache: jax.Array | jax.ShapeDtypeStruct,
    q_len: int = 1,
    q_dtype: Any = None,
    batch_invariant: bool = False,
    implementation: str | None = None,
) -> DecodeScratch:
    """What a step of decode needs for its plan and its partial results, from static shapes alone.

    batch: sequences. num_heads: query heads. cache: an array or a ShapeDtypeStruct of the cache's shape and dtype.
    q_len: query tokens a sequence; for ragged queries max_q_len. q_dtype, batch_invariant: as in `plan_decode`.
    implementation: None for this process's default backend, or a name; "cuda" works without a GPU, and then counts on
    132 multiprocessors.

    Where heads are padded (`explain` says so), XLA holds padded copies of q, out and lse beside it. Raises ValueError
    for wrong sizes, and NotImplementedError where the call would run through XLA: its memory is not known before
    `jax.jit(...).lower(...).compile().memory_analysis()`.
    """
    _checks.positive("batch", batch)
    _checks.positive("num_heads", num_heads)
    _checks.num_heads("num_heads", num_heads)
    _checks.positive("q_len", q_len)
    if not hasattr(cache, "shape") or not hasattr(cache, "dtype"):
        raise ValueError(f"cache is a {type(cache).__name__}; expected an array or a jax.ShapeDtypeStruct")
    _checks.cache_layout("cache", cache)
    batch_invariant = _checks.flag("batch_invariant", batch_invariant)
    choice = native_choice(cache, q_dtype, num_heads, q_len, batch_invariant, implementation)
    if choice is None:
        raise NotImplementedError(
            "decode_scratch is of native kernels, and XLA would serve this call: its memory is what "
            "jax.jit(...).lower(...).compile().memory_analysis() says"
        )
    return DecodeScratch(_ffi.plan_shapes(choice.heads, batch), _ffi.partial_shapes(choice.heads, batch))
