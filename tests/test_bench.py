"""The benchmark: what it counts, that its programs compute what they are timed for, its output, and its verdict."""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import oracle
import pytest

import jax_mla
from jax_mla import bench
from jax_mla.__main__ import main
from jax_mla.bench import ceilings, inputs, programs, report, timing
from jax_mla.bench.cells import TABLES, TOLERANCES, Cell

ROOT = Path(__file__).parent.parent
SMALL = ["--batch", "2", "--tokens", "100", "--heads", "3", "--repeats", "2", "--seconds", "0.001"]


def small_inputs(cell, copies=3, calls=5):
    shapes = inputs.abstract(cell, copies, calls)
    return shapes, inputs.make(shapes, inputs.random_arrays(shapes))


def exact(data, layer):
    return oracle.decode(
        np.asarray(data.q),
        np.asarray(data.cache[layer]),
        np.asarray(data.page_table),
        np.asarray(data.kv_lens),
        scale=inputs.SCALE,
        **{name: np.asarray(x) for name, x in data.scales.items()},
    )


def test_bytes_and_flops():
    cell = Cell(128, 4096, 24, 2)
    assert cell.bytes == 128 * 4096 * 1152 + 128 * 2 * 24 * (1152 + 1024)
    assert cell.flops == 2 * 128 * 4096 * 24 * 2 * 1088
    assert dataclasses.replace(cell, dtype="fp8-cache").bytes == 128 * 4096 * 576 + 128 * 2 * 24 * (1152 + 1024)
    assert dataclasses.replace(cell, dtype="fp8").bytes == 128 * 4096 * 576 + 128 * 2 * 24 * (576 + 1024)


