"""The AMD kernels as rows of the tables (docs/amd_tables.md): small problems of so many tiles, with zeros for data.

What data alone brings about is not in the numbers: rescaling a row whose maximum grows, hiding values that are not
finite, replacing codes of fp8_ds_mla that gfx942's type lacks. It is seldom executed.
"""

import numpy as np

from .calls import element_bytes, load, numbers, zeros
from .launch import Execution
from .memory import Memory
from .params import DType, struct
from .prefill import prefill_entries
from .tables import Entry


def decode(architecture: str, name: str, rows: int, query: DType, cache: DType, ds_mla: bool = False) -> Entry:
    """mla_decode: one request of one query and `rows` heads; a tile is 64 tokens in one page."""
    program = load(f"decode/gfx9/{name}.hip", architecture)
    token_bytes = 656 if ds_mla else 576 * element_bytes(cache)
    kernel = f"mla_decode_{name}_{rows}"

    def run(tiles: int) -> Execution:
        memory, p = Memory(), struct("DecodeParams")()
        p.q_latent = zeros(memory, rows, 576, element_bytes(query))
        p.q_rope = p.q_latent + 512 * element_bytes(query)
        p.q_latent_stride = p.q_rope_stride = 576
        p.cache = zeros(memory, tiles, 64, token_bytes)
        p.page_table = numbers(memory, *range(tiles))
        p.kv_lens = numbers(memory, 64 * tiles)
        p.plan.items = numbers(memory, 0, 0, 0, 64 * tiles, -1, 0, 0, 0)
        p.plan.part_offsets = numbers(memory, 0, 1)
        p.plan.tile_splits = numbers(memory, -1, 1)
        p.plan.parts = p.plan.max_items = p.plan.max_partials = p.plan.row_tiles = 1
        p.plan.tile_rows = rows
        p.out = zeros(memory, rows, 512, 4)
        p.lse = zeros(memory, rows, 4)
        p.partial_out, p.partial_lse = zeros(memory, rows, 512, 4), zeros(memory, rows, 4)
        p.pages = p.max_pages = tiles
        p.layers = p.batch = p.tokens = p.max_q_len = p.k_scales = 1
        p.page_size, p.heads, p.scale, p.causal, p.ds_mla = 64, rows, 0.07, True, ds_mla
        p.q_dtype, p.cache_dtype = query, cache
        p.out_dtype = query if query in (DType.BF16, DType.F16) else DType.BF16
        return program.launch(kernel, (1, 1, 1), (256, 1, 1), bytes(p), memory=memory)

    return Entry(program, kernel, f"64 tokens, {rows} rows", 64 * token_bytes, 256, run)


def sparse_decode(architecture: str, name: str, rows: int, query: DType, cache: DType, ds_mla: bool = False) -> Entry:
    """mla_sparse_decode: one query of `rows` heads, and indices of 64 tokens a tile."""
    program = load(f"sparse/gfx9/{name}.hip", architecture)
    token_bytes = 656 if ds_mla else 576 * element_bytes(cache)
    kernel = f"mla_sparse_decode_{name}_{rows}"

    def run(tiles: int) -> Execution:
        memory, p = Memory(), struct("SparseDecodeParams")()
        p.q_latent = zeros(memory, rows, 576, element_bytes(query))
        p.q_rope = p.q_latent + 512 * element_bytes(query)
        p.q_latent_stride = p.q_rope_stride = 576
        p.cache = zeros(memory, tiles, 64, token_bytes)
        p.indices = numbers(memory, *range(64 * tiles))
        p.out, p.lse = zeros(memory, rows, 512, 2), zeros(memory, rows, 4)
        p.slots = p.topk = 64 * tiles
        p.layers = p.tokens = p.splits = p.k_scales = 1
        p.heads = p.tile_rows = rows
        p.scale, p.ds_mla, p.q_dtype, p.cache_dtype = 0.07, ds_mla, query, cache
        p.out_dtype = query if query in (DType.BF16, DType.F16) else DType.BF16
        return program.launch(kernel, (1, 1, 1), (256, 1, 1), bytes(p), memory=memory)

    return Entry(program, kernel, f"64 tokens, {rows} rows", 64 * (token_bytes + 4), 256, run)


