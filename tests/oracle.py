"""The truth of the tests: loops in float64 NumPy, one request and one query at a time, independent of the library.

Keys that may not be read are never touched here, so NaN in them needs no care.
"""

import itertools

import ml_dtypes
import numpy as np

LATENT, ROPE, WIDTH, NOPE = 512, 64, 576, 128
BLOCK_TOKENS = 64
DS_MLA_BYTES = 656


def as_float(x):
    """float64 of an array of any float dtype, or of the (latent, rope) pair as one array."""
    if isinstance(x, tuple):
        return np.concatenate([as_float(part) for part in x], axis=-1)
    return np.asarray(x).astype(np.float64)


def dequantise(cache, k_scale=None):
    """[layers, pages, P, 576] in float64 from a cache of any layout; `k_scale` is a scalar or [layers]."""
    cache = np.asarray(cache)
    cache = cache if cache.ndim == 4 else cache[None]
    if cache.dtype == np.uint8:
        values = cache[..., :LATENT].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        scales = np.ascontiguousarray(cache[..., LATENT : LATENT + 16]).view(np.float32).astype(np.float64)
        rope = np.ascontiguousarray(cache[..., LATENT + 16 :]).view(ml_dtypes.bfloat16).astype(np.float64)
        return np.concatenate([values * np.repeat(scales, 128, axis=-1), rope], axis=-1)
    scale = 1.0 if k_scale is None else np.asarray(k_scale, np.float64)
    return cache.astype(np.float64) * np.reshape(scale, (-1, 1, 1, 1))


def attend(q, keys, values, scale, sink=None):
    """q [H, d] over keys [N, d] or [N, H, d], values likewise -> out [H, dv], lse [H]."""
    keys = keys if keys.ndim == 3 else np.repeat(keys[:, None], len(q), axis=1)
    values = values if values.ndim == 3 else np.repeat(values[:, None], len(q), axis=1)
    if len(keys) == 0:
        return np.zeros((len(q), values.shape[-1])), np.full(len(q), -np.inf)
    scores = np.einsum("hd,nhd->hn", q, keys) * scale
    highest = scores.max(axis=1)
    weights = np.exp(scores - highest[:, None])
    total = weights.sum(axis=1)
    out = np.einsum("hn,nhd->hd", weights / total[:, None], values)
    lse = highest + np.log(total)
    if sink is not None:
        out = out * (1 / (1 + np.exp(np.asarray(sink, np.float64) - lse)))[:, None]
    return out, lse


