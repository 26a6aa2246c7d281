"""Requests that come and go between any two steps, from any thread: nobody waits long, nothing is lost or changed.

Tokens are compared with those of the same requests alone. A model in which each step counts shows who waited for whom.
"""

from __future__ import annotations

import gc
import random
import threading
import time

import numpy as np
import pytest
from checkpoints import EOS, VOCAB_SIZE, write_model
from threads import in_threads
from tiny_engine import by_hand, engine, generate, news_of, settle

from pagedkv import LLM, SamplingParams
from pagedkv.engine import Engine, RequestOutputKind


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), generation={"eos_token_id": EOS})


FINAL = RequestOutputKind.FINAL_ONLY


def request_of(rng: random.Random) -> tuple[list[int], SamplingParams]:
    """Of few prompts and options, so that the answers to all can be known beforehand."""
    kind = rng.randrange(12)
    prompt = [kind * 7 % VOCAB_SIZE] * (1 + kind) + list(range(30 * (kind % 3)))
    options = {"temperature": (kind % 2) * 1.0, "seed": kind, "max_tokens": 1 + 3 * kind, "ignore_eos": True}
    return prompt, SamplingParams(**options, n=1 + (kind == 7) * 2, output_kind=FINAL)


def answers(output) -> list[list[int]]:
    return [one.token_ids for one in output.outputs]


def known_answers(llm: LLM) -> dict[tuple, list[list[int]]]:
    rng, known = random.Random(0), {}
    while len(known) < 12:
        prompt, params = request_of(rng)
        if tuple(prompt) not in known:
            known[tuple(prompt)] = answers(generate(llm, [prompt], params)[0])
    return known


def is_empty(llm: Engine) -> bool:
    """No page and no request is left over."""
    settle(llm)
    llm.manager.check()
    return not (llm.manager.stats()["used"] or len(llm.manager) or llm.has_unfinished_requests() or llm.scheduler.has_work
                or len(llm._book) or llm._book._by_id or llm._book._num_streamed)  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"num_blocks": 40}, {"num_blocks": 40, "swap_space": 1 << 20}], ids=str)
def test_a_thousand_aborts(folder, place, options, seed):
    """At random times between steps. No other token changes."""
    rng = random.Random(seed)
    with engine(folder, place, **options) as llm:
        known = known_answers(llm)
        by_hand(llm)
        living, aborted, finished = {}, set(), 0
        for _ in range(2000):
            if rng.random() < 0.7:
                prompt, params = request_of(rng)
                living[llm.add_request(prompt, params)] = tuple(prompt)
            if rng.random() < 0.5 and living:
                victim = rng.choice(list(living))
                assert llm.abort(victim)
                aborted.add(victim)
                del living[victim]
            for output in llm.step():
                assert output.finished
                if output.request_id in aborted:
                    assert "abort" in [one.finish_reason for one in output.outputs]
                else:
                    assert answers(output) == known[living.pop(output.request_id)]
                    finished += 1
        while llm.has_unfinished_requests():
            finished += len(llm.step())
        assert len(aborted) > 500 and finished > 300 and is_empty(llm)


def test_abort_says_whether_it_came_in_time(folder, place):
    with engine(folder, place) as llm:
        request_id = by_hand(llm).add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
        for _ in range(6):
            llm.step()
        assert llm.abort(request_id) and not llm.abort(request_id)
        last = llm.step()[-1]
        assert last.finished and last.finish_reason == "abort" and 2 <= len(last.token_ids) <= 6 and is_empty(llm)


