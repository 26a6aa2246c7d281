"""Counts what there is to read, as a table in Markdown: of the checkout, or of revisions of git.

    python tools/sizes.py                             # the checkout
    python tools/sizes.py --at d3f6370 --at HEAD      # two revisions beside each other

Lines include comments and blank lines, and csrc/py those of dlpack.h, which is not ours.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import tarfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
GIT = ("git", "-C", str(ROOT))
PARTS = ("csrc", "pagedkv", "tests")
SOURCE = re.compile(rf"^({'|'.join(PARTS)})/.*\.(c|h|cu|inc|py|cpp)$")
FOLDERS = ("csrc/cuda", "csrc/py", "csrc/cpu", "csrc/ops", "csrc/block_manager", "pagedkv", "tests")
# The files that divide attention's work, wherever they lie: `attention_plan.cu`, `attention/plan/lengths.h`, and
# `attention_prefill.h`, which has the items and their order.
PLANNING = r"csrc/cuda/attention.*(plan|shape|schedule|lengths|prefill[_/]batch|prefill[_/]parts|prefill\.h|/items).*"
THRESHOLDS = r"csrc/cuda/(.*/)?thresholds\.h"


def files_at(revision: str | None) -> dict[str, str]:
    """Path -> text of every source file; without a revision, of the checkout and what git would add there."""
    if revision is None:
        command = [*GIT, "ls-files", "-z", "-co", "--exclude-standard"]
        listed = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        paths = filter(SOURCE.search, listed.stdout.decode().split("\0"))
        return {path: (ROOT / path).read_text() for path in paths if (ROOT / path).exists()}
    packed = subprocess.run([*GIT, "archive", revision, "--", *PARTS], stdout=subprocess.PIPE, check=True)
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        members = [each for each in archive if each.isfile() and SOURCE.search(each.name)]
        return {each.name: archive.extractfile(each).read().decode() for each in members}


def sizes_of(files: dict[str, str]) -> dict[str, int]:
    """What is counted -> how much of it there is."""

    def lines(pattern: str) -> int:
        return sum(text.count("\n") for path, text in files.items() if re.fullmatch(pattern, path))

    sizes = {f"lines of {folder}": lines(f"{folder}/.*") for folder in FOLDERS}
    sizes["files of pagedkv/engine"] = sum(path.startswith("pagedkv/engine/") for path in files)
    sizes["lines of attention's planning"] = lines(PLANNING)
    numbers = [numbers_in(text) for path, text in files.items() if re.fullmatch(THRESHOLDS, path)]
    sizes["numbers in thresholds.h"] = sum(numbers)
    return sizes


def numbers_in(thresholds: str) -> int:
    """Constants with a value: `constexpr int A = 1, B = 2; /* a = b */` has two."""
    code = re.sub(r"/\*.*?\*/|//[^\n]*", "", thresholds, flags=re.DOTALL)
    return sum(declaration.count("=") for declaration in re.findall(r"\bconstexpr\b[^;]*;", code))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--at", metavar="REVISION", action="append", help="a revision of git instead of the checkout")
    revisions = parser.parse_args().at or [None]
    columns = [sizes_of(files_at(revision)) for revision in revisions]
    print("|", " | ".join(["what", *(revision or "checkout" for revision in revisions)]), "|")
    print("|---" * (len(columns) + 1) + "|")
    for name in columns[0]:
        print("|", " | ".join([name, *(f"{column[name]:,}" for column in columns)]), "|")


if __name__ == "__main__":
    main()
