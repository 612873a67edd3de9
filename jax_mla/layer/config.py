"""Geometry of one MLA block."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from jax_mla.layer import config_json
from jax_mla.layer.rope import Rope
from jax_mla.layer.widths import HEAD_DIM, LATENT, NOPE, ROPE, VALUE

# The published weights that are cut by heads, and the axis on which the heads lie; a device has the others whole.
HEAD_AXIS = {"q_proj": 0, "q_b_proj": 0, "kv_b_proj": 0, "g_proj": 0, "o_proj": 1}


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """Geometry of one MLA block; the defaults are Kimi-K3's on one device. Hashable: a static argument of ``jax.jit``.

    Attributes:
      hidden_size: M.
      num_heads: query heads of the model, over all devices.
      devices: tensor-parallel devices; each holds ``num_heads // devices`` heads.
      q_lora_rank: C, width of the query latent; None where queries are projected at once (``q_proj``).
      rms_norm_eps: of both latent norms. The published modelling code of all models leaves it at 1e-6, whatever
        ``rms_norm_eps`` their configuration files give the other norms.
      rope: rotation of the rope columns; None where they are used as they come.
      gate: a sigmoid gate on the attention's output (``g_proj``).
    """

    hidden_size: int = 7168
    num_heads: int = 96
    devices: int = 1
    q_lora_rank: int | None = 1536
    rms_norm_eps: float = 1e-6
    rope: Rope | None = None
    gate: bool = True

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "devices", "q_lora_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it has to be at least 1")
        if self.num_heads % self.devices:
            raise ValueError(f"num_heads is {self.num_heads}, which {self.devices} devices cannot share evenly")

    @classmethod
    def from_json(cls, source: str | os.PathLike[str] | Mapping[str, Any], *, devices: int = 1) -> "LayerConfig":
        """Geometry from a checkpoint's ``config.json``.

        Args:
          source: the file, the folder it lies in, or what it holds. ``model_type`` is deepseek_v2, deepseek_v3,
            deepseek_v32, kimi_k2, kimi_linear or kimi_k3; where there is a ``text_config``, that one is read.
          devices: tensor-parallel devices.

        Raises:
          ValueError: a key is missing or has a value that this layer does not serve; the message names the key, its
            value and what is accepted. Or heads that cannot be shared evenly.
          FileNotFoundError: there is no such file.
        """
        return cls(devices=devices, **config_json.read(source))

    def to_json(self) -> dict[str, Any]:
        """What ``from_json`` reads back, but for ``devices`` and ``rms_norm_eps``: a small checkpoint's config.json."""
        return config_json.write(self)

    @property
    def heads(self) -> int:
        """H, the heads of one device."""
        return self.num_heads // self.devices

    @property
    def scale(self) -> float:
        """Of the scores before the softmax: ``192 ** -0.5``, with YaRN's correction where there is one."""
        return HEAD_DIM**-0.5 * (1.0 if self.rope is None else self.rope.score_magnitude**2)

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """One device's part of each weight as published: a projection is [out, in], and out counts heads first."""
        queries = self.heads * HEAD_DIM
        shapes: dict[str, tuple[int, ...]] = {}
        if self.q_lora_rank is None:
            shapes["q_proj"] = (queries, self.hidden_size)
        else:
            shapes["q_a_proj"] = (self.q_lora_rank, self.hidden_size)
            shapes["q_a_layernorm"] = (self.q_lora_rank,)
            shapes["q_b_proj"] = (queries, self.q_lora_rank)
        shapes["kv_a_proj_with_mqa"] = (LATENT + ROPE, self.hidden_size)
        shapes["kv_a_layernorm"] = (LATENT,)
        shapes["kv_b_proj"] = (self.heads * (NOPE + VALUE), LATENT)
        if self.gate:
            shapes["g_proj"] = (self.heads * VALUE, self.hidden_size)
        shapes["o_proj"] = (self.hidden_size, self.heads * VALUE)
        return shapes