def test_threads_share_the_engine(folder, place, seed):
    """Every way in at once; each thread gets its own outputs, and all are right."""
    with engine(folder, place, num_blocks=120) as llm:
        known = known_answers(llm)
        num_done = [0]

        def ask(number: int) -> None:
            rng = random.Random(seed + number)
            for _ in range(12):
                way = rng.randrange(3)
                requests = [request_of(rng) for _ in range(1 if way else rng.randint(1, 6))]
                if way == 0:
                    outputs = llm.generate([p for p, _ in requests], [q for _, q in requests], use_tqdm=False)
                    assert [answers(output) for output in outputs] == [known[tuple(prompt)] for prompt, _ in requests]
                    num_done[0] += 1
                    continue
                (prompt, params), tokens, stream = requests[0], {}, llm.stream(*requests[0])
                for output in stream:
                    for one in output.outputs:
                        tokens.setdefault(one.index, []).extend(one.token_ids)
                    if way == 2 and rng.random() < 0.1:
                        stream.close()
                        break
                else:
                    assert [tokens[i] for i in range(params.n)] == known[tuple(prompt)]

        in_threads(ask, range(8))
        assert is_empty(llm) and num_done[0] > 5


@pytest.mark.parametrize("max_num_seqs", [8, 64])
def test_a_short_request_does_not_wait_for_a_batch(folder, place, max_num_seqs):
    """One that arrives while a step is launched is in the next step and in each one after it until it is answered, and
    its caller is told as early as on an idle engine: whether there is a place for it or one of the batch must yield."""
    num_new = 4
    long = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    short = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, output_kind=FINAL)
    arrivals = range(40, 140, 12)  # launches
    launched, told, short_ids = [], [], []  # per launch: who is in it; how many short ones have been answered
    with engine(folder, place, max_num_seqs=max_num_seqs, num_blocks=3000, max_num_batched_tokens=64) as llm:
        expected = generate(llm, [[5]], short)[0].token_ids
        launch = llm._runner.launch

        def counted(step, wait_for_tokens):
            launched.append({seq.request.id for seq in step.sequences})
            told.append(llm._mailbox._updates.qsize())
            if len(launched) - 1 in arrivals:
                thread = threading.Thread(target=lambda: short_ids.append(llm.add_request([5], short)))
                thread.start()
                thread.join()
            return launch(step, wait_for_tokens)

        llm._runner.launch = counted
        generate(llm, [[i, i] for i in range(20)], long)
        outputs = {output.request_id: output.token_ids for output in news_of(llm)}
        num_preemptions, behind = llm.scheduler.queues.num_preemptions, llm._runner.num_behind
    assert outputs == dict.fromkeys(short_ids, expected) and len(outputs) == len(arrivals)
    assert (num_preemptions > 0) == (max_num_seqs == 8), "a place was free, or none"
    for i, (arrival, short_id) in enumerate(zip(arrivals, short_ids, strict=True)):
        last = arrival + num_new
        assert [n for n, ids in enumerate(launched) if short_id in ids] == list(range(arrival + 1, last + 1))
        assert told[last + behind : last + behind + 2] == [i, i + 1], "told when the step's tokens are there"


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_a_reader_may_come_late(folder, place, kind):
    """Outputs are made when they are read: of what there was after their step, and of nothing that came later."""
    options = {"temperature": 0, "max_tokens": 30, "ignore_eos": True, "logprobs": 1, "output_kind": kind}
    with engine(folder, place) as llm:
        expected = generate(llm, [[3, 4, 5]], SamplingParams(**options | {"output_kind": FINAL}))[0]
        by_hand(llm).add_request([3, 4, 5], SamplingParams(**options))
        llm._core.step()
        while len(llm._book):
            llm._core.step()
        outputs = news_of(llm)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]
    assert outputs[-1].metrics.total_time >= outputs[0].metrics.total_time >= outputs[0].metrics.time_to_first_token
    if kind is RequestOutputKind.DELTA:
        assert [len(output.token_ids) for output in outputs] == [len(output.logprobs) for output in outputs] == [1] * 30
        assert [token for output in outputs for token in output.token_ids] == expected.token_ids
        assert "".join(output.text for output in outputs) == expected.text
    else:
        assert len(outputs) == (1 if kind is FINAL else 30)
        for output in outputs:
            assert output.token_ids == expected.token_ids[: len(output.token_ids)]
            assert expected.text.startswith(output.text) and len(output.logprobs) == len(output.token_ids)
        assert outputs[-1].text == expected.text and outputs[-1].token_ids == expected.token_ids
    assert outputs[-1].outputs[0].cumulative_logprob == expected.outputs[0].cumulative_logprob


