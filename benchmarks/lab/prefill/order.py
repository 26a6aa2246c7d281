"""How long prefill takes by the order in which CTAs get its items: a model, to predict a change before it is measured.

    python benchmarks/lab/prefill/order.py

An item takes 1.4 us per 128 keys of 128 dims and 1.5 us besides. Policies: "begun" gives a CTA its next item when it
begins one, "nearly done" when three tiles of that are left; "backwards" counts the second item from the other end of the
round. All else (memory, clocks, the search for the first item) is left out.
"""

import heapq
import itertools
import math

CTAS, TILE_US, ITEM_US, TILES_AHEAD = 132, 1.4, 1.5, 3


def list_items(sequences: list[tuple[int, int]], kv_heads: int, group: int, *, heads_at_once: int = 0,
               chunks: list[range] | None = None) -> list[int]:  # fmt: skip
    """Keys of every item of sequences (new tokens, cached ones), in the order of attention/prefill/schedule.h."""
    positions, listed = 128 // group, []
    for chunk in chunks or [range(len(sequences))]:
        for first_head in range(0, kv_heads, heads_at_once or kv_heads):
            levels = []
            for seq in chunk:
                new, cached = sequences[seq]
                for i in range(-(-new // positions)):
                    levels.append((-(cached // positions + i), seq, cached + min((i + 1) * positions, new)))
            heads = min(heads_at_once or kv_heads, kv_heads - first_head)
            listed += [keys for _, _, keys in sorted(levels) for _ in range(heads)]
    return listed


def last_end(items: list[int], head_dim: int, *, is_nearly_done: bool, is_backwards: bool) -> float:
    """us until the last item is done."""
    tile_us, order = TILE_US * head_dim / 128, itertools.count()
    taken = itertools.count(2 * CTAS if is_backwards else CTAS)
    ends, events = [0.0] * CTAS, []  # (time, order, CTA, the item that it begins or -1: it takes the next, is_first)
    for cta in range(min(CTAS, len(items))):
        heapq.heappush(events, (0.0, next(order), cta, cta, True))
    while events:
        now, _, cta, item, is_first = heapq.heappop(events)
        if item >= 0:
            tiles = math.ceil(items[item] / 128)
            ends[cta] = now + tiles * tile_us + ITEM_US
            takes_at = max(now, ends[cta] - TILES_AHEAD * tile_us) if is_nearly_done else now
            heapq.heappush(events, (takes_at, next(order), cta, -1, is_first))
            continue
        following = 2 * CTAS - 1 - cta if is_first and is_backwards else next(taken)
        if following < len(items):
            heapq.heappush(events, (ends[cta], next(order), cta, following, False))
    return max(ends)


def main() -> None:
    ragged = [(n, 0) for n in (150, 2850, 600, 2400, 1050, 1950, 1500)]
    cases = {
        "4,096, 16/8": (list_items([(4096, 0)], 8, 2), 128),
        "1,440, 16/8": (list_items([(1440, 0)], 8, 2), 128),
        "2,048 + 2,048, 16/8": (list_items([(2048, 2048)], 8, 2), 128),
        "ragged, 16/8": (list_items(ragged, 8, 2), 128),
        "16 x 1,024, 16/8": (list_items([(1024, 0)] * 16, 8, 2), 128),
        "570, 55/5 x 64": (list_items([(570, 0)], 5, 11), 64),
        "512 + 43,723 and 12 of 442, 60/5": (
            list_items([(512, 43723)] + [(442, 0)] * 12, 5, 12, heads_at_once=1, chunks=[range(2), range(2, 13)]), 128),
    }  # fmt: skip
    print("| case | evenly | begun | begun, backwards | nearly done | nearly done, backwards |\n|---|---|---|---|---|---|")
    for name, (items, head_dim) in cases.items():
        evenly = sum(math.ceil(keys / 128) * TILE_US * head_dim / 128 + ITEM_US for keys in items) / CTAS
        times = [last_end(items, head_dim, is_nearly_done=nearly, is_backwards=back)
                 for nearly in (False, True) for back in (False, True)]  # fmt: skip
        print(f"| {name} | {evenly:,.1f} | " + " | ".join(f"{us:,.1f}" for us in times) + " |")


if __name__ == "__main__":
    main()
