"""Tables of attention on a GPU, from results/ and peers.json alone. See report.py."""

from __future__ import annotations

from peers import best_decode_us, decode_us, figures
from tables import markdown, number, provenance, recorded

CALLS = {"unplanned_us": "no plan", "late_us": "with a plan", "us": "planned and overlapped"}


def decode_rows() -> list[dict]:
    """One query per sequence, bfloat16, head_dim 128: what peers were measured with."""
    rows = recorded("attention-cuda-decode")["rows"]
    return [
        row for row in rows
        if (row["queries"], row["cache"], row["num_splits"], row["head_dim"]) == (1, "bfloat16", 0, 128)
    ]  # fmt: skip


def best_peer_us(row: dict) -> float | None:
    return best_decode_us(row["row"], row["heads"], row["page"], row["bytes"])


def decode() -> str:
    """The three calls beside both peers, and each call's time as a share of the better peer's."""
    fa3, flashinfer = decode_us("flash-attention-3", "16/8", 16), decode_us("flashinfer", "16/8", 16)
    rows = []
    for row in decode_rows():
        best = best_peer_us(row)
        if (row["heads"], row["page"]) == ("16/8", 16):
            times = [row[call] for call in CALLS]
            shares = [f"{us / best:.2f}" for us in times]
            peers = (fa3[row["row"]], flashinfer[row["row"]])
            rows.append((row["row"], *map(number, peers), *map(number, times), *shares))
    names = " | ".join(f"{name}, us" for name in CALLS.values())
    header = f"| batch x keys | FA3, us | FlashInfer, us | {names} | share: no plan | with a plan | overlapped |"
    return f"{markdown(header, rows)}\n\n{provenance('attention-cuda-decode')}"


def decode_heads() -> str:
    """Other numbers of heads and pages of 64, planned and overlapped."""
    columns = [(heads, page) for page in (16, 64) for heads in ("16/8", "32/8", "64/8", "64/4")]
    cells: dict[str, dict[tuple[str, int], str]] = {}
    for row in decode_rows():
        best = best_peer_us(row)
        share = f"{row['us'] / best:.2f}" if best else "-"
        cells.setdefault(row["row"], {})[row["heads"], row["page"]] = f"{number(row['us'])} ({share})"
    header = "| batch x keys | " + " | ".join(f"{heads}, page {page}" for heads, page in columns) + " |"
    rows = [(name, *(found[column] for column in columns)) for name, found in cells.items()]
    return markdown(header, rows)


def decode_more() -> str:
    """More queries, fp8, head_dim 256, a fixed number of splits."""
    rows = []
    for row in recorded("attention-cuda-decode")["rows"]:
        if (row["queries"], row["cache"], row["num_splits"], row["head_dim"]) == (1, "bfloat16", 0, 128):
            continue
        what = f"{row['row']}, {row['heads']}, head_dim {row['head_dim']}, {row['queries']} queries, {row['cache']}"
        splits = str(row["num_splits"]) if row["num_splits"] else "free"
        share = f"{row['of_plain']:.2f}" if "of_plain" in row else "-"
        rows.append((what, splits, number(row["us"]), f"{row['gb_per_s']:,}", share))
    return markdown("| row | splits | us | GB/s | time, of one bfloat16 query with free splits |", rows)


def prefill_rows() -> list[dict]:
    """With TFLOP/s of the call without a plan, and every peer's."""
    fa3, flashinfer = figures("flash-attention-3")["prefill_tflops"], figures("flashinfer")["prefill_tflops"]
    rows = []
    for row in recorded("attention-cuda-prefill")["rows"]:
        name = f"{row['heads']} {row['row']}"
        peers = {f"FA3, {way}": figure[name] for way, figure in fa3.items()}
        peers["FlashInfer, page 16"] = flashinfer["page 16"].get(name)
        ours = {"no plan": row["tflops"] * row["us"] / row["unplanned_us"], "with a plan": row["tflops"],
                "sustained": row["sustained_tflops"]}  # fmt: skip
        rows.append({"name": name} | ours | peers)
    return rows


def prefill() -> str:
    found = prefill_rows()
    columns = [name for name in found[0] if name != "name"]
    rows = []
    for row in found:
        values = [f"{row[name]:.0f}" if row[name] else "-" for name in columns]
        shares = [f"{row['with a plan'] / row[f'FA3, {way}']:.2f}" for way in ("page 16", "page 256")]
        rows.append((row["name"], *values, *shares))
    header = "| heads and row | " + " | ".join(columns) + " | times FA3, page 16 | times FA3, page 256 |"
    return f"{markdown(header, rows)}\n\n{provenance('attention-cuda-prefill')}"


def prefill_more() -> str:
    """The same rows with an fp8 cache, and by the kernels of older GPUs."""
    files = {"bfloat16": "attention-cuda-prefill", "fp8 KV": "attention-cuda-prefill-fp8",
             "kernels of compute capability 8.0": "attention-cuda-prefill-sm80"}  # fmt: skip
    rows = []
    for group in zip(*(recorded(name)["rows"] for name in files.values()), strict=True):
        rows.append((f"{group[0]['heads']} {group[0]['row']}", *(str(row["tflops"]) for row in group)))
    table = markdown("| heads and row | " + " | ".join(files) + " |", rows)
    return f"{table}\n\n{provenance(*files.values())}"


def few_and_two_lengths() -> str:
    rows = []
    for batch, by_heads in figures("vllm-flash-attention-3")["decode_us"].items():
        for heads, (theirs, *ours) in by_heads.items():
            shares = [f"{us / theirs:.2f}" for us in ours]
            rows.append((batch, heads, *map(number, (theirs, *ours)), *shares))
    columns = "FA3, us | no plan, us | planned and overlapped, us | share: no plan | overlapped"
    return markdown(f"| batch x keys | heads | {columns} |", rows)
