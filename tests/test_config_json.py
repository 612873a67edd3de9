"""config.json of every model of the family, and the message for what does not fit."""

import json
import re

import pytest

from jax_mla.layer import LayerConfig, Rope, Yarn

WIDTHS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}


def published(model_type, hidden_size, heads, q_lora_rank, **more):
    geometry = {"hidden_size": hidden_size, "num_attention_heads": heads, "num_key_value_heads": heads}
    return {"model_type": model_type, "q_lora_rank": q_lora_rank, "rms_norm_eps": 1e-5, **geometry, **WIDTHS, **more}


def yarn(factor, mscale, beta_fast=32.0):
    return Yarn(float(factor), 4096, beta_fast, 1.0, mscale, mscale)


# The keys of the published files that concern attention, and what they mean.
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
V3 = published(
    "deepseek_v3", 7168, 128, 1536, attention_bias=False, rope_theta=10000, quantization_config=FP8,
    rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
)  # fmt: skip
V2_LITE = published(
    "deepseek_v2", 2048, 16, None, rope_theta=10000, rope_scaling=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
)
K2 = published(
    "kimi_k2", 7168, 64, 1536, rope_theta=50000.0,
    rope_scaling=YARN | {"beta_fast": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
)  # fmt: skip
KIMI_LINEAR = published("kimi_linear", 2304, 32, None, mla_use_nope=True, rope_theta=10000.0, rope_scaling=None)
K3_TEXT = published("kimi_linear", 7168, 96, 1536, mla_use_nope=True, mla_use_output_gate=True)

V3_LAYER = LayerConfig(7168, 128, 1, 1536, rope=Rope(10000.0, yarn(40, 1.0)), gate=False)
K3_LAYER = LayerConfig(7168, 96, 1, 1536)


@pytest.mark.parametrize(
    ("values", "config"),
    [
        (V3, V3_LAYER),
        (V3 | {"model_type": "deepseek_v32", "index_topk": 2048}, V3_LAYER),
        (V2_LITE, LayerConfig(2048, 16, 1, None, rope=Rope(10000.0, yarn(40, 0.707)), gate=False)),
        (K2, LayerConfig(7168, 64, 1, 1536, rope=Rope(50000.0, yarn(32, 1.0, 1.0)), gate=False)),
        ({"model_type": "kimi_k25", "text_config": K2}, LayerConfig.from_json(K2)),
        (KIMI_LINEAR, LayerConfig(2304, 32, 1, None, gate=False)),
        ({"model_type": "kimi_k3", "text_config": K3_TEXT}, K3_LAYER),
        (K3_TEXT | {"model_type": "kimi_k3"}, K3_LAYER),
        (V3 | {"rope_scaling": None}, LayerConfig(7168, 128, 1, 1536, rope=Rope(10000.0), gate=False)),
        (V3 | {"rope_interleave": False, "rope_scaling": None},
         LayerConfig(7168, 128, 1, 1536, rope=Rope(10000.0, None, False), gate=False)),
        (V3 | {"rope_theta": None, "rope_scaling": None,
               "rope_parameters": YARN | {"rope_theta": 1e4, "rope_type": "yarn", "mscale": 1, "mscale_all_dim": 1}},
         V3_LAYER),
        (V3 | {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}},
         LayerConfig(7168, 128, 1, 1536, rope=Rope(5000.0), gate=False)),
    ],
    ids=["V3", "V3.2", "V2-Lite", "K2", "K2.5", "Kimi-Linear", "K3", "K3 alone", "no YaRN", "halves", "transformers",
         "transformers, no YaRN"],
)  # fmt: skip
def test_published_configurations(tmp_path, values, config):
    assert LayerConfig.from_json(values) == config
    assert hash(LayerConfig.from_json(values)) == hash(config)
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert LayerConfig.from_json(tmp_path) == LayerConfig.from_json(str(tmp_path / "config.json")) == config
    assert LayerConfig.from_json(tmp_path, devices=4).heads == config.num_heads // 4
    assert LayerConfig.from_json(config.to_json()) == config


def test_latent_norms_keep_their_own_epsilon():
    """The files' rms_norm_eps is that of the other norms: the modelling code gives the latents' none, which is 1e-6."""
    for values in (V3, KIMI_LINEAR, K3_TEXT | {"model_type": "kimi_k3"}):
        assert values["rms_norm_eps"] == 1e-5
        assert LayerConfig.from_json(values).rms_norm_eps == LayerConfig().rms_norm_eps == 1e-6


