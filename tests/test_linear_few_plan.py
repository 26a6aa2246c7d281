"""How the kernel for few rows divides a product, by its own code without a GPU: rings fit in every card's shared memory."""

import pytest
from cards import CARDS
from emulated import load, struct_of

Product = struct_of("num_rows", "in_features", "out_features", "is_gated", "num_sms", "compute_capability", "tile", "num_tiles",
                    "num_ctas", "num_warps", "num_slots", "is_shallow", "sums_at", "smem_bytes")  # fmt: skip
SQUARES = 512  # bytes that the kernel declares, at most: test_build.py compares it with what was compiled
# in_features, out_features, is_gated: the products of a layer of Qwen3 0.6B and 8B
MODELS = [(1024, 4096, 0), (2048, 1024, 0), (1024, 6144, 1), (3072, 1024, 0),
          (4096, 6144, 0), (4096, 4096, 0), (4096, 24576, 1), (12288, 4096, 0)]  # fmt: skip


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return load(tmp_path_factory.mktemp("few"), "linear_few_on_cpu.cpp", "linear_few_on_cpu")


def planned(plan, card, rows, size, outputs, is_gated):
    product = Product(rows, size, outputs, is_gated, card.num_sms, card.compute_capability)
    plan(product)
    return product


def check(product, card):
    """Copies, and the sums behind or in place of them, are in the memory that is asked for; all of that has room."""
    slot, blocks = product.num_warps * 2048, -(-product.tile // 16)
    copies, sums = product.num_slots * slot, product.num_warps * product.num_rows * (blocks * 16 + 4) * 4
    is_one_round = product.num_tiles <= product.num_ctas
    assert product.num_slots > 0 and product.num_ctas <= card.num_sms
    assert product.sums_at * 16 == (0 if is_one_round else copies)
    assert max(copies, product.sums_at * 16 + sums) == product.smem_bytes <= card.smem_per_cta - SQUARES
    lines = -(-product.in_features // (64 * product.num_warps))
    depth = 6 if product.num_warps == 8 else 5
    needed = min(depth, blocks * lines) if is_one_round else depth
    assert product.num_slots <= needed and product.is_shallow == (product.num_slots < needed)
    if product.is_shallow:  # another slot has no room
        assert product.smem_bytes + slot > card.smem_per_cta - SQUARES


@pytest.mark.parametrize("card", CARDS, ids=str)
def test_rings_are_as_deep_as_the_card_has_room(plan, rng, card):
    num_shallow = 0
    for _ in range(2000):
        size, outputs = 8 * int(10 ** rng.uniform(0, 3.6)), 2 * int(10 ** rng.uniform(0.5, 5))
        product = planned(plan, card, int(rng.integers(1, 17)), size, outputs, int(rng.integers(2)))
        if product.num_warps == 16 and product.num_rows > 8:
            continue  # a large weight is not for so many rows
        check(product, card)
        num_shallow += product.is_shallow
    assert (num_shallow > 100) == (card.smem_per_cta < 200_000), num_shallow


@pytest.mark.parametrize("card", CARDS, ids=str)
@pytest.mark.parametrize("rows", [1, 8])
def test_the_products_of_models_have_rings_everywhere(plan, card, rows):
    for size, outputs, is_gated in MODELS:
        product = planned(plan, card, rows, size, outputs, is_gated)
        check(product, card)
        assert product.num_slots >= 2  # one is on its way while another is multiplied
