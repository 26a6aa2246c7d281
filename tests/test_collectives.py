"""all_reduce, all_gather and sample_candidates of two and three processes, against NumPy: to the bit, for all that fits in
the boxes and what does not. On a GPU all ranks share it. How a group ends: test_communicator.py."""

import os

import numpy as np
import oracle
import pytest
from pools import get, put
from ranks import Ranks

from pagedkv import Graph, Stream, ops

DTYPES = ["float32", "float16", "bfloat16"]
SHAPES = [(0, 8), (3, 0), (1, 1), (1, 4096), (3, 40), (17, 333), (70, 1000), (300, 2050)]
MORE_THAN_A_BOX = (2, 1_050_000)


def raw(x):
    """The bits of a result, which `get` would convert."""
    return x if isinstance(x, np.ndarray) else ops.asarray(x, device="cpu").numpy()


@pytest.fixture(scope="module", params=[2, 3])
def size(request) -> int:
    return request.param


# How on a GPU: the ways of an all_reduce, and where the mail is.
WAYS = [("one-shot", "auto"), ("two-shots", "auto"), ("simple", "auto"), ("one-shot", "host"), ("two-shots", "host")]
ON_GPUS = [pytest.param(*each, id="-".join(each)) for each in WAYS]


@pytest.fixture(scope="module", params=["cpu", *(pytest.param(each, id="-".join(each), marks=pytest.mark.gpu) for each in WAYS)])
def ranks(request, size):
    """On the CPU, and on a GPU by each way."""
    if request.param == "cpu":
        with Ranks(size) as started:
            yield started
        return
    if problem := ops.build_info()["cuda_problem"]:
        pytest.skip(problem)
    way, memory = request.param
    with Ranks(size, "cuda:0", way=way, memory=memory) as started:
        yield started


def summed(parts, residual, dtype):
    """As all_reduce promises it: float32 from 0 on, in the order of the ranks, rounded once."""
    total = np.zeros(parts[0].shape, np.float32)
    for part in [*parts, *([] if residual is None else [residual])]:
        total = total + part.astype(np.float32)
    return oracle.rounded(total, dtype)


def numbers(rng, shape, dtype):
    """Of very different sizes, so that the order of a sum shows."""
    return oracle.rounded(rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3, shape), dtype)


def reduce_rows(comm, seed, shape, dtype, wants_residual, in_place, stride):
    """What this rank gets, and its sums of squares."""
    rng = np.random.default_rng(seed)
    parts = [numbers(rng, shape, dtype) for _ in range(comm.size)]
    residual = numbers(rng, shape, dtype) if wants_residual else None
    wide = np.full((shape[0], shape[1] + stride), np.nan)
    wide[:, : shape[1]] = parts[comm.rank]
    x = put(wide, comm.device, dtype)[:, : shape[1]]
    there = None if residual is None else put(residual, comm.device, dtype)
    squares = put(np.full((shape[0], 1), np.nan, np.float32), comm.device)
    out = {"x": x, "residual": there, None: None}[in_place]
    result = ops.all_reduce(x, comm, residual=there, out_squares=squares, out=out)
    assert out is None or result is out
    got = get(result)
    np.testing.assert_array_equal(got, summed(parts, residual, dtype))
    exact = (np.asarray(got, np.float64) ** 2).sum(1, keepdims=True)
    np.testing.assert_allclose(get(squares), exact, rtol=1e-4)
    return got.tobytes(), get(squares).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_reduce(ranks, seed, shape, dtype):
    for wants_residual, in_place, stride in [(False, None, 0), (True, "residual", 0), (True, "x", 0), (False, "x", 3)]:
        results = ranks(reduce_rows, seed, shape, dtype, wants_residual, in_place, stride)
        assert all(result == results[0] for result in results)  # the same bits on every rank


def test_all_reduce_piece_by_piece(ranks, seed):
    ranks(reduce_rows, seed, MORE_THAN_A_BOX, "float32", True, "residual", 0)


def reduce_bits(comm, bits):
    """x of all ranks is bits, float32."""
    x = put(np.array(bits, np.uint32).view(np.float32).reshape(1, -1), comm.device)
    return raw(ops.all_reduce(x, comm)).view(np.uint32).ravel().tolist()