def test_uneven_lengths_and_their_even_twins():
    normal, twin = TABLES["uneven"][0], TABLES["uneven"][1]
    assert 3500 < normal.kv_lens.mean() < 4700
    assert normal.kv_lens.std() > 1500
    assert normal.kv_lens.min() >= 1
    long = TABLES["uneven"][4]
    assert sorted(long.kv_lens)[-2:] == [1024, 100_000]
    for uneven, even in zip(TABLES["uneven"][::2], TABLES["uneven"][1::2], strict=True):
        assert even.lengths == "even"
        assert abs(int(even.kv_lens.sum()) - int(uneven.kv_lens.sum())) <= uneven.batch // 2
    assert twin.key == [128, twin.tokens, 128, 1]
    assert normal.key == [128, 4096, 128, 1, "normal"]


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_inputs_and_truth(dtype):
    """NaN in exactly the pages that no sequence owns; the truth is the tests' own oracle."""
    cell = Cell(3, 150, 4, 2, dtype=dtype, lengths="normal")
    shapes, data = small_inputs(cell)
    counts = -(-cell.kv_lens // 64)
    owned = np.concatenate([row[:n] for row, n in zip(np.asarray(data.page_table), counts, strict=True)])
    assert len(set(owned)) == len(owned)
    is_nan = np.isnan(np.asarray(data.cache).astype(np.float32))
    assert is_nan.all(axis=(0, 2, 3)).sum() == inputs.POISONED_PAGES
    assert not is_nan[:, owned].any()
    truth = inputs.lower_truth(shapes).compile()(*data.operands, **data.scales)
    np.testing.assert_allclose(np.asarray(truth), exact(data, 0)[0], rtol=1e-9, atol=1e-12)


def test_plans_are_the_plan():
    shapes, data = small_inputs(Cell(2, 130, 4, 2))
    program = programs.plan("", "cpu", 4, shapes)
    program.compiled = program.lower().compile()
    program.start(data)
    program.seconds(1)
    plan = jax_mla.plan_decode(data.kv_lens, num_heads=4, cache=data.cache, q_len=2, implementation="cpu")
    assert len(program.results) == 4
    for result in program.results:
        for found, wanted in zip(result, jax.tree.leaves(plan), strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dtype", ["bf16", "fp8-cache", "fp8"])
def test_every_call_of_a_program_has_a_cache_of_its_own(dtype):
    shapes, data = small_inputs(Cell(2, 130, 4, 2, dtype=dtype))
    wanted = [exact(data, layer) for layer in range(data.copies)]

    def run(program):
        program.compiled = program.lower().compile()
        program.start(data)
        assert program.seconds(2) > 0
        return program.results

    for program in (programs.decode("", "cpu", 5, shapes), programs.plan_and_decode("", "cpu", 5, shapes)):
        first, lses = run(program)  # all of the first call, and lse of every one
        assert inputs.relative_error(first[0], wanted[0][0]) < TOLERANCES[dtype]
        assert len(lses) == program.calls
        for i, lse in enumerate(lses):
            np.testing.assert_allclose(lse, wanted[i % data.copies][1], atol=1e-3)
        assert program.out() is first[0]
    for program in (programs.decode("", "xla", 2, shapes), programs.gather_einsum("", 2, shapes)):
        results = run(program)
        assert len(results) == program.calls
        for i, result in enumerate(results):
            assert inputs.relative_error(result[0], wanted[i % data.copies][0]) < TOLERANCES[dtype]
        assert program.out() is results[0][0]


def test_contestants_take_turns():
    log = []

    class Fake:
        calls = 4

        def __init__(self, name, seconds):
            self.name, self._seconds = name, seconds

        def seconds(self, runs):
            log.append((self.name, runs))
            return self._seconds.pop() * runs

        def out(self):
            return None

    a = Fake("a", [0.004, 0.002, 0.003, 0.01, 9.0])  # from the end: a warm-up, one run, then the repeats
    b = Fake("b", [0.02, 0.02, 0.02, 0.02, 9.0])
    found = timing.take_turns([a, b], repeats=3, seconds=0.02)
    assert log == [("a", 3), ("a", 1), ("b", 3), ("b", 1)] + [
        (name, {"a": 2, "b": 1}[name]) for name in ("a", "b", "b", "a", "a", "b")
    ]
    assert found[0].us == pytest.approx(0.003 / 4 * 1e6)
    assert found[0].spread == pytest.approx(2 / 3)
    assert found[1] == timing.Timing(pytest.approx(5000), 0)


def test_floor():
    measured = [
        ceilings.Ceiling("copy", 1, 1.0, TBps=4.0),
        ceilings.Ceiling("read", 1, 1.0, TBps=4.5),
        ceilings.Ceiling("matmul bf16", 1, 1.0, TFLOPs=800.0),
        ceilings.Ceiling("matmul fp8", 1, 1.0, TFLOPs=1600.0),
    ]
    assert ceilings.floor_us(4_500_000, 1, "bf16", measured) == pytest.approx(1)
    assert ceilings.floor_us(1, 1_600_000_000, "fp8-cache", measured) == pytest.approx(2)
    assert ceilings.floor_us(1, 1_600_000_000, "fp8", measured) == pytest.approx(1)
    assert ceilings.floor_us(1, 1, "bf16", []) is None


def test_bench_as_a_user_runs_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench.host, "LAYERS", 2)
    monkeypatch.setattr(bench.host, "REPEATS", 3)
    rows, plot = tmp_path / "rows.jsonl", tmp_path / "plot.png"
    arguments = [*SMALL, "--dtype", "bf16", "fp8", "--host", "--json", str(rows), "--plot", str(plot)]
    assert main(["bench", *arguments]) == 0
    captured = capsys.readouterr()
    best = re.escape(bench.dispatch.explain(num_heads=3).implementation)
    for pattern in (
        rf"^2 x 100, 3 heads x 1, bf16 +{best} +[\d.]+ +[\d.]+% +[\d.]+ +[\d.]+ ",
        r"^ +xla +[\d.]+ ",
        r"^ +einsum +[\d.]+ ",
        rf"^2 x 100, 3 heads x 1, fp8 +{best} ",
        r"^ceilings: copy [\d.]+ GB/s, read [\d.]+ GB/s, matmul bf16 [\d.]+ GFLOP/s$",
        r"^step of 2 layers +\d+ +\d+$",
    ):
        assert re.search(pattern, captured.out, re.MULTILINE), pattern
    assert "[2/2] 2 x 100, 3 heads x 1, fp8, " in captured.err
    kept = [json.loads(line) for line in rows.read_text().splitlines()]
    decodes = [row for row in kept if row["op"] == "mla_decode"]
    assert [row["cell"] for row in decodes] == [[2, 100, 3, 1]] * 4
    assert all(0 < row["error"] < TOLERANCES[row["dtype"]] and row["us"] > 0 for row in decodes)
    planned = [row for row in decodes if row["implementation"][:3] == "cpu" and row["dtype"] == "bf16"]
    assert all(row["with_plan_us"] > 0 and row["plan_us"] > 0 for row in planned)
    assert ["plan_us" in row for row in decodes].count(True) == len(planned) == 1
    assert [row["op"] for row in kept if row["implementation"] == "ceiling"] == ["copy", "read", "matmul bf16"]
    assert plot.exists() or "matplotlib is not installed" in captured.out


def test_wrong_values_are_found(monkeypatch, capsys):
    decode = programs.mla_decode
    monkeypatch.setattr(programs, "mla_decode", lambda *a, **k: [x * 1.05 for x in decode(*a, **k)])
    assert main(["bench", *SMALL, "--no-ceilings", "--implementations", "cpu"]) == 1
    captured = capsys.readouterr()
    assert re.search(r"^WRONG: 2 x 100, 3 heads x 1, bf16, cpu.*: error [45].\d+e-02$", captured.err, re.MULTILINE)
    assert "of floor" in captured.out


def test_nan_is_wrong_and_kept_as_null():
    row = report.Row(Cell(1, 1, 1), "cpu:portable", 1.0, 0.0, 1, float("nan"))
    results = report.Results("", "G", [row])
    assert bench.verdict(results) == 1
    assert bench.records(results)[0]["error"] is None
    assert bench.verdict(report.Results("", "G", [dataclasses.replace(row, implementation="fa3")])) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "small", "--batch", "1"], "--table and --batch are given; expected one or the other"),
        (["--repeats", "0"], "--repeats is 0; it has to be at least 1"),
        (["--heads", "0"], "heads is 0; it has to be at least 1"),
        (["--heads", "129", "--implementations", "xla"], "num_heads|heads"),
        (["--implementations", "gpu"], "implementation is 'gpu'; expected None, "),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    assert main(["bench", "--no-ceilings", *arguments]) == 2
    assert re.search(f"python -m jax_mla: .*({message})", capsys.readouterr().err)


