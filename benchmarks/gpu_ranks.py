"""A benchmark whose ranks are processes with a GPU each: its script starts itself once more for each of them."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import Any


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """rank is None: the process that starts the others. file: of the ranks' Communicator."""
    parser.add_argument("--devices", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=int, help=argparse.SUPPRESS)


def run_ranks(script: str, devices: list[int], *options: Any) -> str:
    """Runs the script for each rank, with these options, and returns what the first one has printed."""
    file = os.memfd_create("ranks")
    command = [sys.executable, script, *options, "--devices", *devices, "--file", file, "--rank"]
    processes = [
        subprocess.Popen([*map(str, command), str(rank)], pass_fds=(file,), stdout=subprocess.PIPE, text=True)
        for rank in range(len(devices))
    ]
    os.close(file)
    said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{' '.join(map(str, options))}: a rank has failed")
    print(said[0], end="")
    return said[0]


def machine(devices: list[int]) -> dict[str, Any]:
    """For record()."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    gpus = subprocess.run(query, capture_output=True, text=True).stdout
    return {"gpus": gpus.split("\n")[:-1], "devices": devices}
