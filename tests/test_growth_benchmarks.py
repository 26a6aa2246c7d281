"""Benchmarks of how costs grow: run on the CPU in small, and their tables and plots of figures that are made up."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from pagedkv import LLM, ops
from pagedkv.cli import nano_bench

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import batch_sizes
import plots
import record
import report
import tables
import tables_growth


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder in place of benchmarks/results: write(name, rows)."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(record, "RESULTS", tmp_path)

    def write(name: str, rows: list[dict]) -> None:
        file = {"commit": "abc1234", "machine": {"gpu": "NVIDIA H200"}, "rows": rows}
        (tmp_path / f"{name}.json").write_text(json.dumps(file))

    return write


def table_rows(text: str) -> list[list[str]]:
    """Cells of all rows, without headers."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and ", us" not in line and "tok/s" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


# --- steps of every size


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(nano_bench.SHAPES, "tiny", (32, 64, 2, 4, 2, True))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_steps_of_every_size_are_measured(tiny, results, tmp_path, monkeypatch, kv_cache_dtype):
    arguments = ["--models", "tiny", "--device", "cpu", "--most", "5", "--contexts", "40", "24", "--block-size", "16"]
    monkeypatch.setattr(sys, "argv", ["batch_sizes.py", *arguments, "--passes", "2", "--kv-cache-dtype", kv_cache_dtype])
    batch_sizes.main()
    suffix = "-fp8" if kv_cache_dtype == "fp8" else ""
    rows = json.loads((tmp_path / f"batch-sizes-cpu-tiny{suffix}.json").read_text())["rows"]
    assert [row["context"] for row in rows] == [40, 24]
    for row in rows:
        assert list(row["step_us"]) == list("12345")
        for n, us in row["step_us"].items():
            assert 0 < row["step_us_least"][n] <= us <= row["step_us_most"][n]
    key_bytes = 2 * 2 * 2 * 128 * (1 if suffix else 2)  # keys and values, layers, heads, head_dim
    assert rows[0]["sequence_us"] == pytest.approx(40 * key_bytes / 4540e3, abs=1e-3)


def test_numbers_of_sequences():
    assert batch_sizes.counts(5, 1) == [1, 2, 3, 4, 5]
    assert batch_sizes.counts(70, 16) == [1, 17, 32, 33, 49, 64, 65, 70]