def test_what_is_left_out_is_named(capsys):
    arguments = ["--batch", "1", "2", "--tokens", "64", "--heads", "2", "--no-ceilings", "--repeats", "1"]
    assert main(["bench", *arguments, "--implementations", "cpu:none", "cpu", "--time-limit", "0"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^bf16: cpu:none: no variant 'none' for mla_decode on this machine", out, re.MULTILINE)
    assert "time limit: not measured from cell 1 on: 1 x 64, 2 heads x 1, bf16" in out


def parse(*arguments):
    parser = bench.argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(arguments)


def test_cells_that_arguments_ask_for():
    two = bench.cells(parse("--batch", "1", "3", "--page-size", "16", "--dtype", "fp16"))
    assert two == [Cell(b, 4096, 24, dtype="fp16", page_size=16) for b in (1, 3)]
    both = bench.cells(parse("--table", "dense", "uneven", "--dtype", "bf16", "fp8"))
    assert len(both) == 2 * len(TABLES["dense"]) + len(TABLES["uneven"])
    assert [cell.lengths for cell in both if cell.dtype == "fp8"] == ["even"] * len(TABLES["dense"])


PEER = """
def find():
    return {"double": Double}, {"absent": "no such module"}

class Double:
    calls = 1

    def __init__(self, inputs):
        if inputs.cell.queries > 1:
            raise NotImplementedError("it takes one query")
        self.name, self.shape = "double", (*inputs.q.shape[:-1], 512)

    def seconds(self, runs):
        return 1e-3 * runs

    def out(self):
        import numpy
        return numpy.ones(self.shape)
"""


def test_a_peer_beside_us(tmp_path):
    (tmp_path / "__init__.py").write_text(PEER)
    notes = []
    peers = bench._peers(tmp_path, notes)
    assert notes == ["peers left out: absent: no such module"]
    arguments = parse(*SMALL[-4:], "--implementations", "cpu")
    for queries in (1, 2):
        job = bench._Job(Cell(2, 70, 2, queries), ["cpu"], gpu=False, with_plan=True, notes=notes)
        bench._compile(job.to_compile())
        rows = job.measure(arguments, peers, notes)
        assert [row.implementation for row in rows[1:]] == ["double"] * (queries == 1)
    assert rows[0].error < 1e-2
    assert notes[1:] == ["double: it takes one query"]


def test_absent_peers_are_named(tmp_path):
    notes = []
    assert bench._peers(tmp_path, notes) == {}
    assert re.match(rf"peers: none, {tmp_path} is not here", notes[0])
    if importlib.util.find_spec("torch") is None:
        notes.clear()
        assert bench._peers(ROOT / "benchmarks" / "peers", notes) == {}
        assert notes == ["peers left out: flashmla: No module named 'torch'; fa3: No module named 'torch'"]


def test_rows_are_appended_by_the_benchmark(tmp_path):
    """benchmarks/decode.py: one run's rows share an id, the ceilings are rows of their own."""
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / "decode.py"), *SMALL, "--implementations", "cpu"]
    environment = os.environ | {"RESULTS": str(tmp_path / "results"), "COMMIT": "abc", "JAX_PLATFORMS": "cpu"}
    for _ in range(2):
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300, cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "results" / "decode.jsonl").read_text().splitlines()]
    assert [row["op"] for row in rows] == ["copy", "read", "matmul bf16", "mla_decode"] * 2
    assert [len({row["run"] for row in rows[i : i + 4]}) for i in (0, 4)] == [1, 1]
    assert rows[0]["run"] != rows[4]["run"]
    assert {row["commit"] for row in rows} == {"abc"}
    assert rows[3]["versions"]["jax"] == jax.__version__


