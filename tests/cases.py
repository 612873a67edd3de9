"""One table of shapes for decode: what the oracle, every implementation and the benchmark run on.

Inputs are random; pages are scattered over the cache; every slot that no token owns holds NaN, pages no request owns
too, and the padding of the page table points at them, at -1 or past the end.
"""

import dataclasses

import ml_dtypes
import numpy as np

LATENT, ROPE, WIDTH = 512, 64, 576
DS_MLA = "fp8_ds_mla"
SCALE = 192**-0.5

# Relative error of out, by the coarsest rounding on the way.
TOLERANCES = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2, "float8_e4m3fn": 4e-2, "float8_e4m3fnuz": 4e-2}


def dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    """A decode batch. `q_lens` is an int (the same for all sequences) or one count a sequence (ragged)."""

    name: str
    kv_lens: tuple[int, ...]
    heads: int = 24
    q_lens: int | tuple[int, ...] = 1
    page_size: int = 64
    q_dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    causal: bool = True
    layers: int | None = None
    layer: int = 0
    scattered: bool = True
    pair: bool = False  # queries as (latent, rope)
    unowned_queries: int = 0  # ragged: query tokens past the last request's
    padding_pages: int = 3  # table columns that no request uses
    seed: int = 0

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.q_dtype]

    @property
    def ragged(self) -> bool:
        return not isinstance(self.q_lens, int)


@dataclasses.dataclass
class DecodeInputs:
    """Positional arguments of mla_decode, its array keywords (`arrays`) and its static ones (`static`)."""

    q: np.ndarray | tuple[np.ndarray, np.ndarray]
    cache: np.ndarray
    page_table: np.ndarray
    kv_lens: np.ndarray
    arrays: dict[str, np.ndarray]
    static: dict[str, object]

    @property
    def args(self) -> tuple:
        return self.q, self.cache, self.page_table, self.kv_lens


def encode(rows: np.ndarray, cache_dtype: str) -> np.ndarray:
    """float rows [..., 576] as a cache stores them: rounded, or packed into the 656 bytes of fp8_ds_mla."""
    if cache_dtype != DS_MLA:
        return rows.astype(np.float32).astype(dtype(cache_dtype))
    groups = rows[..., :LATENT].astype(np.float32).reshape(*rows.shape[:-1], 4, 128)
    scales = np.maximum(np.abs(groups).max(axis=-1), 1e-4).astype(np.float32) / np.float32(448)
    values = (groups / scales[..., None]).astype(ml_dtypes.float8_e4m3fn).reshape(*rows.shape[:-1], LATENT)
    rope = np.ascontiguousarray(rows[..., LATENT:].astype(ml_dtypes.bfloat16))
    return np.concatenate([values.view(np.uint8), scales.view(np.uint8), rope.view(np.uint8)], axis=-1)


def poisoned_cache(shape: tuple[int, ...], cache_dtype: str) -> np.ndarray:
    """[..., width] full of NaN."""
    if cache_dtype == DS_MLA:
        return np.full((*shape, 656), 0xFF, np.uint8)  # NaN as e4m3, as fp32 and as bf16
    return np.full((*shape, WIDTH), np.nan, np.float32).astype(dtype(cache_dtype))


