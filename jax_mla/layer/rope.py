"""Rotary positions of the 64 rope columns: RoFormer's rotation, and YaRN's longer contexts as DeepSeek uses them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_mla.layer.widths import ROPE


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv:2309.00071) with the two magnitudes of DeepSeek's configuration files.

    Attributes:
      factor: how many times longer the context is than in training.
      original_max_position_embeddings: the length of training.
      beta_fast, beta_slow: rotations over that length above which a frequency is kept, and below which it is divided by
        ``factor``; in between a ramp over the columns.
      mscale, mscale_all_dim: of the magnitude ``0.1 * mscale * log(factor) + 1``: rotated columns are multiplied by the
        quotient of the first and the second, the softmax scale by the square of the second (DeepSeek-V2,
        arXiv:2405.04434, section 3.1.4, and its published modelling code).
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it has to be above 0")

    def magnitude(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def slow_down(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Radians a token, [32] float64: fast ones as they are, slow ones divided by ``factor``."""

        def column(rotations: float) -> float:
            """Which pair of columns turns that often over the length of training."""
            turns = self.original_max_position_embeddings / (2 * math.pi * rotations)
            return ROPE * math.log(turns) / (2 * math.log(theta))

        # DeepSeek's bounds: whole columns, and the upper one is held to the head's width, not to the number of pairs.
        low, high = max(math.floor(column(self.beta_fast)), 0), min(math.ceil(column(self.beta_slow)), ROPE - 1)
        ramp = np.clip((np.arange(len(frequencies)) - low) / max(high - low, 1e-3), 0, 1)
        return frequencies * (1 - ramp) + frequencies / self.factor * ramp


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotation of the rope columns by position (RoFormer, arXiv:2104.09864). Hashable.

    Attributes:
      theta: base; pair i of 32 turns by ``theta ** (-i / 32)`` radians a token.
      yarn: None where the context is that of training.
      interleaved: pairs are columns (2i, 2i + 1), as in DeepSeek's checkpoints; else (i, i + 32). Rotated pairs stay in
        their columns, in queries as in the cache.
    """

    theta: float = 10000.0
    yarn: Yarn | None = None
    interleaved: bool = True

    def __post_init__(self) -> None:
        if not self.theta > 1:
            raise ValueError(f"theta is {self.theta}; it has to be above 1")

    @property
    def frequencies(self) -> np.ndarray:
        """Radians a token of each pair, [32] float64."""
        plain = self.theta ** (-np.arange(0, ROPE, 2) / ROPE)
        return plain if self.yarn is None else self.yarn.slow_down(plain, self.theta)

    @property
    def magnitude(self) -> float:
        """Of rotated columns, in queries and keys alike; 1 for every published model of the family."""
        return 1.0 if self.yarn is None else self.yarn.magnitude(self.yarn.mscale) / self.score_magnitude

    @property
    def score_magnitude(self) -> float:
        """Its square multiplies the softmax scale."""
        return 1.0 if self.yarn is None else self.yarn.magnitude(self.yarn.mscale_all_dim)

    def rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """x [.., 64] turned by its positions [..] int32 (broadcast against x's leading shape), in fp32; x's dtype."""
        angle = positions[..., None].astype(jnp.float32) * jnp.asarray(self.frequencies, jnp.float32)
        cos, sin = jnp.cos(angle) * self.magnitude, jnp.sin(angle) * self.magnitude
        wide = x.astype(jnp.float32)
        if self.interleaved:
            pairs = wide.reshape(*x.shape[:-1], ROPE // 2, 2)
            first, second = pairs[..., 0], pairs[..., 1]
        else:
            first, second = wide[..., : ROPE // 2], wide[..., ROPE // 2 :]
        turned = (first * cos - second * sin, second * cos + first * sin)
        rotated = jnp.stack(turned, -1).reshape(x.shape) if self.interleaved else jnp.concatenate(turned, -1)
        return rotated.astype(x.dtype)
