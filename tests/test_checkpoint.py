"""Safetensors reading and writing: values, slices for each device, and the messages for what does not fit."""

import json
import re

import ml_dtypes
import numpy as np
import pytest

from jax_mla.checkpoint import (
    INDEX,
    Checkpoint,
    attention_layers,
    load_layer,
    load_layers,
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
    for text in ("{}", '{"weight_map": ["model-00001-of-00002.safetensors"]}'):
        index.write_text(text)
        with pytest.raises(ValueError, match=re.escape(str(index)) + ": expected an object 'weight_map' from tensor"):
            load_layer(tmp_path, 0, CONFIG)
    with pytest.raises(FileNotFoundError, match=r"expected model.safetensors.index.json or files \*.safetensors"):
        load_layer(tmp_path / "elsewhere", 0, CONFIG)


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="rank is 4; expected 0 to 3 for 4 devices"):
        load_layer(tmp_path, 0, LayerConfig(devices=4), rank=4)
    with pytest.raises(ValueError, match="num_heads is 96, which 5 devices cannot share evenly"):
        LayerConfig(devices=5)
    for name in ("hidden_size", "num_heads", "devices", "q_lora_rank"):
        with pytest.raises(ValueError, match=f"{name} is 0; it has to be at least 1"):
            LayerConfig(**{name: 0})
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


def quantised(weights, config=CONFIG, seed=0):
    """Projections as e4m3 with random scales of each block, named as published, and their products in float64."""
    generator = np.random.default_rng(seed)
    tensors, products = {}, {}
    for name, weight in weights.items():
        tensors[published_name(0, name)] = weight
        if weight.ndim == 2:
            e4m3 = weight.astype(ml_dtypes.float8_e4m3fn)
            scales = generator.uniform(0.1, 3, [-(-size // 128) for size in weight.shape]).astype(np.float32)
            tensors[published_name(0, name)] = e4m3
            tensors[published_name(0, name, "weight_scale_inv")] = scales
            spread = np.kron(scales, np.ones((128, 128)))[: weight.shape[0], : weight.shape[1]]
            products[name] = e4m3.astype(np.float64) * spread
    return tensors, products


WIDE = LayerConfig(hidden_size=200, num_heads=8, q_lora_rank=130)  # no multiples of 128


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_fp8_weights_times_their_scales(tmp_path, devices):
    """Each rank's part, also where the cut goes through a block (one head has 192 rows of q_b_proj)."""
    weights = random_layer(config=WIDE)
    tensors, products = quantised(weights)
    write_checkpoint(tmp_path, tensors)
    config = LayerConfig(200, 8, devices, 130)
    parts = [load_layer(tmp_path, 0, config, rank=rank) for rank in range(devices)]
    for name, shape in config.weight_shapes.items():
        assert all(part[name].shape == shape for part in parts)
        axis = HEAD_AXIS.get(name)
        got = parts[-1][name] if axis is None else np.concatenate([part[name] for part in parts], axis=axis)
        if name in products:
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, products[name], rtol=1e-7)
        else:
            assert same_bits(got, weights[name])


def test_fp8_values_by_hand(tmp_path):
    """kv_a_proj_with_mqa has 4.5 blocks of rows: the last scale counts for 64 rows."""
    tensors, _ = quantised(random_layer())
    name = "kv_a_proj_with_mqa"
    tensors[published_name(0, name)] = np.full((576, 48), 0x40, np.uint8).view(ml_dtypes.float8_e4m3fn)  # 2.0
    tensors[published_name(0, name, "weight_scale_inv")] = np.float32([[0.5], [1], [2], [3], [-4]])
    write_checkpoint(tmp_path, tensors)
    got = load_layer(tmp_path, 0, CONFIG)[name]
    want = np.repeat(np.float32([1, 2, 4, 6, -8]), [128, 128, 128, 128, 64])
    np.testing.assert_array_equal(got, np.repeat(want[:, None], 48, axis=1))


def test_reads_no_more_than_the_part_of_fp8(tmp_path, monkeypatch):
    tensors, _ = quantised(random_layer())
    write_checkpoint(tmp_path, tensors)
    copied = []
    copy = np.array
    monkeypatch.setattr(
        "jax_mla.checkpoint.np.array", lambda view, **kwargs: (copied.append(view.nbytes), copy(view, **kwargs))[1]
    )
    config = LayerConfig(48, 8, 4, 40)
    load_layer(tmp_path, 0, config, rank=3)
    widths = {1: 2, 2: 1}  # norms in bf16, projections in e4m3
    assert sum(copied) == sum(widths[len(shape)] * np.prod(shape) for shape in config.weight_shapes.values())


SCALE_NAME = "model.layers.0.self_attn.q_b_proj.weight_scale_inv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: {name: array for name, array in tensors.items() if name != SCALE_NAME},
            r"safetensors: tensor 'model.layers.0.self_attn.q_b_proj.weight' is F8_E4M3 and needs its scales: .*"
            r"expected one tensor named \[prefix.\]model.layers.0.self_attn.q_b_proj.weight_scale_inv; found none",
        ),
        (
            lambda tensors: tensors | {SCALE_NAME: np.ones((12, 2), np.float32)},
            r"safetensors: tensor 'model.layers.0.self_attn.q_b_proj.weight_scale_inv' has shape \[12, 2\] in F32; "
            r"expected \[12, 1\] for one scale for each 128 x 128 block of the weight",
        ),
        (
            lambda tensors: tensors | {SCALE_NAME: np.ones((12, 1), BF16)},
            r"safetensors: tensor '\S+q_b_proj.weight_scale_inv' has dtype BF16; expected F32",
        ),
        (
            lambda tensors: tensors | {published_name(0, "q_b_proj"): np.ones((100, 40), ml_dtypes.float8_e4m3fn)},
            r"q_b_proj.weight' has shape \[100, 40\] in F8_E4M3; expected \[1536, 40\] for 8 heads",
        ),
        (
            lambda tensors: tensors | {published_name(0, "q_a_layernorm"): np.ones(40, ml_dtypes.float8_e4m3fn)},
            r"q_a_layernorm.weight' has dtype F8_E4M3; expected BF16 or F16 or F32$",
        ),
    ],
    ids=["no scale", "scale's shape", "scale's dtype", "weight's shape", "fp8 norm"],
)
def test_fp8_errors(tmp_path, change, message):
    tensors, _ = quantised(random_layer())
    write_checkpoint(tmp_path, change(tensors))
    with pytest.raises(ValueError, match=message):
        load_layer(tmp_path, 0, CONFIG)