def test_numbers_that_a_mailbox_could_take_for_none(ranks):
    """Zeros of both signs, NaNs and what two halves of them are: each is a number, and 0 has no sign afterwards."""
    bits = [
        0, 0x80000000, 0x80008000, 0xFFFFFFFF, 0x7FFF7FFF, 0x7FC00000, 0xFFFEFFFF, 0x00000001, 0x7F800000,
        0xFF800000,
    ]
    with np.errstate(over="ignore"):
        one = np.array(bits, np.uint32).view(np.float32)
        expected = np.zeros(len(bits), np.float32)
        for _ in range(len(ranks.pipes)):
            expected = expected + one
    for result in ranks(reduce_bits, bits):
        got = np.array(result, np.uint32).view(np.float32)
        np.testing.assert_array_equal(got, expected)
        assert not np.signbit(got[:2]).any()


def reduce_in_turns(comm, seed, count):
    """Calls of any size after another, so that what a call leaves in a mailbox would show in the next ones."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        shape = (int(rng.choice([1, 2, 3, 5, 9, 40])), int(rng.choice([1, 7, 64, 300, 2048, 5000])))
        dtype = str(rng.choice(DTYPES))
        parts = [numbers(rng, shape, dtype) for _ in range(comm.size)]
        if rng.random() < 0.3:
            got = get(ops.all_gather(put(parts[comm.rank], comm.device, dtype), comm))
            np.testing.assert_array_equal(got, np.concatenate(parts, 1))
        else:
            got = get(ops.all_reduce(put(parts[comm.rank], comm.device, dtype), comm))
            np.testing.assert_array_equal(got, summed(parts, None, dtype))


def test_one_call_after_another(ranks, seed):
    ranks(reduce_in_turns, seed, 40)


def gather_columns(comm, seed, shape, dtype):
    rng = np.random.default_rng(seed)
    parts = [numbers(rng, shape, dtype) for _ in range(comm.size)]
    got = get(ops.all_gather(put(parts[comm.rank], comm.device, dtype), comm))
    np.testing.assert_array_equal(got, np.concatenate(parts, 1))
    wide = put(np.full((shape[0], comm.size * shape[1] + 5), np.nan), comm.device, dtype)
    ops.all_gather(put(parts[comm.rank], comm.device, dtype), comm, out=wide[:, : comm.size * shape[1]])
    np.testing.assert_array_equal(get(wide)[:, : comm.size * shape[1]], got)
    assert np.isnan(get(wide)[:, comm.size * shape[1] :]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_gather(ranks, seed, shape, dtype):
    ranks(gather_columns, seed, shape, dtype)


def gather_ints(comm, ints):
    as_floats = ops.asarray(ints, device=comm.device).view(ints.shape, "float32")
    return get(ops.all_gather(as_floats, comm).view((1, comm.size * ints.size), "int32"))


def gather_bits(comm, seed):
    rng = np.random.default_rng(seed)
    parts = rng.integers(-(2**31), 2**31, (comm.size, 1, 77)).astype(np.int32)
    parts[0, 0, :5] = 0, 1, 151_935, 0x7F800001, 0xFF800001 - 2**32  # small ones are denormal as floats; NaNs that signal
    np.testing.assert_array_equal(gather_ints(comm, parts[comm.rank]), np.concatenate(parts, 1))
    assert (gather_ints(comm, np.full((1, 3), -1, np.int32)) < 0).all()  # all bits ones may become another NaN, which stays negative


def test_all_gather_keeps_bits(ranks, seed):
    """Of token ids, too, that travel as floats."""
    ranks(gather_bits, seed)


def test_all_gather_piece_by_piece(ranks, seed):
    ranks(gather_columns, seed, MORE_THAN_A_BOX, "float32")


# --- a vocabulary in parts

VOCAB, STEP = 200, 64


def sample_parts(comm, seed, rows):
    """The head of this rank begins at token 64 * rank; the last rank has what is left."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-2, 3, (rows, 16)).astype(np.float32)
    weight = rng.integers(-2, 3, (VOCAB, 16)).astype(np.float32) / 16
    temperatures = np.resize(np.array([0, 0.5, 1, 3, 1e30], np.float32), rows)
    seeds, positions = rng.integers(-(2**63), 2**63, rows), rng.integers(0, 2**31, rows, dtype=np.int32)
    first = STEP * comm.rank
    part = weight[first : VOCAB if comm.rank == comm.size - 1 else first + STEP]
    per_row = [put(each, comm.device) for each in (temperatures, seeds, positions)]
    logits = put(np.full((rows, len(part)), np.nan, np.float32), comm.device)
    x_there, part = put(x, comm.device), put(part, comm.device)
    candidates = ops.linear_candidates(x_there, part, *per_row, first, logits=logits)
    tokens = get(ops.sample_candidates(candidates, comm))
    np.testing.assert_array_equal(tokens, ops.sample(x @ weight.T, temperatures, seeds, positions))
    return tokens.tolist()


