"""How expert_linear lists experts and divides products on a GPU, by its own code without one."""

import math

import numpy as np
import pytest
from cards import CARDS
from emulated import load, struct_of

Experts = struct_of("num_tokens", "num_experts", "num_chosen", "in_features", "out_features", "is_gated", "is_summed", "num_sms",
                    "compute_capability", "most_rows", "most_groups", "weight_dtype", "tile", "num_blocks", "num_warps", "num_ctas", "num_slots", "sums_at",
                    "smem_bytes", "num_entries", "has_bad", "num_groups", "num_listed", "bad_kind", "bad_token", "bad_expert",
                    "is_beyond")  # fmt: skip
LISTED = 2048  # pairs that each CTA lists by itself
LIST = 3152  # bytes that the kernel for few tokens declares: test_build.py compares it with what was compiled


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    listed = load(tmp_path_factory.mktemp("experts"), "experts_on_cpu.cpp", "experts_on_cpu")

    def call(
        experts, num_experts, size=64, outputs=32, *, is_gated=0, is_summed=0, card=CARDS[3], most_rows=16,
        weight_dtype=2,
    ):
        tokens, chosen = experts.shape
        most_groups = experts.size if tokens == 1 else min(experts.size, experts.size // most_rows + num_experts + 1)
        its = Experts(tokens, num_experts, chosen, size, outputs, is_gated, is_summed, card.num_sms, card.compute_capability, most_rows,
                      most_groups, weight_dtype)  # fmt: skip
        entries = np.full((experts.size + 1, 9), -9, np.int32)
        groups = np.full((2, most_groups, 3), -9, np.int32)
        order = np.full((2, experts.size), -9, np.int32)
        listed(its, np.ascontiguousarray(experts, np.int32), entries, groups, order)
        assert (entries[its.num_entries :] == -9).all()
        assert (groups[0, its.num_groups :] == -9).all() and (groups[1, its.num_listed :] == -9).all()
        return its, entries[: its.num_entries], groups, order

    return call


def draw(rng, tokens, num_experts, chosen):
    """Some of a token's experts may be the same, or out of range."""
    experts = rng.integers(0, num_experts, (tokens, chosen))
    is_bad = rng.random(experts.shape) < rng.choice([0, 0.1])
    return np.where(is_bad, rng.choice([-1, num_experts, -(2**31), 2**31 - 1], experts.shape), experts)


@pytest.mark.parametrize("case", range(60))
def test_experts_of_few_tokens(rng, run, case):
    """Each pair is in one entry, in the column of its token; entries are in the order of experts."""
    tokens = int(rng.integers(1, 9))
    chosen, num_experts = int(rng.integers(1, min(112 // tokens, 32) + 1)), int(rng.choice([1, 3, 16, 128, 1024]))
    experts = draw(rng, tokens, num_experts, chosen)
    its, entries, _, _ = run(experts, num_experts)
    known = np.where((experts < 0) | (experts >= num_experts), num_experts, experts)
    expected = []
    for expert in range(num_experts + 1):
        times = (known == expert).sum(1)
        for turn in range(times.max()):
            pairs = [t * chosen + np.flatnonzero(known[t] == expert)[turn] if times[t] > turn else -1 for t in range(tokens)]
            expected.append([expert if expert < num_experts else -1, *pairs, *[-1] * (8 - tokens)])
    np.testing.assert_array_equal(entries, expected)
    assert its.has_bad == (known == num_experts).any()


@pytest.mark.parametrize("case", range(40))
def test_lists_of_many_tokens(rng, run, case):
    tokens = int(rng.choice([1, 2, 9, 33, 300, 1000]))
    chosen, num_experts = int(rng.integers(1, 9)), int(rng.choice([1, 3, 16, 128, 1024]))
    experts, rows = draw(rng, tokens, num_experts, chosen), int(rng.choice([16, 32, 64, 128, 192]))
    its, _, groups, order = run(experts, num_experts, most_rows=rows)
    known = np.where((experts < 0) | (experts >= num_experts), num_experts, experts).ravel()
    np.testing.assert_array_equal(order[0], np.argsort(known, kind="stable"))
    expected, evenly, first = [], [], 0
    for expert, count in enumerate(np.bincount(known, minlength=num_experts + 1)):
        expected += [[expert, first + at, min(rows, count - at)] for at in range(0, count, rows)]
        even = math.ceil(count / max(1, math.ceil(count / rows)) / 16) * 16  # as many groups, of multiples of 16
        evenly += [[expert, first + at, min(even, count - at)] for at in range(0, count, even or 16)]
        first += count
    np.testing.assert_array_equal(groups[0, : its.num_groups], evenly)
    assert not its.is_beyond
    if rows > 128:
        assert its.num_listed == 0
    elif tokens == 1:  # by each CTA: each pair is a group
        np.testing.assert_array_equal(groups[1, : its.num_listed], [[known[pair], pair, 1] for pair in range(chosen)])
        np.testing.assert_array_equal(order[1], np.arange(chosen))
    elif experts.size <= LISTED:  # by each CTA: those of a group in any order, but all CTAs have the same groups
        np.testing.assert_array_equal(groups[1, : its.num_listed], expected)
        np.testing.assert_array_equal(order[1][np.lexsort((order[1], known[order[1]]))], order[0])
        assert (np.diff(known[order[1]]) >= 0).all()
        for expert in np.flatnonzero(np.bincount(known) > rows):
            assert (np.diff(order[1][known[order[1]] == expert]) > 0).all()
    else:
        assert its.num_listed == 0
    assert bool(its.bad_kind) == (known == num_experts).any()
    if its.bad_kind:
        assert its.bad_expert in experts[its.bad_token]


@pytest.mark.parametrize("card", CARDS, ids=str)
@pytest.mark.parametrize("weight_dtype, line, slot", [(2, 64, 2048), (3, 128, 2048), (4, 128, 1024)], ids=["bfloat16", "float8", "int4"])
def test_rings_have_room_on_every_card(rng, run, card, weight_dtype, line, slot):
    """And two CTAs on a Hopper's SM: this product's and the next one's. A slot is 16 outputs by a line of inputs."""
    for _ in range(200):
        size, outputs = 8 * int(10 ** rng.uniform(0, 3)), 16 * int(10 ** rng.uniform(0, 3))
        experts = draw(rng, int(rng.integers(1, 9)), 16, int(rng.integers(1, 9)))
        is_summed = int(rng.integers(2))
        its, *_ = run(experts, 16, size, outputs, is_summed=is_summed, is_gated=0 if is_summed else int(rng.integers(2)), card=card,
                       weight_dtype=weight_dtype)  # fmt: skip
        lines = -(-size // line)
        assert min(lines, 8) <= its.num_warps <= min(lines, 12) and 2 <= its.num_slots <= 6
        ring, sums = its.num_slots * its.num_warps * slot, 2 * its.num_warps * 8 * 18 * 4
        assert its.sums_at * 16 == ring and its.smem_bytes == ring + sums
        assert its.smem_bytes + LIST <= card.smem_per_cta
        if card.compute_capability == 90:
            assert 2 * (its.smem_bytes + LIST + 1024) <= 228 << 10
        assert its.tile in ((8, 16) if is_summed else (16,)) and its.num_blocks == -(-outputs // its.tile)
        assert 1 <= its.num_ctas <= card.num_sms


def test_the_products_of_a_model_are_dealt_evenly(run):
    """Qwen3 30B-A3B, one token: 8 experts of 1536 x 2048 and 2048 x 768, of which 97 % of the SMs' time is work."""
    experts = np.arange(8)[None] * 3
    up, *_ = run(experts, 128, 2048, 1536, is_gated=1)
    down, *_ = run(experts, 128, 768, 2048, is_summed=1)
    assert (up.num_warps, up.num_slots, down.num_warps, down.num_slots) == (8, 6, 12, 4)
    tiles = 8 * up.num_blocks
    assert up.num_ctas == 132 and tiles / (-(-tiles // 132) * 132) > 0.96
    assert (down.num_ctas, down.tile) == (128, 16)