def test_a_step_that_is_made_is_one_that_the_engine_plans(tiny, tmp_path, monkeypatch):
    """The same arrays on their way to the device, for the same sequences in the same pages."""
    folder, steps = nano_bench.write_shape("tiny", tmp_path), []
    options = dict(device="cpu", load_format="dummy", max_model_len=64, num_blocks=12, enable_prefix_caching=False)
    prompts = [[1] * 19, [1] * 19]
    with LLM(folder, **options) as llm:
        fill = llm._runner.fill
        monkeypatch.setattr(llm._runner, "fill", lambda step: steps.append(describe(llm, step)) or fill(step))
        llm.generate(prompts, batch_sizes.SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    with LLM(folder, **options) as llm:
        llm.manager.allocate_batch([0, 1], [[0] * 20] * 2)
        assert describe(llm, batch_sizes.make_step(2, 20)) == steps[-1]
        step = batch_sizes.make_step(2, 20)
        llm._runner.launch(step)
        assert len(step.tokens()) == 2


def describe(llm: LLM, step) -> tuple:
    arrays = llm.manager.prepare(step.ids, step.starts, step.lengths)
    named = (arrays.positions, arrays.slot_mapping, arrays.context_lens, arrays.block_tables)
    return step.only_decodes, step.num_decodes, *(array.tolist() for array in named)


def test_a_pool_is_full_of_numbers(tiny, tmp_path):
    folder = nano_bench.write_shape("tiny", tmp_path)
    with LLM(folder, device="cpu", load_format="dummy", max_model_len=64, num_blocks=7) as llm:
        caches = llm._runner.caches
        batch_sizes.fill_pool(caches, 7)
        pages = [ops.asarray(cache[:7], "float32").numpy() for pair in caches.layers for cache in pair]
    assert all((page == pages[0][0]).all() for cache in pages for page in cache)
    assert pages[0].std() > 0.5


def batch_row(context: int = 640, kv_cache_dtype: str = "bfloat16") -> dict:
    times = {n: 1000.0 + 5 * n for n in range(1, 257)} | {n: 1400.0 + 5 * n for n in range(33, 65)}
    return {"model": "0.6B", "kv_cache_dtype": kv_cache_dtype, "context": context, "sequence_us": 5.0, "step_us": times}


def test_the_table_of_steps(results):
    results("batch-sizes-cuda-0.6B", [batch_row(), batch_row(1128)])
    results("batch-sizes-cuda-0.6B-fp8", [batch_row(kv_cache_dtype="float8_e4m3fn")])
    text = tables_growth.batch_sizes()
    rows = table_rows(text)
    assert [row[0] for row in rows] == ["0.6B, 640 tokens", "0.6B, 1,128 tokens", "0.6B, fp8 KV, 640 tokens"]
    assert rows[0][1:6] == ["995", "27,586", "37,209", "78,049", "112,281"]
    assert rows[0][6:9] == ["1 of 255", "1.317 at 33", "23.6% at 33"]
    assert "`batch-sizes-cuda-0.6B.json`, `batch-sizes-cuda-0.6B-fp8.json`" in text


def test_the_plot_of_steps(results):
    results("batch-sizes-cuda-0.6B", [batch_row()])
    (panel,) = plots.batch_sizes().panels
    ours, theirs = panel.series.values()
    assert (ours[0], ours[255]) == (995, 112281)
    recorded = plots.VLLM["concurrency_tokens_per_second"]
    assert (theirs[0], theirs[255]) == (recorded["1"], recorded["256"])
    assert theirs[1] is None and len(panel.groups) == 256
    results("batch-sizes-cuda-0.6B", [batch_row(1128)])
    assert list(plots.batch_sizes().panels[0].series) == ["0.6B, 1,128 tokens each"]  # vLLM was not measured so


# --- attention


def growth_row(part: str, sequences: int, keys: int, us: float, **other) -> dict:
    nbytes = sequences * keys * 4096
    row = {"part": part, "row": f"{sequences}x{keys}", "sequences": sequences, "keys": keys, "bytes": nbytes, "pages": 64}
    times = {"us": us, "unplanned_us": 2 * us, "gb_per_s": nbytes / us / 1e3, "unplanned_gb_per_s": nbytes / us / 2e3}
    return row | times | other


GROWTH = [
    *(growth_row("keys", 1, keys, 4 + keys / 1000) for keys in (32768, 65536)),
    *(growth_row("sequences", count, 16, us) for count, us in ((1, 3.0), (2, 3.3))),
    growth_row("pool", 32, 4096, 128.0, row="pool of its own"),
    growth_row("pool", 32, 4096, 130.0, row="far end", pages=163840),
]


def test_the_tables_of_growth(results):
    results("growth-cuda", GROWTH)
    rows = table_rows(tables_growth.growth())
    assert rows[0] == ["32,768", "29.6", "36.8", "73.5", "3,650", "1,825", "", ""]
    assert rows[1][-2:] == ["4,096", "2,048"]  # the launch's 4 us are in neither
    assert rows[2:4] == [["1", "3.0", "6.0", "", ""], ["2", "3.3", "6.6", "1.10", "1.10"]]
    assert rows[5] == ["far end", "163,840", "130", "260", "1.016", "1.016"]


def test_a_part_that_was_not_measured(results):
    results("growth-cuda", GROWTH[:2])
    assert len(table_rows(tables_growth.growth())) == 2


def test_the_plot_of_growth(results):
    results("growth-cuda", GROWTH)
    keys, sequences = plots.growth().panels
    assert (keys.groups, sequences.groups) == (["32768", "65536"], ["1", "2"])
    assert keys.series["floor"] == [29.56, 59.13] and sequences.series["pagedkv, no plan"] == [6.0, 6.6]
    assert keys.is_log and [plots._short(n) for n in keys.ticks] == ["1,024", "8k", "64k", "512k", "2M"]


@pytest.mark.parametrize("name", ["batch_sizes", "growth"])
def test_such_plots_are_drawn(results, tmp_path, name):
    pytest.importorskip("matplotlib", reason="matplotlib draws the plots")
    results("batch-sizes-cuda-0.6B", [batch_row()])
    results("growth-cuda", GROWTH)
    plot = getattr(plots, name)()
    plots.draw(plot, tmp_path / "new.svg")
    texts = ElementTree.parse(tmp_path / "new.svg").iter("{http://www.w3.org/2000/svg}text")
    assert {panel.label for panel in plot.panels} < {text.text for text in texts}


def test_the_table_of_queries(results):
    def row(queries: int, us: float) -> dict:
        return {"row": "32x4096", "heads": "32/8", "queries": queries, "us": us - 1, "late_us": us, "unplanned_us": us + 1}

    results("queries-cuda", [row(1, 100.0), row(2, 104.0), row(32, 140.0)])
    cells = [each[2:] for each in table_rows(tables_growth.queries())]
    assert cells == [
        ["1", "101", "100", "99.0", "", ""],
        ["2", "105", "104", "103", "1.04", "1.05"],
        ["32", "141", "140", "139", "1.40", "1.35, missed"],
    ]


def test_what_was_not_recorded_is_left_out(results):
    for name in ("batch-sizes", "growth", "queries", "random-shapes"):
        assert report.table(name) == "Not recorded yet."
    with pytest.raises(FileNotFoundError):  # of a benchmark that was recorded long ago: a mistake
        report.table("linear")


# --- inputs, as far as they need no GPU


def test_pages_of_a_pool(monkeypatch):
    """Random, each once, and where they were asked for."""
    pytest.importorskip("torch", reason="the benchmark is written with torch")
    import attention_cuda
    import growth

    monkeypatch.setattr(attention_cuda, "ROTATED_BYTES", 3 * 2 * 40 * 2 * 64 * 4)
    lens = [40, 40]
    plain, far, many = (
        attention_cuda.Inputs(lens, (4, 2), 64, 16, device="cpu", **options)
        for options in ({}, {"num_pages": 100, "is_far": True}, {"num_pages": 100})
    )
    named = plain.copies * 6
    for inputs, low, high in ((plain, 0, named), (far, 100 - named, 100), (many, 0, 100)):
        pages = inputs.tables.flatten().tolist()
        assert len(set(pages)) == named and low <= min(pages) and max(pages) < high
        assert len(inputs.k_cache) == high and inputs.nbytes == 2 * 80 * 2 * 64 * 2
    assert max(many.tables.flatten().tolist()) >= named
    args = SimpleNamespace(parts=["pool"], pool_row=(32, 4096), far_elements=1 << 31, most_pages=10**6)
    far_options = next(case for case in growth.cases(args) if case[1] == "far end")[-1]
    first_named = far_options["num_pages"] - 2 * 32 * 4096 // 16  # with two tables
    assert first_named * growth.PAGE_ELEMENTS >= 1 << 31
    assert growth.doublings(1024, 1 << 21)[-1] == 1 << 21 and growth.doublings(1, 5) == [1, 2, 4]


def test_a_loop_stands_for_a_graph(monkeypatch):
    pytest.importorskip("torch", reason="the benchmark is written with torch")
    import attention_cuda

    launched = []
    graph = attention_cuda.capture(launched.append, 3, "cpu")
    assert attention_cuda.time_us(graph, 3, 2) > 0 and launched == [0, *[0, 1, 2] * 2]


def test_attention_is_measured_on_the_cpu(results, monkeypatch):
    pytest.importorskip("torch", reason="the benchmark is written with torch")
    import attention_cuda
    import growth

    monkeypatch.setattr(attention_cuda, "ROTATED_BYTES", 1e5)
    monkeypatch.setattr(attention_cuda.Inputs, "launches", 2)
    row = growth.measure("keys", "1x32", 1, 32, {}, "cpu")
    assert (row["part"], row["sequences"], row["keys"], row["pages"]) == ("keys", 1, 32, 2)
    assert 0 < row["us_min"] <= row["us"] <= row["us_max"] and row["unplanned_us"] > 0
    assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["us"] / 1e3, rel=0.1)
    medians: dict = {}
    for queries in (1, 2):
        row = attention_cuda.measure(("2x32", (4, 2), 64, 16, queries, "bfloat16", 0), medians, "cpu")
    assert row["queries"] == 2 and row["of_plain"] > 0 and row["late_us"] > 0
