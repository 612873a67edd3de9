"""Safetensors reading and writing: values, slices for each device, and the messages for what does not fit."""

import json
import re

import ml_dtypes
import numpy as np
import pytest

from jax_mla.checkpoint import (
    INDEX,
    Checkpoint,
    load_layer,
    published_name,
    write_checkpoint,
)
from jax_mla.layer import HEAD_AXIS, LayerConfig

CONFIG = LayerConfig(hidden_size=48, num_heads=8, q_lora_rank=40)
BF16 = np.dtype(ml_dtypes.bfloat16)


def random_layer(seed=0, dtype=BF16, config=CONFIG):
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=shape).astype(dtype) for name, shape in config.weight_shapes.items()}


def named(weights, layer, prefix=""):
    return {prefix + published_name(layer, name): array for name, array in weights.items()}


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16), np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_round_trip(tmp_path, dtype, prefix):
    layers = [random_layer(seed, dtype) for seed in range(12)]
    tensors = {}
    for number, weights in enumerate(layers):
        tensors |= named(weights, number, prefix)
    tensors["lm_head.weight"] = np.zeros((3, 5), dtype)
    write_checkpoint(tmp_path, tensors)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX,
    ]
    for number in (0, 1, 11):  # 1 and 11: a suffix of one is not taken for the other
        loaded = load_layer(tmp_path, number, CONFIG)
        assert loaded.keys() == layers[number].keys()
        assert all(same_bits(loaded[name], layers[number][name]) for name in loaded)


def test_layer_across_shards_without_index(tmp_path):
    weights = random_layer()
    write_checkpoint(tmp_path, named(weights, 0), shards=4)
    checkpoint = Checkpoint(tmp_path)
    files = {checkpoint.find(0, name).file.name for name in weights}
    assert len(files) == 2
    (tmp_path / INDEX).unlink()
    loaded = load_layer(tmp_path, 0, CONFIG)
    assert all(same_bits(loaded[name], weights[name]) for name in weights)


def test_file_bytes_are_the_format(tmp_path):
    """The layout of the format, spelled out by hand, so that reader and writer cannot agree on an error."""
    array = np.array([[1.0, -2.0, 0.5]], np.float32).astype(BF16)
    write_checkpoint(tmp_path, {"t": array}, shards=1)
    raw = (tmp_path / "model-00001-of-00001.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert length % 8 == 0
    assert header["t"] == {"dtype": "BF16", "shape": [1, 3], "data_offsets": [0, 6]}
    assert raw[8 + length :] == bytes.fromhex("803f00c0003f")
    index = json.loads((tmp_path / INDEX).read_text())
    assert index == {"metadata": {"total_size": 6}, "weight_map": {"t": "model-00001-of-00001.safetensors"}}


def test_header_of_odd_length_is_read(tmp_path):
    """Other writers need not align the header."""
    weights = random_layer()
    header, blob = {}, b""
    for name, array in named(weights, 2).items():
        offsets = [len(blob), len(blob) + array.nbytes]
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": offsets}
        blob += array.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)
    assert len(text) % 2
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + blob)
    loaded = load_layer(tmp_path, 2, CONFIG)
    assert all(same_bits(loaded[name], weights[name]) for name in weights)


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_parts_of_all_devices_make_the_whole(tmp_path, devices):
    weights = random_layer()
    write_checkpoint(tmp_path, named(weights, 0))
    config = LayerConfig(48, 8, devices, 40)
    parts = [load_layer(tmp_path, 0, config, rank=rank) for rank in range(devices)]
    for name, shape in config.weight_shapes.items():
        assert all(part[name].shape == shape for part in parts)
        if name in HEAD_AXIS:
            joined = np.concatenate([part[name] for part in parts], axis=HEAD_AXIS[name])
            assert same_bits(joined, weights[name])
        else:
            assert all(same_bits(part[name], weights[name]) for part in parts)


