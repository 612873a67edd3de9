"""README.md: the usage gives the right values, the generated tables are up to date, the links lead somewhere."""

import importlib.util
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import jax_mla
from jax_mla.checkpoint import published_name, write_checkpoint
from jax_mla.layer import LayerConfig, Rope, init_weights

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_usage():
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    scope = {}
    exec(compile(code, "README.md", "exec"), scope)
    q, kv_c, k_pe, out, lse, cache = (
        np.asarray(scope[name], np.float64) for name in ("q", "kv_c", "k_pe", "out", "lse", "cache")
    )
    assert out.shape == (2, 1, 24, 512)
    for b, tokens in enumerate((100, 1)):  # all tokens but the new one are zeros
        score = q[b, 0] @ np.concatenate([kv_c[b], k_pe[b]]) * 192**-0.5
        weight = np.exp(score) / (np.exp(score) + tokens - 1)
        np.testing.assert_allclose(out[b, 0], weight[:, None] * kv_c[b], atol=2e-2)
        np.testing.assert_allclose(lse[b, 0], np.log(np.exp(score) + tokens - 1), atol=1e-3)
    assert (cache[1, 2, 99 - 64, :512] == kv_c[0]).all()
    assert (cache[1, 7, 0, 512:] == k_pe[1]).all()
    assert np.count_nonzero(cache.any(-1)) == 2


def test_models_page(tmp_path, monkeypatch):
    """Its code on a small checkpoint with DeepSeek-V3's keys: all ranks give the same shapes, and each token a row."""
    config = LayerConfig(64, 8, 1, 48, rope=Rope(), gate=False)
    tensors = {
        published_name(number, name): weight
        for number in range(2)
        for name, weight in init_weights(jax.random.key(number), config).items()
    }
    write_checkpoint(tmp_path / "DeepSeek-V3", tensors)
    (tmp_path / "DeepSeek-V3" / "config.json").write_text(json.dumps(config.to_json()))
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "models.md").read_text()
    scope = {}
    exec(compile(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], "models.md", "exec"), scope)
    x = jax.random.normal(jax.random.key(9), (2, 1, 64), "bfloat16")
    page_table, kv_lens = np.array([[5, 2], [7, -1]], np.int32), np.array([70, 1], np.int32)
    y, cache = scope["decode"](scope["cache"], scope["params"], x, page_table, kv_lens)
    assert y.shape == x.shape and not np.array_equal(y, x)
    assert np.argwhere(np.asarray(cache).any(-1)).tolist() == [[0, 2, 5], [0, 7, 0], [1, 2, 5], [1, 7, 0]]


def test_every_error_of_loading_has_a_test():
    """The rows of the models page name tests that are there, in the file that their letter stands for."""
    page = (ROOT / "docs" / "models.md").read_text()
    section = page.split("## What an error says")[1].split("\n## ")[0]
    files = {letter: (ROOT / file).read_text() for file, letter in re.findall(r"`(tests/\w+\.py)`\s\((\w)\)", section)}
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert len(files) == 4 and len(rows) == 20
    for row in rows:
        named = re.findall(r"(\w): `(test_\w+)`", row.rsplit(" | ", 1)[1])
        assert named, row
        assert all(f"def {test}(" in files[letter] for letter, test in named), row


def test_tables_are_up_to_date(tables):
    page = tables.BENCHMARKS.read_text()
    assert tables.refresh(README) == README, "run: python docs/tables.py"
    assert tables.refresh_benchmarks(page) == page, "run: python docs/tables.py"
    page = tables.SPARSE.read_text()
    assert tables.refresh_sparse(page) == page, "run: python docs/tables.py"
    page = tables.CONTEXT.read_text()
    assert tables.refresh_context(page) == page, "run: python docs/tables.py"
    page = tables.PREFILL.read_text()
    assert tables.refresh_prefill(page) == page, "run: python docs/tables.py"


