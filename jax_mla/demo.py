"""``python -m jax_mla demo``: MLA layers, Kimi-K3's or a checkpoint's, prefill and decode, checked in float64.

Each geometry (all heads, or the share of one of 4 or 8 devices) loads its part of a checkpoint, prefills prompts of
different lengths into scattered pages of a cache that holds NaN everywhere else, and decodes with one compiled step
whose cache is donated. Attention layers alone are run, not a whole model: random hidden states stand in for prompts,
and each step's output, normalised and with noise in place of a sampled token, is the next step's input.
"""

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mla import layer as mla
from jax_mla.cache import allocate_cache, slots
from jax_mla.checkpoint import load_layer, published_name, write_checkpoint
from jax_mla.decode import plan_decode
from jax_mla.dispatch import explain
from jax_mla.layer import LayerConfig, LayerParams
from jax_mla.progress import show

PAGE = 64
TOLERANCE = 1e-2  # relative, of results in bf16
CHECKED_SEQUENCES = 4

# What is written where no checkpoint is given: Kimi-K3's heads and widths over a smaller hidden size.
SMALL = LayerConfig(hidden_size=512, num_heads=96, q_lora_rank=256)
SMALL_LAYERS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="safetensors folder; default: a small random one"
    )
    parser.add_argument("--layer", type=int, default=0, metavar="N", help="layer of --checkpoint (default 0)")
    parser.add_argument("--heads", type=int, nargs="+", default=[96, 24, 12], metavar="H", help="default 96 24 12")
    parser.add_argument("--batch", type=int, default=4, metavar="B", help="sequences (default 4)")
    parser.add_argument("--prompt-tokens", type=int, default=256, metavar="T", help="longest prompt (default 256)")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="tokens to decode a sequence (default 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--implementation", metavar="NAME", help="of mla_decode: cpu, cuda, xla, cpu:avx2, ...")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a plot of the decode rates (needs matplotlib)")


