"""BlockManager's speed, beside a manager of the same semantics in plain Python (below) on the same calls.

Prints the median of several rounds with the fastest and the slowest, and writes results/block_manager.json.
"""

import time
from collections import OrderedDict

import numpy as np
from record import make_parser, record

from pagedkv import BlockManager

BLOCK_SIZE, NUM_SEQS, CONTEXT, LONG_PROMPT = 16, 256, 1024, 50_000


class PlainManager:
    """The yardstick: verified prefix hits (a dict compares keys), reference counts, LRU eviction, copy on write.

    No salt, swap, truncate, twins of equal pages or all-or-nothing batches: what it leaves out would only slow it down.
    """

    def __init__(self, num_blocks, block_size):
        self.block_size = block_size
        self.refs = [0] * num_blocks
        self.keys = [None] * num_blocks  # (parent page, its generation, tokens)
        self.generations = [0] * num_blocks
        self.free_pages = list(range(num_blocks))
        self.cached = OrderedDict()  # least recently used first
        self.index = {}
        self.tables, self.tokens, self.computed = {}, {}, {}

    def take(self):
        if self.free_pages:
            page = self.free_pages.pop()
        elif self.cached:
            page = self.cached.popitem(last=False)[0]
            del self.index[self.keys[page]]
            self.keys[page] = None
        else:
            raise MemoryError
        self.refs[page] = 1
        self.generations[page] += 1
        return page

    def match(self, tokens):
        size, parent, pages = self.block_size, (-1, 0), []
        for start in range(0, len(tokens) // size * size, size):
            page = self.index.get((*parent, tuple(tokens[start : start + size])))
            if page is None:
                break
            pages.append(page)
            parent = (page, self.generations[page])
        return pages

    def allocate(self, seq_id, tokens):
        pages = self.match(tokens)
        for page in pages:
            if self.refs[page] == 0:
                del self.cached[page]
            self.refs[page] += 1
        hits = len(pages) * self.block_size
        pages += [self.take() for _ in range(-(-len(tokens) // self.block_size) - len(pages))]
        self.tables[seq_id], self.tokens[seq_id], self.computed[seq_id] = pages, list(tokens), hits
        return hits

    def append(self, seq_id, token):
        table, tokens = self.tables[seq_id], self.tokens[seq_id]
        if len(tokens) % self.block_size == 0:
            table.append(self.take())
        elif self.refs[table[-1]] > 1:
            self.refs[table[-1]] -= 1
            table[-1] = self.take()
        tokens.append(token)

    def commit(self, seq_id, computed):
        size, table, tokens = self.block_size, self.tables[seq_id], self.tokens[seq_id]
        for i in range(self.computed[seq_id] // size, computed // size):
            parent = (table[i - 1], self.generations[table[i - 1]]) if i else (-1, 0)
            key = (*parent, tuple(tokens[i * size : (i + 1) * size]))
            if self.keys[table[i]] is None and key not in self.index:
                self.keys[table[i]] = key
                self.index[key] = table[i]
        self.computed[seq_id] = computed

    def free(self, seq_id):
        for page in reversed(self.tables.pop(seq_id)):
            self.refs[page] -= 1
            if self.refs[page] == 0 and self.keys[page] is not None:
                self.cached[page] = None
            elif self.refs[page] == 0:
                self.free_pages.append(page)
        del self.tokens[seq_id], self.computed[seq_id]

    def fork(self, parent, child):
        self.tables[child] = list(self.tables[parent])
        self.tokens[child], self.computed[child] = list(self.tokens[parent]), self.computed[parent]
        for page in self.tables[child]:
            self.refs[page] += 1

    def prepare(self, seq_ids, starts, lens):
        size, slots, positions, offsets = self.block_size, [], [], [0]
        for seq_id, start, length in zip(seq_ids, starts, lens):
            table, computed = self.tables[seq_id], self.computed[seq_id]
            for p in range(start, start + length):
                slots.append(-1 if p < computed else table[p // size] * size + p % size)
                positions.append(p)
            offsets.append(offsets[-1] + length)
        contexts = [start + length for start, length in zip(starts, lens)]
        width = max(-(-c // size) for c in contexts)
        tables = [self.tables[s][:width] + [-1] * (width - len(self.tables[s])) for s in seq_ids]
        return [np.array(rows, np.int32) for rows in (slots, positions, contexts, offsets, tables)]


def rounds(function, count, setup=lambda: ()):
    """Seconds of each round, after one to warm up."""
    times = []
    for _ in range(count + 1):
        arguments = setup()
        start = time.perf_counter()
        function(*arguments)
        times.append(time.perf_counter() - start)
    return np.array(times[1:])


def page_churn(make, is_batch, count):
    """Pages per second: fresh prompts are allocated, committed and freed; in the steady state every page evicts one."""
    rng = np.random.default_rng(1)
    num_pages = NUM_SEQS * CONTEXT // BLOCK_SIZE
    manager, ids, computed = make(2 * num_pages), list(range(NUM_SEQS)), [CONTEXT] * NUM_SEQS

    def prompts():
        rows = list(rng.integers(0, 150_000, (NUM_SEQS, CONTEXT), dtype=np.int32))
        return (rows if is_batch else [row.tolist() for row in rows],)  # each gets the form that it reads fastest

    def churn(rows):
        if is_batch:
            manager.allocate_batch(ids, rows)
            manager.commit_batch(ids, computed)
            manager.free_batch(ids)
        else:
            for seq_id in ids:
                manager.allocate(seq_id, rows[seq_id])
            for seq_id in ids:
                manager.commit(seq_id, CONTEXT)
            for seq_id in ids:
                manager.free(seq_id)

    churn(*prompts())
    churn(*prompts())
    return 2 * num_pages / rounds(churn, count, prompts)  # an allocation and a free each


def single_append(make, is_batch, count):
    manager, appends = make(4096), 2000
    manager.allocate(1, [1])

    def fresh():
        manager.free(1)
        manager.allocate(1, [1])
        return ()

    def append():
        for _ in range(appends):
            manager.append(1, 7)

    return rounds(append, count, fresh) / appends * 1e6


def running_batch(make):
    manager = make(2 * NUM_SEQS * CONTEXT // BLOCK_SIZE)
    lengths = [CONTEXT - seq_id % 100 for seq_id in range(NUM_SEQS)]
    for seq_id, length in enumerate(lengths):
        manager.allocate(seq_id, list(range(seq_id, seq_id + length)))
        manager.commit(seq_id, length)
        manager.append(seq_id, 1)
    return manager, list(range(NUM_SEQS)), lengths


def prepare_decode(make, is_batch, count):
    manager, ids, starts = running_batch(make)
    ones = [1] * NUM_SEQS
    return rounds(lambda: manager.prepare(ids, starts, ones), count) * 1e6


def append_step(make, is_batch, count):
    manager, ids, _ = running_batch(make)
    tokens = [5] * NUM_SEQS

    def append():
        if is_batch:
            manager.append_batch(ids, tokens)
        else:
            for seq_id, token in zip(ids, tokens):
                manager.append(seq_id, token)

    return rounds(append, min(count, 200)) * 1e6


def long_prompt(make, is_batch):
    manager = make(2 * LONG_PROMPT // BLOCK_SIZE)
    prompt = np.random.default_rng(2).integers(0, 150_000, LONG_PROMPT, dtype=np.int32)
    prompt = prompt if is_batch else prompt.tolist()
    manager.allocate(1, prompt)
    manager.commit(1, LONG_PROMPT)
    return manager, prompt


def lookup(make, is_batch, count):
    manager, prompt = long_prompt(make, is_batch)
    return rounds(lambda: manager.match(prompt), count) * 1e3


def hit(make, is_batch, count):
    manager, prompt = long_prompt(make, is_batch)

    def request():
        manager.allocate(2, prompt)
        manager.free(2)

    return rounds(request, count) * 1e3


def fork_and_write(make, is_batch, count):
    manager = make(4096)
    manager.allocate(1, list(range(CONTEXT + 1)))

    def branch():
        manager.fork(1, 2)
        manager.append(2, 7)
        manager.free(2)

    return rounds(branch, 10 * count) * 1e6


# name, unit, function, target of the project ("at least" or "at most")
CASES = [
    ("pages allocated and freed, batch forms, 256 prompts x 1024, all evicting", "pages/s", page_churn, ">= 2e6"),
    ("append of one token", "us", single_append, "< 1"),
    ("append_batch of one token each, 256 sequences", "us", append_step, None),
    ("prepare of a decode step, 256 sequences x ~1000 tokens", "us", prepare_decode, "< 30"),
    ("prefix lookup, 50,000 tokens in pages of 16, all cached", "ms", lookup, "< 0.5"),
    ("allocate and free of that prompt", "ms", hit, None),
    ("fork of 1025 tokens, first write, free", "us", fork_and_write, None),
]


def is_reached(value: float, target: str | None) -> bool | None:
    if target is None:
        return None
    relation, bound = target.split()
    return value >= float(bound) if relation == ">=" else value < float(bound)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=51)
    arguments = parser.parse_args()
    rows = []
    print(f"{'':75} {'BlockManager':>14} {'(min .. max)':>26} {'plain Python':>14} {'ratio':>7}")
    for name, unit, function, target in CASES:
        ours = function(lambda n: BlockManager(n, BLOCK_SIZE), True, arguments.rounds)
        plain = function(lambda n: PlainManager(n, BLOCK_SIZE), False, max(arguments.rounds // 10, 3))
        median, yardstick = float(np.median(ours)), float(np.median(plain))
        ratio = median / yardstick if unit == "pages/s" else yardstick / median
        rows.append({
            "case": name, "unit": unit, "median": median, "min": float(ours.min()), "max": float(ours.max()),
            "plain_python_median": yardstick, "times_faster": ratio, "target": target,
            "is_reached": is_reached(median, target),
        })  # fmt: skip
        spread = f"({ours.min():.5g} .. {ours.max():.5g})"
        print(f"{name:75} {median:10.5g} {unit:>7} {spread:>22} {yardstick:14.5g} {ratio:6.0f}x  {target or ''}")
    if not arguments.no_record:
        record("block_manager", rows, block_size=BLOCK_SIZE, rounds=arguments.rounds)


if __name__ == "__main__":
    main()
