"""The cached context of a batch, cut into chunks that fit a workspace: on the host and on the device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jax_mla.reference.attend import varying_like


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContextPlan:
    """The cached context of B requests, cut into chunks of at most `workspace_tokens` tokens.

    Shapes have room for `max_chunks` chunks, so that steps share compiled programs; those from `num_chunks` on are
    empty. A `num_chunks` above `max_chunks` says that the plan has no room for the end of the context.
    """

    num_chunks: jax.Array  # [] int32: chunks that the context takes
    starts: jax.Array  # [max_chunks, B] int32: first token of the request's piece in the chunk, in its context
    cu_kv_lens: jax.Array  # [max_chunks, B + 1] int32: the pieces in the workspace; an empty one has no context there
    workspace_tokens: int = dataclasses.field(metadata={"static": True})
    page_size: int = dataclasses.field(metadata={"static": True})

    @property
    def max_chunks(self) -> int:
        return self.starts.shape[0]


def plan_context(context_lens, *, workspace_tokens: int, page_size: int, max_chunks: int | None = None) -> ContextPlan:
    """Cuts contexts of `context_lens` [B] tokens, on the host.

    Requests go in order. One is taken whole if it fits in what is left of the chunk; else as many whole pages of it as
    fit, if that is at least one, and the chunk is closed. Lengths below 0 count as 0.
    """
    chunks: list[dict[int, tuple[int, int]]] = [{}]  # request -> (start, length)
    room = workspace_tokens
    lengths = np.maximum(np.asarray(context_lens, np.int64), 0)
    for request, length in enumerate(lengths.tolist()):
        start = 0
        while start < length:
            left = length - start
            piece = left if left <= room else room // page_size * page_size
            if piece > 0:
                chunks[-1][request] = (start, piece)
                start += piece
                room -= piece
            if piece < left:
                chunks.append({})
                room = workspace_tokens
    num_chunks = len(chunks) if chunks[-1] else 0
    shape = (1 << (len(chunks) - 1).bit_length() if max_chunks is None else max_chunks, len(lengths))
    starts, pieces = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for i, chunk in enumerate(chunks[: shape[0]]):
        for request, (start, piece) in chunk.items():
            starts[i, request], pieces[i, request] = start, piece
    cu_kv_lens = np.pad(np.cumsum(pieces, axis=1, dtype=np.int32), ((0, 0), (1, 0)))
    arrays = (jnp.asarray(x) for x in (np.int32(num_chunks), starts, cu_kv_lens))
    return ContextPlan(*arrays, workspace_tokens, page_size)


def plan_context_traced(
    context_lens: jax.Array, *, workspace_tokens: int, page_size: int, max_chunks: int
) -> ContextPlan:
    """The same in closed form for one request after another, on the device.

    A request that does not fit takes whole pages of the open chunk, then full chunks, then its rest.
    """
    lengths = jnp.maximum(jnp.asarray(context_lens, jnp.int32), 0)
    full = workspace_tokens // page_size * page_size  # of a request that leaves nothing for others

    def place(state, length):
        chunk, room = state
        fits = length <= room
        first = jnp.where(fits, length, room // page_size * page_size)
        rest = length - first
        full_chunks = jnp.where(fits, 0, jnp.maximum(rest - workspace_tokens + full - 1, 0) // full)
        last = rest - full_chunks * full
        end = (chunk + 1 + full_chunks, workspace_tokens - last)
        state = jax.tree.map(lambda here, there: jnp.where(fits, here, there), (chunk, room - length), end)
        return state, (chunk, first, full_chunks, last)

    begin = varying_like((jnp.int32(0), jnp.int32(workspace_tokens)), lengths)
    (chunk, room), (opened, first, full_chunks, last) = jax.lax.scan(place, begin, lengths)
    behind = jnp.arange(max_chunks, dtype=jnp.int32)[:, None] - opened  # [max_chunks, B]: chunks after the first
    pieces = jnp.where(behind == 0, first, 0)
    pieces = jnp.where((behind > 0) & (behind <= full_chunks), full, pieces)
    pieces = jnp.where((behind > 0) & (behind == full_chunks + 1), last, pieces)
    starts = jnp.where((behind > 0) & (pieces > 0), first + (behind - 1) * full, 0)
    cu_kv_lens = jnp.pad(jnp.cumsum(pieces, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    num_chunks = chunk + (room < workspace_tokens)
    return ContextPlan(num_chunks, starts, cu_kv_lens, workspace_tokens, page_size)
