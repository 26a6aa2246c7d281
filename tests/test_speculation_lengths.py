"""How many guesses pay: by hand, beside all ways there are, and that no batch is slower than without."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from pagedkv import SamplingParams
from pagedkv.engine.scheduling.sequence import Sequence
from pagedkv.engine.scheduling.step import Step
from pagedkv.engine.speculation import lengths as lengths_module
from pagedkv.engine.speculation import speculation
from pagedkv.engine.speculation.drafter import Draft
from pagedkv.engine.speculation.lengths import EXPECTED, FORGET_AFTER, MARGIN, StepTimes, lengths
from pagedkv.engine.speculation.speculation import Speculation, without_luck


def test_by_hand():
    times = StepTimes(8)
    assert lengths([1.0], [3], 1, times) == [0]  # nothing was measured
    times.add(1, 1, 1.0)
    assert lengths([1.0], [3], 1, times) == [3]  # each row is expected to cost a tenth
    assert lengths([0.1], [3], 1, times) == [0] and lengths([], [], 1, times) == []
    times.add(1, 2, 1.2)
    times.add(1, 4, 3.0)
    assert lengths([1.0], [3], 1, times) == [2]  # 3 / 1.3 of three rows, 4 / 3 of four
    times.add(1, 3, 3.0)
    assert lengths([1.0], [3], 1, times) == [1]
    assert lengths([0.5], [3], 1, times) == [1] and lengths([0.2], [3], 1, times) == [0]
    times.add(2, 2, 1.0)
    times.add(2, 3, 1.1)
    times.add(2, 6, 1.4)
    assert lengths([0.9, 0.01], [3, 3], 2, times) == [2, 0]  # 2.9 / 1.1, 3.71 / 1.15, 4.44 / 1.4
    assert lengths([0.9, 0.8], [1, 2], 2, times) == [1, 1] and lengths([0.9, 0.9], [0, 2], 2, times) == [0, 2]
    assert lengths([0.9, 0.9], [3, 3], 2, times, 0.5) == [1, 1]  # 3.8 / 1.65, 5.42 / 2.4
    assert lengths([0.9, 0.9], [3, 3], 2, times, 5.0) == [0, 0]
    assert lengths([0.9] * 8, [3] * 8, 8, times) == [0] * 8  # as many rows as a step may have


@pytest.mark.parametrize("draft_seconds", [0.0, 0.1])
def test_the_most_tokens_a_second(seed, draft_seconds):
    """Beside all ways to give up to three guesses to each of up to three sequences, in steps with rows for all or few."""
    rng, num_found = random.Random(seed), 0
    for _ in range(100):
        most_rows, num_seqs, n = rng.choice([7, 16]), rng.randint(3, 5), rng.randint(1, 3)
        times = StepTimes(most_rows)
        times.add(num_seqs, num_seqs, 1.0)
        for rows in range(num_seqs + 1, most_rows + 1):
            times.add(num_seqs, rows, 1 + rng.random() * (rows - num_seqs) / 6)
        chances, most = [rng.random() for _ in range(n)], [rng.randint(0, 3) for _ in range(n)]
        seconds = times.guessing(num_seqs, times.max_num_rows)

        def rate(given):
            gain = sum(p**j for p, k in zip(chances, given, strict=True) for j in range(1, k + 1))
            return (num_seqs + gain) / (seconds[sum(given) - 1] + max(given) * draft_seconds) if any(given) else 0

        ways = [(a, b, c)[:n] for a in range(4) for b in range(4) for c in range(4)]
        ways = [way for way in ways if num_seqs + sum(way) <= most_rows]
        best = max(rate(way) for way in ways if all(k <= m for k, m in zip(way, most, strict=True)))
        found = lengths(chances, most, num_seqs, times, draft_seconds)
        assert any(found) == (best > MARGIN * num_seqs)
        if any(found):
            num_found += 1
            assert rate(found) == pytest.approx(best)
    assert 5 < num_found < 100


def test_times_follow_and_are_forgotten():
    times = StepTimes(64)
    assert times.plain(1) is None
    times.add(1, 1, 1.0)
    times.add(1, 1, 100.0)  # an outlier
    assert 1.0 < times.plain(1) < 1.2
    for _ in range(200):
        times.add(1, 1, 3.0)
    assert times.plain(1) == pytest.approx(3.0, rel=0.01)
    times.add(1, 8, 50.0)
    slope = EXPECTED * times.plain(1)
    assert times.guessing(1, 63)[0] == pytest.approx(times.plain(1) + slope) and times.guessing(1, 63)[6] == 50.0
    assert times.guessing(1, 63)[62] == pytest.approx(50 + (64 - 9) * slope, rel=0.01)  # behind the class of eight
    for _ in range(FORGET_AFTER):
        times.add(1, 1, 3.0)
    assert times.guessing(1, 63)[6] == pytest.approx(times.plain(1) + 7 * slope)  # it is tried again
    times.add(1, 8, 4.0)
    assert times.guessing(1, 63)[6] == 4.0  # what was forgotten has no part in it
    times.add(1, 8, 1.5)
    assert times.plain(1) == pytest.approx(3.0)  # it stays: eight rows take 3.75 by all measurements
    times.add(2, 2, 3.0)
    times.add(2, 8, 2.0)
    assert times.plain(2) is None  # fewer rows do not take longer
    times.add(2, 2, 1.0)
    for _ in range(FORGET_AFTER):
        assert times.plain(2) == 1.0
        times.add(2, 8, 2.0)
    assert times.plain(2) is None  # it is measured again


def test_times_of_a_draft_model():
    times = StepTimes(64)
    assert times.draft(0) == times.draft(16) == 0.0
    times.add_draft(4, 1.0)
    assert times.draft(3) == 0.0 and times.draft(4) == times.draft(64) == 1.0
    times.add_draft(64, 3.0)
    assert times.draft(4) == times.draft(16) == 1.0 and times.draft(64) == 3.0
    times.add_draft(64, 4.0)
    assert times.draft(64) == pytest.approx(3.1)
    for _ in range(FORGET_AFTER):
        times.add(1, 1, 3.0)
    assert times.draft(64) == 0.0


def test_luck_is_not_believed(seed):
    """Of 64 sequences that are alike the best measured is no better; those that are not alike stay what they are."""
    rng = random.Random(seed)

    def measured(chances: list[float]) -> list[float]:
        drafts = [Draft(0.6) for _ in chances]
        guesser = Speculation(None, 7, 64)
        for _ in range(100):
            for draft, chance in zip(drafts, chances, strict=True):
                is_right = rng.random() < chance
                guesser._learn_chance(draft, int(is_right), not is_right)
        return [draft.chance for draft in drafts]

    alike = measured([0.5] * 64)
    believed = without_luck(alike)
    assert max(alike) > 0.6 and max(believed) < (0.5 + max(alike)) / 2
    assert sum(believed) == pytest.approx(sum(alike))
    others = measured([0.1, 0.9] * 32)
    assert without_luck(others) == pytest.approx(others, abs=0.05)
    assert without_luck([0.0, 1.0]) == pytest.approx([0.0, 1.0], abs=0.05)
    assert without_luck([]) == [] and without_luck([0.3]) == [0.3] and without_luck([1.0, 1.0]) == [1.0, 1.0]


# --- no batch is slower than without


class Drafter:
    """Guesses 1 where it is right, with a chance of the sequence's own, and 2 else. A guess of all takes `seconds`."""

    is_measurable = True

    def __init__(self, rng: random.Random, is_free: bool, seconds: float, clock: list[float]) -> None:
        self.rng, self.is_free, self.seconds, self.clock = rng, is_free, seconds, clock
        self.chances: dict[int, float] = {}

    def guess(self, sequences, counts):
        self.clock[0] += self.seconds * max(counts, default=0)
        pairs = zip(sequences, counts, strict=True)
        return [[1 if self.rng.random() < self.chances[seq.id] else 2 for _ in range(count)] for seq, count in pairs]

    def take(self, sequences) -> None: ...

    def forget(self) -> None: ...


