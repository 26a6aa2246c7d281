"""sample on CUDA beside the CPU backend: the same tokens, with and without options, in graphs, and rows that have none."""

import numpy as np
import pytest
from cuda_tensors import numbers

from pagedkv import ops

pytestmark = pytest.mark.gpu
DTYPES = ["float32", "float16", "bfloat16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 151_936), (256, 5000), (40, 4099), (3, 32_003), (2000, 257), (17_000, 9)])
def test_sample_draws_what_the_cpu_draws(torch, rng, dtype, rows, vocab_size):
    logits = numbers(torch, rng, (rows, vocab_size), dtype) * 2
    temperatures = torch.from_numpy(rng.choice([0, 0.3, 0.6, 1, 5, 1e-6], rows).astype(np.float32)).cuda()
    seeds = torch.from_numpy(rng.integers(-(2**63), 2**63, rows)).cuda()
    positions = torch.from_numpy(rng.integers(0, 2**31, rows).astype(np.int32)).cuda()
    tokens = ops.sample(logits, temperatures, seeds, positions)
    expected = ops.sample(logits.cpu(), temperatures.cpu(), seeds.cpu(), positions.cpu())
    assert torch.equal(tokens.cpu(), expected)
    some = torch.randperm(rows)[:7].cuda()
    assert torch.equal(ops.sample(logits[some], temperatures[some], seeds[some], positions[some]), tokens[some])


@pytest.mark.parametrize("shift", [-1e30, -3000.0, 100.0, 1e6, 3e38])
def test_sample_of_logits_of_any_size(torch, rng, shift):
    """Where floats are coarse the bounds dismiss nothing, and keys are still compared exactly."""
    logits = numbers(torch, rng, (64, 3001), "float32")
    logits[32:] += shift
    logits[:, 0] = shift
    logits[::2, 1::3] = -float("inf")
    temperatures = torch.from_numpy(rng.choice([0.01, 1, 100], 64).astype(np.float32)).cuda()
    seeds, positions = torch.arange(64).cuda(), torch.arange(64, dtype=torch.int32).cuda()
    tokens = ops.sample(logits, temperatures, seeds, positions)
    expected = ops.sample(logits.cpu(), temperatures.cpu(), seeds.cpu(), positions.cpu())
    assert torch.equal(tokens.cpu(), expected)


def test_sample_of_equal_logits_and_of_infinities(torch, rng):
    """Equal keys are as near as a runner-up can be: 2^31 words make g equal for some pairs of 150,000 tokens."""
    logits = torch.zeros(300, 150_001, device="cuda", dtype=torch.bfloat16)
    logits[200:, 70_000:70_010] = float("inf")
    temperatures = torch.full((300,), 1e4, device="cuda")
    seeds, positions = torch.from_numpy(rng.integers(0, 2**60, 300)).cuda(), torch.zeros(300, dtype=torch.int32, device="cuda")
    tokens = ops.sample(logits, temperatures, seeds, positions)
    assert (tokens[200:] == 70_000).all()
    few = rng.permutation(200)[:40]
    expected = ops.sample(logits[few].cpu(), *(a[few].cpu() for a in (temperatures, seeds, positions)))
    assert torch.equal(tokens[few].cpu(), expected)


def test_sample_unaligned_rows(torch, rng):
    wide = numbers(torch, rng, (30, 5003), "float16")
    arguments = torch.rand(30, device="cuda"), torch.arange(30).cuda(), torch.arange(30, dtype=torch.int32).cuda()
    for start in (0, 1, 8):
        view = wide[:, start : start + 4990]
        assert torch.equal(ops.sample(view, *arguments), ops.sample(view.contiguous(), *arguments))


def sample_options(torch, rng, rows, vocab_size, num_slots):
    """Every option with neutral rows among the others, on the GPU."""
    def mix(neutral, *others):
        return np.where(rng.random(rows) < 0.4, neutral, rng.choice(others, rows))

    counts = np.zeros((num_slots, vocab_size), np.int32)
    for row in counts:
        np.add.at(row, rng.integers(0, vocab_size, 50), 2)
        row[rng.integers(0, vocab_size, 20)] |= 1
    options = dict(
        top_k=mix(0, 1, 2, 7, 50, 1000, 10**9).astype(np.int32), top_p=mix(1, 0, 1e-3, 0.5, 0.9, 0.999),
        min_p=mix(0, 1e-4, 0.05, 0.5, 1), repetition_penalties=mix(1, 0.5, 1.2, 3), presence_penalties=mix(0, -1, 0.5),
        frequency_penalties=mix(0, -0.3, 0.2), slots=np.where(rng.random(rows) < 0.2, -1, rng.permutation(num_slots)[:rows]).astype(np.int32),
        counts=counts)  # fmt: skip
    return {name: torch.from_numpy(a if a.dtype == np.int32 else a.astype(np.float32)).cuda() for name, a in options.items()}


def sample_inputs(torch, rng, rows):
    return [torch.from_numpy(a).cuda() for a in (rng.choice([0, 0.3, 1, 5], rows).astype(np.float32),
            rng.integers(-(2**63), 2**63, rows), rng.integers(0, 2**31, rows).astype(np.int32))]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 151_936), (5, 32_003), (60, 5000), (300, 257), (7, 1), (40, 33)])
