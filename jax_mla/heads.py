"""Head counts: which ones a kernel takes, how others are padded, and every size that follows from the padded count.

Kernels differ in the head counts that they take natively, and the work planner and the reducer are asked apart: a
count is native only when both have it. Where it is not, the wrapper pads. One `HeadSpecification`, made once a call,
then gives the padded heads, the shape of the work split, the scratch and the launch, so that no two of them can
disagree.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

# As in kernels/decode/plan_rule.h: pieces of a tile whose split depends on its own length alone.
INVARIANT_MAX_SPLITS = 32


@dataclasses.dataclass(frozen=True)
class HeadCounts:
    """A set of head counts (or page sizes), as inclusive (first, last, step) ranges."""

    ranges: tuple[tuple[int, int, int], ...] = ()

    def __contains__(self, count: int) -> bool:
        return any(first <= count <= last and (count - first) % step == 0 for first, last, step in self.ranges)

    def __str__(self) -> str:
        def text(first: int, last: int, step: int) -> str:
            if first == last:
                return str(first)
            return f"{first}-{last}" if step == 1 else f"{first}-{last} by {step}"

        return ", ".join(text(*r) for r in self.ranges) or "none"

    @property
    def largest(self) -> int:
        return max((last for _, last, _ in self.ranges), default=0)

    @classmethod
    def of(cls, *counts: int) -> HeadCounts:
        """Exactly these counts."""
        return cls(tuple((count, count, 1) for count in sorted(counts)))


NO_HEADS = HeadCounts()


def padded_count(num_heads: int, planner: HeadCounts, reducer: HeadCounts) -> int | None:
    """The smallest count from num_heads on that planner and reducer both take; None where there is none."""
    limit = min(planner.largest, reducer.largest)
    return next((n for n in range(num_heads, limit + 1) if n in planner and n in reducer), None)


def is_valid_count(num_heads: int) -> bool:
    """Whether jax_mla takes this count at all: 1 to 128, and multiples of 16 beyond."""
    return 1 <= num_heads <= 128 or (num_heads > 128 and num_heads % 16 == 0)


@dataclasses.dataclass(frozen=True)
class HeadSpecification:
    """Heads as the caller has them and as the kernels run them, and the sizes that follow. Static and hashable.

    num_heads: the caller's heads. padded_heads: the kernels'. max_q_len: query tokens a sequence. tile_rows:
    (query, head) rows that a piece of work handles at once. parts: even shares that the planner cuts a batch
    into. batch_invariant: a tile's splits depend on its own length alone.
    """

    num_heads: int
    padded_heads: int
    max_q_len: int
    tile_rows: int
    parts: int
    batch_invariant: bool = False

    @property
    def row_tiles(self) -> int:
        """Tiles of a sequence with max_q_len query tokens."""
        return -(-self.max_q_len * self.padded_heads // self.tile_rows)

    def max_items(self, batch: int) -> int:
        """Work items a plan for `batch` sequences may need; as max_items in kernels/decode/plan_rule.h."""
        tiles = batch * self.row_tiles
        return tiles * INVARIANT_MAX_SPLITS if self.batch_invariant else tiles + self.parts

    def max_partials(self, batch: int) -> int:
        """Partial results that split tiles may need: a cut splits one tile in two, so 2 * parts hold them all."""
        return batch * self.row_tiles * INVARIANT_MAX_SPLITS if self.batch_invariant else 2 * self.parts

    def index_splits(self, tokens: int, topk: int, units: int | None, min_indices: int) -> int:
        """Pieces that mla_sparse_decode cuts the chosen slots of each query token into, for `units` pieces of work."""
        tiles = tokens * self.row_tiles
        return max(1, min((units or self.parts) // tiles, -(-topk // min_indices)))

    def pad(self, x: jax.Array) -> jax.Array:
        """[T, num_heads, width] -> [T, padded_heads, width]: real heads again, so that no row can be NaN or slow.

        A count that divides the padded one repeats each head; any other tiles the heads and cuts the surplus.
        """
        if self.padded_heads == self.num_heads:
            return x
        if self.padded_heads % self.num_heads == 0:
            return jnp.repeat(x, self.padded_heads // self.num_heads, axis=1)
        return jnp.tile(x, (1, -(-self.padded_heads // self.num_heads), 1))[:, : self.padded_heads]

    def unpad(self, x: jax.Array) -> jax.Array:
        """[T, padded_heads, ...] -> [T, num_heads, ...], the inverse of pad."""
        if self.padded_heads == self.num_heads:
            return x
        if self.padded_heads % self.num_heads == 0:
            return x[:, :: self.padded_heads // self.num_heads]
        return x[:, : self.num_heads]