class Engine:
    """Its clock alone: a step takes base + per_row * rows, and with guesses `host` besides."""

    def __init__(self, rng, batch: int, draw_chance, *, is_free, draft=0.0, base, per_row, host) -> None:
        self.rng, self.batch, self.draw_chance, self.clock = rng, batch, draw_chance, [0.0]
        self.base, self.per_row, self.host = base, per_row, host
        self.drafter = Drafter(rng, is_free, draft, self.clock)
        self.speculation = Speculation(self.drafter, 7, max(batch, min(8 * batch, 256)))
        self.num_made = self.num_tokens = 0
        self.running = [self.arrive() for _ in range(batch)]

    def arrive(self) -> Sequence:
        seq = Sequence(self.num_made, [0], SamplingParams(max_tokens=256), 0, frozenset(), 0.0)
        self.drafter.chances[seq.id] = self.draw_chance(self.rng)
        self.num_made += 1
        seq.num_tokens, seq.num_in_pages, seq.new_tokens = 2, 1, [1]
        return seq

    def step(self) -> None:
        start, spec, running, host = self.clock[0], self.speculation, self.running, 0.0
        step = Step(sequences=running, num_decodes=self.batch, receivers=running, accepted=[0] * self.batch)
        if spec.pays(running):
            guesses = spec.guess(running)
            step.guesses = [guesses.get(seq.id, []) for seq in running] if guesses else []
            host = self.host
        for i, guesses in enumerate(step.guesses):
            step.accepted[i] = (*guesses, 2).index(2)
        rows = step.num_decode_tokens
        self.clock[0] += (self.base + self.per_row * rows) * (1 + 0.03 * self.rng.random()) + host
        for seq, right in zip(running, step.accepted, strict=True):
            count = min(right + 1, 256 - len(seq.new_tokens))
            seq.new_tokens += [1] * count
            seq.num_tokens, seq.num_in_pages = seq.num_tokens + count, seq.num_in_pages + count
            seq.finish_reason = "length" if len(seq.new_tokens) == 256 else None
            self.num_tokens += count
        spec.learn(step, self.clock[0] - start)
        self.running = [self.arrive() if seq.finish_reason else seq for seq in running]

    def have_accident(self, what: str) -> None:
        """The first step without guesses, or the first guess, takes 20 times as long as the others."""
        owner, name = (self.speculation.times, "add") if what == "step" else (self.drafter, "guess")
        method = getattr(owner, name)

        def once(*args):
            setattr(owner, name, method)
            if what == "step":
                *sizes, seconds = args
                assert sizes[0] == sizes[1]
                return method(*sizes, 20 * seconds)
            self.clock[0] += 19 * self.drafter.seconds * max(args[1])
            return method(*args)

        setattr(owner, name, once)

    def speed(self, monkeypatch, num_steps: int) -> float:
        """Tokens a second, of those without guesses, once as many steps were made to learn."""
        monkeypatch.setattr(speculation, "time", SimpleNamespace(perf_counter=lambda: self.clock[0]))
        for _ in range(num_steps):
            self.step()
        before = self.num_tokens, self.clock[0]
        for _ in range(num_steps):
            self.step()
        rate = (self.num_tokens - before[0]) / (self.clock[0] - before[1])
        return rate / (self.batch / ((self.base + self.per_row * self.batch) * 1.015))


