"""Cases drawn at random: from the lines of a run to a record, and from the record to tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import random_cases
import record
import tables
import tables_random

HEADER = {"card": "NVIDIA H200", "torch": "2.11.0", "seed": 5, "heads": None, "fill": "none"}


def line(case: int, who: str, us: float | None, **other) -> dict:
    """us None: a call that raised."""
    row = {"case": case, "kind": "decode", "row": f"1x{case}", "heads": "16/8x128", "page": 16, "who": who}
    row |= {"error": "ValueError('no')"} if us is None else {"us": us, "relative": 2e-3, "unwritten": 0, "is_right": True}
    return row | other


LINES = [
    HEADER,
    line(0, "ours", 10.0), line(0, "ours, no plan", 13.0), line(0, "FA3", 8.0, is_right=False, relative=0.5),
    line(0, "FA3, no metadata", 12.5), line(0, "FI XQA", None),
    line(1, "ours", 11.0), line(1, "ours, no plan", 11.5), line(1, "FA3", 10.0), line(1, "FI XQA", 11.0),
    line(2, "ours", 3.0, is_right=False, relative=0.25, unwritten=1), line(2, "ours, no plan", None), line(2, "FA3", 4.0),
    HEADER,  # it went on after a lost context
    line(3, "ours", 5.0, heads="4/4x256", kind="prefill", row="64+0", page=32), line(3, "FA3", None, heads="4/4x256"),
]  # fmt: skip


def found_in(*rows: dict | str) -> random_cases.Found:
    found = random_cases.Found()
    found.read([row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows])
    return found


def summaries() -> list[dict]:
    return [random_cases.summary(seed, each) for (seed, _), each in found_in(*LINES).cases.items()]


def test_a_wrong_peer_is_no_peer():
    first = summaries()[0]
    assert (first["best_peer"], first["planned_of_peer"], first["plain_of_peer"]) == ("FA3, no metadata", 0.8, 1.04)
    assert first["us"] == {"planned": 10.0, "plain": 13.0, "FA3, no metadata": 12.5}
    assert first["failed"] == {"FA3": "wrong: 5.0e-01 relative, 0 rows unwritten", "FI XQA": "ValueError('no')"}
    assert (first["heads"], first["head_dim"], first["page"], first["seed"]) == ("16/8", 128, 16, 5)


def test_the_fastest_peer_counts_for_both_calls():
    second = summaries()[1]
    assert (second["best_peer"], second["planned_of_peer"], second["plain_of_peer"]) == ("FA3", 1.1, 1.15)


def test_a_wrong_or_failed_result_of_ours_has_no_ratio():
    third = summaries()[2]
    assert (third["planned_of_peer"], third["plain_of_peer"], third["us"]) == (None, None, {"FA3": 4.0})
    assert third["failed"] == {"planned": "wrong: 2.5e-01 relative, 1 rows unwritten", "plain": "ValueError('no')"}


def test_a_case_without_a_peer():
    fourth = summaries()[3]
    assert (fourth["best_peer"], fourth["planned_of_peer"]) == (None, None) and fourth["us"] == {"planned": 5.0}


def test_lines_of_other_kinds():
    """A table at the end, a warning before, and what a killed process left."""
    found = found_in("a warning\n", *LINES[:6], "| table |\n", '{"case": 7, "ki')
    assert list(found.cases) == [(5, 0)] and found.num_torn == 1
    found.read([json.dumps(HEADER | {"seed": 6}), json.dumps(line(0, "ours", 1.0))])
    assert list(found.cases) == [(5, 0), (6, 0)]
    with pytest.raises(ValueError, match="no line with the card comes before"):
        found_in(line(0, "ours", 1.0))


def test_the_command_writes_the_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LINES))
    monkeypatch.setattr(sys, "argv", ["random_cases.py", str(tmp_path / "run.jsonl"), "--commit", "abc1234"])
    random_cases.main()
    written = json.loads((tmp_path / "attention-random-cuda.json").read_text())
    assert written["rows"] == summaries()
    assert (written["commit"], written["machine"]) == ("abc1234", {"gpu": "NVIDIA H200"})  # not of this machine
    assert set(written["versions"]) == {"torch", "peers"} and written["versions"]["torch"] == "2.11.0"
    printed = capsys.readouterr().out
    assert "planned: 2 of 4 cases beside a peer, geometric mean 0.938, 1 above 1.00, 1 above 1.03" in printed
    assert "FAILED: seed 5, case 2: wrong" in printed and "FAILED: seed 5, case 2: ValueError" in printed


# --- the tables


def test_classes_and_counts():
    rows = [row.split(" | ") for row in tables_random.by_class(summaries()).splitlines()[2:]]
    assert [row[:2] for row in rows] == [["| all", "4"], ["| decode", "3"], ["| prefill", "1"],
                                         ["| head_dim 128", "3"], ["| head_dim 256", "1"]]
    assert rows[0][2:] == ["0.94", "1 of 2", "1 of 2", "1.09", "2 of 2", "2 of 2 |"]
    assert rows[2][2:] == ["", "0 of 0", "0 of 0", "", "0 of 0", "0 of 0 |"]


def test_what_is_left_out_is_said():
    text = tables_random.left_out(summaries())
    assert text.startswith("1 of 4 cases had no peer with a right result. pagedkv failed in these: 1x2, 16/8, planned: wrong")
    assert tables_random.left_out(summaries()[:2]) == ""


def test_who_was_the_fastest_peer():
    assert tables_random.first_peers(summaries()) == "The fastest peer: FA3 (2); FA3, no metadata (1)."


def test_the_worst_come_first():
    cases = summaries()
    assert [case["case"] for case in tables_random.worst(cases, "plain", 1.00)] == [1, 0]
    assert [case["case"] for case in tables_random.worst(cases, "planned", 1.00)] == [1]
    assert tables_random.listed(tables_random.worst(cases, "planned", 1.00), "planned").splitlines()[2] == (
        "| 1 x 1 | 16/8 | 16 | 11.0 | 10.0 (FA3) | 1.100 |"
    )
    assert tables_random.plain_share(cases) == (
        "100% of the plain calls take more than 1.03 times the best peer's time; all of them:"
    )
    assert tables_random.plain_share(cases[2:3]) == "No plain call takes more than 1.03 times the best peer's time."


def test_the_block(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    rows = summaries() + [summaries()[1] | {"case": 10 + i, "plain_of_peer": 2 + i / 10} for i in range(25)]
    text = json.dumps({"commit": "abc1234", "machine": {"gpu": "NVIDIA H200"}, "rows": rows})
    (tmp_path / "attention-random-cuda.json").write_text(text)
    losses = tables_random.random_losses()
    assert losses.count("\n| 1 x 1 | 16/8 | 16 | 11.0 ") == 26  # planned: all; it is not so for plain
    assert losses.count("\n| 1 x 1 | 16/8 | 16 | 11.5 ") == tables_random.NUM_WORST
    assert "the worst 20:" in losses and "| 4.400 |" in losses and "| 1.150 |" not in losses
    for block in (losses, tables_random.random_shapes()):
        assert block.endswith("NVIDIA H200, recorded at abc1234: `attention-random-cuda.json`.")


def test_a_batch_is_named_by_its_lengths():
    names = {
        "512+245": "1 x 512+245",
        "1+62,1+0,1+0,1+62": "2 x 1+62, 2 x 1+0",
        "1x346": "1 x 346",
        "3x5000,1x7,2x5000": "5 x 5000, 1 x 7",
        "4+0,1+0,5+0,12+0,9+0": "1 x 4+0, 1 x 1+0, 1 x 5+0, ... (5 sequences)",
        "64+0,8+0,8+0,6... (28 sequences)": "1 x 64+0, 2 x 8+0, ... (28 sequences)",
        "64+0,8+0,8+0,...(101)": "1 x 64+0, 2 x 8+0, ... (101 sequences)",
    }
    assert {row: tables_random.batch(row) for row in names} == names