def test_the_kept_benchmark_of_prefill(tmp_path):
    """benchmarks/prefill.py on this machine's CPU: two runs, each with its ceilings, and a right result."""
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / "prefill.py"), "--shape", "2", "50", "70", "3"]
    command += ["--implementations", "cpu", "--no-peers", "--dtype", "bf16", "mixed", "--runs", "2"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "RESULTS": str(tmp_path)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "left out: mixed Cell(batch=2, queries=50, keys=70, heads=3, causal=True): " in ran.stderr
    rows = [json.loads(line) for line in (tmp_path / "prefill.jsonl").read_text().splitlines()]
    measured = [row for row in rows if row["op"] == "mla_prefill"]
    assert len({row["run"] for row in measured}) == len(measured) == 2
    assert {row["run"] for row in rows if row["implementation"] == "ceiling"} == {row["run"] for row in measured}
    for row in measured:
        assert row["cell"] == [2, 50, 70, 3] and row["causal"] and 0 < row["error"] < 1e-2
        assert row["us"] > 0 and row["sustained_us"] > 0


def test_the_kept_benchmark_of_context(tmp_path):
    """benchmarks/context.py on this machine's CPU: the scan gives what XLA's does."""
    rows, _ = kept_rows(tmp_path, "context", "--tokens", "128", "--heads", "2", "--new", "16", "--chunks", "2", "3")
    scans = [row for row in rows if row["op"] == "mla_context"]
    assert [row["cell"][1] for row in scans] == [256] * 3 + [384] * 2
    # Two results in bf16, whose up-projections are rounded where XLA sees fit: each is 3e-3 off the truth.
    assert scans[0]["error"] < 1e-2 and all(row["us"] > 0 for row in scans)
    assert scans[0]["temporary_bytes"] == scans[3]["temporary_bytes"] > 0  # whatever the length of the context
    sums = 128 * (576 + 2 * 256) * 2 + 16 * 2 * 129 * 4
    assert scans[0]["temporary_of_sum"] == pytest.approx(scans[0]["temporary_bytes"] / sums, rel=1e-3)
    bare = scans[4]
    assert scans[3]["ratio"] == pytest.approx(scans[3]["us"] / bare["us"], rel=1e-2)
    assert scans[3]["sustained_ratio"] == pytest.approx(scans[3]["sustained_us"] / bare["sustained_us"], rel=1e-2)


def kept_rows(folder, name, *arguments, status=0):
    """What a benchmark appended on this machine's CPU, and what it printed."""
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / f"{name}.py"), *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "RESULTS": str(folder)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == status, ran.stderr
    results = folder / f"{name}.jsonl"
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else [], ran.stderr


