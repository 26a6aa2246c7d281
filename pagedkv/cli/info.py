"""pagedkv info: what was built and found."""

from __future__ import annotations

import argparse
import platform
from importlib import metadata
from pathlib import Path

import pagedkv
from pagedkv import ops

from .options import Commands

LIBRARIES = ("numpy", "tokenizers", "jinja2", "huggingface_hub", "tqdm", "torch", "xgrammar")


def add(commands: Commands) -> None:
    text = "versions, which backends were found or why not, threads, BLAS"
    info = commands.add_parser("info", help=text, description=text)
    kernels = "the instances of the GPU's attention, matrix and sampling kernels"
    info.add_argument("--kernels", action="store_true", help=kernels)
    info.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    return _show_kernels() if args.kernels else _show_build()


def _show_kernels() -> int:
    kernels = ops.kernel_instances()
    if not kernels:
        print("This pagedkv was built for the CPU only: it has no kernels of a GPU.")
        return 0
    table = [["kernel", "variant", "reads", "multiplies", "head_dim", "rows", "threads",
              "KB of shared memory by capability: " + " ".join(kernels[0]["smem_bytes"])]]  # fmt: skip
    for each in kernels:
        names = [each["kernel"], each["variant"] or "-", each["reads"], each["multiplies"]]
        smem = " ".join("-" if size is None else f"{size / 1024:.0f}" for size in each["smem_bytes"].values())
        sizes = [each["head_dim"] or "-", each["rows"], each["threads"], smem]
        table.append([str(cell) for cell in names + sizes])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _show_build() -> int:
    build = ops.build_info()
    devices = build["cuda_devices"]
    rows = {
        "pagedkv": f"{pagedkv.__version__} in {Path(pagedkv.__file__).parent}, built by {build['compiler'].strip()}",
        "python": f"{platform.python_version()} on {platform.platform()}",
        "libraries": ", ".join(f"{name} {_version(name)}" for name in LIBRARIES),
        "cpu": f"yes, ISA {build['isa']}",
        "cuda": f"yes, {_gpus(devices)}" if devices else f"no: {build['cuda_problem']}",
        "threads": str(build["threads"]),
        "BLAS": build["blas"],
        "DLPack": build["dlpack"],
    }
    for name, value in rows.items():
        print(f"{name:<11}{value}")
    return 0


def _gpus(count: int) -> str:
    """The free memory of each: an engine uses the share gpu_memory_utilization of a GPU's memory."""
    gpus = []
    for i in range(count):
        free, total = (num_bytes / 2**30 for num_bytes in ops.memory_info(f"cuda:{i}"))
        gpus.append(f"cuda:{i} with {free:.1f} of {total:.1f} GiB free")
    return ", ".join(gpus)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"