def test_support_table_names_what_runs_here(tables):
    """Every capability of this machine stands in the table, whatever the generator did."""
    table = README.split("<!-- support: by docs/tables.py -->")[1].split("<!-- end of support -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()[2:]]
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    for row in jax_mla.capabilities():
        lines = [r for r in rows if r[0] == row.operation and r[1].startswith(row.platform + ":")]
        lines = [r for r in lines if row.variant in re.split("[:, ]+", r[1]) and r[2] == row.architecture]
        source, target = (short.get(name, name.removeprefix("float8_")) for name in (row.q_dtype, row.cache_dtype))
        dtypes = rf"(^|; ){source} → ([^;]+, )?{target}(,|;|$)"  # a variant has a line for each set of page sizes
        assert len([r for r in lines if re.search(dtypes, r[3])]) == 1, (row, lines)


def test_tables_keep_what_this_machine_cannot_know(tables, monkeypatch):
    """Other platforms, architectures and CPU variants stay; what a module here no longer has goes."""
    header = "<!-- support: by docs/tables.py -->\n"
    rocm = "| mla_decode | rocm: gfx950 | gfx950 | bf16 → bf16 | 16-128 by 16, 24 | any | any |\n"
    elsewhere = "| mla_decode | cpu: portable | riscv64 | bf16 → bf16 | 1-128 | any | any |\n"
    gone = "| mla_decode | cpu: sse2 | x86_64 | bf16 → bf16 | 1-128 | any | any |\n"
    start = README.index("| --- |", README.index(header)) + len("| --- " * len(tables.HEADER) + "|\n")
    monkeypatch.delitem(tables._ffi.MODULES, "rocm", raising=False)
    with jax_mla.override_capabilities(row for row in jax_mla.capabilities() if row.platform != "rocm"):
        text = tables.refresh(README[:start] + rocm + elsewhere + gone + README[start:])
        assert tables.refresh(text) == text
    assert rocm in text
    assert gone not in text
    assert elsewhere in text


def test_cpu_figures(tables):
    """Of each machine the last run alone makes its table, with the best variant beside XLA."""
    rows = [
        '{"run": "a", "op": "mla_decode", "device": "a CPU, 2 threads", "cell": [1, 64, 8, 1], "us": 1.0}',
        '{"run": "b", "op": "mla_decode", "date": "2026-01-02T00:00:00", "device": "a CPU, 2 threads", '
        '"versions": {"jax": "0.10.2", "jaxlib": "0.10.1"}, "cell": [4, 4096, 24, 1], "implementation": "cpu:avx2", '
        '"us": 3250.0, "TBps": 0.0058, '
        '"TFLOPs": 0.263, "error": 0.0021, "ratio": 8.16}',
    ]
    rows.append(rows[1].replace("cpu:avx2", "cpu:portable"))
    rows.append(rows[1].replace("2 threads", "2 threads, limited to AVX2"))
    prefill = rows[1].replace("mla_decode", "mla_prefill").replace("[4, 4096, 24, 1]", "[512, 16384, 24]")
    rows.append(prefill.replace('"b"', '"c"').replace('"TBps": 0.0058, ', ""))  # a later run of prefill alone
    text = tables._cpu_table("\n".join(rows))
    other = tables._cpu_table("\n".join([*rows, rows[1].replace("a CPU", "another CPU").replace('"b"', '"d"')]))
    assert other == text + "\n" + text.replace("a CPU", "another CPU")
    assert text.startswith("a CPU, 2 threads; jax 0.10.2, jaxlib 0.10.1; 2026-01-02.\n\n| sequences x tokens, heads |")
    assert text.endswith("| 4 x 4096, 24 | cpu:avx2 | 3.25 | 5.80 | 263 | 2.1e-03 | 8.2 |\n")
    text = tables._cpu_queries_table("\n".join(rows), "mla_prefill")
    assert text.endswith("| 512 x 16384, 24 | cpu:avx2 | 3.25 | 263 | 2.1e-03 | 8.2 |\n") and text.count("\n") == 5


def row(run, op, implementation, us, **fields):
    """A line of results."""
    heading = {"run": run, "date": "2026-01-02T00:00:00", "device": "NVIDIA H200", "versions": {"jax": "0.11.2"}}
    return json.dumps(heading | {"op": op, "implementation": implementation, "us": us} | fields)


def test_decode_figures(tables):
    """Of a device the last run alone: the faster of our kernels beside the peers, and a floor from its ceilings."""

    def decode(run, implementation, us, **fields):
        rates = {"TBps": 400 / us, "TFLOPs": 8000 / us, "error": 0.002, "spread": 0.01}
        return row(run, "mla_decode", implementation, us, cell=[128, 4096, 24, 1], dtype="bf16", **rates, **fields)

    rows = [
        decode("a", "cuda:sm90", 1.0, plan_us=1.0),
        row("b", "read", "ceiling", 9.0, cell=[1], TBps=4.0, TFLOPs=0.0),
        row("b", "matmul bf16", "ceiling", 9.0, cell=[1], TBps=0.0, TFLOPs=800.0),
        decode("b", "cuda:generic", 170.0, plan_us=9.0),
        decode("b", "cuda:sm90", 150.0, plan_us=8.0),
        decode("b", "fa3", 180.0),
        decode("b", "flashmla", 165.0),
    ]
    text = tables._gpu_tables("\n".join(rows), tables._decode_table)
    assert text.startswith("NVIDIA H200; jax 0.11.2; 2026-01-02; read 4.00 TB/s, matmul bf16 800 TFLOP/s.\n\n| ")
    line = "| 128 x 4096, 24 x 1 | bf16 | 100.0 | 150.0 (sm90) | 8.0 | 165.0 | 180.0 | - | 1.10 | 2.0e-03 |\n"
    assert text.endswith(line)
    assert text.count("\n") == 5


def test_sparse_figures(tables):
    """The faster of our kernels beside the peer and the reference, where there are; prefill has no bytes."""

    def sparse(run, implementation, us, cell, dtype, **fields):
        fields |= {"TFLOPs": 40_000 / us, "error": 0.002}
        return row(run, "mla_sparse_decode", implementation, us, cell=cell, dtype=dtype, **fields)

    decode, prefill = [128, 2048, 128, 1], [1, 2048, 24, 4096]
    rows = [
        sparse("a", "cuda:sm90", 1.0, decode, "fp8_ds_mla"),
        row("b", "copy", "ceiling", 9.0, cell=[1], TBps=4.2, TFLOPs=0.0),
        sparse("b", "cuda:sm90", 100.0, decode, "fp8_ds_mla", TBps=1.72),
        sparse("b", "cuda:generic", 200.0, decode, "fp8_ds_mla", TBps=0.86),
        sparse("b", "xla", 900.0, decode, "fp8_ds_mla", TBps=0.19),
        sparse("b", "flashmla", 110.0, decode, "fp8_ds_mla", TBps=1.56),
        sparse("b", "cuda:sm90", 160.0, decode, "bf16", TBps=1.9),
        sparse("b", "cuda:sm90", 2000.0, prefill, "bf16"),
    ]
    text = tables._gpu_tables("\n".join(rows), tables._sparse_table)
    assert text.startswith("NVIDIA H200; jax 0.11.2; 2026-01-02; copy 4.20 TB/s.\n\n| sequences x chosen tokens, ")
    assert text.endswith(
        "| 128 x 2048, 128 x 1 | fp8_ds_mla | 100.0 (sm90) | 400 | 1.72 | 110.0 | 900.0 | 1.10 | 2.0e-03 |\n"
        "| 128 x 2048, 128 x 1 | bf16 | 160.0 (sm90) | 250 | 1.90 | - | - | - | 2.0e-03 |\n"
        "| 1 x 2048, 24 x 4096 | bf16 | 2000.0 (sm90) | 20 | - | - | - | - | 2.0e-03 |\n"
    )
    assert text.count("\n") == 7


def test_helpers_figures(tables):
    """An update of a few tokens is a matter of time alone, and has no share of a copy."""
    rows = [
        row("b", "copy", "ceiling", 500.0, cell=[1], TBps=4.2),
        row("b", "pack_kv", "cuda:generic", 250.0, cell=[65536, 24], TBps=3.99, of_copy=0.95, of_aim=1.05, error=0.0),
        row("b", "pack_kv", "xla", 500.0, cell=[65536, 24], TBps=1.99, of_copy=0.475),
        row("b", "update_cache bf16", "cuda:generic", 3.5, cell=[128], TBps=0.08, of_aim=1.43),
    ]
    text = tables._gpu_tables("\n".join(rows), tables._helpers_table)
    assert text.startswith("NVIDIA H200; jax 0.11.2; 2026-01-02; copy 4.20 TB/s.\n\n| operation | tokens, heads | ")
    assert text.endswith(
        "| pack_kv | 65536, 24 | 250.0 | 3.99 | 95% | 500.0 | 2.0 |\n"
        "| update_cache bf16 | 128 | 3.5 | 0.08 | - | - | - |\n"
    )


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", [path for path in PAGES if path.parent.name != "notebook"], ids=lambda path: path.stem)
def test_links_and_paths_exist(page):
    """Links, and every path in backticks that names a folder of the repository."""
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+)", text):
        made = link.startswith("notebook/")  # by the site, of the notebook in examples/
        assert made or link.startswith("https://") or (page.parent / link).exists(), link
    for path in re.findall(r"`((?:jax_mla|ffi|kernels|tests|benchmarks|docs|examples)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path


def test_every_public_function_is_named():
    functions = [name for name in jax_mla.__all__ if name.islower()]
    missing = [name for name in functions if not re.search(rf"\b{name}\b", README)]
    assert not missing
