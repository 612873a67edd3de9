"""``python -m jax_mla demo``: Kimi-K3's attention layers prefill and decode a batch, and are checked in float64.

Each geometry (all heads, or the share of one of 4 or 8 devices) loads its part of a checkpoint, prefills prompts of
different lengths into scattered pages of a cache that holds NaN everywhere else, and decodes with one compiled step
whose cache is donated. Only attention layers are run, without the rest of the model: random hidden states stand in for
prompts, and each step's output, normalised and with noise in place of a sampled token, is the next step's input.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mla import layer as mla
from jax_mla.cache import allocate_cache, slots
from jax_mla.checkpoint import load_layer, published_name, read_config, write_checkpoint
from jax_mla.decode import plan_decode
from jax_mla.dispatch import explain
from jax_mla.layer import LayerConfig, LayerParams

PAGE = 64
TOLERANCE = 1e-2  # relative, of bf16 results

# What is written where no checkpoint is given: Kimi-K3's heads and widths over a smaller hidden size.
SMALL = LayerConfig(hidden_size=512, num_heads=96, q_lora_rank=256)
SMALL_LAYERS = 2


class Sample(NamedTuple):
    """One attended row: what went into each layer's attention, and what came out."""

    sequence: int
    position: int
    inputs: np.ndarray  # [layers, M]
    outputs: np.ndarray  # [layers, M]


class Result(NamedTuple):
    heads: int
    prefill_rate: float  # tokens a second
    decode_rate: float
    error: float  # relative, of the sampled rows
    in_place: bool
    curve: list[tuple[int, float]]  # (step, tokens a second since the last such point)


class State(NamedTuple):
    """What a decode step consumes and gives back; donated."""

    x: jax.Array  # [B, 1, M], the next input
    cache: jax.Array  # [layers, pages, P, 576]
    kv_lens: jax.Array  # [B]
    step: jax.Array  # []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="folder of safetensors shards; default: a small one")
    parser.add_argument("--layer", type=int, default=0, metavar="N", help="layer of --checkpoint (default 0)")
    parser.add_argument(
        "--heads", type=int, nargs="+", default=[96, 24, 12], metavar="H", help="heads on this device (96 24 12)"
    )
    parser.add_argument("--batch", type=int, default=4, help="sequences (default 4)")
    parser.add_argument("--prompt-tokens", type=int, default=256, metavar="T", help="longest prompt (default 256)")
    parser.add_argument("--steps", type=int, default=200, help="tokens to decode in each sequence (default 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--implementation", metavar="NAME", help="of mla_decode, as in 'cpu' or 'cuda:generic' or 'xla'")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a plot of the decode rates (needs matplotlib)")


