# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Decoding with Kimi-K3's attention
#
# Kimi-K3's attention layers keep one short vector a token in their cache, the *latent*, where other models keep a key
# and a value for each head. This notebook goes from a checkpoint's files to decoding, and then looks at what happens on
# the way: the cache, 24 heads, updates in place, speculative decoding, a prompt of 32,768 tokens, and how a step's time
# grows with the context.
#
# The weights are small and random, so it shows speed and exactness, and writes no text. It runs on a GPU where JAX
# finds one, and else on the CPU. It is the file `examples/kimi_k3_decode.py` too, with
# `pip install 'jax_mla[examples]'`.

# %%
import dataclasses
import itertools
import json
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jax_mla
from jax_mla import checkpoint, layer
from jax_mla.heads import HeadCounts

PAGE = 64  # tokens
ON_GPU = jax.default_backend() == "gpu"
print(f"jax_mla {jax_mla.__version__}, jax {jax.__version__}, on {jax.devices()[0].device_kind}")


def milliseconds(*calls, repeats=5):
    """Of each call the shortest time, after a first one that compiles. The calls take turns."""
    for call in calls:
        jax.block_until_ready(call())
    best = [float("inf")] * len(calls)
    for _ in range(repeats):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            jax.block_until_ready(call())
            best[i] = min(best[i], 1e3 * (time.perf_counter() - start))
    return best


