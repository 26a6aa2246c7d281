"""BlockManager against the model of block_model.py: every number, every page, every exception, and the KV itself.

A simulated cache is written through prepare's slots and copied by the returned pairs. The KV of a position is the
(salt, tokens) prefix that it was computed from, so that a page given to the wrong prompt, a missing copy or a write
into a shared page is seen at once.
"""

import numpy as np
import pytest
from block_model import Model, OutOfPages
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import pagedkv

SEQ_IDS = st.integers(0, 5)
SALTS = st.sampled_from([b"", b"", b"a\0"])


class Machine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from([10, 6, 4, 14, 1]),
        block_size=st.integers(1, 4),
        num_host_blocks=st.sampled_from([0, 3, 10]),
        watermark=st.sampled_from([0.0, 0.2]),
        hash_bits=st.sampled_from([64, 2, 0]),
        eviction=st.sampled_from(["reuse", "lru"]),
    )
    def create(self, num_blocks, block_size, num_host_blocks, watermark, hash_bits, eviction):
        self.model = Model(num_blocks, block_size, num_host_blocks, watermark, eviction)
        self.manager = pagedkv.BlockManager(
            num_blocks, block_size, num_host_blocks=num_host_blocks, watermark=watermark, eviction=eviction,
            _hash_bits=hash_bits
        )
        self.block_size = block_size
        self.device = np.full((num_blocks, block_size), None, dtype=object)
        self.host = np.full((num_host_blocks, block_size), None, dtype=object)
        self.sampled = {}  # tokens that the device knows and the manager does not

    # --- helpers

    def tokens(self, data, most=None):
        """Zeros, of which one may be a one: prompts with long common prefixes."""
        limit = 4 * self.block_size + 1 if most is None else most
        length = data.draw(st.sampled_from(range(limit, -1, -1)), label="length")
        odd = data.draw(st.sampled_from([limit, *range(limit)]), label="odd one")
        return [int(i == odd) for i in range(length)]

    def residents(self, data):
        ids = [s for s, seq in self.model.seqs.items() if not seq.is_swapped]
        if not ids:
            return []
        return data.draw(st.lists(st.sampled_from(ids), unique=True, min_size=1, max_size=3), label="seqs")

    def both(self, call, method, *args):
        """Runs the model and the manager; both fail or both succeed. Returns (model's result, manager's) or None."""
        try:
            trial, expected = self.model.attempt(method, *args)
        except OutOfPages:
            with pytest.raises(pagedkv.OutOfBlocks):
                call()
            return None
        result = call()
        self.model = trial
        return expected, result

    def resident(self, data):
        return next(iter(self.residents(data)), None)

    def known(self, seq_id):
        """The sequence's tokens as the device knows them."""
        return self.model.seqs[seq_id].tokens + self.sampled.get(seq_id, [])

    def kv(self, seq_id, position):
        return self.model.seqs[seq_id].salt, tuple(self.known(seq_id)[: position + 1])

    def copy(self, pairs):
        assert pairs.dtype == np.int32 and pairs.ndim == 2 and pairs.shape[1] == 2
        for source, destination in pairs:
            self.device[destination] = self.device[source]

    # --- rules

    @rule(salt=SALTS, seq_id=SEQ_IDS)
    def allocate_again(self, salt, seq_id):
        if seq_id in self.model.seqs:
            new = next(i for i in range(8) if i not in self.model.seqs)
            with pytest.raises(ValueError, match="already exists"):
                self.manager.allocate_batch([new, seq_id], [[1], [1]], salt=salt)

    @rule(data=st.data(), count=st.sampled_from([1, 1, 2, 3]), salt=SALTS, end=st.sampled_from(["", "step", "free"]))
    def allocate(self, data, count, salt, end):
        ids = [i for i in range(7) if i not in self.model.seqs][:count]
        prompts = {seq_id: self.tokens(data) for seq_id in ids}
        if not ids:
            return
        if len(ids) > 1:
            done = self.both(
                lambda: self.manager.allocate_batch(ids, list(prompts.values()), salt=salt).tolist(),
                "allocate", prompts, salt,
            )  # fmt: skip
        else:
            hits, pending = self.model.walk(prompts[ids[0]], salt)
            match = self.manager.match(np.array(prompts[ids[0]], dtype=np.int32), salt=salt)
            assert match == (len(hits) * self.block_size, pending * self.block_size)
            can = self.manager.can_allocate(prompts[ids[0]], salt=salt)
            done = self.both(
                lambda: [self.manager.allocate(ids[0], prompts[ids[0]], salt=salt)], "allocate", prompts, salt
            )
            assert can == (done is not None)
        if not done:
            return
        assert done[0] == done[1]
        for seq_id in ids if end else []:
            self.compute(seq_id, self.model.seqs[seq_id].computed, len(prompts[seq_id]), 1.0)
        for seq_id in ids if end == "free" else []:
            self.both(lambda: self.manager.free(seq_id), "free", seq_id)

    @rule(data=st.data(), most=st.sampled_from([1, 2, None]))
    def append(self, data, most):
        ids, more = self.residents(data), {}
        for seq_id in ids:
            fresh, sampled = self.tokens(data, most), self.sampled.get(seq_id, [])
            more[seq_id] = sampled[: len(fresh)] + fresh[len(sampled) :]
        self.grow(more)

    def grow(self, more):
        ids = list(more)
        if len(ids) == 1 and len(more[ids[0]]) == 1:
            done = self.both(lambda: self.manager.append(ids[0], more[ids[0]][0]), "append", more)
        elif all(len(tokens) == 1 for tokens in more.values()):
            flat = [tokens[0] for tokens in more.values()]
            done = self.both(lambda: self.manager.append_batch(ids, flat), "append", more)
        else:
            done = self.both(lambda: self.manager.append_batch(ids, list(more.values())), "append", more)
        if done:
            assert len(done[0]) == len(done[1])
            self.copy(done[1])
            for seq_id, tokens in more.items():
                self.sampled[seq_id] = self.sampled.get(seq_id, [])[len(tokens) :]

    @precondition(lambda self: self.model.seqs)
    @rule(data=st.data())
    def reserve(self, data):
        ids = self.residents(data)
        ends = {s: len(self.model.seqs[s].tokens) + data.draw(st.integers(0, self.block_size + 2)) for s in ids}
        done = self.both(lambda: self.manager.reserve_batch(ids, list(ends.values())), "make_room", ends)
        if done:
            assert len(done[0]) == len(done[1])
            self.copy(done[1])

    @precondition(lambda self: self.model.seqs)
    @rule(data=st.data(), share=st.sampled_from([1.0, 1.0, 0.5]))
    def step(self, data, share):
        seq_id = self.resident(data)
        if seq_id is None:
            return
        seq = self.model.seqs[seq_id]
        start = max(seq.computed - data.draw(st.integers(0, 1)), 0)
        length = data.draw(st.sampled_from(range(seq.reserved - start, -1, -1)), label="length")
        missing = start + length - len(self.known(seq_id))
        if missing > 0:
            new = data.draw(st.lists(st.integers(0, 1), min_size=missing, max_size=missing), label="sampled")
            self.sampled[seq_id] = self.sampled.get(seq_id, []) + new
        self.compute(seq_id, start, start + length, share)

    def compute(self, seq_id, start, end, share):
        """One step over [start, end) of the sequence; commits a share of it."""
        seq, length = self.model.seqs[seq_id], end - start
        step = self.manager.prepare([seq_id], [start], [length])
        table = self.manager.block_table(seq_id)
        assert step.positions.tolist() == list(range(start, start + length))
        assert step.context_lens.tolist() == [start + length] and step.cu_seqlens_q.tolist() == [0, length]
        assert step.block_tables[0].tolist() == table[: -(-(start + length) // self.block_size)].tolist()
        for position, slot in zip(range(start, start + length), step.slot_mapping.tolist()):
            page, offset = table[position // self.block_size], position % self.block_size
            is_computed = position < seq.computed or seq.pages[position // self.block_size].is_computed
            assert slot == (-1 if is_computed else page * self.block_size + offset)
            if slot >= 0:
                self.device[page, offset] = self.kv(seq_id, position)
        self.both(
            lambda: self.manager.commit(seq_id, max(start + int(length * share), seq.computed)),
            "commit", seq_id, max(start + int(length * share), seq.computed),
        )  # fmt: skip

    @precondition(lambda self: self.model.seqs)
    @rule(data=st.data(), child=SEQ_IDS, writes=st.sampled_from(["child", "parent", "both", "none"]))
    def fork(self, data, child, writes):
        parent = self.resident(data)
        if parent is None:
            return
        if child in self.model.seqs:
            with pytest.raises(ValueError, match="already exists"):
                self.manager.fork(parent, child)
        else:
            self.both(lambda: self.manager.fork(parent, child), "fork", parent, child)
            self.sampled.pop(child, None)
            writers = {"child": [child], "parent": [parent], "both": [parent, child], "none": []}[writes]
            self.grow({s: (self.sampled.get(s, []) or [0])[:1] for s in writers})

    @precondition(lambda self: self.model.seqs)
    @rule(data=st.data())
    def truncate(self, data):
        seq_id = self.resident(data)
        if seq_id is not None:
            keep = data.draw(st.integers(0, len(self.model.seqs[seq_id].tokens)))
            self.both(lambda: self.manager.truncate(seq_id, keep), "truncate", seq_id, keep)
            self.sampled.pop(seq_id, None)

    @rule(seq_id=SEQ_IDS)
    def free(self, seq_id):
        if seq_id not in self.model.seqs:
            with pytest.raises(KeyError):
                self.manager.free(seq_id)
            return
        self.both(lambda: self.manager.free(seq_id), "free", seq_id)
        self.sampled.pop(seq_id, None)

    @precondition(lambda self: self.model.seqs)
    @rule(data=st.data())
    def swap(self, data):
        seq_id = data.draw(st.sampled_from(sorted(self.model.seqs)))
        seq = self.model.seqs[seq_id]
        if not seq.is_swapped:
            table = self.manager.block_table(seq_id)
            done = self.both(lambda: self.manager.swap_out(seq_id), "swap_out", seq_id)
            if done:
                num_computed = min(seq.computed, len(seq.tokens))
                assert done[1][:, 0].tolist() == table[: -(-num_computed // self.block_size)].tolist()
                for device_page, host_page in done[1]:
                    self.host[host_page] = self.device[device_page]
                self.sampled.pop(seq_id, None)
        else:
            with pytest.raises(ValueError, match="swapped out"):
                self.manager.append(seq_id, 1)
            done = self.both(lambda: self.manager.swap_in(seq_id), "swap_in", seq_id)
            if done:
                table = self.manager.block_table(seq_id)
                assert done[1][:, 1].tolist() == [table[i] for i in done[0]]
                for host_page, device_page in done[1]:
                    self.device[device_page] = self.host[host_page]

    @rule(chance=st.integers(0, 20))
    def reset(self, chance):
        if chance == 20:
            self.both(self.manager.reset_prefix_cache, "reset")

    # --- what must hold after every rule

    @invariant()
    def equal(self):
        if not hasattr(self, "model"):
            return
        self.manager.check()
        model, stats = self.model, self.manager.stats()
        pages = {id(p): p for s in model.seqs.values() if not s.is_swapped for p in s.pages}.values()
        expected = {
            "num_seqs": len(model.seqs), "used": model.used(), "cached": len(model.cached), "free": model.free_pages,
            "shared": sum(p.refs > 1 for p in pages), "host_free": model.host_free, "waste_tokens": model.waste(),
            "pending": sum(p.node is not None and not p.is_computed for p in pages),
            "hit_tokens": model.hit_tokens, "lookup_tokens": model.lookup_tokens, "evictions": model.evictions,
            "copies": model.copies,
        }  # fmt: skip
        assert {name: stats[name] for name in expected} == expected
        names = {}  # model page -> page
        for seq_id, seq in model.seqs.items():
            assert self.manager.token_ids(seq_id).tolist() == seq.tokens
            assert self.manager.num_computed(seq_id) == seq.computed
            if seq.is_swapped:
                continue
            table = self.manager.block_table(seq_id).tolist()
            assert len(table) == len(seq.pages)
            for page, name in zip(seq.pages, table):
                assert names.setdefault(id(page), name) == name
            for position in range(seq.computed):
                page = table[position // self.block_size]
                assert self.device[page, position % self.block_size] == self.kv(seq_id, position)
        assert len(set(names.values())) == len(names)


TestBlockManager = Machine.TestCase
TestBlockManager.settings = settings(
    max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