def with_shape(name, shape, dtype=BF16):
    return lambda tensors: tensors | {published_name(0, name): np.zeros(shape, dtype)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            with_shape("kv_b_proj", (8 * 256, 500)),
            r"model-0000\d-of-00002.safetensors: tensor 'model.layers.0.self_attn.kv_b_proj.weight' has shape "
            r"\[2048, 500\] in BF16; expected \[2048, 512\] for 8 heads, hidden size 48 and query latent 40",
        ),
        (with_shape("o_proj", (8 * 128, 48)), r"o_proj.weight' has shape \[1024, 48\] in BF16; expected \[48, 1024\]"),
        (with_shape("g_proj", (8, 48)), r"g_proj.weight' has shape \[8, 48\] in BF16; expected \[1024, 48\]"),
        (
            lambda tensors: {name: array for name, array in tensors.items() if "kv_a_layernorm" not in name},
            r"expected one tensor named \[prefix.\]model.layers.0.self_attn.kv_a_layernorm.weight; found none",
        ),
        (
            lambda tensors: tensors | {"draft." + published_name(0, "q_a_proj"): np.zeros((40, 48), BF16)},
            r"q_a_proj.weight; found model.layers.0.self_attn.q_a_proj.weight in model-\S+, draft.model.layers.0",
        ),
    ],
    ids=["kv_b_proj", "o_proj", "gate a head", "missing", "twice"],
)
@pytest.mark.parametrize("indexed", [True, False])
def test_errors_name_file_tensor_and_shapes(tmp_path, change, message, indexed):
    write_checkpoint(tmp_path, change(named(random_layer(), 0)))
    if not indexed:
        (tmp_path / INDEX).unlink()
    with pytest.raises(ValueError, match=message):
        load_layer(tmp_path, 0, CONFIG)


def damaged(tmp_path, damage):
    write_checkpoint(tmp_path, named(random_layer(), 0), shards=1)
    file = tmp_path / "model-00001-of-00001.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    return file


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:-2], r"tensor 'model.layers.0.self_attn.o_proj.weight' lies at \[\d+, \d+\) of \d+ bytes"),
        (lambda raw: b"PK\x03\x04" + raw[4:], "is no safetensors file: a header of"),
        (lambda raw: raw[:5], "is no safetensors file: a header of"),
        (lambda raw: raw[:8] + b"x" + raw[9:], "expected JSON"),
        (lambda raw: raw.replace(b'"BF16"', b'"I16" ', 1), "weight' has dtype I16; expected BF16 or F16 or F32"),
        (lambda raw: raw.replace(b'"BF16"', b'"F32" ', 1), r"weight' has \d+ bytes; expected \[40, 48\] in F32"),
        (lambda raw: raw.replace(b'"shape"', b'"sharp"', 1), "expected dtype, shape and data_offsets"),
    ],
    ids=["truncated", "magic", "short", "json", "dtype", "size", "entry"],
)
def test_damaged_files(tmp_path, damage, message):
    file = damaged(tmp_path, damage)
    with pytest.raises(ValueError, match=re.escape(str(file)) + ".*" + message):
        load_layer(tmp_path, 0, CONFIG)


def test_index_that_does_not_fit(tmp_path):
    write_checkpoint(tmp_path, named(random_layer(), 0))
    index = tmp_path / INDEX
    text = index.read_text()
    index.write_text(text.replace("00002-of-00002", "00003-of-00003"))
    with pytest.raises(FileNotFoundError, match=r"model-00003-of-00003.safetensors"):
        load_layer(tmp_path, 0, CONFIG)
    index.write_text(text.replace("00002-of-00002", "00001-of-00002"))
    with pytest.raises(ValueError, match=r"model-00001-of-00002.safetensors: lacks tensor"):
        load_layer(tmp_path, 0, CONFIG)
    index.write_text("[]")
    with pytest.raises(ValueError, match="expected a JSON object; found list"):
        load_layer(tmp_path, 0, CONFIG)
    with pytest.raises(FileNotFoundError, match=r"expected model.safetensors.index.json or files \*.safetensors"):
        load_layer(tmp_path / "elsewhere", 0, CONFIG)


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="rank is 4; expected 0 to 3 for 4 devices"):
        load_layer(tmp_path, 0, LayerConfig(devices=4), rank=4)
    with pytest.raises(ValueError, match="num_heads is 96, which 5 devices cannot share evenly"):
        LayerConfig(devices=5)
    with pytest.raises(ValueError, match="tensor 't' has dtype int32; expected bfloat16 or float16 or float32"):
        write_checkpoint(tmp_path, {"t": np.zeros(3, np.int32)})


def test_reads_no_more_than_the_part(tmp_path, monkeypatch):
    """A device's rows are copied out of the mapping; the mapping itself is never copied whole."""
    write_checkpoint(tmp_path, named(random_layer(), 0))
    copied = []
    copy = np.array

    def record(view, **kwargs):
        copied.append(view.nbytes)
        return copy(view, **kwargs)

    monkeypatch.setattr("jax_mla.checkpoint.np.array", record)
    config = LayerConfig(48, 8, 4, 40)
    load_layer(tmp_path, 0, config, rank=3)
    assert sum(copied) == sum(2 * np.prod(shape) for shape in config.weight_shapes.values())
