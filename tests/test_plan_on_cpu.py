"""The plan of decode attention, by the code of the GPU on an emulated CTA: any batch, read back and checked, without a GPU.

What is checked is test_decode_plan.py's, and that each CTA finds the same units for itself as the kernel that plans.
"""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from test_decode_plan import COLUMNS, STEPS, check_units, draw_lengths

ROOT = Path(__file__).parent.parent
COMPILER = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
TOOLKITS = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
HEADERS = next((path for path in (Path(t) / "include" for t in TOOLKITS if t) if (path / "cuda_fp8.h").exists()), None)


class Batch(ctypes.Structure):
    """struct planned_batch of plan_on_cpu.cpp."""

    _fields_ = [(name, ctypes.c_int) for name in (
        "num_seqs", "num_kv_heads", "group", "head_dim", "is_fp8", "block_size", "max_blocks_per_seq",
        "num_units", "max_slots", "is_crowded", "ctas_may_plan")]  # fmt: skip


@pytest.fixture(scope="module")
def plan_on_cpu(tmp_path_factory):
    if COMPILER is None or HEADERS is None or not (ROOT / "csrc").exists():
        pytest.skip("a checkout, a C++ compiler and CUDA's headers are needed")
    library = tmp_path_factory.mktemp("plan") / "plan.so"
    options = [
        "-std=c++17",
        "-O1",
        "-w",
        "-shared",
        "-fPIC",
        "-DPAGEDKV_WITH_CUDA",
        f"-I{ROOT / 'csrc'}",
        f"-I{HEADERS}",
    ]
    sources = [ROOT / "tests" / "plan_on_cpu.cpp", ROOT / "csrc" / "pk.c"]
    subprocess.run([COMPILER, *options, *sources, "-o", library], check=True)
    function = ctypes.CDLL(str(library)).plan_on_cpu
    function.restype = ctypes.c_char_p
    return function


def units_of(plan_on_cpu, batch, lens, by_each_cta):
    """The rows that are units; no others stand between them."""
    rows = np.zeros((16 * len(lens) + 2000, len(COLUMNS)), np.int32)
    problem = plan_on_cpu(ctypes.byref(batch), lens.ctypes.data_as(ctypes.c_void_p), by_each_cta,
                          rows.ctypes.data_as(ctypes.c_void_p), len(rows))  # fmt: skip
    assert problem is None, problem
    rows = rows[: batch.num_units]
    units = rows[rows[:, COLUMNS.index("num_parts")] != 0]
    assert (rows[len(units) :, COLUMNS.index("num_parts")] == 0).all()
    return [dict(zip(COLUMNS, row.tolist(), strict=True)) for row in units]


def draw(rng):
    """From one sequence to five times as many as the smallest CTAs have places for."""
    batch = Batch(
        num_kv_heads=int(rng.choice([1, 2, 3, 4, 8, 8, 8, 16, 40])), group=int(rng.choice([1, 2, 4, 8, 5, 12, 16]))
    )
    batch.head_dim, batch.block_size = int(rng.choice([64, 128, 256])), int(rng.choice([16, 64, 256]))
    batch.is_fp8 = int(rng.integers(3) > 0)
    places = 528 // batch.num_kv_heads
    batch.num_seqs = int(rng.integers(1, rng.choice([3, 33, 33, places + 2, 5 * places, 5 * places])))
    lens = draw_lengths(rng, batch.num_seqs).astype(np.int32)
    batch.max_blocks_per_seq = -(-int(lens.max() or 1) // batch.block_size) * int(rng.choice([1, 1, 8]))
    return batch, lens


def check_places(units, max_slots):
    """Parts are left in places of their own, inside of the room."""
    places = [unit["first_part"] + unit["part"] for unit in units if unit["num_parts"] > 1]
    assert len(places) == len(set(places)) and set(places) <= set(range(max_slots))


def without_places(units):
    return sorted(
        tuple(value for name, value in unit.items() if name not in ("signature", "first_part")) for unit in units
    )


def test_every_plan_covers_every_key_once(plan_on_cpu, rng):
    numbers_of_parts, num_crowded, num_by_ctas = set(), 0, 0
    for _ in range(300):
        batch, lens = draw(rng)
        units = units_of(plan_on_cpu, batch, lens, False)
        steps = STEPS["float8_e4m3fn" if batch.is_fp8 else "bfloat16"][batch.head_dim]
        numbers_of_parts |= check_units(units, lens, [1] * batch.num_seqs, batch.group, steps)
        check_places(units, batch.max_slots)
        num_crowded += batch.is_crowded
        if batch.ctas_may_plan:
            found = units_of(plan_on_cpu, batch, lens, True)
            assert without_places(found) == without_places(units)
            check_places(found, batch.max_slots)
            num_by_ctas += 1
    assert {1, 2, 3} <= numbers_of_parts and max(numbers_of_parts) > 20 and num_crowded > 5 and num_by_ctas > 30
