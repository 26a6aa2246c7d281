"""Sampling, for the fuzzer of calls; see fuzz_calls_ops.py."""

import numpy as np
import oracle
from fuzz_calls_dense import draw_weight, weight_of
from fuzz_calls_memory import place
from fuzz_calls_ops import Draw, Operation, Outcome, near, numbers

PENALTIES = ("repetition_penalties", "presence_penalties", "frequency_penalties")


def draw_row_numbers(d: Draw, rows: int) -> dict:
    temperatures = d.rng.choice([0.0, 0.5, 1.0, 3.0], rows).astype(np.float32)
    return {
        "temperatures": d.array(temperatures, "float32"),
        "seeds": d.array(d.rng.integers(-(2**62), 2**62, rows), "int64"),
        "positions": d.array(d.rng.integers(0, 2**31, rows)),
    }


def draw_sample(d: Draw) -> dict:
    dtype, rows, vocab = d.dtype(), d.size(4), int(d.rng.integers(1, 3000 if d.is_large else 60))
    logits = d.floats((rows, vocab), dtype, 3)
    logits[:, 1:][d.rng.random((rows, vocab - 1)) < 0.1] = -np.inf

    def one(*choices):
        return d.array(d.rng.choice(choices, rows).astype(np.float32), "float32")

    a = {
        "logits": place(d.rng, logits, dtype, may_repeat=True, may_be_readonly=True),
        **draw_row_numbers(d, rows),
        **d.some(
            0.3,
            top_k=lambda: d.array(d.rng.choice([-5, 0, 1, 3, 10**9], rows)),
            top_p=lambda: one(0, 0.3, 0.9, 1, 7),
            min_p=lambda: one(-1, 0, 0.1, 1),
        ),
        **d.some(out=lambda: d.output((rows,), "int32")),
        **d.stream(),
    }
    if d.maybe(0.4):
        slots = d.rng.permutation(rows + 3)[:rows]
        slots[d.rng.random(rows) < 0.2] = d.one_of(-1, -(2**31))
        a["counts"] = place(d.rng, d.rng.choice([0, 0, 1, 2, 3, 7], (rows + 3, vocab)), "int32")
        a |= d.some(
            0.5,
            slots=lambda: d.array(slots),
            repetition_penalties=lambda: one(1, 0.5, 2),
            presence_penalties=lambda: one(0, 1, -1),
            frequency_penalties=lambda: one(0, 0.5, -2),
        )
    return a


def per_row(view, rows: int, neutral) -> np.ndarray:
    return np.full(rows, neutral) if view is None else numbers(view)


def expect_sample(a, logits=None, slack=1e-5) -> dict:
    """A near tie may go either way, in a draw and at what a filter drops."""
    logits = numbers(a.logits) if logits is None else logits
    rows = len(logits)
    has_counts = a.counts is not None
    slots = per_row(a.slots, rows, 0) if a.slots is not None else np.arange(rows)
    counts = numbers(a.counts) if has_counts else None
    names = dict(zip(PENALTIES, (1, 0, 0), strict=True)) | {"top_k": 0, "top_p": 1, "min_p": 0}
    options = {name: per_row(getattr(a, name), rows, neutral) for name, neutral in names.items()}
    temperatures, seeds, positions = numbers(a.temperatures), numbers(a.seeds), numbers(a.positions)

    def check(tokens):
        for row, token in enumerate(tokens):
            x, temperature = logits[row], temperatures[row]
            assert 0 <= token < len(x), (row, token)
            if has_counts and slots[row] >= 0:
                x = oracle.penalized(x, counts[slots[row]], *(options[name][row] for name in PENALTIES))
            keys = oracle.sample_keys(x, temperature, int(seeds[row]), int(positions[row]))
            sure = maybe = np.ones(len(x), bool)
            if temperature:
                filters = [options[name][row] for name in ("top_k", "top_p", "min_p")]
                sure, maybe = (
                    oracle.kept(x, temperature, int(filters[0]), *filters[1:], slack=s) for s in (-1e-5, 1e-5)
                )
            margin = slack + (8 * np.spacing(np.float32(np.abs(x[np.isfinite(x)]).max(initial=1))) / (temperature or 1))
            assert maybe[token] and keys[token] >= keys[sure].max(initial=-np.inf) - margin, (
                row,
                token,
                keys[token],
                keys[sure].max(),
            )

    outcomes = {"out": Outcome(None, check=check)}
    if has_counts:
        mask = np.zeros(a.counts.shape, bool)
        mask[slots[slots >= 0]] = True

        def check_counts(new):
            used = np.unique(slots[slots >= 0])
            grown = new - counts
            is_shared = len(used) < (slots >= 0).sum()  # which no two rows may
            assert is_shared or (
                ((grown == 0) | (grown == 2)).all() and (grown.sum(1)[used] == 2).all() and grown.sum() == 2 * len(used)
            )

        outcomes["counts"] = Outcome(None, mask=mask, check=check_counts)
    return outcomes