def test_sample_with_options_draws_what_the_cpu_draws(torch, rng, dtype, rows, vocab_size):
    logits = numbers(torch, rng, (rows, vocab_size), dtype) * 3
    logits[: rows // 8] = logits[: rows // 8].round()  # equal ones
    inputs, options = sample_inputs(torch, rng, rows), sample_options(torch, rng, rows, vocab_size, rows + 3)
    on_cpu = {name: a.cpu() for name, a in options.items()}
    expected = ops.sample(logits.cpu(), *(a.cpu() for a in inputs), **on_cpu)
    tokens = ops.sample(logits, *inputs, **options)
    assert torch.equal(tokens.cpu(), expected) and torch.equal(options["counts"].cpu(), on_cpu["counts"])
    ops.check_errors()


def test_sample_reads_no_more_than_its_rows(torch, rng):
    wide, table = torch.full((20, 5003), float("nan"), device="cuda"), torch.full((23, 5003), -(2**31), device="cuda", dtype=torch.int32)
    wide[:, 3:4993] = numbers(torch, rng, (20, 4990), "float32")
    inputs, options = sample_inputs(torch, rng, 20), sample_options(torch, rng, 20, 4990, 23)
    dense = dict(options, counts=options["counts"].clone())
    expected = ops.sample(wide[:, 3:4993].contiguous(), *inputs, **dense)
    table[:, 3:4993] = options["counts"]
    tokens = ops.sample(wide[:, 3:4993], *inputs, **dict(options, counts=table[:, 3:4993]))
    assert torch.equal(tokens, expected) and (tokens >= 0).all() and torch.equal(table[:, 3:4993], dense["counts"])
    assert (table[:, :3] == -(2**31)).all() and (table[:, 4993:] == -(2**31)).all()
    best, _ = ops.token_logprobs(wide[:, 3:4993], tokens, 20)
    order = wide[:, 3:4993].sort(descending=True, stable=True).indices  # topk takes equal ones in any order
    assert torch.equal(best[:, 1:].long(), order[:, :20])


def test_one_graph_samples_any_mix_of_rows(torch, rng):
    rows, vocab_size = 24, 4099
    logits = numbers(torch, rng, (rows, vocab_size), "bfloat16")
    inputs, options = sample_inputs(torch, rng, rows), sample_options(torch, rng, rows, vocab_size, rows)
    ops.sample(logits, *inputs, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = ops.sample(logits, *inputs, **options)
        best = ops.token_logprobs(logits, tokens, 4)
    for _ in range(4):
        logits.copy_(numbers(torch, rng, (rows, vocab_size), "bfloat16") * 3)
        new = sample_options(torch, rng, rows, vocab_size, rows)
        for old, values in zip([*inputs, *options.values()], [*sample_inputs(torch, rng, rows), *new.values()], strict=True):
            old.copy_(values)
        graph.replay()
        assert torch.equal(tokens, ops.sample(logits, *inputs, **new)) and torch.equal(options["counts"], new["counts"])
        for a, b in zip(best, ops.token_logprobs(logits, tokens, 4), strict=True):
            assert torch.equal(a, b)


def test_rows_that_cannot_be_sampled(torch):
    def run(**changed):
        given = dict(logits=torch.zeros(4, 900), temperatures=torch.ones(4), seeds=torch.arange(4),
                     positions=torch.zeros(4, dtype=torch.int32))  # fmt: skip
        if changed.keys() & {"slots", "repetition_penalties"}:
            given |= {"counts": torch.zeros(4, 900, dtype=torch.int32)}
        for name, value in changed.items():
            given.setdefault(name, torch.full((4,), float(name != "min_p")) if name != "slots" else torch.arange(4, dtype=torch.int32))[2] = value
        return ops.sample(**{name: a.cuda() for name, a in given.items()})

    number = "sample: row 2 has a top_p, min_p, penalty or slot"
    good = run()
    for changed, message in (({"logits": float("nan")}, "logits: row 2 has a NaN or is -inf everywhere"),
                             ({"logits": -float("inf")}, "logits: row 2"), ({"temperatures": -1}, "temperatures: row 2"),
                             ({"temperatures": float("inf")}, "temperatures: row 2"), ({"temperatures": float("nan")}, "temperatures: row 2"),
                             ({"positions": -4}, "positions: token 2 has position -4"),
                             ({"logits": float("nan"), "temperatures": 0}, "logits: row 2"),
                             ({"logits": float("nan"), "top_p": 0.5}, "logits: row 2"),
                             ({"logits": -float("inf"), "top_p": 0.5}, "logits: row 2"), ({"top_p": float("nan")}, number),
                             ({"min_p": float("nan")}, number), ({"repetition_penalties": 0}, number), ({"slots": 4}, number)):  # fmt: skip
        tokens = run(**changed)
        assert tokens[2] == -1 and torch.equal(tokens[[0, 1, 3]], good[[0, 1, 3]])
        with pytest.raises(ValueError, match=message):
            ops.check_errors()
