"""MLA layers from a checkpoint in Hugging Face's format: safetensors shards, with or without an index.

Tensors are mapped into memory, so that of a large checkpoint only the pages that a device's part lies on are read, one
layer at a time. Weights in bf16, fp16 and fp32 come as they are; DeepSeek's fp8 weights, which have a scale for each
block of 128 x 128, come dequantised to fp32.
"""

import functools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from jax_mla.layer import HEAD_AXIS, LayerConfig
from jax_mla.layer.config_json import BLOCK
from jax_mla.progress import show
from jax_mla.safetensors import INDEX, Tensor, read_header, read_index, write_checkpoint

__all__ = [
    "BLOCK",
    "INDEX",
    "Checkpoint",
    "attention_layers",
    "load_layer",
    "load_layers",
    "published_name",
    "write_checkpoint",
]

FLOATS = ("BF16", "F16", "F32")
FP8 = "F8_E4M3"

_ATTENTION = re.compile(r"(?:^|\.)model\.layers\.(\d+)\.self_attn\.(\w+\.\w+)$")


def published_name(layer: int, name: str, kind: str = "weight") -> str:
    """Full name of a weight, or of its ``weight_scale_inv``, without prefix."""
    return f"model.layers.{layer}.self_attn.{name}.{kind}"


class Checkpoint:
    """Where a checkpoint's attention tensors lie. The index is read once, and each shard's header when it is needed.

    Raises:
      ValueError: the index is no such file. FileNotFoundError: the folder holds no checkpoint.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.source, entries = read_index(Path(directory))
        self._places: dict[tuple[int, str], list[tuple[str, Path]]] = {}
        for full, file in entries:
            if match := _ATTENTION.search(full):
                self._places.setdefault((int(match[1]), match[2]), []).append((full, file))
        self._header = functools.cache(read_header)

    @property
    def layers(self) -> list[int]:
        """Numbers of the MLA layers, ascending; of a hybrid model's other layers none."""
        return sorted(layer for layer, name in self._places if name == "kv_a_proj_with_mqa.weight")

    def find(self, layer: int, name: str, kind: str = "weight") -> Tensor:
        """A tensor by its short name ("q_a_proj"), of whatever shape and dtype.

        Raises ValueError where there is none or more than one, and FileNotFoundError for a file that is not there.
        """
        places = self._places.get((layer, f"{name}.{kind}"), [])
        if len(places) != 1:
            listed = ", ".join(f"{full} in {file.name}" for full, file in places) or "none"
            wanted = published_name(layer, name, kind)
            raise ValueError(f"{self.source}: expected one tensor named [prefix.]{wanted}; found {listed}")
        full, file = places[0]
        if full not in self._header(file):
            raise ValueError(f"{file}: lacks tensor {full!r}, which {self.source} places there")
        return self._header(file)[full]

    def load(self, layer: int, config: LayerConfig, rank: int) -> dict[str, np.ndarray]:
        """See ``load_layer``."""
        weights = {}
        for name, part in config.weight_shapes.items():
            axis = HEAD_AXIS.get(name)
            begin = tuple(rank * size if i == axis else 0 for i, size in enumerate(part))
            whole = tuple(size * config.devices if i == axis else size for i, size in enumerate(part))
            tensor = self.find(layer, name)
            _check(tensor, whole, (*FLOATS, FP8) if len(whole) == 2 else FLOATS, config)
            place = tuple(slice(b, b + size) for b, size in zip(begin, part, strict=True))
            if tensor.dtype == FP8:
                weights[name] = _dequantised(tensor, self._scales(layer, name, tensor), place)
            else:
                weights[name] = np.array(tensor.map()[place], order="C")
        return weights

    def _scales(self, layer: int, name: str, weight: Tensor) -> np.ndarray:
        try:
            scales = self.find(layer, name, "weight_scale_inv")
        except ValueError as error:
            raise ValueError(f"{weight} is {weight.dtype} and needs its scales: {error}") from None
        _check(scales, tuple(-(-size // BLOCK) for size in weight.shape), ("F32",))
        return scales.map()


def load_layer(
    directory: str | os.PathLike[str], layer: int, config: LayerConfig, *, rank: int = 0
) -> dict[str, np.ndarray]:
    """One device's part of a layer's attention weights, as published, in the dtype they are stored in; fp8 as fp32.

    Reads ``model.layers.{layer}.self_attn.{name}.weight``, behind any prefix such as ``language_model.``, for each name
    of ``config.weight_shapes``, and of an fp8 weight (float8_e4m3fn) ``weight_scale_inv`` too, [ceil(out / 128),
    ceil(in / 128)] in fp32: the weight is their product, as in DeepSeek-V3's published conversion. ``layer.absorb``
    makes serving parameters of the result.

    Args:
      directory: of the checkpoint; its index names the files, or else every ``*.safetensors`` in it is looked at.
      layer: number in the checkpoint, from 0.
      config: the layer's geometry; ``config.devices`` share its heads.
      rank: which of the devices: heads [rank * H, (rank + 1) * H). Of ``o_proj``, whose heads lie in columns, a part
        of each row is read; of the other weights whole rows.

    Raises:
      ValueError: a tensor or a scale that is missing, there more than once, or of another shape or dtype; or a file
        that is not in the format. The message names the file, the tensor, what was found and what was expected.
      FileNotFoundError: the folder holds no checkpoint, or not a file that its index names.
    """
    _check_rank(config, rank)
    return Checkpoint(directory).load(layer, config, rank)


def load_layers(
    directory: str | os.PathLike[str],
    config: LayerConfig,
    *,
    rank: int = 0,
    layers: Iterable[int] | None = None,
    progress: bool = True,
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """(number, weights) of one layer after another, as ``load_layer``; a layer is read when it is asked for.

    Args:
      directory, config, rank: as in ``load_layer``.
      layers: numbers in the checkpoint; None: ``attention_layers(directory)``.
      progress: tell on stderr which layer is read.

    Raises:
      ValueError, FileNotFoundError: as ``load_layer``; what concerns one layer, when that layer is asked for.
    """
    _check_rank(config, rank)
    checkpoint = Checkpoint(directory)
    numbers = checkpoint.layers if layers is None else list(layers)
    return _each(checkpoint, numbers, config, rank, progress)


def _each(checkpoint: Checkpoint, numbers: list[int], config: LayerConfig, rank: int, progress: bool):
    for done, number in enumerate(numbers, 1):
        if progress:
            show(f"layer {number}, {done} of {len(numbers)}", last=done == len(numbers))
        yield number, checkpoint.load(number, config, rank)


def attention_layers(directory: str | os.PathLike[str]) -> list[int]:
    """Numbers of a checkpoint's MLA layers, ascending; of a hybrid model's other layers none.

    DeepSeek-V3's number 61, which predicts the token after the next, is among them.
    """
    return Checkpoint(directory).layers


def _check_rank(config: LayerConfig, rank: int) -> None:
    if not 0 <= rank < config.devices:
        raise ValueError(f"rank is {rank}; expected 0 to {config.devices - 1} for {config.devices} devices")


def _check(tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[str, ...], config: LayerConfig | None = None) -> None:
    if tensor.shape != shape:
        reason = "one scale for each 128 x 128 block of the weight"
        if config is not None:
            reason = f"{config.num_heads} heads, hidden size {config.hidden_size} and query latent {config.q_lora_rank}"
        raise ValueError(
            f"{tensor} has shape {list(tensor.shape)} in {tensor.dtype}; expected {list(shape)} for {reason}"
        )
    if tensor.dtype not in dtypes:
        raise ValueError(f"{tensor} has dtype {tensor.dtype}; expected {' or '.join(dtypes)}")


def _dequantised(weight: Tensor, scales: np.ndarray, place: tuple[slice, slice]) -> np.ndarray:
    """weight[place] times the scale of each block, fp32. Ranks may cut inside a block."""
    values = np.array(weight.map()[place], order="C").astype(np.float32)
    rows, columns = place
    of_column = np.arange(columns.start, columns.stop) // BLOCK
    for block in range(rows.start // BLOCK, -(-rows.stop // BLOCK)):
        inside = slice(max(block * BLOCK - rows.start, 0), (block + 1) * BLOCK - rows.start)
        values[inside] *= scales[block, of_column]
    return values