KINDS = {  # milliseconds
    "suffix, 8B": dict(is_free=True, base=3.9, per_row=0.02, host=0.2),
    "suffix, 0.6B": dict(is_free=True, base=0.55, per_row=0.008, host=0.15),
    "suffix, rows that cost": dict(is_free=True, base=1.0, per_row=0.1, host=0.2),
    "0.6B for 8B": dict(is_free=False, draft=0.65, base=3.9, per_row=0.02, host=0.2),
    "a draft as slow as the model": dict(is_free=False, draft=0.6, base=0.55, per_row=0.008, host=0.15),
}
CHANCES = {"0": lambda rng: 0.0, "0.2": lambda rng: 0.2, "0.7": lambda rng: 0.7, "0.9": lambda rng: 0.9,
           "0 or 0.9": lambda rng: rng.choice([0.0, 0.9])}  # fmt: skip
GAIN = {("suffix, 8B", "0.9", 1): 4, ("suffix, 8B", "0.7", 1): 2.4, ("suffix, 8B", "0.9", 64): 1.6,
        ("0.6B for 8B", "0.7", 1): 1.45, ("0.6B for 8B", "0.9", 16): 1.7, ("suffix, 0.6B", "0.9", 1): 3}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_no_batch_is_slower(monkeypatch, seed, kind):
    """Within what few steps can show: each of them within a few tries, and all together within one per cent."""
    speeds = []
    for batch, num_steps in ((1, 600), (4, 300), (16, 150), (64, 80), (256, 5)):
        for name, draw_chance in CHANCES.items():
            speed = Engine(random.Random(seed), batch, draw_chance, **KINDS[kind]).speed(monkeypatch, num_steps)
            speeds.append(min(speed, 1.0))
            assert speed > 0.95, (kind, batch, name, speed)
            assert speed > GAIN.get((kind, name, batch), 0), (kind, batch, name, speed)
    assert sum(speeds) / len(speeds) > 0.99, (kind, speeds)


@pytest.mark.parametrize("what", ["step", "guess"])
def test_an_accident_is_not_believed_for_ever(monkeypatch, seed, what):
    """It makes guesses look better than they are, or worse."""
    monkeypatch.setattr(lengths_module, "FORGET_AFTER", 300)
    for kind in KINDS if what == "step" else ["0.6B for 8B"]:
        for batch in (1, 16):
            for name in ("0", "0.7"):
                engine = Engine(random.Random(seed), batch, CHANCES[name], **KINDS[kind])
                engine.have_accident(what)
                speed = engine.speed(monkeypatch, 400)
                assert speed > 0.95, (kind, batch, name, speed)
                assert speed > 0.9 * GAIN.get((kind, name, batch), 0), (kind, batch, name, speed)
