"""The plan of decode attention, by the code of the GPU on an emulated CTA: any batch, read back and checked, without a GPU.

What is checked is test_decode_plan.py's, and that each CTA finds the same units for itself as the kernel that plans.
"""

import heapq

import numpy as np
import pytest
from cards import CARDS
from emulated import load, load_fusing, struct_of
from test_decode_plan import COLUMNS, STEPS, check_units, draw_lengths


class Batch(struct_of("num_seqs", "num_kv_heads", "group", "head_dim", "is_fp8", "block_size", "max_blocks_per_seq",
                      "num_sms", "compute_capability", "window_left", "num_queries", "num_splits",
                      "num_units", "max_slots", "slots", "is_crowded", "ctas_may_plan", "are_left_whole", "ctas_per_sm",
                      "step", "order_warps", "takes_heads", "first_bad_kind")):  # fmt: skip
    """On an H200, unless something else is said."""

    def __init__(self, **values):
        super().__init__(**{"num_sms": 132, "compute_capability": 90, "window_left": -1, "num_queries": 1} | values)



@pytest.fixture(scope="module")
def plan_on_cpu(tmp_path_factory):
    return load(tmp_path_factory.mktemp("plan"), "plan_on_cpu.cpp", "plan_on_cpu")


def units_of(plan_on_cpu, batch, lens, by_each_cta):
    """The rows that are units; no others stand between them."""
    rows = np.zeros((20 * batch.num_queries * len(lens) + 2000, len(COLUMNS)), np.int32)
    plan_on_cpu(batch, lens, int(by_each_cta), rows, len(rows))
    rows = rows[: batch.num_units]
    units = rows[rows[:, COLUMNS.index("num_parts")] != 0]
    assert (rows[len(units) :, COLUMNS.index("num_parts")] == 0).all()
    return [dict(zip(COLUMNS, row.tolist(), strict=True)) for row in units]