# Kernels that only move data: a tile is what one workgroup does, and `tiles` is the grid, but for the reduction.


def reduction(architecture: str) -> Entry:
    """The reduction of mla_decode: 16 rows from 4 partial results each, in a small grid that goes round."""
    program, partials = load("decode/gfx9/reduce.hip", architecture), 4

    def run(tiles: int) -> Execution:
        memory, p = Memory(), struct("DecodeParams")()
        p.kv_lens = numbers(memory, *[4096] * tiles)
        p.plan.tile_splits = numbers(memory, *(x for i in range(tiles) for x in (partials * i, partials)))
        p.plan.parts = p.plan.max_items = p.plan.max_partials = partials * tiles
        p.plan.row_tiles, p.plan.tile_rows = 1, 16
        p.partial_out = zeros(memory, partials * tiles, 16, 512, dtype=np.float32)
        p.partial_lse = zeros(memory, partials * tiles, 16, dtype=np.float32)
        p.out, p.lse = zeros(memory, tiles, 16, 512, 2), zeros(memory, tiles, 16, 4)
        p.batch = p.tokens = tiles
        p.heads, p.max_q_len, p.layers, p.k_scales, p.page_size = 16, 1, 1, 1, 64
        p.q_dtype = p.cache_dtype = p.out_dtype = DType.BF16
        slices = 16 * tiles * 8
        arguments = bytes(p) + slices.to_bytes(4, "little")
        return program.launch("mla_reduce_bf16", (15, 1, 1), (256, 1, 1), arguments, memory=memory)

    tile_bytes = 16 * (partials * (512 * 4 + 4) + 512 * 2 + 4)
    return Entry(program, "mla_reduce_bf16", "16 rows, 4 partials", tile_bytes, 256, run)