def request_rows(cache, page_table_row, length):
    """The readable rows of a request's first `length` tokens, and their positions."""
    pages, page_size, _ = cache.shape
    positions = [
        j for j in range(min(length, len(page_table_row) * page_size)) if 0 <= page_table_row[j // page_size] < pages
    ]
    rows = [cache[page_table_row[j // page_size], j % page_size] for j in positions]
    return np.array(rows).reshape(-1, cache.shape[-1]), np.array(positions, int)


def decode(
    q,
    cache,
    page_table,
    kv_lens,
    *,
    scale,
    causal=True,
    cu_q_lens=None,
    max_q_len=None,
    layer=None,
    q_scale=None,
    k_scale=None,
):
    """out, lse in float64, for queries [B, Q, H, 576] or ragged [T, H, 576], or a pair of them."""
    q = as_float(q) * (1.0 if q_scale is None else float(q_scale))
    cache = dequantise(cache, k_scale)
    layer = 0 if layer is None else int(layer)
    leading = q.shape[:-1]
    if cu_q_lens is None:
        batch, q_len = q.shape[:2]
        cu_q_lens, max_q_len = np.arange(batch + 1) * q_len, q_len
        q = q.reshape(-1, *q.shape[2:])
    out, lse = np.zeros((*q.shape[:2], LATENT)), np.full(q.shape[:2], -np.inf)
    if 0 <= layer < len(cache):
        for b, length in enumerate(max(int(n), 0) for n in kv_lens):
            rows, positions = request_rows(cache[layer], np.asarray(page_table)[b], length)
            count = int(cu_q_lens[b + 1]) - int(cu_q_lens[b])
            for i in range(min(count, max_q_len)):
                seen = rows[positions <= length - count + i] if causal else rows
                t = int(cu_q_lens[b]) + i
                out[t], lse[t] = attend(q[t], seen, seen[:, :LATENT], scale)
    return out.reshape(*leading, LATENT), lse.reshape(leading)


def sparse_decode(q, cache, indices, *, scale, topk_lens=None, sink=None, layer=None, q_scale=None, k_scale=None):
    q = as_float(q) * (1.0 if q_scale is None else float(q_scale))
    cache = dequantise(cache, k_scale)
    leading = q.shape[:-1]
    q, indices = q.reshape(-1, *q.shape[-2:]), np.asarray(indices).reshape(-1, np.shape(indices)[-1])
    lens = np.full(len(q), indices.shape[1]) if topk_lens is None else np.asarray(topk_lens).reshape(-1)
    out, lse = np.zeros((*q.shape[:2], LATENT)), np.full(q.shape[:2], -np.inf)
    layer = 0 if layer is None else int(layer)
    if 0 <= layer < len(cache):
        rows = cache[layer].reshape(-1, WIDTH)
        for t in range(len(q)):
            chosen = [s for s in indices[t, : max(lens[t], 0)] if 0 <= s < len(rows)]
            out[t], lse[t] = attend(q[t], rows[chosen], rows[chosen][:, :LATENT], scale, sink)
    return out.reshape(*leading, LATENT), lse.reshape(leading)


def prefill(q, k, v, cu_q_lens, cu_kv_lens, *, causal, scale):
    """q [T, H, 192], k [S, H, 192], v [S, H, 128], any float dtype -> out, lse in float64."""
    q, k, v = as_float(q), as_float(k), as_float(v)
    out, lse = np.zeros((*q.shape[:2], v.shape[-1])), np.full(q.shape[:2], -np.inf)
    for b in range(len(cu_q_lens) - 1):
        queries = range(int(cu_q_lens[b]), int(cu_q_lens[b + 1]))
        start, stop = int(cu_kv_lens[b]), int(cu_kv_lens[b + 1])
        for i, t in enumerate(queries):
            seen = max(start, stop - len(queries) + i + 1) if causal else stop
            out[t], lse[t] = attend(q[t], k[start:seen], v[start:seen], scale)
    return out, lse


def context(q, cache, page_table, context_lens, w_kv_b, *, cu_q_lens, scale, layer=None, k_scale=None, dtype=None):
    """All of the context at once. Given a `dtype`, the latent and the up-projection are rounded to it, as keys are."""

    def rounded(x):
        return x if dtype is None else x.astype(dtype).astype(np.float64)

    q, w_kv_b = as_float(q), as_float(w_kv_b)
    cache = dequantise(cache, k_scale)
    heads = q.shape[1]
    out, lse = np.zeros((*q.shape[:2], NOPE)), np.full(q.shape[:2], -np.inf)
    layer = 0 if layer is None else int(layer)
    if not 0 <= layer < len(cache):
        return out, lse
    for b, length in enumerate(context_lens):
        rows = rounded(request_rows(cache[layer], np.asarray(page_table)[b], int(length))[0])
        kv_up = rounded(np.einsum("nl,lhv->nhv", rows[:, :LATENT], w_kv_b))
        keys = np.concatenate([kv_up[..., :NOPE], np.repeat(rows[:, None, LATENT:], heads, axis=1)], axis=-1)
        for t in range(int(cu_q_lens[b]), int(cu_q_lens[b + 1])):
            out[t], lse[t] = attend(q[t], keys, kv_up[..., NOPE:], scale)
    return out, lse


def plan(kv_lens, cu_q_lens, *, heads, max_q_len, tile_rows, parts, batch_invariant, **tuning):
    """The work split of decode, piece by piece: items, part offsets, and (first partial, count) of each tile."""
    row_tiles = -(-max_q_len * heads // tile_rows)
    requests = []  # (tokens, row tiles in use)
    for request, kv_len in enumerate(int(n) for n in kv_lens):
        count = max_q_len
        if cu_q_lens is not None:
            count = min(max(int(cu_q_lens[request + 1]) - int(cu_q_lens[request]), 0), max_q_len)
        used = -(-count * heads // tile_rows)
        requests.append((kv_len, used) if kv_len > 0 and used else (0, 0))

    # Requests whose tiles are alike are cut as one, and their tiles run side by side in a group of parts.
    used = {tiles for _, tiles in requests if tiles}
    width = used.pop() if len(used) == 1 else None
    if width is None or (width > 1 and (width > parts or parts % width * 16 > parts)):
        width = 1
        units = [
            (b, [t], tokens if t < tiles else 0) for b, (tokens, tiles) in enumerate(requests) for t in range(row_tiles)
        ]
    else:
        units = [(b, list(range(tiles)), tokens) for b, (tokens, tiles) in enumerate(requests)]
    groups = parts // width
    units = [(request, tiles, tokens, -(-tokens // BLOCK_TOKENS)) for request, tiles, tokens in units if tokens]
    pieces = _pieces([blocks for *_, blocks in units], groups, width, tile_rows, batch_invariant, **tuning)

    part_items = [[] for _ in range(parts)]
    splits = {(b, t): (-1, 0) for b in range(len(requests)) for t in range(row_tiles)}
    partials = 0
    for (request, tiles, tokens, _), own in zip(units, pieces, strict=True):
        for place, tile in enumerate(tiles):
            split = len(own) > 1
            splits[request, tile] = (partials if split else -1, len(own))
            for group, begin, end in own:
                span = begin * BLOCK_TOKENS, min(end * BLOCK_TOKENS, tokens)
                part_items[group * width + place].append((request, tile, *span, partials if split else -1, 0, 0, 0))
                partials += split
    items = [item for own in part_items for item in own]
    offsets = [sum(map(len, part_items[:part])) for part in range(parts + 1)]
    return items, offsets, list(splits.values())


def _pieces(lengths, groups, width, tile_rows, batch_invariant, *, overhead_blocks, min_part_blocks, few_pieces, slack):
    """(group, first block, end block) of each piece of units of these lengths, in blocks, none of which is 0."""

    def even(length, count):
        chunk = -(-length // count)
        return [(begin, min(begin + chunk, length)) for begin in range(0, length, chunk)]

    least = max(min_part_blocks, 1)
    if max(lengths, default=0) > least and sum(lengths) * width <= few_pieces:
        least = 1

    def share(total):
        return max(-(-total // groups), least)

    def with_slack(blocks, slack):
        return blocks + blocks * slack // 64 + min(tile_rows // 9, blocks // 4)

    line = share(sum(lengths) + len(lengths) * overhead_blocks)
    starts = [sum(lengths[:i]) + (i + 1) * overhead_blocks for i in range(len(lengths))]  # of the blocks on the line
    if batch_invariant:
        own = [even(n, min(32, -(-n // 32))) for n in lengths]
        return [
            [((start + begin) // line, begin, end) for begin, end in x] for x, start in zip(own, starts, strict=True)
        ]

    together = max(-(-len(lengths) // groups), 1)
    if together * (max(lengths, default=0) + overhead_blocks) <= with_slack(line, slack if width == 1 else slack // 3):
        return [[(i // together, 0, n)] for i, n in enumerate(lengths)]

    if together == 1:
        least = share(sum(lengths))
        for trial in range(8):
            capacity = least + (with_slack(least, slack // 3) - least) * trial // 7
            own = [even(n, -(-n // capacity)) for n in lengths]
            if sum(-(-n // capacity) for n in lengths) <= groups:
                group = iter(range(groups))
                return [[(next(group), *piece) for piece in x] for x in own]

    own = []
    for start, n in zip(starts, lengths, strict=True):
        cuts = [0, *(cut - start for cut in range(-(-(start + 1) // line) * line, start + n, line)), n]
        own.append([((start + begin) // line, begin, end) for begin, end in itertools.pairwise(cuts)])
    return own


def relative_errors(got, want):
    """Of the norm of the difference over the norm: of the whole, and of the worst row that is not zero."""
    got, want = as_float(got), as_float(want)
    difference, size = np.linalg.norm(got - want, axis=-1), np.linalg.norm(want, axis=-1)
    whole = np.linalg.norm(difference) / max(np.linalg.norm(size), 1e-30)
    return whole, np.max(difference / np.where(size > 0, size, 1), initial=0.0)


def assert_attention(got, want, tolerance, lse_tolerance=1e-3):
    """(out, lse) against the truth: empty rows exactly, the rest within `tolerance`, each row within twice."""
    (out, lse), (want_out, want_lse) = got, want
    out, lse = as_float(out), as_float(lse)
    assert out.shape == want_out.shape and lse.shape == want_lse.shape
    empty = want_lse == -np.inf
    np.testing.assert_array_equal(lse == -np.inf, empty)
    np.testing.assert_array_equal(out[empty], 0.0)
    assert np.all(np.isfinite(out)), "NaN or inf in the output"
    whole, worst = relative_errors(out, want_out)
    assert whole <= tolerance and worst <= 2 * tolerance, f"relative error {whole:.2e}, worst row {worst:.2e}"
    np.testing.assert_allclose(lse[~empty], want_lse[~empty], atol=lse_tolerance, rtol=0)
