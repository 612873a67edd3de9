"""One MLA layer from a checkpoint in Hugging Face's format: safetensors shards, with or without an index.

The file format is that of https://github.com/huggingface/safetensors: eight bytes with the header's length, a JSON
header ``{name: {"dtype", "shape", "data_offsets"}}``, then the tensors' bytes, row-major and little-endian. Tensors are
mapped into memory, so that of a large checkpoint only the pages that a device's part lies on are read.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike

from jax_mla.layer import HEAD_AXIS, LATENT, NOPE, VALUE, LayerConfig

DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}
INDEX = "model.safetensors.index.json"

# The format's own bound; a larger length means that the file is something else.
_MAX_HEADER_BYTES = 100_000_000


class Tensor(NamedTuple):
    """Where a tensor lies."""

    file: Path
    name: str
    dtype: str  # the format's name: "BF16", "F16", "F32", ...
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    def map(self) -> np.ndarray:
        """The tensor as a read-only view of the file; its bytes are read when they are used."""
        if self.dtype not in DTYPES:
            raise ValueError(
                f"{self.file}: tensor {self.name!r} has dtype {self.dtype}; expected {' or '.join(DTYPES)}"
            )
        return np.memmap(self.file, DTYPES[self.dtype], mode="r", offset=self.offset, shape=self.shape)


def load_layer(
    directory: str | os.PathLike[str], layer: int, config: LayerConfig, *, rank: int = 0
) -> dict[str, np.ndarray]:
    """One device's part of a layer's attention weights, as published and in the dtype they are stored in.

    Reads ``model.layers.{layer}.self_attn.{name}.weight``, behind any prefix such as ``language_model.``, for each name
    of ``config.weight_shapes``. ``layer.absorb`` makes serving parameters of the result.

    Args:
      directory: of the checkpoint; its index names the files, or else every ``*.safetensors`` in it is looked at.
      layer: number in the checkpoint.
      config: the layer's geometry; ``config.devices`` share its heads.
      rank: which of the devices: heads [rank * H, (rank + 1) * H). Of ``o_proj``, whose heads lie in columns, a part
        of each row is read; of the other weights whole rows.

    Raises:
      ValueError: a tensor that is missing, there more than once, or of another shape or dtype; or a file that is not in
        the format. The message names the file, the tensor, what was found and what was expected.
      FileNotFoundError: the folder holds no checkpoint, or not a file that its index names.
    """
    if not 0 <= rank < config.devices:
        raise ValueError(f"rank is {rank}; expected 0 to {config.devices - 1} for {config.devices} devices")
    tensors = find_layer(directory, layer)
    weights = {}
    for name, part in config.weight_shapes.items():
        tensor = tensors[name]
        axis = HEAD_AXIS.get(name)
        whole = tuple(size * config.devices if i == axis else size for i, size in enumerate(part))
        if tensor.shape != whole:
            raise ValueError(
                f"{tensor.file}: tensor {tensor.name!r} has shape {list(tensor.shape)} in {tensor.dtype}; expected "
                f"{list(whole)} for {config.num_heads} heads, hidden size {config.hidden_size} and query latent "
                f"{config.q_lora_rank}"
            )
        view = tensor.map()
        if axis is not None:
            start = rank * part[axis]
            view = view[(slice(None),) * axis + (slice(start, start + part[axis]),)]
        weights[name] = np.array(view, order="C")
    return weights


def read_config(directory: str | os.PathLike[str], layer: int, *, devices: int = 1) -> LayerConfig:
    """The geometry of a layer, from the shapes of its tensors.

    Raises:
      ValueError: as ``load_layer``; a shape that is no MLA layer's of these widths; heads that cannot be shared evenly.
    """
    tensors = find_layer(directory, layer)
    per_head = NOPE + VALUE
    q_a, kv_b = tensors["q_a_proj"], tensors["kv_b_proj"]
    if len(q_a.shape) != 2:
        raise ValueError(f"{q_a.file}: tensor {q_a.name!r} has shape {list(q_a.shape)}; expected [q_lora_rank, hidden]")
    if len(kv_b.shape) != 2 or kv_b.shape[1] != LATENT or kv_b.shape[0] % per_head:
        raise ValueError(
            f"{kv_b.file}: tensor {kv_b.name!r} has shape {list(kv_b.shape)}; expected [heads * {per_head}, {LATENT}]"
        )
    q_lora_rank, hidden_size = q_a.shape
    return LayerConfig(hidden_size, kv_b.shape[0] // per_head, devices, q_lora_rank)


def find_layer(directory: str | os.PathLike[str], layer: int) -> dict[str, Tensor]:
    """Where the attention weights of a layer lie, by their short names ("q_a_proj", ...). Reads headers alone."""
    directory = Path(directory)
    index = directory / INDEX
    source = index if index.is_file() else directory
    entries = _read_index(index) if index.is_file() else _list_tensors(directory)
    headers: dict[Path, dict[str, Tensor]] = {}
    found = {}
    for name in LayerConfig().weight_shapes:
        suffix = published_name(layer, name)
        matches = [(full, file) for full, file in entries if full == suffix or full.endswith("." + suffix)]
        if len(matches) != 1:
            listed = ", ".join(f"{full} in {file.name}" for full, file in matches) or "none"
            raise ValueError(f"{source}: expected one tensor named [prefix.]{suffix}; found {listed}")
        full, file = matches[0]
        if file not in headers:
            headers[file] = _read_header(file)
        if full not in headers[file]:
            raise ValueError(f"{file}: lacks tensor {full!r}, which {source} places there")
        found[name] = headers[file][full]
    return found


def _read_index(index: Path) -> list[tuple[str, Path]]:
    weight_map = _read_json(index, index.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index}: expected an object 'weight_map' from tensor names to file names")
    return [(name, index.parent / file) for name, file in weight_map.items()]


def _list_tensors(directory: Path) -> list[tuple[str, Path]]:
    shards = sorted(directory.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(f"{directory}: expected {INDEX} or files *.safetensors")
    return [(name, shard) for shard in shards for name in _read_header(shard)]


def published_name(layer: int, name: str) -> str:
    """Full name of a weight, without prefix."""
    return f"model.layers.{layer}.self_attn.{name}.weight"


def write_checkpoint(directory: str | os.PathLike[str], tensors: Mapping[str, ArrayLike], *, shards: int = 2) -> None:
    """Writes non-empty tensors (bf16, fp16 or fp32) into numbered shards of about equal size, and their index.

    Args:
      directory: made where it does not exist.
      tensors: full names to arrays, written in this order.
      shards: number of files; fewer where one tensor fills several.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    total = sum(array.nbytes for array in arrays.values())
    by_shard: dict[int, dict[str, np.ndarray]] = {}
    written = 0
    for name, array in arrays.items():
        by_shard.setdefault(written * shards // total, {})[name] = array
        written += array.nbytes
    parts = list(by_shard.values())
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        _write_shard(directory / file, part)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_shard(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    format_names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in tensors.items():
        if array.dtype not in format_names:
            raise ValueError(f"tensor {name!r} has dtype {array.dtype}; expected {' or '.join(map(str, format_names))}")
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": format_names[array.dtype], "shape": array.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors start aligned
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            stream.write(array.tobytes())


def _read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of a shard; every one lies inside the file."""
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"{file}: is no safetensors file: a header of {length} bytes in a file of {size}")
        header = _read_json(file, stream.read(length))
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = {}
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{file}: tensor {name!r} is {entry}; expected dtype, shape and data_offsets") from None
        if not 0 <= begin <= end <= size - start:
            raise ValueError(
                f"{file}: tensor {name!r} lies at [{begin}, {end}) of {size - start} bytes: a truncated file?"
            )
        if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
            raise ValueError(f"{file}: tensor {name!r} has {end - begin} bytes; expected {list(shape)} in {dtype}")
        tensors[name] = Tensor(file, name, dtype, shape, start + begin)
    return tensors


def _read_json(file: Path, text: bytes) -> dict:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{file}: {error}; expected JSON") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object; found {type(value).__name__}")
    return value
