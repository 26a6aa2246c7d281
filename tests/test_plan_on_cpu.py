"""The plan of decode attention, by the code of the GPU on an emulated CTA: any batch, read back and checked, without a GPU.

What is checked is test_decode_plan.py's, and that each CTA finds the same units for itself as the kernel that plans.
"""

import numpy as np
import pytest
from emulated import load, struct_of
from test_decode_plan import COLUMNS, STEPS, check_units, draw_lengths

Batch = struct_of("num_seqs", "num_kv_heads", "group", "head_dim", "is_fp8", "block_size", "max_blocks_per_seq",
                  "num_units", "max_slots", "is_crowded", "ctas_may_plan", "are_left_whole")  # fmt: skip


@pytest.fixture(scope="module")
def plan_on_cpu(tmp_path_factory):
    return load(tmp_path_factory.mktemp("plan"), "plan_on_cpu.cpp", "plan_on_cpu")


def units_of(plan_on_cpu, batch, lens, by_each_cta):
    """The rows that are units; no others stand between them."""
    rows = np.zeros((16 * len(lens) + 2000, len(COLUMNS)), np.int32)
    plan_on_cpu(batch, lens, int(by_each_cta), rows, len(rows))
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
    numbers_of_parts, num_crowded, num_by_ctas, num_left_whole = set(), 0, 0, 0
    for _ in range(300):
        batch, lens = draw(rng)
        units = units_of(plan_on_cpu, batch, lens, False)
        steps = STEPS["float8_e4m3fn" if batch.is_fp8 else "bfloat16"][batch.head_dim]
        numbers_of_parts |= check_units(units, lens, [1] * batch.num_seqs, batch.group, steps)
        check_places(units, batch.max_slots)
        num_crowded += batch.is_crowded
        if batch.ctas_may_plan:
            found = units_of(plan_on_cpu, batch, lens, True)
            if batch.are_left_whole:
                assert check_units(found, lens, [1] * batch.num_seqs, batch.group, steps) == {1}
            else:
                assert without_places(found) == without_places(units)
            check_places(found, batch.max_slots)
            num_by_ctas += 1
            num_left_whole += batch.are_left_whole
    assert {1, 2, 3} <= numbers_of_parts and max(numbers_of_parts) > 20 and num_crowded > 5
    assert num_by_ctas > 30 and num_left_whole > 5
