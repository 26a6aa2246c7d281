"""docs/performance.md, its plots and what they are made of: peers' figures and the lab's have sources, nothing is stale."""

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import peers
import plots
import report
import tables

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
DUBLIN_CORE = "{http://purl.org/dc/elements/1.1/}"


def test_every_table_is_on_a_page():
    named = [name for page in report.PAGES for _, name, _ in report.BLOCK.findall(page.read_text())]
    assert set(named) == set(report.TABLES)


def test_a_stale_table_would_be_found():
    stale = "<!-- report: headline -->\n| old |\n<!-- end -->\n"
    assert report.with_tables(stale) == stale.replace("| old |", tables.headline())


@pytest.mark.parametrize("name", peers.PEERS)
def test_a_peer_says_where_its_figures_come_from(name):
    entry = peers.PEERS[name]
    assert set(entry) == {"peer", "version", "source", "how", "machine", "figures"}
    assert all(entry.values())


def test_shares_of_the_ragged_row_count_its_bytes():
    """The peers read more bytes there, so their time for ours is shorter than the time that was measured."""
    ours = 8 * peers.figures("flashinfer")["ragged_bytes_per_kv_head"] // 2
    measured = peers.decode_us("flashinfer", "16/8", 16)["256xragged"]
    assert peers.best_decode_us("256xragged", "16/8", 16, ours) == pytest.approx(measured / 2)
    assert peers.best_decode_us("1x1024", "16/8", 16, 1 << 22) == peers.decode_us("flashinfer", "16/8", 16)["1x1024"]
    assert peers.best_decode_us("1x1024", "64/4", 16, 1 << 21) == peers.decode_us("flash-attention-3", "64/4", 16)["1x1024"]
    assert peers.best_decode_us("1x1024", "64/4", 64, 1 << 21) is None


# --- what the lab's notes hold


def is_in(number: float, text: str) -> bool:
    """As it is, with commas, or a thousandth of it (us in ms)."""
    forms = {f"{number:,}", f"{number}", f"{number / 1000:,}"}
    return any(re.search(rf"(?<![\d.,]){re.escape(form)}(?![\d]|[.,]\d)", text) for form in forms)


@pytest.mark.parametrize("case", tables.lab("special_cases"), ids=lambda case: f"{case['case']}: {case['row']}")
def test_a_special_case_is_in_the_code_and_in_the_notes(case):
    assert (ROOT / case["where"]).exists()
    if "with" not in case:
        assert not case["source"], "measured, without figures"
        return
    text = (ROOT / case["source"]).read_text()
    assert case["quote"] in text
    for number in (case["with"], case["without"]):
        assert is_in(number, case["quote"] if case["source"].endswith(".md") else text)


# --- plots


def description(path: Path) -> str:
    return ElementTree.parse(path).find(f".//{DUBLIN_CORE}description").text


def drawn_by(path: Path) -> str:
    return ElementTree.parse(path).find(f".//{DUBLIN_CORE}creator//{DUBLIN_CORE}title").text


def test_plots_are_on_the_page_and_nothing_else_is():
    pages = PAGE.read_text() + PAGE.with_name("parallel.md").read_text()
    shown = set(re.findall(r"\(plots/(\w+)\.svg\)", pages))
    assert shown == set(plots.PLOTS) == {path.stem for path in plots.FOLDER.iterdir()}


@pytest.mark.parametrize("name", plots.PLOTS)
def test_a_plot_shows_what_is_recorded(name):
    """`make plots` after a recording. The file says what it shows, so this needs no matplotlib."""
    assert description(plots.FOLDER / f"{name}.svg") == plots.PLOTS[name]().description()


@pytest.mark.parametrize("name", plots.PLOTS)
def test_a_plot_is_drawn_as_the_script_draws_it(name, tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib draws the plots")
    kept = plots.FOLDER / f"{name}.svg"
    if f"v{matplotlib.__version__}," not in drawn_by(kept):
        pytest.skip(f"drawn by {drawn_by(kept)}; this is matplotlib {matplotlib.__version__}, which may differ")
    plots.draw(plots.PLOTS[name](), tmp_path / "new.svg")
    assert (tmp_path / "new.svg").read_bytes() == kept.read_bytes()


# --- benchmarks/README.md


def test_benchmarks_that_are_listed_exist():
    again = (ROOT / "benchmarks" / "README.md").read_text()
    listed = re.findall(r"^- `(\w+\.py)", again, re.M)
    assert len(listed) > 15 and all((ROOT / "benchmarks" / name).exists() for name in listed)
    recorded = {path.name for path in RESULTS.glob("*.json")}
    named = set(re.findall(r"`([\w.-]+\.json)`", again))
    assert recorded <= named
    assert named - recorded <= {f"{name}.json" for name in tables.LATER}