def gather(architecture: str, name: str, token_bytes: int, cache: DType, ds_mla: bool = False) -> Entry:
    """gather_context of whole pages to bf16: 16 tokens."""
    program, kernel = load("context/gfx9/gather.hip", architecture), f"mla_gather_context_{name}_bf16"

    def run(tiles: int) -> Execution:
        memory, p, rows = Memory(), struct("GatherContextParams")(), 16 * tiles
        pages = -(-rows // 64)
        p.cache = zeros(memory, pages, 64, token_bytes)
        p.page_table, p.starts = numbers(memory, *range(pages)), numbers(memory, 0)
        p.cu_kv_lens = numbers(memory, 0, rows)
        p.latent, p.rope = zeros(memory, rows, 512, 2), zeros(memory, rows, 64, 2)
        p.pages = p.max_pages = pages
        p.rows, p.layers, p.page_size, p.batch, p.k_scales, p.ds_mla = rows, 1, 64, 1, 1, ds_mla
        p.cache_dtype, p.output_dtype = cache, DType.BF16
        return program.launch(kernel, (tiles, 1, 1), (128, 1, 1), bytes(p), memory=memory)

    return Entry(program, kernel, "16 tokens", 16 * (token_bytes + 576 * 2), 128, run)


def update_cache(architecture: str, name: str, cache: DType) -> Entry:
    """update_cache of bf16: 4 tokens."""
    program, kernel = load("cache/gfx9/update.hip", architecture), f"mla_update_cache_bf16_{name}"

    def run(tiles: int) -> Execution:
        memory, p, tokens = Memory(), struct("UpdateCacheParams")(), 4 * tiles
        p.cache = zeros(memory, 1, 64, 576 * element_bytes(cache))
        p.kv_c, p.k_pe = zeros(memory, tokens, 512, 2), zeros(memory, tokens, 64, 2)
        p.slot_mapping = numbers(memory, *range(tokens))
        p.pages, p.layers, p.page_size, p.tokens, p.k_scales = 1, 1, 64, tokens, 1
        p.input_dtype, p.cache_dtype = DType.BF16, cache
        return program.launch(kernel, (tiles, 1, 1), (256, 1, 1), bytes(p), memory=memory)

    return Entry(program, kernel, "4 tokens", 4 * 576 * (2 + element_bytes(cache)), 256, run)


def merge_states(architecture: str) -> Entry:
    """merge_states in fp32 at 128 columns: 8 rows."""
    program = load("merge/gfx9/merge.hip", architecture)

    def run(tiles: int) -> Execution:
        memory, p, rows = Memory(), struct("MergeStatesParams")(), 8 * tiles
        p.out_a, p.out_b, p.out = (zeros(memory, rows, 128, dtype=np.float32) for _ in range(3))
        p.lse_a, p.lse_b, p.lse = (zeros(memory, rows, dtype=np.float32) for _ in range(3))
        p.rows, p.width, p.dtype = rows, 128, DType.F32
        return program.launch("mla_merge_states_f32", (tiles, 1, 1), (32, 8, 1), bytes(p), memory=memory)

    return Entry(program, "mla_merge_states_f32", "8 rows of 128", 8 * 3 * (128 * 4 + 4), 256, run)


def pack_kv(architecture: str, name: str, output: DType) -> Entry:
    """pack_kv of bf16 with 32 heads: keys and values of one token."""
    program, kernel = load("pack/gfx9/pack.hip", architecture), f"mla_pack_kv_bf16_bf16_{name}"

    def run(tiles: int) -> Execution:
        memory, p = Memory(), struct("PackKvParams")()
        p.kv_up, p.k_pe = zeros(memory, tiles, 32, 256, 2), zeros(memory, tiles, 64, 2)
        p.k, p.v = (zeros(memory, tiles, 32, width, element_bytes(output)) for width in (192, 128))
        p.k_pe_stride, p.tokens, p.heads = 64, tiles, 32
        p.input_dtype = p.k_pe_dtype = DType.BF16
        p.output_dtype = output
        return program.launch(kernel, (tiles, 1, 1), (256, 1, 1), bytes(p), memory=memory)

    tile_bytes = 32 * (256 * 2 + (192 + 128) * element_bytes(output)) + 64 * 2
    return Entry(program, kernel, "1 token, 32 heads", tile_bytes, 256, run)


def entries() -> list[Entry]:
    """Every row of the page."""
    rows = prefill_entries()
    for architecture, fp8, fp8_name in (("gfx942", DType.E4M3FNUZ, "e4m3fnuz"), ("gfx950", DType.E4M3FN, "e4m3fn")):
        for make in (decode, sparse_decode):
            for tile_rows in (32, 64):
                rows.append(make(architecture, "bf16", tile_rows, DType.BF16, DType.BF16))
                rows.append(make(architecture, "f16", tile_rows, DType.F16, DType.F16))
                rows.append(make(architecture, "bf16_fp8", tile_rows, DType.BF16, fp8))
                rows.append(make(architecture, "f16_fp8", tile_rows, DType.F16, fp8))
                rows.append(make(architecture, "fp8", tile_rows, fp8, fp8))
                rows.append(make(architecture, "bf16_ds_mla", tile_rows, DType.BF16, DType.E4M3FN, ds_mla=True))
        rows.append(reduction(architecture))
        rows.append(gather(architecture, "bf16", 576 * 2, DType.BF16))
        rows.append(gather(architecture, fp8_name, 576, fp8))
        rows.append(gather(architecture, "ds_mla", 656, DType.E4M3FN, ds_mla=True))
        rows.append(update_cache(architecture, "bf16", DType.BF16))
        rows.append(update_cache(architecture, fp8_name, fp8))
        rows.append(merge_states(architecture))
        rows.append(pack_kv(architecture, "bf16", DType.BF16))
        rows.append(pack_kv(architecture, fp8_name, fp8))
    return rows
