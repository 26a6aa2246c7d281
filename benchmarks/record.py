"""Writes what a benchmark measured, with what it was measured on, to benchmarks/results/<name>.json."""

import argparse
import datetime
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def commit() -> str:
    """PAGEDKV_COMMIT, for a copy without git; else the checkout's commit, with "+changes" where tracked files outside of
    results/ differ from it."""
    given = os.environ.get("PAGEDKV_COMMIT")
    if given:
        return given
    git = ["git", "-C", str(Path(__file__).parent)]
    changes = ["status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude,top)benchmarks/results"]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        dirty = subprocess.run([*git, *changes], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown (no git checkout)"
    return head + ("+changes" if dirty else "")


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def pagedkv_version() -> str:
    from pagedkv import __version__

    return __version__


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """What every benchmark's command line has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-record", action="store_true", help="do not write benchmarks/results/<name>.json")
    return parser


def record(name: str, rows: list[dict], *, machine: dict | None = None, versions: dict | None = None,
           is_from_here: bool = True, **extra) -> Path:
    """Writes the rows as JSON and returns the file's path.

    `machine` and `versions` add to what is found out here (a GPU and its driver, say), or are all that is known of where
    the rows are from. `extra` becomes further fields beside "rows".
    """
    here, packages = {}, {}
    if is_from_here:
        here = {"cpu": cpu_name(), "cores": cores()}
        packages = {"python": platform.python_version(), "numpy": version("numpy"), "pagedkv": pagedkv_version()}
    result = {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": here | (machine or {}),
        "versions": packages | (versions or {}),
        **extra,
        "rows": rows,
    }
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")
    return path


def record_run(args: argparse.Namespace, name: str, rows: list[dict], device: str = "cuda", /, *,
               versions: dict | None = None, **extra) -> None:
    """Ends a run on a device of PyTorch's: raises what kernels found there, and records the rows, unless args.no_record,
    with the GPU and PyTorch's version. The rest is as in record."""
    from pagedkv import ops

    machine, versions = {}, {"torch": version("torch")} | (versions or {})
    if device != "cpu":
        import torch  # only here: on the CPU not every benchmark needs it

        ops.check_errors(device)
        gpu = torch.cuda.get_device_properties(device)
        machine = {"gpu": gpu.name, "sms": gpu.multi_processor_count}
        versions["cuda"] = torch.version.cuda
    if not args.no_record:
        record(name, rows, machine=machine, versions=versions, **extra)