def main(arguments: argparse.Namespace) -> int:
    """Runs the demo; 0 where every geometry agrees with float64, else 1."""
    for name in ("batch", "prompt_tokens", "steps"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; it has to be at least 1")
    device = jax.devices()[0]
    print(f"jax {jax.__version__} on {device.device_kind} ({device.platform})")
    print("attention layers alone, on random hidden states: it shows speed and exactness, and writes no text")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.checkpoint is None:
            directory, layers = Path(folder), list(range(SMALL_LAYERS))
            print(f"checkpoint: {SMALL_LAYERS} random layers, hidden size {SMALL.hidden_size}, {SMALL.num_heads} heads")
            _write_small_checkpoint(directory, arguments.seed)
        else:
            directory, layers = arguments.checkpoint, [arguments.layer]
            print(f"checkpoint: layer {arguments.layer} of {directory}")
        results = [_run(arguments, directory, layers, heads) for heads in arguments.heads]
    _print_table(results)
    if arguments.plot is not None:
        _plot(results, arguments.plot)
    return 0 if all(result.passed for result in results) else 1


class Result(NamedTuple):
    heads: int
    prefill_rate: float  # tokens a second
    decode_rate: float
    error: float  # relative, of the rows that were checked
    curve: list[tuple[int, float]]  # (step, tokens a second since the last such point)

    @property
    def passed(self) -> bool:
        return self.error <= TOLERANCE


class Rows(NamedTuple):
    """One attended token of each sequence: what went into each layer's attention, and what came out."""

    positions: np.ndarray  # [B]
    inputs: jax.Array  # [layers, B, M]
    outputs: jax.Array  # [layers, B, M]


class State(NamedTuple):
    """What a decode step consumes and gives back; donated."""

    x: jax.Array  # [B, M], the next input
    cache: jax.Array  # [layers, pages, P, 576]
    kv_lens: jax.Array  # [B]
    step: jax.Array  # []


def _run(arguments: argparse.Namespace, directory: Path, layers: list[int], heads: int) -> Result:
    """One geometry, from the checkpoint to the check."""
    num_heads = LayerConfig.from_json(directory).num_heads
    if heads < 1 or num_heads % heads:
        raise ValueError(f"--heads is {heads}; expected a divisor of the checkpoint's {num_heads}")
    config = LayerConfig.from_json(directory, devices=num_heads // heads)
    weights = [load_layer(directory, layer, config) for layer in layers]
    params = tuple(mla.absorb(weight, config) for weight in weights)
    print(f"\n{heads} heads ({num_heads} on {config.devices} device{'s' * (config.devices > 1)}, this one's share)")
    for operation in ("mla_decode", "update_cache", "mla_prefill"):
        name = arguments.implementation if operation == "mla_decode" else None
        print(f"  {operation:12} {explain(operation, num_heads=heads, implementation=name)}")

    generator = np.random.default_rng(arguments.seed)
    prompts = generator.integers(
        -(-arguments.prompt_tokens // 8), arguments.prompt_tokens, arguments.batch, endpoint=True
    )
    page_table, pages = _scatter_pages(prompts + arguments.steps, generator)
    cache = jnp.full_like(allocate_cache(pages, PAGE, layers=len(layers)), jnp.nan)
    key = jax.random.key(arguments.seed)

    state, rows, seconds = _prefill(config, params, cache, page_table, prompts, key)
    prefill_rate = prompts.sum() / seconds
    print(f"  prefilled {prompts.sum()} tokens of {len(prompts)} prompts: {prefill_rate:.0f} tokens/s")

    address = state.cache.unsafe_buffer_pointer()
    fixed = (params, jnp.asarray(page_table), key)
    step = _compile(partial(_step, config, arguments.implementation), 3, *fixed, state)
    started = time.perf_counter()
    state, decoded, curve = _decode(partial(step, *fixed), state, arguments.steps, prompts, heads)
    decode_rate = len(prompts) * arguments.steps / (time.perf_counter() - started)
    place = "in place" if state.cache.unsafe_buffer_pointer() == address else "by copies"
    print(f"  decoded {arguments.steps} tokens a sequence: {decode_rate:.0f} tokens/s, cache updated {place}")

    error = _check(rows + decoded, weights, np.asarray(state.cache), page_table, config)
    result = Result(heads, prefill_rate, decode_rate, error, curve)
    print(f"  sampled rows against float64: relative error {error:.1e}, {'PASS' if result.passed else 'FAIL'}")
    return result


def _write_small_checkpoint(directory: Path, seed: int) -> None:
    tensors = {}
    for layer, key in enumerate(jax.random.split(jax.random.key(seed), SMALL_LAYERS)):
        for name, weight in mla.init_weights(key, SMALL).items():
            tensors["language_model." + published_name(layer, name)] = weight
    write_checkpoint(directory, tensors)
    (directory / "config.json").write_text(json.dumps(SMALL.to_json(), indent=2) + "\n")


def _scatter_pages(lengths: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, int]:
    """A page table [B, max_pages] of shuffled page ids, -1 where a sequence needs none, and the number of pages."""
    counts = -(-lengths // PAGE)
    page_table = np.full((len(lengths), counts.max()), -1, np.int32)
    page_table[np.arange(counts.max()) < counts[:, None]] = generator.permutation(counts.sum())
    return page_table, int(counts.sum())


def _compile(function: Any, donated: int, *operands: Any) -> jax.stages.Compiled:
    return jax.jit(function, donate_argnums=donated).lower(*operands).compile()


def _normalised(x: jax.Array, config: LayerConfig) -> jax.Array:
    return mla.rms_norm(x, jnp.ones(config.hidden_size), config.rms_norm_eps)


def _next_input(x: jax.Array, config: LayerConfig, key: jax.Array) -> jax.Array:
    return _normalised(x + jax.random.normal(key, x.shape, x.dtype), config)


def _prefill(
    config: LayerConfig,
    params: tuple[LayerParams, ...],
    cache: jax.Array,
    page_table: np.ndarray,
    prompts: np.ndarray,
    key: jax.Array,
) -> tuple[State, list[Rows], float]:
    """All prompts in one call. Returns the state after them, two rows of each prompt, and seconds without compiling."""

    def forward(params, positions, slot_mapping, cu_q_lens, x, cache):
        inputs, outputs = [], []
        for layer, layer_params in enumerate(params):
            inputs.append(_normalised(x, config))
            batch = (inputs[-1], cache, slot_mapping, cu_q_lens)
            y, cache = mla.prefill(layer_params, config, *batch, positions=positions, layer=layer)
            outputs.append(y)
            x = x + y
        return x, cache, jnp.stack(inputs), jnp.stack(outputs)

    request = np.repeat(np.arange(len(prompts), dtype=np.int32), prompts)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in prompts])
    slot_mapping = slots(page_table, positions, PAGE, request=request)
    ends = np.cumsum(prompts)
    cu_q_lens = jnp.asarray([0, *ends], jnp.int32)
    x = jax.random.normal(key, (ends[-1], config.hidden_size), jnp.bfloat16)
    operands = (params, jnp.asarray(positions), slot_mapping, cu_q_lens, x, cache)
    compiled = _compile(forward, 5, *operands)
    started = time.perf_counter()
    x, cache, inputs, outputs = jax.block_until_ready(compiled(*operands))
    seconds = time.perf_counter() - started

    rows = []
    for at in (prompts // 2, prompts - 1):
        flat = ends - prompts + at
        rows.append(Rows(at, inputs[:, flat], outputs[:, flat]))
    x = _next_input(x[ends - 1], config, key)
    return State(x, cache, jnp.asarray(prompts, jnp.int32), jnp.int32(0)), rows, seconds


def _step(
    config: LayerConfig,
    implementation: str | None,
    params: tuple[LayerParams, ...],
    page_table: jax.Array,
    key: jax.Array,
    state: State,
) -> tuple[State, jax.Array, jax.Array]:
    """One token of every sequence through all layers, with one plan. Also returns what each layer saw and gave."""
    x, cache = state.x, state.cache
    slot_mapping = slots(page_table, state.kv_lens, PAGE)
    kv_lens = state.kv_lens + 1
    plan = plan_decode(kv_lens, num_heads=config.heads, cache=cache, q_len=1, implementation=implementation)
    inputs, outputs = [], []
    for layer, layer_params in enumerate(params):
        inputs.append(_normalised(x, config))
        y, cache = mla.decode(
            layer_params,
            config,
            inputs[-1][:, None],
            cache,
            page_table,
            kv_lens,
            slot_mapping,
            positions=state.kv_lens[:, None],
            layer=layer,
            plan=plan,
            implementation=implementation,
        )
        outputs.append(y[:, 0])
        x = x + y[:, 0]
    x = _next_input(x, config, jax.random.fold_in(key, state.step))
    return State(x, cache, kv_lens, state.step + 1), jnp.stack(inputs), jnp.stack(outputs)


def _decode(
    step: Any, state: State, steps: int, prompts: np.ndarray, heads: int
) -> tuple[State, list[Rows], list[tuple[int, float]]]:
    """The decode loop, with progress. Returns the last state, a few rows, and (step, tokens a second) as it went."""
    kept, rows, curve = {0, steps // 2, steps - 1}, [], []
    stretch = max(steps // 10, 1)
    begin, since = 0, time.perf_counter()
    for i in range(steps):
        state, inputs, outputs = step(state)
        if i in kept:
            rows.append(Rows(prompts + i, inputs, outputs))
        if (i + 1) % stretch == 0 or i + 1 == steps:
            jax.block_until_ready(state)
            now = time.perf_counter()
            rate = len(prompts) * (i + 1 - begin) / (now - since)
            show(f"  {heads} heads: step {i + 1}/{steps}, {rate:.0f} tokens/s", last=i + 1 == steps)
            curve.append((i + 1, rate))
            begin, since = i + 1, now
    return state, rows, curve


def _check(
    rows: list[Rows],
    weights: list[dict[str, np.ndarray]],
    cache: np.ndarray,
    page_table: np.ndarray,
    config: LayerConfig,
) -> float:
    """Error of the sampled rows: full attention over the stored latents, unabsorbed, in float64 NumPy.

    Relative, norm of the difference over norm: the larger one of the attention's output and the stored latents.
    """
    squares = np.zeros((2, 2))  # (latents, outputs), (difference, expected)
    for layer, published in enumerate(weights):
        wide = {name: np.asarray(weight, np.float64) for name, weight in published.items()}
        for b in range(min(len(page_table), CHECKED_SEQUENCES)):
            length = max(row.positions[b] for row in rows) + 1
            pages = cache[layer, page_table[b][page_table[b] >= 0]]
            latents = np.asarray(pages.reshape(-1, cache.shape[-1])[:length], np.float64)
            attend = _oracle(wide, latents, config)
            for row in rows:
                expected = attend(np.asarray(row.inputs[layer, b], np.float64), row.positions[b])
                found = (latents[row.positions[b]], np.asarray(row.outputs[layer, b], np.float64))
                for i, (f, e) in enumerate(zip(found, expected, strict=True)):
                    squares[i] += np.sum((f - e) ** 2), np.sum(e**2)
    return float(np.max(np.sqrt(squares[:, 0] / squares[:, 1])))


def _oracle(w: dict[str, np.ndarray], latents: np.ndarray, config: LayerConfig) -> Any:
    """attend(x [M], position) -> the latent row [576] that x should have stored, and the attention's output [M]."""

    def rms_norm(x, weight):
        return x / np.sqrt(np.mean(x * x) + config.rms_norm_eps) * weight

    def rotated(x, position):
        """Pairs of columns as complex numbers, turned."""
        rope = config.rope
        if rope is None:
            return x
        pairs = x.reshape(*x.shape[:-1], 32, 2) if rope.interleaved else np.stack(np.split(x, 2, axis=-1), -1)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * position * rope.frequencies) * rope.magnitude
        pairs = (turned.real, turned.imag)
        return np.stack(pairs, -1).reshape(x.shape) if rope.interleaved else np.concatenate(pairs, -1)

    up = (latents[:, : mla.LATENT] @ w["kv_b_proj"].T).reshape(len(latents), -1, mla.NOPE + mla.VALUE)
    nope, value, rope = up[..., : mla.NOPE], up[..., mla.NOPE :], latents[:, mla.LATENT :]

    def attend(x, position):
        seen = slice(position + 1)
        joint = w["kv_a_proj_with_mqa"] @ x
        latent, key = rms_norm(joint[: mla.LATENT], w["kv_a_layernorm"]), rotated(joint[mla.LATENT :], position)
        q = w["q_proj"] @ x if "q_proj" in w else w["q_b_proj"] @ rms_norm(w["q_a_proj"] @ x, w["q_a_layernorm"])
        q = q.reshape(-1, mla.HEAD_DIM)
        scores = (
            np.einsum("hd,nhd->hn", q[:, : mla.NOPE], nope[seen]) + rotated(q[:, mla.NOPE :], position) @ rope[seen].T
        )
        p = np.exp(config.scale * (scores - scores.max(axis=1, keepdims=True)))
        attended = np.einsum("hn,nhv->hv", p / p.sum(axis=1, keepdims=True), value[seen])
        gate = 1 / (1 + np.exp(-(w["g_proj"] @ x))) if "g_proj" in w else 1
        return np.concatenate([latent, key]), w["o_proj"] @ (attended.reshape(-1) * gate)

    return attend


def _print_table(results: list[Result]) -> None:
    print("\nRates of whole layers: the projections around the attention run through XLA.")
    print("heads  prefill tokens/s  decode tokens/s  relative error")
    for r in results:
        verdict = "PASS" if r.passed else "FAIL"
        print(f"{r.heads:5}  {r.prefill_rate:16.0f}  {r.decode_rate:15.0f}  {r.error:14.1e}  {verdict}")


def _plot(results: list[Result], file: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print(f"no plot: matplotlib is not installed (pip install 'jax_mla[examples]'), {file} is not written")
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for result in results:
        axes.plot(*zip(*result.curve, strict=True), label=f"{result.heads} heads")
    axes.set(xlabel="decode step", ylabel="tokens a second", ylim=(0, None))
    axes.legend()
    figure.savefig(file)
    print(f"wrote {file}")
