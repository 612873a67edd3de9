"""The work split of decode: the rule of kernels/decode/plan_rule.h on whole arrays."""

import jax
import jax.numpy as jnp

BLOCK_TOKENS = 64  # a sequence is cut at multiples of it
INVARIANT_MAX_SPLITS = 32
INVARIANT_MIN_BLOCKS = 32
EVEN_TRIALS = 8
MAX_GROUPED_PARTS = 8192
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
    few_pieces: int,
    slack: int,
    batch_invariant: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """items [max_items, 8], part_offsets [parts + 1] and tile_splits [B * row_tiles, 2], int32, as in kernels/params.h.

    What is cut, a unit, is a request whose row tiles run side by side in a group of parts, or one tile; the ways of
    cutting are those of kernels/decode/plan_rule.h. The native planners sum in 64 bits; here, in 32, a unit is taken to
    be at most 2^30 / tiles blocks long, which binds only where a batch could be longer than 64 billion tokens.
    """
    batch = kv_lens.shape[0]
    row_tiles = -(-max_q_len * num_heads // tile_rows)
    tiles = batch * row_tiles
    capacity = max_items(tiles, parts, batch_invariant)
    if tiles == 0:
        empty = jnp.zeros((capacity, 8), jnp.int32), jnp.zeros(parts + 1, jnp.int32), jnp.zeros((0, 2), jnp.int32)
        return empty

    def ceil_div(a, b):
        return (a + b - 1) // b

    # Work of each request.
    q_lens = jnp.full((batch,), max_q_len, jnp.int32)
    if cu_q_lens is not None:
        first, last = cu_q_lens[:-1], cu_q_lens[1:]
        difference = (last - first).astype(jnp.uint32)  # of any two int32, where it is not negative
        q_lens = jnp.where(last > first, jnp.minimum(difference, max_q_len).astype(jnp.int32), 0)
    kv_len = jnp.maximum(kv_lens, 0)
    used = jnp.where(kv_len > 0, ceil_div(q_lens * num_heads, tile_rows), 0)  # row tiles
    busy = used > 0
    most = jnp.max(used)

    # Units: of a request alike others the first tile stands for all.
    alike = jnp.all(jnp.where(busy, used == most, True)) & (most > 0)
    grouped = (most <= parts) & (parts <= MAX_GROUPED_PARTS) & (parts % jnp.maximum(most, 1) * 16 <= parts)
    by_request = alike & (grouped | (most == 1))
    width = jnp.where(by_request, most, 1)
    groups = parts // width
    request = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), row_tiles)
    row_tile = jnp.tile(jnp.arange(row_tiles, dtype=jnp.int32), batch)
    has_work = row_tile < jnp.where(by_request, jnp.minimum(used, 1), used)[request]
    blocks = kv_len[request] // BLOCK_TOKENS + (kv_len[request] % BLOCK_TOKENS != 0)
    blocks = jnp.where(has_work, jnp.minimum(blocks, _LONGEST_LINE // tiles), 0)
    cost = jnp.where(has_work, blocks + overhead_blocks, 0)
    end = jnp.cumsum(cost, dtype=jnp.int32)
    first_block = end - cost + overhead_blocks  # on the line

    # The way of cutting, and with it the pieces of each unit.
    longest, all_blocks, least = jnp.max(blocks), jnp.sum(blocks, dtype=jnp.int32), max(min_part_blocks, 1)
    least = jnp.where((longest > least) & (all_blocks * width <= few_pieces), 1, least)

    def share(total):
        return jnp.maximum(ceil_div(total, groups), least)

    def with_slack(share, slack):
        return share + share // 64 * slack + share % 64 * slack // 64 + jnp.minimum(tile_rows // 9, share // 4)

    line, even = share(end[-1]), share(all_blocks)
    together = jnp.maximum(ceil_div(jnp.sum(has_work, dtype=jnp.int32), groups), 1)
    whole = together * (longest + overhead_blocks) <= with_slack(line, jnp.where(width == 1, slack, slack // 3))
    trials = even + (with_slack(even, slack // 3) - even) * jnp.arange(EVEN_TRIALS) // (EVEN_TRIALS - 1)
    fits = jnp.sum(ceil_div(blocks, trials[:, None]), axis=1, dtype=jnp.int32) <= groups
    if batch_invariant:
        on_line = jnp.array(False)
        wanted = jnp.clip(ceil_div(blocks, INVARIANT_MIN_BLOCKS), 1, INVARIANT_MAX_SPLITS)
    else:
        on_line = ~whole & ~((together == 1) & jnp.any(fits))
        wanted = jnp.where(whole, 1, jnp.maximum(ceil_div(blocks, trials[jnp.argmax(fits)]), 1))
    chunk = jnp.maximum(ceil_div(blocks, wanted), 1)
    first_group = first_block // line
    pieces = jnp.where(on_line, (first_block + blocks - 1) // line - first_group + 1, ceil_div(blocks, chunk))
    count = jnp.where(has_work, pieces, 0)
    last_piece = jnp.cumsum(count, dtype=jnp.int32)
    slots = jnp.where(count >= 2, count * width, 0)
    first_partial = jnp.cumsum(slots, dtype=jnp.int32) - slots

    # Pieces come in the order of their groups.
    def find(piece):
        unit = jnp.minimum(jnp.searchsorted(last_piece, piece, side="right").astype(jnp.int32), tiles - 1)
        number = piece - (last_piece - count)[unit]
        begin = jnp.where(on_line, (first_group[unit] + number) * line - first_block[unit], number * chunk[unit])
        stop = jnp.minimum(begin + jnp.where(on_line, line, chunk[unit]), blocks[unit])
        begin = jnp.maximum(begin, 0)
        along = jnp.array(batch_invariant) | on_line
        group = jnp.where(along, (first_block[unit] + begin) // line, piece // jnp.where(whole, together, 1))
        return unit, number, begin, stop, group

    index = jnp.arange(capacity, dtype=jnp.int32)
    group = jnp.where(index < last_piece[-1], find(index)[-1], parts)
    group_first = jnp.searchsorted(group, jnp.arange(parts + 1), side="left").astype(jnp.int32)

    # Items: group by group, in a group tile by tile.
    used_items = last_piece[-1] * width
    group = jnp.searchsorted(group_first * width, index, side="right").astype(jnp.int32) - 1
    group = jnp.minimum(group, groups - 1)
    in_group = jnp.maximum(group_first[group + 1] - group_first[group], 1)
    place = index - group_first[group] * width
    tile = place // in_group
    unit, number, begin, stop, _ = find(group_first[group] + place % in_group)
    kv_end = jnp.where(stop >= blocks[unit], kv_len[request[unit]], stop * BLOCK_TOKENS)
    partial = jnp.where(count[unit] >= 2, first_partial[unit] + tile * count[unit] + number, -1)
    columns = [request[unit], row_tile[unit] + tile, begin * BLOCK_TOKENS, kv_end, partial]
    columns += [jnp.zeros_like(index)] * 3
    items = jnp.where((index < used_items)[:, None], jnp.stack(columns, axis=-1), 0)

    part = jnp.arange(parts + 1, dtype=jnp.int32)
    group = jnp.minimum(part // width, groups - 1)
    in_group = group_first[group + 1] - group_first[group]
    offset = group_first[group] * width + part % width * in_group
    part_offsets = jnp.where(part < groups * width, offset, used_items)

    unit = jnp.where(by_request, jnp.arange(tiles) - row_tile, jnp.arange(tiles))
    own = jnp.where(by_request & (row_tile >= width), 0, count[unit])
    partials = first_partial[unit] + jnp.where(by_request, row_tile * own, 0)
    tile_splits = jnp.stack([jnp.where(own >= 2, partials, -1), own], axis=-1)
    return items, part_offsets.astype(jnp.int32), tile_splits.astype(jnp.int32)
