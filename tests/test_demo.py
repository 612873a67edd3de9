"""The command line: the demo's verdict and output, a checkpoint of one's own, and messages for bad arguments."""

import json
import re
import subprocess
import sys

import jax
import pytest

import jax_mla
from jax_mla import demo
from jax_mla.__main__ import main
from jax_mla.checkpoint import published_name, write_checkpoint
from jax_mla.layer import LayerConfig, Rope, Yarn, init_weights

SHORT = ["--steps", "5", "--batch", "2", "--prompt-tokens", "9"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Layer 3 of a model with 12 heads, as float16 behind a prefix."""
    directory = tmp_path_factory.mktemp("checkpoint")
    config = LayerConfig(64, 12, 1, 48)
    weights = init_weights(jax.random.key(1), config, "float16")
    write_checkpoint(directory, {f"language_model.{published_name(3, name)}": w for name, w in weights.items()})
    (directory / "config.json").write_text(json.dumps(config.to_json()))
    return directory


def test_demo_as_a_user_runs_it(tmp_path):
    plot = tmp_path / "plot.png"
    command = [sys.executable, "-m", "jax_mla", "demo", "--heads", "96", "12", "--steps", "20", "--batch", "3"]
    done = subprocess.run(
        [*command, "--prompt-tokens", "70", "--plot", str(plot)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for heads in (96, 12):
        row = re.search(rf"^ +{heads} +\d+ +\d+ +(\S+)  PASS$", done.stdout, re.MULTILINE)
        assert 0 < float(row[1]) < 1e-2
        assert f"  {heads} heads: step 20/20, " in done.stderr
    assert done.stdout.count("cache updated in place") == 2
    assert done.stdout.count(f"mla_decode   {jax_mla.explain(num_heads=12).platform}: ") == 2
    assert plot.exists() or "matplotlib is not installed" in done.stdout


@pytest.mark.parametrize(("heads", "name"), [("12", None), ("3", "xla")])
def test_demo_on_a_given_checkpoint(checkpoint, heads, name, capsys):
    chosen = [] if name is None else ["--implementation", name]
    assert main(["demo", "--checkpoint", str(checkpoint), "--layer", "3", "--heads", heads, *SHORT, *chosen]) == 0
    out = capsys.readouterr().out
    assert f"\n{heads} heads (" in out
    assert "PASS" in out
    if name == "xla":
        assert re.search(r"mla_decode +\w+: xla: asked for by name", out)


@pytest.mark.parametrize(
    "config",
    [
        LayerConfig(64, 12, 1, 48, rope=Rope(1e4, Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)), gate=False),
        LayerConfig(64, 12, 1, None, rope=Rope(1e4, None, False), gate=False),
    ],
    ids=["YaRN", "q_proj, halves"],
)
def test_demo_on_other_models(config, tmp_path, capsys):
    weights = init_weights(jax.random.key(1), config)
    write_checkpoint(tmp_path, {published_name(0, name): w for name, w in weights.items()})
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    assert main(["demo", "--checkpoint", str(tmp_path), "--heads", "12", *SHORT]) == 0
    assert "PASS" in capsys.readouterr().out


def test_demo_fails_on_wrong_values(checkpoint, monkeypatch, capsys):
    """The check is able to fail: an output that is two percent off is found."""
    decode = demo.mla.decode

    def wrong(*args, **kwargs):
        y, cache = decode(*args, **kwargs)
        return y * 1.02, cache

    monkeypatch.setattr(demo.mla, "decode", wrong)
    assert main(["demo", "--checkpoint", str(checkpoint), "--layer", "3", "--heads", "12", *SHORT]) == 1
    assert "FAIL" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "5"], "--heads is 5; expected a divisor of the checkpoint's 12"),
        (["--steps", "0"], "--steps is 0; it has to be at least 1"),
        (
            ["--layer", "4", "--heads", "12"],
            r"expected one tensor named \[prefix.\]model.layers.4.self_attn.q_a_proj.weight; found none",
        ),
        (["--heads", "12", "--implementation", "gpu"], "implementation is 'gpu'; expected None, "),
    ],
)
def test_bad_arguments(checkpoint, arguments, message, capsys):
    assert main(["demo", "--checkpoint", str(checkpoint), "--layer", "3", *arguments]) == 2
    assert re.search(f"python -m jax_mla: .*{message}", capsys.readouterr().err)


def test_help_and_info(capsys):
    assert main([]) == 0
    assert re.search(r"\n +demo +\S(.|\n)*\n +info +\S.*\n +bench +\S", capsys.readouterr().out)
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert f"jax {jax.__version__}\n" in out
    for row in jax_mla.capabilities():
        assert row.operation in out
        assert row.variant in out