def test_the_kept_benchmark_of_sparse(tmp_path):
    """benchmarks/sparse.py: each layout is right, rates are compared with what is aimed at, failures leave the rest."""
    arguments = ["--quick", "--implementations", "cpu:none", "cpu", "--cache", "fp8_ds_mla", "bf16", "e4m3fn"]
    rows, printed = kept_rows(tmp_path, "sparse", *arguments, "--runs", "2", status=1)
    assert printed.count("FAILED: ") == printed.count("cpu:none: NotImplementedError: ") == 7
    assert "FAILED: 2 x 16 of 256, 3 heads x 1, fp8_ds_mla, cpu:none: NotImplementedError: " in printed
    runs = list(dict.fromkeys(row["run"] for row in rows))
    assert len(runs) == 2 and [row["run"] for row in rows] == sorted((r["run"] for r in rows), key=runs.index)
    measured = [row for row in rows if row["run"] == runs[1] and row["implementation"] != "ceiling"]
    ours = [row for row in measured if row["implementation"] == "cpu"]
    assert [(row["cell"], row["dtype"]) for row in ours] == [
        *(([2, 16, 3, queries], kind) for queries in (1, 2) for kind in ("fp8_ds_mla", "bf16", "e4m3fn")),
        ([1, 16, 3, 20], "bf16"),
    ]
    assert [row["implementation"] for row in measured if row not in ours] == ["xla"] * 3
    assert all(0 < row["error"] < 1e-2 and row["us"] > 0 for row in measured)
    assert ours[0]["TFLOPs"] == pytest.approx(2 * 1088 * 16 * 3 * 2 / ours[0]["us"] * 1e-6, rel=1e-2)
    assert ours[0]["TBps"] == pytest.approx(656 * 16 * 2 / ours[0]["us"] * 1e-6, rel=1e-2)
    assert ours[0]["of_aim"] == pytest.approx(ours[0]["TBps"], rel=1e-2)
    assert ours[3]["of_aim"] == pytest.approx(2 * ours[0]["us"] / ours[3]["us"], rel=1e-2)
    assert "TBps" not in ours[6]
    if importlib.util.find_spec("torch") is None:
        assert printed.count("left out: ") == printed.count("flashmla: No module named 'torch'") == 7


def test_the_kept_benchmark_of_helpers(tmp_path):
    """benchmarks/helpers.py: the native helpers give what the reference gives, and so in place."""
    rows, printed = kept_rows(tmp_path, "helpers", "--quick")
    assert "prepares pack_kv [256, 2]" in printed
    native = {(row["op"], *row["cell"]): row for row in rows if row["implementation"] == "cpu"}
    layouts = ("bf16", "e4m3fn", "fp8_ds_mla")
    assert list(native) == [
        *((f"pack_kv{kind}", 256, 2) for kind in ("", "_fp8 plain", "_fp8 kernel")),
        *((f"gather_context {layout}", 256) for layout in layouts),
        ("merge_states", 256, 2),
        *((f"update_cache {layout}", tokens) for tokens in (256, 128) for layout in layouts),
    ]
    assert native.pop(("merge_states", 256, 2))["error"] < 1e-2
    assert {row["error"] for row in native.values()} == {0}
    few = native["update_cache bf16", 128]
    assert few["of_aim"] == pytest.approx(5 / few["us"], rel=1e-2)
    many = native["update_cache bf16", 256]
    assert many["TBps"] == pytest.approx(256 * (2 * 1152 + 4) / many["us"] * 1e-6, rel=1e-2)
    assert many["of_aim"] == pytest.approx(many["of_copy"] / 0.9, rel=1e-2)
    assert sum(row["implementation"] == "xla" for row in rows) == len(native) + 1
    assert not kept_rows(tmp_path / "none", "helpers", "--quick", "--dry-run")[0]
