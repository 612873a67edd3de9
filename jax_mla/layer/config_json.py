"""A checkpoint's config.json, read into the arguments of ``LayerConfig``.

Keys and their meaning are those of the published configuration and modelling files of DeepSeek-V2, V3 and V3.2 and of
Kimi-K2, Kimi-Linear and Kimi-K3, and of Hugging Face's transformers, which writes ``rope_parameters`` for what the
first ones call ``rope_theta`` and ``rope_scaling``.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_mla.layer.rope import Rope, Yarn
from jax_mla.layer.widths import LATENT, NOPE, ROPE, VALUE
from jax_mla.safetensors import read_json

ROTATED = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2")
UNROTATED = ("kimi_linear", "kimi_k3")
WIDTHS = {"kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE}
BLOCK = 128  # rows and columns that share a scale of fp8 weights
LATENT_EPS = 1e-6  # see LayerConfig.rms_norm_eps

_MISSING = object()


def read(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``LayerConfig`` that a model determines, all but ``devices``."""
    if isinstance(source, Mapping):
        values, where = source, "config"
    else:
        file = Path(source)
        file = file / "config.json" if file.is_dir() else file
        values, where = read_json(file, file.read_bytes()), str(file)
    return _Reader(values, where).arguments()


def write(config: Any) -> dict[str, Any]:
    """What ``read`` makes that ``LayerConfig`` of, but for ``devices`` and ``rms_norm_eps``: for small checkpoints."""
    values = {
        "model_type": "kimi_linear" if config.rope is None else "deepseek_v3",
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "q_lora_rank": config.q_lora_rank,
        "mla_use_output_gate": config.gate,
        **WIDTHS,
    }
    if config.rope is not None:
        values |= {"rope_theta": config.rope.theta, "rope_interleave": config.rope.interleaved}
        if config.rope.yarn is not None:
            values["rope_scaling"] = {"type": "yarn", **dataclasses.asdict(config.rope.yarn)}
    return values


class _Reader:
    """Takes keys from a configuration; an error names the file, the key, its value and what is accepted."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.where = where
        self.outer_type = values.get("model_type")
        text = values.get("text_config")
        self.values, self.prefix = (text, "text_config.") if isinstance(text, Mapping) else (values, "")

    def arguments(self) -> dict[str, Any]:
        model_type = self._choice("model_type", (*ROTATED, *UNROTATED), default=self.outer_type)
        for name, width in WIDTHS.items():
            self._exactly(name, width)
        num_heads = self._positive("num_attention_heads")
        self._exactly("num_key_value_heads", num_heads, default=num_heads)
        self._exactly("attention_bias", False, default=False)
        self._check_blocks()
        gate = self._choice("mla_use_output_gate", (True, False), default=self.outer_type == "kimi_k3")
        if model_type in UNROTATED:
            self._exactly("mla_use_nope", True, default=True)
        return {
            "hidden_size": self._positive("hidden_size"),
            "num_heads": num_heads,
            "q_lora_rank": None if self._get("q_lora_rank", None) is None else self._positive("q_lora_rank"),
            "rms_norm_eps": LATENT_EPS,
            "rope": self._rope() if model_type in ROTATED else None,
            "gate": gate,
        }

    def _rope(self) -> Rope:
        # transformers writes one object, the published files a number and an object that may be null.
        scaling_key = "rope_parameters" if self._get("rope_parameters", None) is not None else "rope_scaling"
        scaling = self._get(scaling_key, None) or {}
        if not isinstance(scaling, Mapping):
            self._refuse(scaling_key, scaling, "an object or null")
        inner = _Reader(scaling, self.where)
        inner.prefix = f"{self.prefix}{scaling_key}."
        theta = inner._number("rope_theta") if "rope_theta" in scaling else self._number("rope_theta")
        if theta <= 1:
            self._refuse("rope_theta", theta, "a number above 1")
        interleaved = self._choice("rope_interleave", (True, False), default=True)
        type_key = "rope_type" if "rope_type" in scaling else "type"
        kind = inner._choice(type_key, ("yarn", "default"), default="default")
        return Rope(theta, inner._yarn() if kind == "yarn" else None, interleaved)

    def _yarn(self) -> Yarn:
        self._exactly("attention_factor", None, default=None)
        self._exactly("truncate", True, default=True)
        return Yarn(
            self._number("factor", above=0),
            self._positive("original_max_position_embeddings"),
            self._number("beta_fast", 32.0, above=0),
            self._number("beta_slow", 1.0, above=0),
            self._number("mscale", 1.0),
            self._number("mscale_all_dim", 0.0),
        )

    def _check_blocks(self) -> None:
        """Of the quantised formats fp8 in blocks is read; others may leave attention alone, and the tensors tell."""
        quantization = self._get("quantization_config", None)
        if isinstance(quantization, Mapping) and quantization.get("quant_method") == "fp8":
            size = quantization.get("weight_block_size")
            if size != [BLOCK, BLOCK]:
                self._refuse("quantization_config.weight_block_size", size, f"[{BLOCK}, {BLOCK}]")

    def _get(self, key: str, default: Any = _MISSING) -> Any:
        return self.values.get(key, default)

    def _refuse(self, key: str, value: Any, accepted: str) -> None:
        found = "missing" if value is _MISSING else repr(value)
        raise ValueError(f"{self.where}: {self.prefix}{key} is {found}; expected {accepted}")

    def _choice(self, key: str, accepted: tuple[Any, ...], default: Any) -> Any:
        value = self._get(key, default)
        if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in accepted):
            self._refuse(key, value, " or ".join(map(repr, accepted)))
        return value

    def _exactly(self, key: str, accepted: Any, default: Any = _MISSING) -> None:
        value = self._get(key, default)
        if type(value) is not type(accepted) or value != accepted:
            self._refuse(key, value, repr(accepted))

    def _positive(self, key: str) -> int:
        value = self._get(key)
        if type(value) is not int or value < 1:
            self._refuse(key, value, "an integer above 0")
        return value

    def _number(self, key: str, default: Any = _MISSING, above: float = float("-inf")) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not value > above:
            self._refuse(key, value, "a number" if above == float("-inf") else f"a number above {above:g}")
        return float(value)