def test_all_layers_one_after_another(tmp_path, capsys):
    """The MLA layers of a hybrid model; nothing is read before it is asked for."""
    layers = {number: random_layer(number) for number in (3, 7, 10)}
    tensors = {"model.layers.0.self_attn.q_proj.weight": np.zeros((4, 4), BF16)}  # of a linear layer
    for number, weights in layers.items():
        tensors |= named(weights, number, "language_model.")
    write_checkpoint(tmp_path, tensors)
    assert attention_layers(tmp_path) == [3, 7, 10]

    iterator = load_layers(tmp_path, CONFIG)
    assert capsys.readouterr().err == ""
    number, loaded = next(iterator)
    assert number == 3
    assert capsys.readouterr().err == "layer 3, 1 of 3\n"
    assert all(same_bits(loaded[name], layers[3][name]) for name in loaded)
    assert [number for number, _ in iterator] == [7, 10]

    part = dict(load_layers(tmp_path, LayerConfig(48, 8, 4, 40), rank=2, layers=[10], progress=False))
    assert same_bits(part[10]["kv_b_proj"], layers[10]["kv_b_proj"][2 * 512 : 3 * 512])
    assert capsys.readouterr().err == "layer 7, 2 of 3\nlayer 10, 3 of 3\n"

    with pytest.raises(ValueError, match="rank is 9; expected 0 to 3"):
        load_layers(tmp_path, LayerConfig(48, 8, 4, 40), rank=9)
    with pytest.raises(ValueError, match=r"model.layers.4.self_attn.q_a_proj.weight; found none"):
        list(load_layers(tmp_path, CONFIG, layers=[4]))


def test_layers_without_query_latent_and_gate(tmp_path):
    config = LayerConfig(48, 8, 1, None, gate=False)
    weights = random_layer(config=config)
    assert weights.keys() == {"q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
    write_checkpoint(tmp_path, named(weights, 0))
    part = load_layer(tmp_path, 0, LayerConfig(48, 8, 8, None, gate=False), rank=7)
    assert same_bits(part["q_proj"], weights["q_proj"][7 * 192 :])
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn.q_a_proj.weight; found none"):
        load_layer(tmp_path, 0, CONFIG)
