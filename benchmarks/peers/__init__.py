"""The peers that decode is timed beside, where they can be imported: FlashMLA and FlashAttention-3, through PyTorch.

They come with vLLM (measured: 0.33.0 with PyTorch 2.11 for CUDA 13). An installed vLLM serves; so does a folder on
PYTHONPATH with these files of its wheel: an empty vllm/__init__.py, vllm/_flashmla_C.abi3.so,
vllm/_flashmla_extension_C.abi3.so, vllm/third_party/flashmla/flash_mla_interface.py, and
vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so. FA3_LIBRARY in the environment names that last one elsewhere; it may be
compressed, with ".xz" at the end of its name. Nothing of them is part of this repository.

`python -m jax_mla bench` loads this package. find() gives, for each peer, what makes a contestant
(jax_mla/bench/timing.py) from a cell's inputs, over the very same device memory; it raises NotImplementedError where
the peer does not take the cell.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

PEERS = ("flashmla", "fa3")


def _make(peer: str, module: str, function: str, *inputs: Any) -> Any:
    """NotImplementedError, with the peer's name, where it cannot be imported or does not take the cell."""
    try:
        return getattr(importlib.import_module(f"{__name__}.{module}"), function)(*inputs)
    except Exception as error:
        raise NotImplementedError(f"{peer}: {error}") from error


# What makes a contestant of benchmarks/prefill.py from a cell's inputs and dtype.
PREFILL = tuple(functools.partial(_make, name, "prefill", name) for name in ("fa3", "cudnn"))
# Of benchmarks/sparse.py, from a cell's inputs.
SPARSE = (functools.partial(_make, "flashmla", "flashmla", "sparse"),)


def find() -> tuple[dict[str, Callable[[Any], Any]], dict[str, str]]:
    """The peers that can be imported, by name, and why the others cannot."""
    found, missing = {}, {}
    for name in PEERS:
        try:
            found[name] = importlib.import_module(f"{__name__}.{name}").make
        except (ImportError, OSError) as error:
            missing[name] = str(error)
    return found, missing