def test_the_last_output_is_there_before_its_request_is_crossed_off(folder):
    """By the engine's thread, which may be stopped between the two: step() must not wait for what nobody sends."""
    received, outputs = threading.Event(), []

    class Slow(dict):
        def pop(self, *args):
            if threading.current_thread().name == "pagedkv":
                received.wait(60)
            return super().pop(*args)

    def collect():
        while llm.has_unfinished_requests():
            outputs.extend(llm.step())

    with engine(folder, ("cpu", 0)) as llm:
        llm._mailbox._expected = Slow()
        llm.add_request([1, 2], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        thread = threading.Thread(target=collect, daemon=True)
        thread.start()
        thread.join(20)
        received.set()
        assert not thread.is_alive() and [output.finished for output in outputs] == [False, False, True]


def test_a_step_makes_one_object_per_reader(folder):
    """More of them are alive in the middle of a step, and the garbage collector takes them for old."""
    num_readers, num_steps = 8, 20
    with engine(folder, ("cpu", 1)) as llm:
        params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        by_hand(llm)
        for i in range(num_readers):
            llm.add_request([i, 1, 2], params)
        for _ in range(5):
            llm._core.step()
        gc.collect()
        gc.disable()
        try:
            before, num_items = len(gc.get_objects()), llm._mailbox._updates.qsize()
            for _ in range(num_steps):
                llm._core.step()
            grown = len(gc.get_objects()) - before
        finally:
            gc.enable()
        assert llm._mailbox._updates.qsize() - num_items == num_steps * num_readers
    assert num_steps * num_readers <= grown < 1.5 * num_steps * num_readers


def test_an_error_of_a_request_is_its_callers(folder, place, seed):
    """Where it fails a step in which others are. They are tried again without it, and their tokens do not change."""
    with engine(folder, place) as llm:
        known, launch = known_answers(llm), llm._runner.launch

        def fail(step, wait_for_tokens):
            if any(seq.params.seed == 13 and len(seq.new_tokens) >= seq.params.min_tokens for seq in step.sequences):
                raise LookupError("of 13")
            return launch(step, wait_for_tokens)

        llm._runner.launch = fail
        results = []

        def ask(number: int) -> None:
            rng = random.Random(seed + number)
            bad_rounds = rng.sample(range(12), 3)
            for i in range(12):
                requests = [request_of(rng) for _ in range(rng.randint(1, 5))]
                if i in bad_rounds:
                    late = rng.choice([0, 1, 5])  # in its prompt's step, in its first decode, later
                    requests.append(([1, 2, 3], SamplingParams(seed=13, max_tokens=9, min_tokens=late, output_kind=FINAL)))
                outputs = llm.generate([p for p, _ in requests], [q for _, q in requests], use_tqdm=False)
                for (prompt, params), output in zip(requests, outputs, strict=True):
                    is_right = answers(output) == known.get(tuple(prompt)) if params.seed != 13 else None
                    results.append((params.seed == 13, output.finish_reason, str(output.error), is_right))

        in_threads(ask, range(4))
        assert is_empty(llm)
    assert {each for each in results if each[0]} == {(True, "error", "of 13", None)}
    assert {each for each in results if not each[0]} == {(False, "length", "None", True)}
    assert len(results) > 80 and sum(each[0] for each in results) == 4 * 3


def test_an_error_that_is_nobodys(folder, caplog):
    """Steps that fail now and then: all are tried again. Only a request that fails twice, alone, ends with it."""
    rng = random.Random(5)
    with engine(folder, ("cpu", 1)) as llm:
        known, launch, num_errors = known_answers(llm), llm._runner.launch, 0

        def fail(step, wait_for_tokens):
            nonlocal num_errors
            if rng.random() < 0.02:
                num_errors += 1
                raise RuntimeError("broken")
            return launch(step, wait_for_tokens)

        llm._runner.launch = fail
        requests = [request_of(rng) for _ in range(100)]
        outputs = llm.generate([p for p, _ in requests], [q for _, q in requests], use_tqdm=False)
        failed = [output for output in outputs if output.error]
        assert all(answers(output) == known[tuple(prompt)] for output, (prompt, _) in zip(outputs, requests, strict=True) if not output.error)
        assert num_errors > 3 and len(failed) <= num_errors / 4 and all("broken" in str(output.error) for output in failed)
        assert is_empty(llm)
    told = [record for record in caplog.records if record.name == "pagedkv.engine.core" and record.levelname in ("WARNING", "ERROR")]
    assert len(told) == num_errors and any("are tried again" in record.message for record in told)


def test_explain(folder):
    with engine(folder, ("cpu", 0), max_num_seqs=2, num_blocks=30) as llm:
        by_hand(llm)
        final = {"temperature": 0, "ignore_eos": True, "output_kind": FINAL}
        a, b, c = (llm.add_request([i] * 3, SamplingParams(max_tokens=40, **final)) for i in range(3))
        assert "waits behind 2 others" in llm.explain(c)
        llm.step()
        assert llm.explain(a) == "answer 0: runs: 1 of at most 40 tokens are sampled"
        assert llm.explain(c).startswith("answer 0: waits behind 0 others: all 2 places (max_num_seqs) are taken")
        llm.abort(b)
        wide = llm.add_request([7] * 3, SamplingParams(max_tokens=90, **final), priority=-1)
        while "preempted" not in llm.explain(c):
            llm.step()
        assert "preempted 1 times, the last time because" in llm.explain(c)
        llm.abort(wide)
        llm.abort(a)
        with pytest.raises(KeyError, match="request_id is '0'"):
            llm.explain(a)


def test_stats(folder):
    with engine(folder, ("cpu", 1)) as llm:
        assert llm.stats().time_to_first_token == {} and "none yet" in llm.stats()._repr_html_()
        outputs = generate(llm, [[i] for i in range(20)], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
        stats = llm.stats()
    first = [output.metrics.time_to_first_token for output in outputs]
    assert stats.time_to_first_token == pytest.approx({f"p{p}": np.percentile(first, p) for p in (50, 90, 99)})
    queue = [output.metrics.queue_time for output in outputs]
    assert stats.queue_time == pytest.approx({f"p{p}": np.percentile(queue, p) for p in (50, 90, 99)})
    rest = [(each.metrics.total_time - each.metrics.time_to_first_token) / 4 for each in outputs]
    assert stats.time_per_token == pytest.approx({f"p{p}": np.percentile(rest, p) for p in (50, 90, 99)}, rel=0.2)
    assert (stats.num_running, stats.num_waiting, stats.num_finished) == (0, 0, 20)
    assert stats.pool["used"] == 0 and "20 finished" in stats._repr_html_()
    assert "<pre>" in outputs[0]._repr_html_() and "Engine" not in llm._repr_html_() and "LLM on cpu" in llm._repr_html_()


def test_closing_in_the_middle(folder, place):
    """Whoever waits gets what there is, and an end."""
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    llm = LLM(folder, device=place[0], block_size=4, num_blocks=400)
    results = []
    thread = threading.Thread(target=lambda: results.extend(generate(llm, [[1], [2]], long)))
    thread.start()
    while llm.counters.num_steps < 10:
        time.sleep(0.001)
    llm.close()
    thread.join()
    assert [output.finish_reason for output in results] == ["abort", "abort"] and len(results[0].token_ids) > 3
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.add_request([1])
    llm.close()


def test_nothing_grows(folder, seed):
    """Memory and pages after thousands of requests, aborted ones among them."""
    rng = random.Random(seed)
    with engine(folder, ("cpu", 1)) as llm:
        by_hand(llm)

        def serve(count: int) -> None:
            for _ in range(count):
                prompt, params = request_of(rng)
                request_id = llm.add_request(prompt, params)
                if rng.random() < 0.3:
                    llm.abort(request_id)
                llm.step()
            while llm.has_unfinished_requests():
                llm.step()

        serve(300)
        gc.collect()
        before = len(gc.get_objects())
        serve(1500)
        gc.collect()
        assert is_empty(llm) and len(gc.get_objects()) - before < 200