def error(got, want):
    """Relative: norm of the difference over norm."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


# %% [markdown]
# ## From its files to decoding in ten lines
#
# A checkpoint is a folder: `config.json`, safetensors shards, and an index that says which tensor is where. In place of
# Kimi-K3's we write one of four layers with its 96 heads and its widths, over a smaller hidden size.

# %%
LAYERS = 4
WHOLE = layer.LayerConfig(hidden_size=512, num_heads=96, q_lora_rank=256)
folder = tempfile.TemporaryDirectory()
files = Path(folder.name)
tensors = {
    f"language_model.{checkpoint.published_name(number, name)}": weight
    for number in range(LAYERS)
    for name, weight in layer.init_weights(jax.random.key(number), WHOLE).items()
}
checkpoint.write_checkpoint(files, tensors)
(files / "config.json").write_text(json.dumps(WHOLE.to_json()))
for file in sorted(files.iterdir()):
    print(f"{file.stat().st_size / 1e6:8.3f} MB  {file.name}")

# %% [markdown]
# Now the ten lines, for one layer and two sequences that begin with nothing cached. A model calls `layer.decode` for
# each of its layers, between norms and experts of its own.

# %%
x = jax.random.normal(jax.random.key(0), (2, 1, WHOLE.hidden_size), jnp.bfloat16)

config = layer.LayerConfig.from_json(files, devices=4)  # 24 of 96 heads are this device's
params = layer.absorb(checkpoint.load_layer(files, 3, config, rank=0), config)
cache = jax_mla.allocate_cache(num_pages=16, page_size=PAGE)
page_table = jnp.array([[5, 2], [7, 0]], jnp.int32)  # each sequence's pages, in any order
decode = jax.jit(layer.decode, static_argnums=1, donate_argnums=3)
kv_lens = jnp.ones(2, jnp.int32)  # cached tokens, the new one included
for _ in range(8):
    own = jax_mla.slots(page_table, kv_lens[:, None] - 1, PAGE)  # where the new token's latent goes
    x, cache = decode(params, config, x, cache, page_table, kv_lens, own)
    kv_lens += 1

print(f"y {x.shape} in {x.dtype}; {np.count_nonzero(np.asarray(cache, np.float32).any(-1))} slots of the cache in use")

# %% [markdown]
# ## What the cache holds
#
# 512 latent values and 64 rope values a token, whatever the number of heads. fp8 layouts halve that again: with one
# scale for the whole cache, or, in `fp8_ds_mla`, with a scale for each 128 latent values and rope values in bf16.

# %%
LAYOUTS = ("float32", "bfloat16", "fp8_ds_mla", "float8_e4m3fn")
MLA_LAYERS, CONTEXT = 24, 131072  # of Kimi-K3's 93 layers 24 are such

sizes = {"keys and values of 96 heads": 96 * (192 + 128) * 2}  # in bf16: keys of 192, values of 128
for dtype in LAYOUTS:
    one = jax.eval_shape(partial(jax_mla.allocate_cache, 1, 1, dtype=dtype))
    sizes[f"latents, {dtype}"] = one.size * one.dtype.itemsize

print(f"{'':29}bytes a token and layer   GiB for {CONTEXT} tokens, {MLA_LAYERS} layers")
for name, size in sizes.items():
    print(f"{name:28}{size:24}{size * CONTEXT * MLA_LAYERS / 2**30:28.2f}")

figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
bars = axes.barh(list(sizes), list(sizes.values()), color=["#888888", *["#4477aa"] * len(LAYOUTS)])
axes.bar_label(bars, [f"{size:,}" for size in sizes.values()], padding=3)
axes.set(xscale="log", xlabel="cache, bytes a token and layer", xlim=(300, 2e5))
axes.invert_yaxis()

# %% [markdown]
# ## 24 heads
#
# 96 heads on four devices are 24 a device, and many kernels take multiples of 16 alone. There are two ways out: pad the
# queries to 32 heads and drop the surplus, or give the kernel tiles of any height, whose rows beyond the last head are
# masked. `explain` says which of them serves a call. The sizes that follow are in one `HeadSpecification`, so that
# planner, kernel and reducer cannot disagree.

# %%
scale = 192**-0.5
batch, tokens = 4, 4096
pages = batch * tokens // PAGE
keys = jax.random.split(jax.random.key(1), 2)
cache = jax.random.normal(keys[0], (pages, PAGE, 576), jnp.bfloat16)
page_table = jax.random.permutation(keys[1], pages).reshape(batch, -1).astype(jnp.int32)
kv_lens = jnp.full(batch, tokens, jnp.int32)

# The same table of kernels, as if they took multiples of 16 alone: then the wrapper pads.
sixteens = HeadCounts(((16, 128, 16),))
multiples_of_16 = [
    dataclasses.replace(row, planner_heads=sixteens, reducer_heads=sixteens)
    for row in jax_mla.capabilities()
    if row.operation == "mla_decode"
]

for table in (jax_mla.capabilities(), multiples_of_16):
    with jax_mla.override_capabilities(table):
        choice = jax_mla.explain(num_heads=24)
        print(f"{choice}\n  {choice.heads}")

print(f"\n{batch} sequences of {tokens} tokens\nheads   rows native   rows padded   ms native   ms padded   difference")
for heads in (24, 17, 12, 96):
    q = jax.random.normal(jax.random.key(heads), (batch, 1, heads, 576), jnp.bfloat16)
    calls, results, rows = [], [], []
    for table in (jax_mla.capabilities(), multiples_of_16):
        with jax_mla.override_capabilities(table):  # the choice is made while tracing
            calls.append(partial(jax.jit(partial(jax_mla.mla_decode, scale=scale)), q, cache, page_table, kv_lens))
            results.append(calls[-1]()[0])
            specification = jax_mla.explain(num_heads=heads).heads
            rows.append(specification.padded_heads if specification else heads)
    times = milliseconds(*calls, repeats=20)
    difference = error(*results)
    assert difference < 1e-2
    print(f"{heads:5}{rows[0]:14}{rows[1]:14}{times[0]:12.2f}{times[1]:12.2f}{difference:13.1e}")

# %% [markdown]
# ## A decode step under jit, its cache donated
#
# All layers share one stacked cache, `[layers, pages, 64, 576]`, which is the carry of a `lax.scan` over the layers.
# Donated to `jit`, it is updated in place: its address stays. Without donation JAX has to keep the old one, and each
# step copies it, tokens and empty pages alike.

# %%
loaded = checkpoint.load_layers(files, config, rank=0, progress=False)
layers = [layer.absorb(weights, config) for _, weights in loaded]
PARAMS = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def through_layers(attend, x, cache):
    """attend(params, x, cache, layer) -> y, cache, for each layer, with a norm before and a residual around it."""

    def block(carry, scanned):
        x, cache = carry
        number, layer_params = scanned
        normalised = layer.rms_norm(x, jnp.ones(config.hidden_size), 1e-6)
        y, cache = attend(layer_params, normalised, cache, number)
        return (x + y, cache), None

    (x, cache), _ = jax.lax.scan(block, (x, cache), (jnp.arange(LAYERS, dtype=jnp.int32), PARAMS))
    return x, cache


def prefill_step(cache, x, own, cu_q_lens):
    """x [T, hidden]: prompts, one after another."""
    return through_layers(lambda p, x, cache, i: layer.prefill(p, config, x, cache, own, cu_q_lens, layer=i), x, cache)


def decode_step(cache, x, kv_lens, page_table):
    """x [B, 1, hidden]: the newest token of each sequence. One plan cuts the work of all layers."""
    own = jax_mla.slots(page_table, kv_lens[:, None] - 1, PAGE)
    plan = jax_mla.plan_decode(kv_lens, num_heads=config.heads, cache=cache)

    def attend(p, x, cache, i):
        return layer.decode(p, config, x, cache, page_table, kv_lens, own, layer=i, plan=plan)

    return through_layers(attend, x, cache)


prompts = np.array([500, 120, 900, 64])
cache = jax_mla.allocate_cache(256, PAGE, layers=LAYERS)
page_table = jnp.asarray(np.random.default_rng(0).permutation(256)[:80].reshape(4, 20), jnp.int32)
positions = np.concatenate([np.arange(n) for n in prompts]).astype(np.int32)
request = np.repeat(np.arange(4), prompts).astype(np.int32)
own = jax_mla.slots(page_table, positions, PAGE, request=request)
x = jax.random.normal(jax.random.key(2), (len(positions), config.hidden_size), jnp.bfloat16)
cu_q_lens = jnp.asarray(np.append(0, prompts.cumsum()), jnp.int32)
_, cache = jax.jit(prefill_step, donate_argnums=0)(cache, x, own, cu_q_lens)

continuation = jax.random.normal(jax.random.key(3), (4, 24, config.hidden_size), jnp.bfloat16)  # tokens to come
kv_lens = jnp.asarray(prompts + 1, jnp.int32)
print(f"cache {cache.shape}: {cache.nbytes / 1e6:.0f} MB")
(undonated,) = milliseconds(partial(jax.jit(decode_step), cache, continuation[:, :1], kv_lens, page_table))

prompt_cache = jnp.copy(cache)  # for the next section
donated_step = jax.jit(decode_step, donate_argnums=0)
donated_step = donated_step.lower(cache, continuation[:, :1], kv_lens, page_table).compile()
address, outputs, times = cache.unsafe_buffer_pointer(), [], []
for i in range(continuation.shape[1]):
    start = time.perf_counter()
    y, cache = jax.block_until_ready(donated_step(cache, continuation[:, i : i + 1], kv_lens + i, page_table))
    times.append(1e3 * (time.perf_counter() - start))
    outputs.append(y[:, 0])
one_by_one = np.asarray(jnp.stack(outputs, axis=1), np.float32)

assert cache.unsafe_buffer_pointer() == address
print(f"{len(outputs)} steps of 4 sequences through {LAYERS} layers, the cache at the same address as before")
print(f"a step takes {min(times):.1f} ms with the cache donated, {undonated:.1f} ms without")

# %% [markdown]
# ## Speculative decoding: four tokens drafted, a different number accepted
#
# A small model drafts up to four tokens, and one step of the large one verifies them all. Of each sequence a different
# number was drafted, and a different number is accepted. So queries are *ragged*: sequence b has the rows
# `cu_q_lens[b]` to `cu_q_lens[b + 1]` of `[T, hidden]`, and each of its n rows sees the keys up to its own place. Sizes
# stay the same (rows at the end that nobody owns are padding, their slots -1), so that one compiled program serves all
# steps.
#
# A rejected token's latent stays where it was written, behind `kv_lens`, where nothing is read, until the next step
# writes over it.
#
# Here the true continuation is the one decoded above. A draft has its first tokens right, and then noise; how many are
# right is drawn at random. What comes out for accepted tokens has to be what came out one by one.

# %%
DRAFTED = 4
ROWS = 4 * (1 + DRAFTED)


@partial(jax.jit, donate_argnums=0)
def verify_step(cache, x, kv_lens, own, cu_q_lens):
    """x [T, hidden]: of each sequence its newest token and those that were drafted."""
    ragged = {"cu_q_lens": cu_q_lens, "max_q_len": 1 + DRAFTED}
    plan = jax_mla.plan_decode(kv_lens, num_heads=config.heads, cache=cache, **ragged)

    def attend(p, x, cache, i):
        return layer.decode(p, config, x, cache, page_table, kv_lens, own, layer=i, plan=plan, **ragged)

    return through_layers(attend, x, cache)


rng = np.random.default_rng(1)
true, wanted = np.asarray(continuation, np.float32), continuation.shape[1]
done, cache, verified, steps = np.zeros(4, int), prompt_cache, np.zeros_like(one_by_one), 0
print("step   rows of each   accepted drafts   cu_q_lens             tokens so far")
while (done < wanted).any():
    drafted = np.minimum(rng.integers(1, DRAFTED + 1, 4), np.maximum(wanted - done - 1, 0))
    accepted = rng.integers(0, drafted + 1)
    rows = np.where(done < wanted, 1 + drafted, 0)  # a sequence that is done has no row
    cu_q_lens = np.append(0, rows.cumsum())
    x = rng.standard_normal((ROWS, config.hidden_size)).astype(np.float32)  # noise, where no token is right
    position, request = np.full(ROWS, -1), np.zeros(ROWS, int)
    for b, (begin, end) in enumerate(itertools.pairwise(cu_q_lens)):
        right = min(1 + accepted[b], end - begin)
        x[begin : begin + right] = true[b, done[b] : done[b] + right]
        position[begin:end] = prompts[b] + done[b] + np.arange(end - begin)
        request[begin:end] = b
    own = jax_mla.slots(page_table, jnp.asarray(position, jnp.int32), PAGE, request=jnp.asarray(request, jnp.int32))
    kv_lens = jnp.asarray(prompts + done + rows, jnp.int32)
    y, cache = verify_step(cache, jnp.asarray(x, jnp.bfloat16), kv_lens, own, jnp.asarray(cu_q_lens, jnp.int32))
    for b, begin in enumerate(cu_q_lens[:-1]):
        right = min(1 + accepted[b], rows[b])
        verified[b, done[b] : done[b] + right] = np.asarray(y[begin : begin + right], np.float32)
        done[b] += right
    steps += 1
    print(f"{steps:4}   {rows!s:12}   {accepted!s:15}   {cu_q_lens!s:19}   {done}")

assert error(verified, one_by_one) < 1e-2
print(f"\n{wanted} tokens of each sequence in {steps} steps, relative difference {error(verified, one_by_one):.1e}")

# %% [markdown]
# ## A prompt of 32,768 tokens, through the context scan
#
# Long prompts come in parts. A part's tokens attend to themselves, and to all that is cached of their sequence. With
# thousands of queries it is cheaper to make whole keys and values of the cached latents than to attend to the latents,
# but of a long context there is no room for them. So `plan_context` cuts the context into chunks that fit a
# workspace, and the scan makes the keys and values of one chunk, attends, merges, and goes on.
#
# The rule of the plan, for four requests with 200, 48, 32 and 0 cached tokens, pages of 16 and a workspace of 128: a
# request goes on in the next chunk where it does not fit.

# %%
plan = jax_mla.plan_context([200, 48, 32, 0], workspace_tokens=128, page_size=16)
for chunk in range(int(plan.num_chunks)):
    counts = np.diff(plan.cu_kv_lens[chunk])
    pieces = [f"request {b}: tokens {plan.starts[chunk, b]} to {plan.starts[chunk, b] + n - 1}"
              for b, n in enumerate(counts) if n]  # fmt: skip
    print(f"chunk {chunk}  " + "; ".join(pieces))

# %% [markdown]
# Now the long prompt: eight parts of 4,096 tokens, a workspace of 4,096 tokens. On a GPU with 24 heads; two CPU cores
# get the two heads that one of 48 devices would have, for this section to end in seconds. The last 64 tokens are then
# decoded once more, over the cached latents: another way of computing, and the same attention.

# %%
share = dataclasses.replace(config, devices=4 if ON_GPU else 48)
share_params = layer.absorb(checkpoint.load_layer(files, 0, share), share)
PROMPT, PART, WORKSPACE = 32768, 4096, 4096
x = jax.random.normal(jax.random.key(4), (PROMPT, share.hidden_size), jnp.bfloat16)
cache = jax_mla.allocate_cache(PROMPT // PAGE, PAGE)
page_table = jax.random.permutation(jax.random.key(5), PROMPT // PAGE)[None].astype(jnp.int32)
own = jax_mla.slots(page_table, jnp.arange(PROMPT, dtype=jnp.int32)[None], PAGE)[0]
one_prompt = jnp.array([0, PART], jnp.int32)
prefill = jax.jit(layer.prefill, static_argnums=1, donate_argnums=3)

cached, seconds = list(range(0, PROMPT, PART)), []
for begin in (0, *cached):  # the first part twice: the first time compiles
    part = slice(begin, begin + PART)
    # Room for 8 chunks from the start, so that all parts run the same program.
    plan = jax_mla.plan_context([begin], workspace_tokens=WORKSPACE, page_size=PAGE, max_chunks=8)
    operands = (share_params, share, x[part], cache, own[part], one_prompt)
    start = time.perf_counter()
    y, cache = jax.block_until_ready(prefill(*operands, page_table=page_table, context=plan))
    seconds.append(time.perf_counter() - start)
seconds = seconds[1:]

absorbed, _ = jax.jit(layer.decode, static_argnums=1)(
    share_params, share, x[None, -64:], cache, page_table, jnp.array([PROMPT], jnp.int32), own[None, -64:]
)
difference = error(absorbed[0], y[-64:])
assert difference < 1e-2
workspace = WORKSPACE * (576 + share.heads * (192 + 256)) * 2
whole = PROMPT * share.heads * (192 + 256) * 2
print(f"{PROMPT} tokens, {share.heads} heads: {sum(seconds):.1f} s in {len(seconds)} parts")
print(f"workspace {workspace / 1e6:.0f} MB; keys and values of the whole prompt would take {whole / 1e6:.0f} MB")
print(f"the last 64 tokens decoded over the latents: relative difference {difference:.1e}")

figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
axes.bar(np.array(cached) / 1024, seconds, width=3, color="#4477aa")
axes.set(
    xlabel="tokens cached before the part (x 1024)",
    ylabel=f"time of a part of {PART} tokens, s",
    title=f"prefill of {PROMPT} tokens through the context scan, {share.heads} heads",
)
axes.set_xticks(np.array(cached) / 1024)
axes.grid(axis="y", alpha=0.3)

# %% [markdown]
# ## A step's time against the context's length
#
# `mla_decode` beside `implementation="xla"`, the library's own `jax.numpy` path: pages gathered into one array, then
# einsums. One sequence, 24 heads. Both axes are logarithmic: one call's cost grows with the tokens it reads, and the
# kernel reads each of them once, where it lies.

# %%
lengths = [1024, 2048, 4096, 8192, 16384, 32768]
batch = 1
pages = batch * lengths[-1] // PAGE
cache = jax.random.normal(jax.random.key(6), (pages, PAGE, 576), jnp.bfloat16)
whole_table = jax.random.permutation(jax.random.key(7), pages).reshape(batch, -1).astype(jnp.int32)
q = jax.random.normal(jax.random.key(8), (batch, 1, 24, 576), jnp.bfloat16)

native = str(jax_mla.explain(num_heads=24).implementation)
times = {native: [], "xla": []}
for length in lengths:
    operands = (q, cache, whole_table[:, : length // PAGE], jnp.full(batch, length, jnp.int32))
    calls = [
        partial(jax.jit(partial(jax_mla.mla_decode, scale=scale, implementation=name)), *operands) for name in times
    ]
    for measured, best in zip(times.values(), milliseconds(*calls, repeats=5), strict=True):
        measured.append(best)

print(f"cached tokens a sequence   {native}, ms   xla, ms   times faster")
for length, fast, slow in zip(lengths, times[native], times["xla"], strict=True):
    print(f"{length:24}{fast:{len(native) + 7}.2f}{slow:10.2f}{slow / fast:15.1f}")

figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for (name, measured), marker in zip(times.items(), "os", strict=True):
    axes.plot(lengths, measured, marker=marker, label=name)
axes.set_xscale("log", base=2)
axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
axes.set(
    yscale="log",
    xlabel="cached tokens a sequence",
    ylabel="time of one mla_decode, ms",
    title=f"{batch} sequence, 24 heads, bfloat16, pages of {PAGE} tokens",
)
axes.legend(title="implementation")
axes.grid(True, which="major", alpha=0.3)

# %% [markdown]
# ## What would serve a call, here and elsewhere
#
# `explain` matches a call with the table of what is compiled in, for this machine or for another target; no GPU is
# needed to ask. A module that this build does not have is named as such, and XLA serves the call. So it does where
# kernels have not passed their tests on hardware yet: those serve a call that asks for them by name.

# %%
TARGETS = {"this machine": None, "H200 (sm_90)": "sm_90", "MI300X (gfx942)": "gfx942", "MI355X (gfx950)": "gfx950"}
for name, target in TARGETS.items():
    fp8 = "float8_e4m3fnuz" if target == "gfx942" else "float8_e4m3fn"  # the format that the hardware has
    calls = {
        "mla_decode, 24 heads, bf16": {"operation": "mla_decode"},
        "mla_decode, 24 heads, fp8 cache": {"operation": "mla_decode", "cache_dtype": fp8},
        "mla_sparse_decode, bf16": {"operation": "mla_sparse_decode"},
        "mla_prefill, bf16": {"operation": "mla_prefill"},
        "mla_context, bf16": {"operation": "mla_context"},
        "update_cache, bf16": {"operation": "update_cache"},
    }
    print(name)
    for call, arguments in calls.items():
        choice = jax_mla.explain(**arguments, target=target)
        print(f"  {call:32} {choice.implementation:18} {choice.reason}")
        rows = () if choice.row else jax_mla.capabilities(target or choice.platform)
        by_name = [row.implementation for row in rows if row.operation == arguments["operation"] and row.by_name]
        for implementation in dict.fromkeys(by_name):
            choice = jax_mla.explain(**arguments, target=target, implementation=implementation)
            print(f"  {'  by name':32} {choice.implementation:18} {choice.reason}")

folder.cleanup()