@pytest.mark.parametrize("rows", [0, 1, 9, 200])
def test_the_tokens_of_the_whole_vocabulary(ranks, seed, rows):
    results = ranks(sample_parts, seed, rows)
    assert all(result == results[0] for result in results)


def sample_words(comm, words):
    return get(ops.sample_candidates(put(np.array(words[comm.rank], np.uint64).view(np.int64), comm.device), comm)).tolist()


def test_the_first_token_and_equal_keys(ranks, size):
    """A word of ones in its low half is token 0; of equal keys the lowest token wins, whoever has it."""
    key = 0xC0000000 << 32
    words = [[key | ~0 & 0xFFFFFFFF, key | 0xFFFFFFF0 - rank, 0 if rank else key | 7] for rank in range(size)]
    for result in ranks(sample_words, words):
        assert result == [0, 15, 0xFFFFFFFF - 7 - 2**32]


def draw_nothing(comm, words):
    try:
        result = sample_words(comm, words)
        ops.check_errors()  # a GPU's
    except ValueError as error:
        return str(error)
    return result


@pytest.mark.parametrize("bad", [0, 0x007FFFFF << 32 | 5, 0xFFC00000 << 32 | 5], ids=["none", "-inf", "NaN"])
def test_a_row_of_which_no_token_comes(ranks, size, bad):
    """Every rank says so, whoever's logits they were."""
    good = 0xC0000000 << 32 | 0xFFFFFFF0
    words = [[good, bad] if rank == 0 or bad >> 60 == 0 else [good, good] for rank in range(size)]
    for text in ranks(draw_nothing, words):
        assert "candidates[1]: the logits have a NaN or are -inf" in text or "logits: row 1 has a NaN or is -inf" in text


# --- graphs