def draw(rng, **card):
    """From one sequence to five times as many as the smallest CTAs have places for."""
    batch = Batch(
        **card, num_kv_heads=int(rng.choice([1, 2, 3, 4, 8, 8, 8, 16, 40])), group=int(rng.choice([1, 2, 4, 8, 5, 12, 16]))
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


def test_tiles_and_splits_cover_every_key_once(plan_on_cpu, rng):
    """Several tiles of query rows for each sequence, and parts whose number depends on a sequence's length alone, or one."""
    num_cut = num_tiled = num_by_ctas = num_in_rounds = 0
    for _ in range(150):
        batch, lens = draw(rng)
        batch.num_queries, batch.num_splits = int(rng.integers(1, 5)), int(rng.choice([0, 0, 1, 4, 16, -1, -1]))
        lens = np.maximum(lens[: 1 + batch.num_seqs // (4 if batch.num_splits >= 0 else 1)], batch.num_queries)
        batch.num_seqs = len(lens)
        batch.max_blocks_per_seq = max(batch.max_blocks_per_seq, -(-int(lens.max()) // batch.block_size))
        units = units_of(plan_on_cpu, batch, lens, False)
        steps = STEPS["float8_e4m3fn" if batch.is_fp8 else "bfloat16"][batch.head_dim]
        numbers = check_units(units, lens, [batch.num_queries] * batch.num_seqs, batch.group, steps)
        check_places(units, batch.max_slots)
        if batch.num_splits < 0:  # the warps that keys are dealt among depend on no batch; those of a CTA divide them
            element = 1 if batch.is_fp8 else 2
            warps = batch.step // (32 if batch.head_dim * element <= 128 else 16)
            assert numbers == {1} and batch.order_warps == (8 if batch.head_dim * element <= 256 else 4)
            assert batch.order_warps % warps == 0
            num_in_rounds += warps < batch.order_warps
        elif batch.num_splits:
            expected = {max(1, min(batch.num_splits, -(-n // batch.step) * batch.step // 1024)) for n in lens.tolist()}
            assert max(numbers) <= max(expected) and (max(numbers) > 1) == (max(expected) > 1)
        if batch.ctas_may_plan and not batch.are_left_whole:
            assert without_places(units_of(plan_on_cpu, batch, lens, True)) == without_places(units)
            num_by_ctas += 1
        num_cut += max(numbers) > 1
        num_tiled += any(unit["tile"] > 0 and unit["num_parts"] > 1 for unit in units)
    found = num_cut, num_tiled, num_by_ctas, num_in_rounds
    assert num_cut > 10 and num_tiled > 0 and num_by_ctas > 40 and num_in_rounds > 0, found


def bytes_of_cta(batch):
    """Its warps' rings, and what it has behind them where it takes its heads from the projection."""
    element = 1 if batch.is_fp8 else 2
    pieces = batch.head_dim * element // 16  # of a row, which ldmatrix reads: rows of few are padded to an odd number
    chunk = 32 if batch.head_dim * element <= 128 else 16
    row_bytes = 16 * (pieces if pieces % 8 == 0 else pieces | 1)
    stages, rows = (2 if batch.is_crowded else 3), (8 if batch.group <= 8 else 16)
    heads = rows * (batch.head_dim + 8) * 2 + 2 * batch.head_dim * element + 16
    return batch.step // chunk * stages * 2 * chunk * row_bytes, heads


@pytest.mark.parametrize("card", CARDS, ids=str)
def test_slots_are_the_places_of_the_card(plan_on_cpu, rng, card):
    """As many CTAs as are planned at once have room on an SM, and one more has not, or no registers."""
    places, num_crowded = {}, 0
    for i in range(400):
        batch, lens = draw(rng, num_sms=card.num_sms, compute_capability=card.compute_capability)
        if i < 12 and batch.num_seqs < 100:  # quick ones
            units = units_of(plan_on_cpu, batch, lens, False)
            steps = STEPS["float8_e4m3fn" if batch.is_fp8 else "bfloat16"][batch.head_dim]
            check_units(units, lens, [1] * batch.num_seqs, batch.group, steps)
            check_places(units, batch.max_slots)
        plan_on_cpu(batch, lens, 0, lens, 0)
        rings, heads = bytes_of_cta(batch)
        heads = heads if batch.takes_heads else 0
        assert rings + heads <= card.smem_per_cta
        assert batch.ctas_per_sm * (rings + heads + 1024) <= card.smem_per_sm
        assert batch.slots == max(card.num_sms * batch.ctas_per_sm // batch.num_kv_heads, 1)
        of_registers = {True: 12, False: 4 if batch.head_dim == 256 and not batch.is_fp8 else 8}[bool(batch.is_crowded)]
        chunk = 32 if batch.head_dim * (1 if batch.is_fp8 else 2) <= 128 else 16
        if not batch.is_crowded:  # then it may be fewer: an even share
            by_memory = card.smem_per_sm // (rings + 1024)
            assert batch.ctas_per_sm == min(by_memory, of_registers // (batch.step // chunk))
            places.setdefault((batch.head_dim, batch.is_fp8), set()).add(batch.ctas_per_sm)
        num_crowded += batch.is_crowded
    assert places[128, 0] == {80: {1, 3}, 86: {1, 2}, 89: {1, 2}, 120: {1, 2}}.get(card.compute_capability, {1, 2, 4})
    assert num_crowded > 0


@pytest.mark.parametrize("card", CARDS, ids=str)
def test_heads_are_taken_where_they_cost_no_place(plan_on_cpu, card):
    taken = set()
    for is_fp8 in (0, 1):
        for head_dim in (64, 128, 256):
            batch = Batch(num_seqs=1, num_kv_heads=1, group=8, head_dim=head_dim, is_fp8=is_fp8, block_size=16,
                          max_blocks_per_seq=999, num_sms=card.num_sms, compute_capability=card.compute_capability)  # fmt: skip
            units_of(plan_on_cpu, batch, np.array([999], np.int32), False)
            taken |= {(head_dim, is_fp8)} if batch.takes_heads else set()
    everything = {(head_dim, is_fp8) for head_dim in (64, 128, 256) for is_fp8 in (0, 1)}
    assert taken == (everything if card.smem_per_sm > 102_400 else {(64, 1)})


@pytest.fixture(scope="module")
def plan_by_fma(tmp_path_factory):
    return load_fusing(tmp_path_factory.mktemp("fma"), "plan_on_cpu.cpp", "plan_on_cpu")


def test_the_compiler_does_not_choose_a_cut(plan_on_cpu, plan_by_fma, rng):
    """A kernel that plans and one that has no plan are compiled apart, and cut alike all the same."""
    for _ in range(1000):
        batch, lens = draw(rng)
        assert units_of(plan_on_cpu, batch, lens, False) == units_of(plan_by_fma, batch, lens, False)


def test_contexts_of_nearly_two_to_the_31(plan_on_cpu, rng):
    """No number of a step overflows: up to the most keys all of them are planned, and beyond that is recorded."""
    most = 2**31 - 1 - 2**16
    for context in (most - 1, most, most + 1, 2**31 - 4096, 2**31 - 1):
        for window in (-1, 1000, int(rng.integers(2**30, 2**31 - 1))):
            batch = Batch(num_seqs=1, num_kv_heads=1, group=1, head_dim=128, block_size=1 << 16,
                          max_blocks_per_seq=1 << 15, window_left=window)  # fmt: skip
            units = units_of(plan_on_cpu, batch, np.array([context], np.int32), False)
            seen = min(context, most)
            first_key = max(seen - 1 - window, 0) // 16 * 16 if window >= 0 else 0
            assert {unit["context"] for unit in units} == {seen}
            assert units[0]["num_parts"] == len(units)
            if window != 1000:  # a warp that adds up too many keys loses the last ones: a float has 24 bits
                assert batch.slots // 2 < len(units) <= batch.slots
            borders = sorted((unit["first_step"], unit["end_step"]) for unit in units)
            assert [begin for begin, _ in borders] == [0, *(end for _, end in borders[:-1])]
            assert borders[-1][1] == -(-(seen - first_key) // batch.step)
            assert (batch.first_bad_kind != 0) == (context > most)
            assert without_places(units_of(plan_on_cpu, batch, np.array([context], np.int32), True)) == without_places(units)


def test_full_waves_stay_whole(plan_on_cpu):
    """Those of one length that fill the places, also where a division is rounded down: nothing is left over to be cut."""
    for count, length in (33, 1500), (50, 1500), (66, 640), (66, 1500), (100, 1500), (132, 1500), (330, 640):
        rows = -(-count // 8) * 8  # the last ones have no keys
        batch = Batch(num_seqs=rows, num_kv_heads=8, group=2, head_dim=128, block_size=16, max_blocks_per_seq=94)
        lens = np.where(np.arange(rows) < count, length, 0).astype(np.int32)
        units = units_of(plan_on_cpu, batch, lens, False)
        assert [unit["num_parts"] for unit in units] == [1] * rows, count


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
    assert time_of(units, batch.slots) < 1.25  # ragged ones are the worst: the estimate has eight classes
    assert bool(batch.ctas_may_plan) == (len(lens) <= 32)
    if batch.ctas_may_plan:
        assert without_places(units_of(plan_on_cpu, batch, lens, True)) == without_places(units)


@pytest.mark.parametrize(("kv_heads", "num_seqs"), [(8, 34), (8, 67), (8, 69), (10, 27), (8, 36), (8, 72), (16, 20)])
def test_the_order_of_sequences_that_are_left_over(plan_on_cpu, kv_heads, num_seqs):
    """Their parts stand behind all whole sequences, or in front of them, but for the last parts."""
    lens = np.full(num_seqs, 1500, np.int32)
    batch = Batch(num_seqs=num_seqs, num_kv_heads=kv_heads, group=2, head_dim=128, block_size=16)
    batch.max_blocks_per_seq = -(-1500 // 16)
    for by_each_cta in range(1 + (num_seqs <= 32)):
        units = units_of(plan_on_cpu, batch, lens, by_each_cta)
        assert {unit["seq"] for unit in units if unit["num_parts"] > 1} == set(range(batch.slots, num_seqs))
        whole = [at for at, unit in enumerate(units) if unit["num_parts"] == 1]
        first = [at for at, unit in enumerate(units) if unit["part"] < unit["num_parts"] - 1]
        assert max(whole) < min(first) or max(first) < min(whole)


@pytest.mark.parametrize("group, num_seqs, tokens", [(2, 1 << 16, 1 << 20), (300, 1 << 13, 1 << 19), (300, 1 << 12, 1 << 22)])
def test_more_steps_than_an_int_holds_are_refused(plan_on_cpu, group, num_seqs, tokens):
    """Their sum was negative, or zero: then there were no units, and nothing was written."""
    batch = Batch(num_kv_heads=1, group=group, num_seqs=num_seqs, head_dim=128, block_size=256)
    batch.max_blocks_per_seq = tokens // batch.block_size
    lens, rows = np.full(num_seqs, tokens, np.int32), np.zeros((1, len(COLUMNS)), np.int32)
    tiles = num_seqs * -(-group // (8 if group <= 8 else 16))
    with pytest.raises(AssertionError, match=f"{tiles} tiles of .* for {tokens} keys are too many for the decode kernel"):
        plan_on_cpu(batch, lens, 0, rows, len(rows))