def test_scale():
    """DeepSeek-V3's published number: 0.1 * ln(40) + 1 = 1.3689 squared; without YaRN 192 ** -0.5 alone."""
    assert V3_LAYER.scale == pytest.approx(0.1352, abs=1e-4)
    assert K3_LAYER.scale == 192**-0.5


def scaling(**values):
    return V3 | {"rope_scaling": V3["rope_scaling"] | values}


def without(name):
    return {key: value for key, value in V3.items() if key != name}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (V3 | {"model_type": "llama"}, "config: model_type is 'llama'; expected 'deepseek_v2' or 'deepseek_v3' or "),
        (without("model_type"), "config: model_type is None; expected 'deepseek_v2'"),
        ({"model_type": "kimi_k3", "text_config": K3_TEXT | {"model_type": "qwen"}},
         "config: text_config.model_type is 'qwen'; expected"),
        (without("hidden_size"), "config: hidden_size is missing; expected an integer above 0"),
        (V3 | {"num_attention_heads": 0}, "num_attention_heads is 0; expected an integer above 0"),
        (V3 | {"num_attention_heads": "128"}, "num_attention_heads is '128'; expected an integer above 0"),
        (V3 | {"num_key_value_heads": 8}, "num_key_value_heads is 8; expected 128"),
        (V3 | {"q_lora_rank": 1.5}, "q_lora_rank is 1.5; expected an integer above 0"),
        (V3 | {"kv_lora_rank": 256}, "kv_lora_rank is 256; expected 512"),
        (without("qk_rope_head_dim"), "qk_rope_head_dim is missing; expected 64"),
        (V3 | {"qk_nope_head_dim": 64}, "qk_nope_head_dim is 64; expected 128"),
        (V3 | {"v_head_dim": None}, "v_head_dim is None; expected 128"),
        (V3 | {"attention_bias": True}, "attention_bias is True; expected False"),
        (KIMI_LINEAR | {"mla_use_nope": False}, "mla_use_nope is False; expected True"),
        (K3_TEXT | {"mla_use_output_gate": "yes"}, "mla_use_output_gate is 'yes'; expected True or False"),
        (without("rope_theta"), "config: rope_theta is missing; expected a number"),
        (V3 | {"rope_theta": 1}, "rope_theta is 1.0; expected a number above 1"),
        (V3 | {"rope_scaling": 4}, "rope_scaling is 4; expected an object or null"),
        (V3 | {"rope_interleave": 1}, "rope_interleave is 1; expected True or False"),
        (scaling(type="linear"), "config: rope_scaling.type is 'linear'; expected 'yarn' or 'default'"),
        (scaling(factor=-1), "config: rope_scaling.factor is -1; expected a number above 0"),
        (scaling(factor=None), "rope_scaling.factor is None; expected a number above 0"),
        (scaling(original_max_position_embeddings=0.5), "original_max_position_embeddings is 0.5; expected an integer"),
        (scaling(beta_slow=0), "rope_scaling.beta_slow is 0; expected a number above 0"),
        (scaling(mscale="1"), "rope_scaling.mscale is '1'; expected a number"),
        (scaling(attention_factor=2.0), "rope_scaling.attention_factor is 2.0; expected None"),
        (scaling(truncate=False), "rope_scaling.truncate is False; expected True"),
        (V3 | {"quantization_config": FP8 | {"weight_block_size": [64, 64]}},
         r"quantization_config.weight_block_size is \[64, 64\]; expected \[128, 128\]"),
    ],
)  # fmt: skip
def test_errors_name_the_key(values, message):
    with pytest.raises(ValueError, match=message):
        LayerConfig.from_json(values)


def test_errors_name_the_file(tmp_path):
    file = tmp_path / "config.json"
    with pytest.raises(FileNotFoundError):
        LayerConfig.from_json(tmp_path / "elsewhere")
    for text, message in (("{", "expected JSON"), ("[]", "expected a JSON object"), ("{}", "model_type is None")):
        file.write_text(text)
        with pytest.raises(ValueError, match=re.escape(str(file)) + ": .*" + message):
            LayerConfig.from_json(tmp_path)
    with pytest.raises(ValueError, match="num_heads is 128, which 3 devices cannot share evenly"):
        LayerConfig.from_json(V3, devices=3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rope(1.0), "theta is 1.0; it has to be above 1"),
        (lambda: Yarn(0.0, 4096), "factor is 0.0; it has to be above 0"),
        (lambda: Yarn(4.0, 0), "original_max_position_embeddings is 0; it has to be above 0"),
    ],
)
def test_rope_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
