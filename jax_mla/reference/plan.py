"""The work split of decode: the rule of kernels/decode/plan_rule.h on whole arrays."""

import jax
import jax.numpy as jnp

BLOCK_TOKENS = 64  # a sequence is cut at multiples of it
INVARIANT_MAX_SPLITS = 16
INVARIANT_MIN_BLOCKS = 32
_LONGEST_LINE = 2**30  # blocks; keeps every sum below 2^31


def max_items(tiles: int, parts: int, batch_invariant: bool) -> int:
    """Rows that the items of any plan of this shape need."""
    return tiles * INVARIANT_MAX_SPLITS if batch_invariant else tiles + parts


def plan_decode(
    kv_lens: jax.Array,
    cu_q_lens: jax.Array | None = None,
    *,
    num_heads: int,
    max_q_len: int,
    tile_rows: int,
    parts: int,
    overhead_blocks: int,
    min_part_blocks: int,
    batch_invariant: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """items [max_items, 8], part_offsets [parts + 1] and tile_splits [B * row_tiles, 2], int32, as in kernels/params.h.

    Tiles lie on one line, each as long as its cost in blocks, and the line is cut into `parts` equal pieces. The native
    planners sum in 64 bits; here, in 32, a tile is taken to be at most 2^30 / tiles blocks long, which binds only where
    a batch could be longer than 64 billion tokens.
    """
    batch = kv_lens.shape[0]
    row_tiles = -(-max_q_len * num_heads // tile_rows)
    tiles = batch * row_tiles
    capacity = max_items(tiles, parts, batch_invariant)
    if tiles == 0:
        empty = jnp.zeros((capacity, 8), jnp.int32), jnp.zeros(parts + 1, jnp.int32), jnp.zeros((0, 2), jnp.int32)
        return empty

    # Cost of each tile.
    request = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), row_tiles)
    row_tile = jnp.tile(jnp.arange(row_tiles, dtype=jnp.int32), batch)
    q_lens = jnp.full((batch,), max_q_len, jnp.int32)
    if cu_q_lens is not None:
        first, last = cu_q_lens[:-1], cu_q_lens[1:]
        difference = (last - first).astype(jnp.uint32)  # of any two int32, where it is not negative
        q_lens = jnp.where(last > first, jnp.minimum(difference, max_q_len).astype(jnp.int32), 0)
    kv_len = jnp.maximum(kv_lens, 0)[request]
    used = row_tile * tile_rows < q_lens[request] * num_heads
    blocks = jnp.where(used, kv_len // BLOCK_TOKENS + (kv_len % BLOCK_TOKENS != 0), 0)
    blocks = jnp.minimum(blocks, _LONGEST_LINE // tiles)
    cost = jnp.where(blocks > 0, blocks + overhead_blocks, 0)

    # Where it lies on the line, and in how many pieces it is cut.
    end = jnp.cumsum(cost, dtype=jnp.int32)
    length = jnp.maximum((end[-1] + parts - 1) // parts, max(min_part_blocks, 1))
    first_block = end - cost + overhead_blocks
    if batch_invariant:
        wanted = jnp.clip(-(-blocks // INVARIANT_MIN_BLOCKS), 1, INVARIANT_MAX_SPLITS)
        chunk = jnp.maximum(-(-blocks // wanted), 1)
        pieces = -(-blocks // chunk)
    else:
        first_part = first_block // length
        pieces = (first_block + blocks - 1) // length - first_part + 1
    count = jnp.where(blocks > 0, pieces, 0)
    last_item = jnp.cumsum(count, dtype=jnp.int32)
    partials = jnp.where(count >= 2, count, 0)
    first_partial = jnp.where(count >= 2, jnp.cumsum(partials, dtype=jnp.int32) - partials, -1)

    # Pieces in the order of the line are items in the order of the parts.
    item = jnp.arange(capacity, dtype=jnp.int32)
    tile = jnp.searchsorted(last_item, item, side="right").astype(jnp.int32)
    filled = tile < tiles
    tile = jnp.minimum(tile, tiles - 1)
    piece = item - (last_item - count)[tile]
    if batch_invariant:
        begin = piece * chunk[tile]
        part = (first_block[tile] + begin) // length
        stop = begin + chunk[tile]
    else:
        part = first_part[tile] + piece
        begin = part * length - first_block[tile]
        stop = begin + length
    kv_end = jnp.where(stop >= blocks[tile], kv_len[tile], stop * BLOCK_TOKENS)
    partial = jnp.where(count[tile] >= 2, first_partial[tile] + piece, -1)
    columns = [request[tile], row_tile[tile], jnp.maximum(begin, 0) * BLOCK_TOKENS, kv_end, partial]
    columns += [jnp.zeros_like(item)] * 3
    items = jnp.where(filled[:, None], jnp.stack(columns, axis=-1), 0)
    part_offsets = jnp.searchsorted(jnp.where(filled, part, parts), jnp.arange(parts + 1), side="left")
    return items, part_offsets.astype(jnp.int32), jnp.stack([first_partial, count], axis=-1).astype(jnp.int32)
