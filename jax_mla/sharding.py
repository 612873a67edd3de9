"""Decode over several devices: batch and heads are split, the latent cache is shared by all heads."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax.sharding import Mesh, PartitionSpec

from jax_mla.decode import mla_decode


def sharded_decode(
    mesh: Mesh, *, batch_axis: str | None = None, head_axis: str | None = None, **options
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """mla_decode under shard_map: each device runs the kernel on its own sequences and heads, and nothing is gathered.

    A custom call on sharded operands would make XLA gather them on every device without a word. Here q [B, Q, H, 576]
    (or the pair) is split over batch_axis (B) and head_axis (H), out and lse likewise. The cache is replicated over
    head_axis, as every head reads the same latent; over batch_axis its pages are split, together with page_table and
    kv_lens, so a page id counts from the first page of its own device.

    options: keyword arguments of mla_decode that are static (scale is required), without plan and cu_q_lens. Returns
    a function `(q, cache, page_table, kv_lens, *, layer=None) -> (out, lse)`, to be called under jit or eagerly.
    Raises ValueError for axes that the mesh does not have or for options that do not go with it.
    """
    for name, axis in (("batch_axis", batch_axis), ("head_axis", head_axis)):
        if axis is not None and axis not in mesh.axis_names:
            raise ValueError(f"{name} is {axis!r}; the mesh has {', '.join(mesh.axis_names)}")
    for refused in ("plan", "cu_q_lens", "max_q_len"):
        if refused in options:
            raise ValueError(f"{refused} cannot be split over devices here; call mla_decode inside jax.shard_map")
    rows = PartitionSpec(batch_axis, None, head_axis)
    decode = functools.partial(mla_decode, **options)

    def call(q, cache, page_table, kv_lens, *, layer=None):
        pages = PartitionSpec(batch_axis) if cache.ndim == 3 else PartitionSpec(None, batch_axis)
        specs = (rows, pages, PartitionSpec(batch_axis), PartitionSpec(batch_axis))
        operands = (q, cache, page_table, kv_lens)
        if layer is not None:
            specs, operands = (*specs, PartitionSpec()), (*operands, jax.numpy.asarray(layer, jax.numpy.int32))

        def local(q, cache, page_table, kv_lens, layer=None):
            return decode(q, cache, page_table, kv_lens, layer=layer)

        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(rows, rows))(*operands)

    return call
