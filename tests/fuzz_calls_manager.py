"""Sessions of a BlockManager, for the fuzzer of calls: its state after an error, and the tokens of its sequences."""

import numpy as np
from fuzz_calls_bad import NOT_NUMBERS, NOT_TENSORS, pick
from fuzz_calls_objects import Wrong, attempt

import pagedkv


def dump(manager, ids=range(-1, 8)):
    state = {
        name: getattr(manager, name)
        for name in (
            "num_blocks", "num_free_blocks", "num_used_blocks", "num_cached_blocks", "num_shared_blocks",
            "num_free_host_blocks", "watermark_blocks",
        )
    }
    for i in (i for i in ids if i in manager):
        state[i] = (manager.num_tokens(i), manager.num_computed(i), manager.token_ids(i).tolist())
        try:
            state[i] += (manager.block_table(i).tolist(),)
        except ValueError:
            state[i] += ("swapped out",)
    return state, manager.stats(), repr(manager), len(manager)


OF_ONE_SEQUENCE = "free", "swap_out", "swap_in", "block_table", "token_ids", "num_tokens", "num_computed"


def draw_number(rng):
    return int(rng.integers(0, 12)) if rng.random() < 0.9 else pick(rng, NOT_NUMBERS)


def draw_tokens(rng):
    few = [int(t) for t in rng.integers(0, 2, rng.integers(0, 12))]
    if rng.random() < 0.1:
        few.insert(0, pick(rng, [-1, 2**31, 2**31 - 1, 1.5, None, "a"]))
    fits = None not in few and "a" not in few and max(few, default=0) < 2**31
    arrays = [np.array(few, pick(rng, ["i4", "i8"]))] * 2 if fits else []
    return pick(rng, [few] * 4 + [tuple(few), draw_number(rng), pick(rng, NOT_TENSORS)] + arrays)


def draw_call(rng) -> tuple[str, list, dict]:
    seq = lambda: int(rng.integers(0, 6)) if rng.random() < 0.95 else pick(rng, [-1, 2**63 - 1, -(2**63), *NOT_NUMBERS])
    number, tokens = (lambda: draw_number(rng)), (lambda: draw_tokens(rng))
    several = lambda make: pick(rng, [[make() for _ in range(rng.integers(0, 4))]] * 9 + [pick(rng, NOT_TENSORS)])
    salt = {"salt": pick(rng, [b"", b"a", b"\0" * 100, *NOT_NUMBERS])} if rng.random() < 0.2 else {}
    table = {
        "allocate": lambda: ([seq(), tokens()], salt),
        "allocate_batch": lambda: ([several(seq), several(tokens)], salt),
        "match": lambda: ([tokens()], salt),
        "can_allocate": lambda: ([tokens()], salt),
        "append": lambda: ([seq(), tokens()], {}),
        "append_batch": lambda: ([several(seq), several(tokens)], {}),
        "reserve": lambda: ([seq(), number()], {}),
        "reserve_batch": lambda: ([several(seq), several(number)], {}),
        "commit": lambda: ([seq(), number()], {}),
        "commit_batch": lambda: ([several(seq), several(number)], {}),
        "fork": lambda: ([seq(), seq()], {}),
        "truncate": lambda: ([seq(), number()], {}),
        "free_batch": lambda: ([several(seq)], {}),
        "check": lambda: ([], {}),
        "stats": lambda: ([], {}),
        "reset_prefix_cache": lambda: ([], {}),
        "prepare": lambda: (
            [several(seq), several(number), several(number)],
            {n: number() for n in ("max_tokens", "max_seqs", "max_blocks") if rng.random() < 0.2},
        ),
    }
    table |= dict.fromkeys(OF_ONE_SEQUENCE, lambda: ([seq()], {}))
    name = pick(rng, [*table, *["allocate", "append"] * 3, "commit"])
    return name, *table[name]()


def follow(shadow: dict, name: str, args):
    """What the tokens of the sequences are then, by the calls' definitions. A batch is its calls, one behind the other."""
    listed = lambda tokens: [int(tokens)] if isinstance(tokens, (int, np.integer)) else [int(t) for t in tokens]
    if name.endswith("_batch"):
        many = [args[0]] if name == "free_batch" else args[:2]
        for each in zip(*many, strict=True):
            follow(shadow, name[:-6], each)
    elif name == "allocate":
        shadow[int(args[0])] = listed(args[1])
    elif name == "append":
        shadow[int(args[0])] += listed(args[1])
    elif name == "fork":
        shadow[int(args[1])] = list(shadow[int(args[0])])
    elif name == "truncate":
        del shadow[int(args[0])][int(args[1]) :]
    elif name == "free":
        del shadow[int(args[0])]


def try_manager(rng, report) -> str:
    options = {
        "num_host_blocks": int(rng.integers(0, 9)),
        "watermark": pick(rng, [0.0, 0.2, 0.9]),
        "enable_prefix_caching": bool(rng.integers(2)),
        "eviction": pick(rng, ["reuse", "lru"]),
        "_hash_bits": pick(rng, [64, 64, 2, 0]),
    }
    if rng.random() < 0.3:
        bad = options | {pick(rng, [*options, "hash_key", "num_blocks"]): pick(rng, NOT_NUMBERS)}
        first = {"num_blocks": bad.pop("num_blocks", 4)}
        if not isinstance(first["num_blocks"], int) or first["num_blocks"] < 2**20:
            attempt(
                report, f"BlockManager({first}, 2, {bad})", lambda: pagedkv.BlockManager(**first, block_size=2, **bad)
            )
    manager = pagedkv.BlockManager(int(rng.integers(1, 14)), int(rng.integers(1, 5)), **options)
    shadow: dict[int, list[int]] = {}
    for _ in range(rng.integers(1, 25)):
        before, (name, args, keywords) = dump(manager), draw_call(rng)
        done, _ = attempt(report, f"{name}(*{args!r}, **{keywords})", lambda: getattr(manager, name)(*args, **keywords))
        manager.check()
        if not done and dump(manager) != before:
            raise Wrong(f"{name} failed and left {dump(manager)} of {before}")
        if done:
            follow(shadow, name, args)
        if {i: manager.token_ids(i).tolist() for i in shadow} != shadow or len(manager) != len(shadow):
            raise Wrong(f"{report}: the sequences are {shadow}")
    return "manager session"