def replay(comm, seed, count):
    """A graph of calls of three sizes is replayed with other numbers each time, and calls come between."""
    rng, stream = np.random.default_rng(seed), Stream(comm.device)
    shapes = [(4, 256), (1, 4096), (9, 33)]
    x = [put(np.zeros(shape), comm.device, "bfloat16") for shape in shapes]
    out = [put(np.zeros(shape), comm.device, "bfloat16") for shape in shapes]
    graph = Graph()
    with graph.capture(stream):
        for one, sums in zip(x, out, strict=True):
            ops.all_reduce(one, comm, residual=sums, out=sums)
    expected = [np.zeros(shape) for shape in shapes]
    for turn in range(count):
        parts = [[numbers(rng, shape, "bfloat16") for shape in shapes] for _ in range(comm.size)]
        with stream:
            for there, own in zip(x, parts[comm.rank], strict=True):
                there.copy_(put(own, comm.device, "bfloat16"))
            graph.replay()
            if turn % 3 == 0:
                got = get(ops.all_reduce(x[1], comm))
                np.testing.assert_array_equal(got, summed([each[1] for each in parts], None, "bfloat16"))
        for i in range(len(shapes)):
            expected[i] = summed([each[i] for each in parts], expected[i], "bfloat16")
    for sums, wanted in zip(out, expected, strict=True):
        np.testing.assert_array_equal(get(sums), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("way, memory", ON_GPUS)
def test_replays(cuda, size, seed, way, memory):
    with Ranks(size, cuda, way=way, memory=memory) as ranks:
        ranks(replay, seed, 10)


# --- whichever way


def reduce_by(comm, seed, shape, dtype):
    x = put(numbers(np.random.default_rng([seed, comm.rank]), shape, dtype), comm.device, dtype)
    squares = put(np.zeros((shape[0], 1), np.float32), comm.device)
    return get(ops.all_reduce(x, comm, out_squares=squares)).tobytes(), get(squares).tobytes()


def where(comm):
    return comm.memory


@pytest.mark.gpu
def test_one_rank_that_needs_the_hosts_memory_decides(cuda, seed):
    """As one does that cannot reach another's."""
    with Ranks(2, cuda, memory=["auto", "host"]) as ranks:
        assert ranks(where) == ["host", "host"]
        ranks(replay, seed, 2)


@pytest.mark.gpu
def test_every_way_gives_the_same_bits(cuda, size, seed):
    """Sums of squares, too, which have an order of their own."""
    cases = [((5, 4096), "bfloat16"), ((3, 1000), "float16"), ((2, 2500), "float32"), ((600, 37), "bfloat16")]
    results = []
    for way, memory in WAYS:
        with Ranks(size, cuda, way=way, memory=memory) as ranks:
            results.append([ranks(reduce_by, seed, *case)[0] for case in cases])
            assert ranks(where) == [{"auto": "gpu"}.get(memory, memory)] * size
    assert all(result == results[0] for result in results)


# --- a GPU for each rank


def replay_and_reduce(comm, seed, count):
    replay(comm, seed, count)
    reduce_in_turns(comm, seed, 3 * count)


@pytest.mark.gpu
@pytest.mark.parametrize("num_gpus", [2, 4, 8])
@pytest.mark.parametrize("way, memory", ON_GPUS)
def test_a_gpu_each(num_gpus, seed, way, memory):
    if ops.build_info()["cuda_devices"] < num_gpus:
        pytest.skip(f"fewer than {num_gpus} GPUs")
    with Ranks(num_gpus, [f"cuda:{i}" for i in range(num_gpus)], way=way, memory=memory) as ranks:
        ranks(replay_and_reduce, seed, 100)


# --- errors


@pytest.fixture(scope="module")
def alone():
    memory = os.memfd_create("alone")
    comm = ops.Communicator(0, 1, memory)
    os.close(memory)
    yield comm
    comm.close()


def test_a_group_of_one(alone, rng):
    x = rng.standard_normal((3, 5)).astype(np.float32)
    np.testing.assert_array_equal(ops.all_reduce(x, alone, residual=x), x + x)
    np.testing.assert_array_equal(ops.all_gather(x, alone), x)


X = np.ones((2, 3), np.float32)
LOGITS, PER_ROW = np.zeros((2, 4), np.float32), (np.zeros(2, np.float32), np.zeros(2, np.int64), np.zeros(2, np.int32))
ERRORS = [
    (lambda comm: ops.all_reduce(X, None), TypeError, "comm: must be a pagedkv.ops.Communicator, not None"),
    (lambda comm: ops.all_reduce(X[0], comm), ValueError, "x: has 1 dimension"),
    (lambda comm: ops.all_reduce(X.astype(np.int32), comm), TypeError, "x: dtype is int32"),
    (lambda comm: ops.all_reduce(X, comm, residual=X[:1]), ValueError, "residual: dim 0 is 1 but x has T=2"),
    (lambda comm: ops.all_reduce(X, comm, out_squares=np.zeros((2, 2), np.float32)), ValueError, "out_squares: dim 1 is 2"),
    (lambda comm: ops.all_reduce(X, comm, out=np.zeros((2, 4), np.float32)), ValueError, "out: dim 1 is 4 but x has D=3"),
    (lambda comm: ops.all_reduce(X, comm, residual=X, out=X[::-1]), BufferError, "out"),
    (lambda comm: ops.all_gather(X.astype(np.int32), comm), TypeError, "x: dtype is int32"),
    (lambda comm: ops.all_gather(X, comm, out=np.zeros((2, 4), np.float32)), ValueError, "out: dim 1 is 4 but x of all ranks has W=3"),
    (lambda comm: ops.sample_candidates(np.zeros(2, np.int32), comm), TypeError, "candidates: dtype is int32"),
    (lambda comm: ops.linear_candidates(X, np.ones((4, 3), np.float32), *PER_ROW, 32, logits=LOGITS), ValueError,
     "first_token is 32 but must be a multiple of 64"),
    (lambda comm: ops.linear_candidates(X, np.ones((4, 3), np.float32), *PER_ROW, 2**31, logits=LOGITS), ValueError, "first_token is 2147483648"),
    (lambda comm: ops.linear_candidates(X, np.ones((4, 3), np.float32), *PER_ROW, None, logits=LOGITS), TypeError, "first_token: must be an int, not 'NoneType'"),
    (lambda comm: ops.linear_candidates(X, np.ones((4, 3), np.float32), *PER_ROW, 0, logits=LOGITS, out=np.zeros(2, np.int32)), TypeError, "out: dtype is int32"),
]  # fmt: skip


@pytest.mark.parametrize("call, error, text", ERRORS, ids=[text for _, _, text in ERRORS])
def test_errors(alone, call, error, text):
    with pytest.raises(error) as raised:
        call(alone)
    assert text in str(raised.value)