def draw_sample_linear(d: Draw) -> dict:
    dtype, rows, vocab, width = d.dtype(), d.size(4), int(d.rng.integers(1, 60)), d.size(40)
    weight, width = draw_weight(d, vocab, width, dtype)
    return {
        "x": d.tensor((rows, width), dtype),
        **weight,
        **draw_row_numbers(d, rows),
        "logits": d.output((rows, vocab), "float32"),
        **d.some(weight_is_constant=d.flag, batch_invariant=d.flag, out=lambda: d.output((rows,), "int32")),
        **d.stream(),
    }


def expect_sample_linear(a) -> dict:
    for name in ("slots", "counts", "top_k", "top_p", "min_p", *PENALTIES):
        setattr(a, name, None)
    slack = 0.3 if a.weight_scales is not None and a.x.dtype == "bfloat16" else 1e-3  # each value is rounded
    return expect_sample(a, oracle.linear(numbers(a.x), weight_of(a)), slack) | {
        "logits": Outcome(None)
    }


def draw_linear_candidates(d: Draw) -> dict:
    a = draw_sample_linear(d) | {"first_token": 64 * int(d.rng.integers(0, 2**25 - 1))}
    return a | ({"out": d.output(a["out"].shape, "int64")} if "out" in a else {})


def expect_linear_candidates(a) -> dict:
    """The noise is that of the tokens' places in the whole vocabulary."""
    for name in ("slots", "counts", "top_k", "top_p", "min_p", *PENALTIES):
        setattr(a, name, None)
    slack = 0.3 if a.weight_scales is not None and a.x.dtype == "bfloat16" else 1e-3
    logits, first = oracle.linear(numbers(a.x), weight_of(a)), int(a.first_token)
    rows = zip(logits, numbers(a.temperatures), numbers(a.seeds), numbers(a.positions), strict=True)
    keys = [oracle.sample_keys(x, t, int(seed), int(position), first) for x, t, seed, position in rows]

    def check(words):
        for row, word in enumerate(words):
            token = 0xFFFFFFFF - (int(word) & 0xFFFFFFFF) - first
            assert 0 <= token < logits.shape[1], (row, token)
            assert keys[row][token] >= keys[row].max() - slack, (row, token, keys[row][token], keys[row].max())

    return {"out": Outcome(None, check=check), "logits": Outcome(None)}


def draw_count(d: Draw) -> dict:
    vocab = int(d.rng.integers(1, 40))
    ids = [d.array(d.rng.integers(0, vocab, d.size(9)), d.one_of("int32", "int64")) for _ in range(2)]
    return {"prompt_ids": ids[0], "output_ids": ids[1], "counts": d.output((vocab,), "int32"), **d.stream()}


def expect_count(a) -> dict:
    return {"counts": Outcome(oracle.token_counts(numbers(a.prompt_ids), numbers(a.output_ids), a.counts.shape[0]))}


def draw_logprobs(d: Draw) -> dict:
    dtype, rows, vocab = d.dtype(), d.size(4), int(d.rng.integers(1, 3000 if d.is_large else 60))
    logits = d.floats((rows, vocab), dtype, 3)
    logits[d.rng.random(logits.shape) < 0.1] = -np.inf
    num_best = int(d.rng.integers(0, min(vocab, 20) + 1))
    tokens = d.rng.integers(-1, vocab, rows)
    shape = (rows, 1 + num_best)
    return {
        "logits": place(d.rng, logits, dtype, may_repeat=True),
        "token_ids": d.array(tokens),
        "num_best": num_best,
        **d.some(
            out_ids=lambda: d.output(shape, "int32", is_plain=True),
            out=lambda: d.output(shape, "float32", is_plain=True),
        ),
        **d.stream(),
    }


