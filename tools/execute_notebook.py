"""Executes notebooks and stores their outputs in them, without times or anything else that differs between machines.

    python tools/execute_notebook.py examples/block_manager.ipynb

Needs an installed pagedkv with its extra `test`, which has nbclient, ipykernel and Matplotlib.
"""

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook after a fresh execution of all cells. An error in a cell raises nbclient's CellExecutionError."""
    notebook = nbformat.read(path, as_version=4)
    language = dict(notebook.metadata.language_info)
    in_its_folder = {"metadata": {"path": str(path.resolve().parent)}}
    # A line may leave the kernel in parts, by chance: coalesce_streams puts a cell's together.
    NotebookClient(notebook, resources=in_its_folder, record_timing=False, coalesce_streams=True, timeout=300).execute()
    notebook.metadata.language_info = language  # the kernel has added the version of Python
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="+", type=Path)
    for path in parser.parse_args().notebooks:
        nbformat.write(execute(path), path)


if __name__ == "__main__":
    main()
