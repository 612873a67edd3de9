"""What is measured: a cell is one decode call's shape, dtypes and lengths, with its bytes and FLOPs."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

LATENT, WIDTH = 512, 576

# Name -> dtypes of the queries and of the cache.
DTYPES = {
    "bf16": (jnp.bfloat16, jnp.bfloat16),
    "fp16": (jnp.float16, jnp.float16),
    "fp32": (jnp.float32, jnp.float32),
    "fp8-cache": (jnp.bfloat16, jnp.float8_e4m3fn),
    "fp8": (jnp.float8_e4m3fn, jnp.float8_e4m3fn),
}
# Relative error that is accepted, of results against float64 on the same inputs, dequantised.
TOLERANCES = {"bf16": 1e-2, "fp16": 2e-3, "fp32": 2e-5, "fp8-cache": 1e-2, "fp8": 4e-2}

LENGTHS = ("even", "normal", "one-long")
LONG = 100_000  # tokens of the one long sequence among short ones


@dataclasses.dataclass(frozen=True)
class Cell:
    """sequences, cached tokens a sequence, query heads, query tokens a sequence; and how they are held.

    lengths: "even", all of `tokens`; "normal", of mean `tokens` and half of it as standard deviation, cut off at the
    query tokens; "one-long", one of 100,000 tokens among others of `tokens`.
    """

    batch: int
    tokens: int
    heads: int
    queries: int = 1
    dtype: str = "bf16"
    lengths: str = "even"
    page_size: int = 64

    def __post_init__(self) -> None:
        for name in ("batch", "tokens", "heads", "queries", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it has to be at least 1")

    @property
    def kv_lens(self) -> np.ndarray:
        """[B] int32, the same each time."""
        lens = np.full(self.batch, self.tokens, np.int32)
        if self.lengths == "normal":
            drawn = np.random.default_rng(0).normal(self.tokens, self.tokens / 2, self.batch)
            lens = np.maximum(drawn.round(), self.queries).astype(np.int32)
        elif self.lengths == "one-long":
            lens[self.batch // 2] = LONG
        return lens

    def even_twin(self) -> Cell:
        """The even cell of the same tokens in all, to the nearest token a sequence."""
        return dataclasses.replace(self, tokens=round(int(self.kv_lens.sum()) / self.batch), lengths="even")

    @property
    def bytes(self) -> int:
        """Moved at the least: the cached tokens and the queries read once, the output written once."""
        q, cache = (jnp.dtype(dtype).itemsize for dtype in DTYPES[self.dtype])
        rows = self.batch * self.queries * self.heads
        return int(self.kv_lens.sum(dtype=np.int64)) * WIDTH * cache + rows * (WIDTH * q + LATENT * max(q, 2))

    @property
    def flops(self) -> int:
        """Of both products, every query over all tokens."""
        return 2 * int(self.kv_lens.sum(dtype=np.int64)) * self.heads * self.queries * (WIDTH + LATENT)

    @property
    def key(self) -> list[int | str]:
        """As results name it; the last entry is left out for even lengths."""
        shape = [self.batch, self.tokens, self.heads, self.queries]
        return shape if self.lengths == "even" else [*shape, self.lengths]

    def __str__(self) -> str:
        lengths = "" if self.lengths == "even" else f" {self.lengths}"
        pages = "" if self.page_size == 64 else f", pages of {self.page_size}"
        return f"{self.batch} x {self.tokens}{lengths}, {self.heads} heads x {self.queries}, {self.dtype}{pages}"


_DENSE = (
    (128, 4096, 128, 1), (128, 4096, 96, 1), (128, 4096, 24, 1), (128, 4096, 24, 4), (128, 4096, 32, 2),
    (128, 4096, 16, 1), (128, 1024, 24, 1), (16, 100000, 24, 1), (1, 131072, 24, 1), (4, 65536, 24, 2),
    (8, 4096, 24, 1), (1, 8192, 24, 1), (1, 512, 24, 1),
)  # fmt: skip
_UNEVEN = (
    Cell(128, 4096, 128, lengths="normal"),
    Cell(128, 4096, 24, lengths="normal"),
    Cell(128, 1024, 24, lengths="one-long"),
)
TABLES = {
    "dense": tuple(Cell(*shape) for shape in _DENSE),
    "uneven": tuple(cell for uneven in _UNEVEN for cell in (uneven, uneven.even_twin())),
    "small": (Cell(1, 2048, 24), Cell(4, 1024, 24)),
    "cpu": (Cell(4, 4096, 24), Cell(1, 32768, 24), Cell(4, 4096, 128)),
}


def copies(cell: Cell, working_set: float, least: int) -> int:
    """Caches that a program goes through in turn, so that no call finds its keys in a cache of the processor."""
    return max(least, math.ceil(working_set / cell.bytes))
