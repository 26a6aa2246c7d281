"""Tables of recorded figures for README.md, docs/ and lab/FIGURES.md: `python benchmarks/report.py`, with --write into the pages.

A page says where a table stands: <!-- report: NAME --> before it and <!-- end --> after it. Figures come from results/,
peers.json and lab/figures.json alone.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import tables
import tables_attention as attention
import tables_growth
import tables_random

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in (
    "README.md", "docs/performance.md", "docs/integrations.md", "docs/parallel.md", "benchmarks/lab/FIGURES.md",
)]  # fmt: skip
TABLES: dict[str, Callable[[], str]] = {
    "headline": tables.headline,
    "engine": tables.engine,
    "vllm": tables.beside_vllm,
    "concurrency": tables.concurrency,
    "batch-sizes": tables_growth.batch_sizes,
    "ways-in": tables.ways_in,
    "vllm-backend": tables.vllm_backend,
    "linear": tables.linear_step,
    "host": tables.host,
    "block-manager": tables.block_manager,
    "cpu": tables.cpu,
    "cpu-engine": tables.cpu_engine,
    "cpu-headline": tables.cpu_headline,
    "replicas": tables.replicas,
    "special-cases": tables.special_cases,
    "decode": attention.decode,
    "decode-heads": attention.decode_heads,
    "decode-more": attention.decode_more,
    "queries": tables_growth.queries,
    "growth": tables_growth.growth,
    "random-shapes": tables_random.random_shapes,
    "random-losses": tables_random.random_losses,
    "few-and-two-lengths": attention.few_and_two_lengths,
    "prefill": attention.prefill,
    "prefill-more": attention.prefill_more,
}
BLOCK = re.compile(r"(<!-- report: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(name: str) -> str:
    """As it is recorded now."""
    try:
        return TABLES[name]()
    except FileNotFoundError as error:
        if Path(error.filename).stem not in tables.LATER:
            raise
        return "Not recorded yet."


def with_tables(text: str) -> str:
    """The page's text with each of its tables as it is recorded now."""
    return BLOCK.sub(lambda found: f"{found[1]}{table(found[2])}\n{found[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into the pages, between the two comments")
    args = parser.parse_args()
    for page in PAGES:
        if args.write:
            page.write_text(with_tables(page.read_text()))
        else:
            print(*(table(name) for _, name, _ in BLOCK.findall(page.read_text())), sep="\n\n")


if __name__ == "__main__":
    main()
