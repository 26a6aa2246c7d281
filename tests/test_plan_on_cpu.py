"""The plan of decode attention, by the code of the GPU on an emulated CTA: any batch, read back and checked, without a GPU.

What is checked is test_decode_plan.py's, and that each CTA finds the same units for itself as the kernel that plans.
"""

import heapq

import numpy as np
import pytest
from emulated import load, struct_of
from test_decode_plan import COLUMNS, STEPS, check_units, draw_lengths

Batch = struct_of("num_seqs", "num_kv_heads", "group", "head_dim", "is_fp8", "block_size", "max_blocks_per_seq",
                  "num_units", "max_slots", "slots", "is_crowded", "ctas_may_plan", "are_left_whole")  # fmt: skip


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


def time_of(units, slots):
    """When the last slot ends that takes a unit at a time, as a share of what all steps take if none waits for another.
    Starts are not counted: while a unit starts, others have the bandwidth."""
    ends = [0] * slots
    for unit in units:
        heapq.heapreplace(ends, ends[0] + unit["end_step"] - unit["first_step"])
    return max(ends) * slots / sum(unit["end_step"] - unit["first_step"] for unit in units)


def ramp(longest, number):
    return [longest * (i + 1) // number for i in range(number)]


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "lens"),
    [
        (16, 4, 256, [46924] * 2 + [733] * 10),  # more sequences than slots, and few are long
        (10, 6, 256, [11275] * 7 + [176] * 46),
        (10, 6, 128, [62597] * 2 + [978] * 7),  # nearly as many
        (6, 9, 256, [19959] + [199] * 15),
        (5, 12, 128, [14825] * 5 + [231] * 35),
        (8, 8, 128, [42699] * 2 + [667] * 12),
        (5, 4, 128, [24717] * 3 + [386] * 21),
        (5, 1, 128, [44919] * 3 + [1497] * 25),  # far fewer; what is left of the long ones goes before the short ones
        (10, 6, 128, [19740] + [197] * 18),  # shares of 8 to 16 steps
        (8, 8, 64, [37209] + [124] * 15),
        (8, 8, 128, [7755, 7500, 7210, 6900, 6610, 6300, 5905, 5600, 4404, 4100, 3200, 2500, 2210]),  # ragged
        (5, 12, 256, ramp(28200, 20)),
        (8, 8, 128, ramp(7000, 40)),
        (4, 4, 128, ramp(16000, 170)),
        (8, 8, 128, [23921] * 12),  # of one length
        (8, 1, 128, [9000] * 39),  # 1.7 shares each
        (6, 10, 256, [119265] * 5),  # whose rests take turns
        (5, 12, 256, [4062] * 20),
    ],
)
def test_units_end_together(plan_on_cpu, kv_heads, group, head_dim, lens):
    """A few long sequences among short ones, ragged lengths, and one length; and each CTA finds these units for itself."""
    lens = np.array(lens, np.int32)
    batch = Batch(num_seqs=len(lens), num_kv_heads=kv_heads, group=group, head_dim=head_dim, block_size=16)
    batch.max_blocks_per_seq = -(-int(lens.max()) // 16)
    units = units_of(plan_on_cpu, batch, lens, False)
    check_units(units, lens, [1] * len(lens), group, STEPS["bfloat16"][head_dim])
    assert time_of(units, batch.slots) < 1.1
    assert bool(batch.ctas_may_plan) == (len(lens) <= 32)
    if batch.ctas_may_plan:
        assert without_places(units_of(plan_on_cpu, batch, lens, True)) == without_places(units)


@pytest.mark.parametrize(
    ("kv_heads", "num_seqs", "are_behind_all"),
    [(8, 34, True), (8, 67, True), (8, 69, True), (10, 27, True), (8, 36, False), (8, 72, False), (16, 20, False)],
)
def test_the_order_of_sequences_that_are_left_over(plan_on_cpu, kv_heads, num_seqs, are_behind_all):
    """Parts of a few stand behind all whole sequences; of more, in front of them, but for the last parts."""
    lens = np.full(num_seqs, 1500, np.int32)
    batch = Batch(num_seqs=num_seqs, num_kv_heads=kv_heads, group=2, head_dim=128, block_size=16)
    batch.max_blocks_per_seq = -(-1500 // 16)
    for by_each_cta in range(1 + (num_seqs <= 32)):
        units = units_of(plan_on_cpu, batch, lens, by_each_cta)
        assert {unit["seq"] for unit in units if unit["num_parts"] > 1} == set(range(batch.slots, num_seqs))
        whole = [at for at, unit in enumerate(units) if unit["num_parts"] == 1]
        first = [at for at, unit in enumerate(units) if unit["part"] < unit["num_parts"] - 1]
        assert max(whole) < min(first) if are_behind_all else max(first) < min(whole)


@pytest.mark.parametrize("group, num_seqs, tokens", [(2, 1 << 16, 1 << 20), (300, 1 << 13, 1 << 19), (300, 1 << 12, 1 << 22)])
def test_more_steps_than_an_int_holds_are_refused(plan_on_cpu, group, num_seqs, tokens):
    """Their sum was negative, or zero: then there were no units, and nothing was written."""
    batch = Batch(num_kv_heads=1, group=group, num_seqs=num_seqs, head_dim=128, block_size=256)
    batch.max_blocks_per_seq = tokens // batch.block_size
    lens, rows = np.full(num_seqs, tokens, np.int32), np.zeros((1, len(COLUMNS)), np.int32)
    tiles = num_seqs * -(-group // (8 if group <= 8 else 16))
    with pytest.raises(AssertionError, match=f"{tiles} tiles of .* for {tokens} keys are too many for the decode kernel"):
        plan_on_cpu(batch, lens, 0, rows, len(rows))