def make_cache(
    rng: np.random.Generator,
    lengths: tuple[int, ...],
    *,
    page_size: int,
    cache_dtype: str,
    layers: int | None = None,
    scattered: bool = True,
    padding_pages: int = 3,
) -> tuple[np.ndarray, np.ndarray]:
    """A cache that holds `lengths[b]` random tokens of each request and NaN elsewhere, and its page table."""
    used = [-(-max(n, 0) // page_size) for n in lengths]
    pages = sum(used) + 3
    ids = rng.permutation(pages) if scattered else np.arange(pages)
    cache = poisoned_cache((layers or 1, pages, page_size), cache_dtype)
    poison = ids[sum(used) :]
    padding = np.array([poison[0], -1, pages, poison[1], np.iinfo(np.int32).max, np.iinfo(np.int32).min])
    table = np.resize(padding, (len(lengths), max(used, default=0) + padding_pages)).astype(np.int32)
    start = 0
    for b, (n, count) in enumerate(zip(lengths, used, strict=True)):
        own = ids[start : start + count]
        start += count
        table[b, :count] = own
        for j in range(count):
            tokens = min(n - j * page_size, page_size)
            rows = rng.standard_normal((layers or 1, tokens, WIDTH), np.float32)
            cache[:, own[j], :tokens] = encode(rows, cache_dtype)
    return (cache if layers else cache[0]), table


def split(q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Queries [..., 576] as the pair (latent, rope)."""
    return np.ascontiguousarray(q[..., :LATENT]), np.ascontiguousarray(q[..., LATENT:])


def make(case: DecodeCase) -> DecodeInputs:
    """Random inputs of a case, the same ones each time."""
    rng = np.random.default_rng(case.seed)
    cache, table = make_cache(
        rng,
        case.kv_lens,
        page_size=case.page_size,
        cache_dtype=case.cache_dtype,
        layers=case.layers,
        scattered=case.scattered,
        padding_pages=case.padding_pages,
    )
    batch = len(case.kv_lens)
    arrays, static = {}, {"scale": SCALE, "causal": case.causal}
    if case.ragged:
        arrays["cu_q_lens"] = np.concatenate([[0], np.cumsum(case.q_lens)]).astype(np.int32)
        static["max_q_len"] = max(case.q_lens)
        leading = (sum(case.q_lens) + case.unowned_queries,)
    else:
        leading = (batch, case.q_lens)
    if case.layers:
        arrays["layer"] = np.int32(case.layer)
    if "float8" in case.cache_dtype:
        shape = (case.layers,) if case.layers else ()
        arrays["k_scale"] = np.asarray(rng.uniform(0.5, 1.5, shape), np.float32)
    if "float8" in case.q_dtype:
        arrays["q_scale"] = np.float32(rng.uniform(0.5, 1.5))
    q = rng.standard_normal((*leading, case.heads, WIDTH), np.float32).astype(dtype(case.q_dtype))
    if case.pair:
        q = split(q)
    return DecodeInputs(q, cache, table, np.asarray(case.kv_lens, np.int32), arrays, static)


DECODE_CASES = (
    DecodeCase("kimi_k3_on_4", (1000, 300, 65, 64, 63, 1), heads=24),
    DecodeCase("kimi_k3_on_1", (200, 130), heads=96),
    DecodeCase("kimi_k3_on_8", (500, 20), heads=12),
    DecodeCase("deepseek_v3", (190, 3), heads=128),
    DecodeCase("one_head", (700,), heads=1),
    DecodeCase("more_than_128_heads", (100, 5), heads=144),
    DecodeCase("long_and_short", (5000, 1, 1, 1, 70), heads=6),
    DecodeCase("empty_requests", (100, 0, -5, 33, 0), heads=17),
    DecodeCase("float16", (300, 77), q_dtype="float16", cache_dtype="float16"),
    DecodeCase("float32", (300, 77), q_dtype="float32", cache_dtype="float32"),
    DecodeCase("fp8_cache", (300, 77), cache_dtype="float8_e4m3fn"),
    DecodeCase("fp8_cache_float16_queries", (130, 7), q_dtype="float16", cache_dtype="float8_e4m3fn", heads=31),
    DecodeCase("fp8_short", (1, 2, 3), cache_dtype="float8_e4m3fn"),
    DecodeCase("fp8_stacked", (90, 100), cache_dtype="float8_e4m3fn", layers=3, layer=2),
    DecodeCase("fp8_gfx942", (130, 7), cache_dtype="float8_e4m3fnuz"),
    DecodeCase("fp8_queries", (130, 7), q_dtype="float8_e4m3fn", cache_dtype="float8_e4m3fn"),
    DecodeCase("ds_mla", (130, 7), cache_dtype=DS_MLA),
    DecodeCase("ds_mla_stacked", (130, 7), cache_dtype=DS_MLA, layers=2, layer=1),
    DecodeCase("ds_mla_float16_queries", (130, 7), q_dtype="float16", cache_dtype=DS_MLA),
    DecodeCase("ds_mla_speculative", (150, 64, 2), cache_dtype=DS_MLA, q_lens=3, heads=31),
    DecodeCase("ds_mla_page_size_16", (333, 16, 17), cache_dtype=DS_MLA, page_size=16),
    DecodeCase("ds_mla_page_size_100", (333, 100, 101), cache_dtype=DS_MLA, page_size=100, heads=31),
    DecodeCase("ds_mla_ragged", (150, 9, 0, 300), cache_dtype=DS_MLA, q_lens=(3, 1, 0, 4), unowned_queries=2),
    DecodeCase("ds_mla_ragged_pages", (150, 64, 9), cache_dtype=DS_MLA, q_lens=(2, 5, 1), page_size=16, heads=31),
    DecodeCase("page_size_1", (37, 5), page_size=1),
    DecodeCase("page_size_4_of_13_tokens", (13,), page_size=4),
    DecodeCase("page_size_16", (333, 16, 17), page_size=16),
    DecodeCase("page_size_100", (333, 100, 101), page_size=100),
    DecodeCase("page_size_128", (300, 128), page_size=128),
    DecodeCase("stacked", (150, 40), layers=4, layer=3),
    DecodeCase("speculative", (150, 64, 2, 700), q_lens=3),
    DecodeCase("draft_model", (150, 64, 2, 700), q_lens=3, causal=False),
    DecodeCase("more_queries_than_keys", (2, 0, 5), q_lens=4),
    DecodeCase("ragged", (150, 64, 9, 0, 1000), q_lens=(3, 1, 0, 2, 4), unowned_queries=3),
    DecodeCase("ragged_short_last_tile", (150, 64, 9), q_lens=(2, 5, 1), heads=31),
    DecodeCase("ragged_draft_model", (150, 64, 9), q_lens=(2, 5, 1), causal=False, heads=12),
    DecodeCase("ragged_fp8_stacked", (150, 64), q_lens=(1, 4), cache_dtype="float8_e4m3fn", layers=2, layer=1),
    DecodeCase("pair", (150, 64), pair=True),
    DecodeCase("pair_ragged", (150, 64), pair=True, q_lens=(2, 3)),
)
BY_NAME = {case.name: case for case in DECODE_CASES}
