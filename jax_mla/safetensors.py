"""Files in the safetensors format: headers read, tensors mapped, small checkpoints written.

The format is that of https://github.com/huggingface/safetensors: eight bytes with the header's length, a JSON header
``{name: {"dtype", "shape", "data_offsets"}}``, then the tensors' bytes, row-major and little-endian.
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

DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
INDEX = "model.safetensors.index.json"

# The format's own bound; a larger length means that the file is something else.
_MAX_HEADER_BYTES = 100_000_000


class Tensor(NamedTuple):
    """Where a tensor lies."""

    file: Path
    name: str
    dtype: str  # the format's name: "BF16", "F16", "F32", "F8_E4M3", ...
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    def __str__(self) -> str:
        return f"{self.file}: tensor {self.name!r}"

    def map(self) -> np.ndarray:
        """The tensor as a read-only view of the file; its bytes are read when they are used."""
        return np.memmap(self.file, DTYPES[self.dtype], mode="r", offset=self.offset, shape=self.shape)


def read_index(directory: Path) -> tuple[Path, list[tuple[str, Path]]]:
    """What names the tensors (the index, or the folder where there is none), and each tensor's name and file."""
    index = directory / INDEX
    return (index, _read_weight_map(index)) if index.is_file() else (directory, _list_tensors(directory))


def _read_weight_map(index: Path) -> list[tuple[str, Path]]:
    weight_map = read_json(index, index.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index}: expected an object 'weight_map' from tensor names to file names")
    return [(name, index.parent / file) for name, file in weight_map.items()]


def _list_tensors(directory: Path) -> list[tuple[str, Path]]:
    shards = sorted(directory.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(f"{directory}: expected {INDEX} or files *.safetensors")
    return [(name, shard) for shard in shards for name in read_header(shard)]


def write_checkpoint(directory: str | os.PathLike[str], tensors: Mapping[str, ArrayLike], *, shards: int = 2) -> None:
    """Writes non-empty tensors (bf16, fp16, fp32 or e4m3) into numbered shards of about equal size, and their index.

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


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of a shard; every one lies inside the file."""
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"{file}: is no safetensors file: a header of {length} bytes in a file of {size}")
        header = read_json(file, stream.read(length))
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


def read_json(file: Path, text: bytes) -> dict:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{file}: {error}; expected JSON") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object; found {type(value).__name__}")
    return value