def expect_logprobs(a) -> dict:
    logits, tokens, num_best = numbers(a.logits), numbers(a.token_ids), int(a.num_best)
    ids, logprobs = np.full((len(tokens), 1 + num_best), -1), np.full((len(tokens), 1 + num_best), np.nan)
    for row, token in enumerate(tokens):
        if token >= 0 and np.isfinite(logits[row].max()):
            ids[row], logprobs[row] = oracle.token_logprobs(logits[row], token, num_best)
    return {"out_ids": Outcome(ids), "out": near(logprobs, "float32", 2)}


def draw_take(d: Draw) -> dict:
    rows = d.size()
    tokens = d.rng.integers(-rows, 50, d.size(9))
    return {"token_ids": place(d.rng, tokens, "int32"), "sampled": d.array(d.rng.integers(-2, 50, rows)), **d.stream()}


def expect_take(a) -> dict:
    tokens, sampled = numbers(a.token_ids), numbers(a.sampled)
    is_open = tokens < 0
    new = tokens.copy()
    new[is_open] = np.maximum(sampled[-1 - tokens[is_open]], 0)
    return {"token_ids": Outcome(new, mask=is_open)}


def draw_bias(d: Draw) -> dict:
    rows, vocab, count = d.size(4), int(d.rng.integers(1, 40)), d.size(9)
    count = count if rows else 0
    return {
        "logits": place(d.rng, d.floats((rows, vocab), "float32", 3), "float32"),
        "rows": d.array(d.rng.integers(0, max(rows, 1), count)),
        "token_ids": d.array(d.rng.integers(0, vocab, count)),
        "values": d.array(d.rng.choice([-np.inf, -2.5, 0, 1.25], count).astype(np.float32), "float32"),
        **d.stream(),
    }


def expect_bias(a) -> dict:
    logits = numbers(a.logits).copy()
    np.add.at(logits, (numbers(a.rows), numbers(a.token_ids)), numbers(a.values))
    return {"logits": near(logits, "float32", 2)}


def draw_mask(d: Draw) -> dict:
    rows, vocab = d.size(4), int(d.rng.integers(1, 3000 if d.is_large else 100))
    chosen = d.rng.integers(0, max(rows, 1), d.size(5) if rows else 0) if d.maybe(0.5) else None
    count = rows if chosen is None else len(chosen)
    bits = d.rng.integers(-(2**31), 2**31, (count, -(-vocab // 32)))
    return {
        "logits": place(d.rng, d.floats((rows, vocab), "float32", 3), "float32"),
        "bitmask": place(d.rng, bits, "int32", may_repeat=True, may_be_readonly=True),
        **({} if chosen is None else {"rows": d.array(chosen)}),
        **d.stream(),
    }


def expect_mask(a) -> dict:
    logits, bits = numbers(a.logits).copy(), numbers(a.bitmask)
    rows = range(len(logits)) if a.rows is None else numbers(a.rows)
    for row, words in zip(rows, bits, strict=True):
        for token in range(logits.shape[1]):
            if not int(words[token // 32]) >> (token % 32) & 1:
                logits[row, token] = -np.inf
    return {"logits": Outcome(logits)}


SAMPLING_OPERATIONS = {
    "sample": Operation(draw_sample, expect_sample),
    "sample_linear": Operation(draw_sample_linear, expect_sample_linear),
    "linear_candidates": Operation(draw_linear_candidates, expect_linear_candidates),
    "count_tokens": Operation(draw_count, expect_count, lambda a: []),
    "token_logprobs": Operation(draw_logprobs, expect_logprobs, lambda a: ["out_ids", "out"]),
    "bias_logits": Operation(draw_bias, expect_bias, lambda a: []),
    "mask_logits": Operation(draw_mask, expect_mask, lambda a: []),
    "take_sampled": Operation(draw_take, expect_take, lambda a: []),
}
