"""The layer beside transformers' attention modules: small random weights, saved by their code and loaded by ours.

Prompts are prefilled in chunks into a paged cache and then decoded; transformers attends to the whole sequence at once.
"""

import dataclasses
import itertools
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_mla import allocate_cache, plan_context, slots
from jax_mla.checkpoint import load_layer, load_layers, published_name
from jax_mla.layer import LayerConfig, absorb, decode, prefill, query_latent

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
save_file = pytest.importorskip("safetensors.torch").save_file

HIDDEN, HEADS, PAGE, LAYER = 96, 4, 16, 2
LENGTHS, PROMPTS, CUTS = (45, 23), (41, 19), ((0, 0), (17, 0), (34, 8), (41, 19))
TOPK = 8

GEOMETRY = {
    "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "num_hidden_layers": 4,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 32,
    "max_position_embeddings": 163840,
}  # fmt: skip


def rope(**more):
    yarn = {"factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
    return {"rope_theta": 10000.0, "rope_type": "yarn", **yarn, "mscale": 1.0, "mscale_all_dim": 1.0, **more}


PLAIN = {"rope_theta": 10000.0, "rope_type": "default"}

# Module of transformers, its classes' prefix, arguments of its configuration.
MODELS = {
    "V3": ("deepseek_v3", "DeepseekV3", {"q_lora_rank": 48, "rope_parameters": rope()}),
    "V3 without YaRN": ("deepseek_v3", "DeepseekV3", {"q_lora_rank": 48, "rope_parameters": PLAIN}),
    "V3 in halves": (
        "deepseek_v3", "DeepseekV3", {"q_lora_rank": 48, "rope_interleave": False, "rope_parameters": rope()}
    ),
    "K2": (
        "deepseek_v3", "DeepseekV3",
        {"q_lora_rank": 48, "rope_parameters": rope(rope_theta=50000.0, factor=32.0, beta_fast=1.0)},
    ),
    "two magnitudes": (
        "deepseek_v3", "DeepseekV3", {"q_lora_rank": 48, "rope_parameters": rope(mscale=1.4, mscale_all_dim=0.6)}
    ),
    "V2": (
        "deepseek_v2", "DeepseekV2", {"q_lora_rank": 48, "rope_parameters": rope(mscale=0.707, mscale_all_dim=0.707)}
    ),
    "V2-Lite": (
        "deepseek_v2", "DeepseekV2", {"q_lora_rank": None, "rope_parameters": rope(mscale=0.707, mscale_all_dim=0.707)}
    ),
    "V3.2": (
        "deepseek_v32", "DeepseekV32",
        {"q_lora_rank": 48, "rope_parameters": rope(), "index_topk": TOPK, "index_n_heads": 4, "index_head_dim": 128},
    ),
    "Kimi-Linear": ("kimi_linear", "KimiLinear", {"q_lora_rank": None}),
}  # fmt: skip


@dataclasses.dataclass
class Model:
    """One attention module of transformers with random weights, and the folder that these are saved in."""

    attention: object
    rotary: object | None
    directory: object
    tensors: dict

    @classmethod
    def make(cls, name, directory, dtype=torch.float32, fp8=False):
        module, prefix, arguments = MODELS[name]
        package = pytest.importorskip(f"transformers.models.{module}")
        config = getattr(package, prefix + "Config")(**GEOMETRY, **arguments)
        config._attn_implementation = "eager"
        modeling = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
        attention = getattr(modeling, prefix + "Attention")(config, layer_idx=LAYER).eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        for parameter in attention.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            matrix = parameter.ndim == 2
            parameter.copy_((noise * parameter.shape[-1] ** -0.5 if matrix else 1 + 0.1 * noise).to(dtype))
        tensors = {}
        for short, parameter in attention.state_dict().items():
            full = f"model.layers.{LAYER}.self_attn.{short}"
            tensors[full] = parameter.to(dtype)
            if fp8 and parameter.ndim == 2:
                tensors[full], tensors[full + "_scale_inv"], product = _quantised(parameter)
                parameter.copy_(product)
        rotary = getattr(modeling, prefix + "RotaryEmbedding", None)
        config.save_pretrained(directory)
        save_file(tensors, directory / "model.safetensors")
        return cls(attention, None if rotary is None else rotary(config), directory, tensors)

    def attend(self, x, positions):
        """[n, M] -> [n, M] of one whole sequence; of V3.2 also what its indexer chose, [n, K]."""
        n = len(x)
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        arguments = {"hidden_states": torch.tensor(x, dtype=torch.float32)[None], "attention_mask": mask}
        if self.rotary is not None:
            arguments["position_embeddings"] = self.rotary(torch.zeros(1), torch.tensor(positions)[None])
        chosen = []
        hook = None
        if hasattr(self.attention, "indexer"):
            hook = self.attention.indexer.register_forward_hook(lambda module, inputs, output: chosen.append(output))
        y = self.attention(**arguments)[0][0].numpy()
        if hook is not None:
            hook.remove()
        return y, chosen[0][0].numpy() if chosen else None


def _quantised(weight):
    """DeepSeek's blocks of 128 x 128 by torch: e4m3, scales, their product in fp32."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scale = (blocks.abs().amax((1, 3), keepdim=True) / 448).float()
    e4m3 = (blocks / scale).to(torch.float8_e4m3fn)
    product = (e4m3.float() * scale).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return e4m3.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous(), scale[:, 0, :, 0].contiguous(), product


class Sequences:
    """Inputs, positions and pages of the sequences, and a paged cache that holds NaN."""

    def __init__(self, dtype=jnp.float32, spread=1, size=1.0):
        rng = np.random.default_rng(0)
        self.dtype = dtype
        self.x = [np.asarray(rng.standard_normal((n, HIDDEN)) * size, dtype) for n in LENGTHS]
        self.positions = [np.arange(n, dtype=np.int32) * spread for n in LENGTHS]
        self.page_table = np.array([[4, 1, 6], [3, 0, -1]], np.int32)
        self.cache = jnp.full_like(allocate_cache(7, PAGE, dtype=dtype), jnp.nan)

    def rows(self, begins, ends):
        """Of tokens [begin, end) of each sequence: x, positions, slots, cu_q_lens."""
        spans = list(zip(begins, ends, strict=True))
        pick = lambda arrays: jnp.concatenate([a[b:e] for a, (b, e) in zip(arrays, spans, strict=True)])  # noqa: E731
        places = jnp.concatenate([jnp.arange(b, e, dtype=jnp.int32) for b, e in spans])
        request = jnp.asarray(np.repeat(range(len(spans)), np.subtract(ends, begins)), jnp.int32)
        own = slots(self.page_table, places, PAGE, request=request)
        return (
            pick(self.x),
            pick(self.positions),
            own,
            jnp.asarray(np.cumsum([0, *np.subtract(ends, begins)]), jnp.int32),
        )

    def want(self, model):
        return [model.attend(np.asarray(x, np.float32), p) for x, p in zip(self.x, self.positions, strict=True)]


jit_prefill = jax.jit(prefill, static_argnums=1)
jit_decode = jax.jit(decode, static_argnums=1)


def dense(params, config, sequences):
    """Every sequence's outputs: prompts in chunks over their cached context, then one token at a time."""
    cache, outputs = sequences.cache, [[] for _ in LENGTHS]
    plan = partial(plan_context, workspace_tokens=32, page_size=PAGE, max_chunks=8)
    for begins, ends in itertools.pairwise(CUTS):
        x, positions, own, cu_q_lens = sequences.rows(begins, ends)
        y, cache = jit_prefill(
            params, config, x, cache, own, cu_q_lens,
            positions=positions, page_table=sequences.page_table, context=plan(begins),
        )  # fmt: skip
        for b, (begin, end) in enumerate(itertools.pairwise(np.asarray(cu_q_lens))):
            outputs[b].append(y[begin:end])
    for step in range(LENGTHS[0] - PROMPTS[0]):
        begins = np.add(PROMPTS, step)
        x, positions, own, _ = sequences.rows(begins, begins + 1)
        y, cache = jit_decode(
            params, config, x[:, None], cache, sequences.page_table, jnp.asarray(begins + 1, jnp.int32), own[:, None],
            positions=positions[:, None],
        )  # fmt: skip
        for b in range(len(LENGTHS)):
            outputs[b].append(y[b])
    return [np.concatenate([np.asarray(y, np.float64) for y in ys]) for ys in outputs]


def assert_close(got, want, tolerance):
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        assert np.linalg.norm(g - w) / np.linalg.norm(w) < tolerance


DENSE = [name for name in MODELS if name != "V3.2"]


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize(("spread", "tolerance"), [(1, 2e-5), (50, 5e-4)], ids=["near", "far"])
def test_chunks_then_decode(tmp_path, name, spread, tolerance):
    """`far` spreads the positions, where fp32 angles of both sides differ by 1e-4 and more."""
    model, sequences = Model.make(name, tmp_path), Sequences(spread=spread)
    config = LayerConfig.from_json(tmp_path)
    params = absorb(load_layer(tmp_path, LAYER, config), config, jnp.float32)
    assert_close(dense(params, config, sequences), [y for y, _ in sequences.want(model)], tolerance)


@pytest.mark.parametrize("name", ["V3", "V2", "K2", "two magnitudes", "V3 without YaRN"])
def test_frequencies_and_scale(tmp_path, name):
    model = Model.make(name, tmp_path)
    config = LayerConfig.from_json(tmp_path)
    np.testing.assert_allclose(config.rope.frequencies, model.rotary.inv_freq.numpy(), rtol=1e-6)
    assert config.rope.magnitude == pytest.approx(model.rotary.attention_scaling, rel=1e-9)
    assert config.scale == pytest.approx(model.attention.scaling, rel=1e-9)


@pytest.mark.parametrize("name", ["V3", "V2", "Kimi-Linear"])
def test_latent_norms_epsilon(tmp_path, name):
    """Inputs so small that an epsilon of 1e-5 would make the latents less than half as large."""
    model, sequences = Model.make(name, tmp_path), Sequences(size=1e-3)
    config = LayerConfig.from_json(tmp_path)
    params = absorb(load_layer(tmp_path, LAYER, config), config, jnp.float32)
    assert_close(dense(params, config, sequences), [y for y, _ in sequences.want(model)], 2e-5)


@pytest.mark.parametrize("name", ["V3", "V2-Lite", "Kimi-Linear"])
def test_bfloat16(tmp_path, name):
    model, sequences = Model.make(name, tmp_path, torch.bfloat16), Sequences(jnp.bfloat16)
    config = LayerConfig.from_json(tmp_path)
    params = absorb(load_layer(tmp_path, LAYER, config), config)
    assert_close(dense(params, config, sequences), [y for y, _ in sequences.want(model)], 1e-2)


@pytest.mark.parametrize("devices", [1, 4])
def test_fp8_weights_on_every_rank(tmp_path, devices):
    """Weights in e4m3 with scales, written by safetensors; the parts of all devices sum to the block."""
    model, sequences = Model.make("V3", tmp_path, fp8=True), Sequences()
    assert model.tensors[published_name(LAYER, "q_b_proj")].dtype == torch.float8_e4m3fn
    config = LayerConfig.from_json(tmp_path, devices=devices)
    total = [0.0] * len(LENGTHS)
    for rank in range(devices):
        ((number, weights),) = load_layers(tmp_path, config, rank=rank, progress=False)
        assert number == LAYER
        part = dense(absorb(weights, config, jnp.float32), config, sequences)
        total = [t + y for t, y in zip(total, part, strict=True)]
    assert_close(total, [y for y, _ in sequences.want(model)], 2e-5)


def test_chosen_slots(tmp_path):
    """DeepSeek-V3.2: what transformers' indexer chose, as slots, in a chunk of prompts and then token by token."""
    model, sequences = Model.make("V3.2", tmp_path), Sequences()
    config = LayerConfig.from_json(tmp_path)
    params = absorb(load_layer(tmp_path, LAYER, config), config, jnp.float32)
    want = sequences.want(model)
    indices = []
    for b, (_, tokens) in enumerate(want):
        seen = np.where(tokens <= np.arange(len(tokens))[:, None], tokens, -1).astype(np.int32)
        assert (seen[TOPK:] >= 0).sum() >= (len(tokens) - TOPK) * TOPK
        rows = jnp.full(seen.size, b, jnp.int32)
        indices.append(slots(sequences.page_table, jnp.asarray(seen.ravel()), PAGE, request=rows).reshape(seen.shape))

    def chosen(begins, ends):
        return jnp.concatenate([i[b:e] for i, b, e in zip(indices, begins, ends, strict=True)])

    x, positions, own, _ = sequences.rows((0, 0), PROMPTS)
    y, cache = jit_decode(
        params, config, x, sequences.cache, None, None, own, positions=positions, indices=chosen((0, 0), PROMPTS)
    )
    outputs = [[y[: PROMPTS[0]]], [y[PROMPTS[0] :]]]
    for step in range(LENGTHS[0] - PROMPTS[0]):
        span = (np.add(PROMPTS, step), np.add(PROMPTS, step + 1))
        x, positions, own, _ = sequences.rows(*span)
        y, cache = jit_decode(
            params, config, x[:, None], cache, None, None, own[:, None],
            positions=positions[:, None], indices=chosen(*span)[:, None],
        )  # fmt: skip
        for b in range(2):
            outputs[b].append(y[b])
    assert_close([np.concatenate(ys) for ys in outputs], [y for y, _ in want], 2e-5)

    latent = query_latent(params, config, jnp.asarray(sequences.x[0]))
    theirs = model.attention.q_a_layernorm(model.attention.q_a_proj(torch.tensor(sequences.x[0])))
    np.testing.assert_allclose(latent, theirs.numpy(), atol=1e-5)


def test_kimi_k3_reads_its_own_configuration(tmp_path):
    """transformers has no Kimi-K3: its layer is Kimi-Linear's with a query latent and a gate, which a factor undoes."""
    model = Model.make("Kimi-Linear", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text()) | {"mla_use_nope": True, "mla_use_output_gate": True}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k3", "text_config": text}))
    gate = {published_name(LAYER, "g_proj"): torch.zeros(HEADS * 128, HIDDEN)}
    save_file(model.tensors | gate, tmp_path / "model.safetensors")
    config, sequences = LayerConfig.from_json(tmp_path), Sequences()
    assert config == LayerConfig(HIDDEN, HEADS, 1, None)
    params = absorb(load_layer(tmp_path, LAYER, config), config, jnp.float32)
    got = dense(params, config, sequences)
    assert_close([2 * y for y in got], [y for y, _ in sequences.want(model)], 2e-5)  # sigmoid(0) is one half
