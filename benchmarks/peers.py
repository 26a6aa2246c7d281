"""What other projects reach, from peers.json: each entry says which version, from where, how it was run and on what.

The figures of a row are those of an H200. Code that compares with them reads them from here; nothing else holds a copy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PEERS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "peers.json").read_text())


def figures(name: str) -> dict[str, Any]:
    """Of the entry of this name: "nano-vllm", say."""
    return PEERS[name]["figures"]


def decode_us(name: str, heads: str, page: int) -> dict[str, float]:
    """Microseconds of each row of benchmarks/attention_cuda.py, as far as the peer was measured there."""
    return figures(name)["decode_us"].get(f"{heads} page {page}", {})


def decode_bytes(name: str, row: str, kv_heads: int, nbytes: int) -> int:
    """That the peer read in this row. Its ragged row had other lengths than ours, hence other bytes than `nbytes`."""
    return kv_heads * figures(name)["ragged_bytes_per_kv_head"] if row == "256xragged" else nbytes


def best_decode_us(row: str, heads: str, page: int, nbytes: int) -> float | None:
    """Of the faster of FlashAttention-3 and FlashInfer, for as many bytes as ours; None where neither was measured."""
    kv_heads = int(heads.partition("/")[2])
    times = [
        us[row] * nbytes / decode_bytes(name, row, kv_heads, nbytes)
        for name in ("flash-attention-3", "flashinfer")
        if row in (us := decode_us(name, heads, page))
    ]
    return min(times, default=None)