def main(arguments: argparse.Namespace) -> int:
    """Runs the demo; 0 where every geometry agrees with float64, else 1."""
    for name in ("batch", "prompt_tokens", "steps"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; it has to be at least 1")
    device = jax.devices()[0]
    print(f"jax {jax.__version__} on {device.platform} ({device.device_kind})")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.checkpoint is None:
            directory, layers = Path(folder), list(range(SMALL_LAYERS))
            print(f"writing a random checkpoint: {SMALL_LAYERS} layers of hidden size {SMALL.hidden_size}, 96 heads")
            _write_small_checkpoint(directory, arguments.seed)
        else:
            directory, layers = arguments.checkpoint, [arguments.layer]
            print(f"reading layer {arguments.layer} of {directory}")
        results = [_run(arguments, directory, layers, heads) for heads in arguments.heads]
    _print_table(results)
    if arguments.plot is not None:
        _plot(results, arguments.plot)
    return 0 if all(result.error <= TOLERANCE for result in results) else 1


def _write_small_checkpoint(directory: Path, seed: int) -> None:
    tensors = {}
    for layer, key in enumerate(jax.random.split(jax.random.key(seed), SMALL_LAYERS)):
        for name, weight in mla.init_weights(key, SMALL).items():
            tensors["language_model." + published_name(layer, name)] = weight
    write_checkpoint(directory, tensors)


def _run(arguments: argparse.Namespace, directory: Path, layers: list[int], heads: int) -> Result:
    """One geometry, from the checkpoint to the check."""
    num_heads = read_config(directory, layers[0]).num_heads
    if heads < 1 or num_heads % heads:
        raise ValueError(f"--heads is {heads}; expected a divisor of the checkpoint's {num_heads}")
    config = read_config(directory, layers[0], devices=num_heads // heads)
    weights = [load_layer(directory, layer, config) for layer in layers]
    params = tuple(mla.absorb(weight, config) for weight in weights)
    share = "all heads" if config.devices == 1 else f"one of {config.devices} devices, its share of the output alone"
    print(f"\n{heads} of {num_heads} heads ({share})")
    for operation in ("mla_decode", "update_cache", "mla_prefill", "pack_kv"):
        name = arguments.implementation if operation == "mla_decode" else None
        print(f"  {operation:12} {explain(operation, num_heads=heads, implementation=name)}")

    generator = np.random.default_rng(arguments.seed)
    prompts = generator.integers(-(-arguments.prompt_tokens // 8), arguments.prompt_tokens + 1, arguments.batch)
    prompts[0] = arguments.prompt_tokens
    page_table, pages = _scatter_pages(prompts + arguments.steps, generator)
    cache = jnp.full_like(allocate_cache(pages, PAGE, layers=len(layers)), jnp.nan)
    key = jax.random.key(arguments.seed)

    x = jax.random.normal(key, (prompts.sum(), config.hidden_size), jnp.bfloat16)
    request = np.repeat(np.arange(len(prompts), dtype=np.int32), prompts)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in prompts])
    slot_mapping = slots(page_table, positions, PAGE, request=request)
    cu_q_lens = jnp.asarray(np.cumsum([0, *prompts]), jnp.int32)
    run_prefill = _compile(partial(_prefill, config), params, slot_mapping, cu_q_lens, key, x, cache, donate=5)
    started = time.perf_counter()
    state, record = jax.block_until_ready(run_prefill(params, slot_mapping, cu_q_lens, key, x, cache))
    prefill_rate = prompts.sum() / (time.perf_counter() - started)
    print(f"  prefilled {prompts.sum()} tokens of {len(prompts)} prompts: {prefill_rate:.0f} tokens/s")

    checked = range(len(prompts))[:4]
    inputs, outputs = (np.asarray(part, np.float64) for part in record)
    ends = np.cumsum(prompts)
    samples = [
        Sample(b, n, inputs[:, ends[b] - prompts[b] + n], outputs[:, ends[b] - prompts[b] + n])
        for b in checked
        for n in {prompts[b] // 2, prompts[b] - 1}
    ]
    run_step = _compile(partial(_step, config, arguments.implementation), params, page_table, key, state, donate=3)
    address = state.cache.unsafe_buffer_pointer()
    state, records, curve = _decode(partial(run_step, params, page_table, key), state, arguments.steps, heads)
    for step, record in records.items():
        inputs, outputs = (np.asarray(part, np.float64) for part in record)
        samples += [Sample(b, prompts[b] + step, inputs[:, b], outputs[:, b]) for b in checked]
    decode_rate = len(prompts) * arguments.steps / sum(seconds for _, seconds in curve)
    in_place = state.cache.unsafe_buffer_pointer() == address
    print(f"  decoded {arguments.steps} tokens in each of {len(prompts)} sequences: {decode_rate:.0f} tokens/s, ", end="")
    print("the cache updated in place" if in_place else "the cache COPIED")

    error = _check(samples, weights, np.asarray(state.cache), page_table, config.rms_norm_eps)
    verdict = "PASS" if error <= TOLERANCE else "FAIL"
    print(f"  {len(samples) * len(layers)} rows against float64: relative error {error:.1e}, {verdict}")
    return Result(heads, prefill_rate, decode_rate, error, in_place, _rates(curve, len(prompts)))
