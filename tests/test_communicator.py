"""How ranks find each other, and how a group ends: by a process that dies, stops or makes another call, and by abort()."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from pools import get, put
from ranks import Ranks
from threads import in_threads

from pagedkv import Event, Stream, ops
from pagedkv.ops import Communicator, GroupError


@pytest.fixture
def memory():
    descriptor = os.memfd_create("group")
    yield descriptor
    os.close(descriptor)


def join_in_threads(memory, size):
    """On the CPU ranks may be threads of one process."""
    return in_threads(lambda rank: Communicator(rank, size, memory), range(size))


def test_ranks_of_one_process(memory):
    comms = join_in_threads(memory, 3)
    assert [(comm.rank, comm.size, comm.device) for comm in comms] == [(0, 3, "cpu"), (1, 3, "cpu"), (2, 3, "cpu")]
    x = np.ones((2, 5), np.float32)
    for each in in_threads(lambda comm: ops.all_reduce(x * (comm.rank + 1), comm), comms):
        np.testing.assert_array_equal(each, 6 * x)
    for comm in comms:
        comm.check()
        comm.close()
        comm.close()
        with pytest.raises(ValueError, match="comm: the Communicator was closed"):
            ops.all_reduce(x, comm)
        with pytest.raises(ValueError, match="check: the Communicator was closed"):
            comm.check()


def test_a_large_group_by_threads(memory):
    comms = join_in_threads(memory, 8)
    x = np.ones((1, 3), np.float32)
    for _ in range(5):
        for each in in_threads(lambda comm: ops.all_reduce(x, comm), comms):
            np.testing.assert_array_equal(each, 8 * x)


def test_memory_is_let_go_of(memory):
    """The files of a process and what it has mapped are as before."""
    comms = join_in_threads(memory, 2)
    for comm in comms:
        comm.close()
    del comms, comm
    with open("/proc/self/maps") as maps:
        assert "memfd:group" not in maps.read()


# --- refused


@pytest.mark.parametrize(
    "arguments, options, text",
    [
        ((0, 0), {}, "size: is 0 but must be in [1, 8]"),
        ((0, 9), {}, "size: is 9 but must be in [1, 8]"),
        ((2, 2), {}, "rank: is 2 but must be in [0, 1]"),
        ((-1, 2), {}, "rank: is -1 but must be in [0, 1]"),
        ((0, 1), {"timeout": 0}, "timeout: is 0 but must be above 0"),
        ((0, 1), {"timeout": float("nan")}, "timeout: is nan but must be above 0"),
        ((0, 1), {"join_timeout": 1e9}, "join_timeout: is 1000000000.0 but must be above 0 and at most 1e6 seconds"),
        ((0, 1), {"device": "gpu"}, "device: 'gpu' is not a device"),
        ((0, 1), {"way": "two-shots"}, "way: is 'two-shots' but must be \"auto\" or, on a GPU,"),
        ((0, 1), {"memory": "host"}, "memory: is 'host' but must be \"auto\" or, on a GPU, \"host\""),
        ((0, 1), {"memory": 3}, "memory: is 3 but must be"),
    ],
)
def test_bad_numbers(memory, arguments, options, text):
    with pytest.raises(ValueError) as raised:
        Communicator(*arguments, memory, **options)
    assert text in str(raised.value)


def test_files_that_are_none(memory):
    with pytest.raises(ValueError, match="fd: 1000000 is no open file"):
        Communicator(0, 1, 1_000_000)
    os.ftruncate(memory, 4096)
    with pytest.raises(ValueError, match="fd: has 4096 bytes, but a group of size 1 shares an empty file or one of"):
        Communicator(0, 1, memory)


def test_a_rank_that_is_taken(memory):
    Communicator(0, 1, memory).close()
    with pytest.raises(ValueError, match=rf"rank: 0 was taken before \(by process {os.getpid()}\)"):
        Communicator(0, 1, memory)


def test_a_rank_that_does_not_come(memory):
    with pytest.raises(GroupError, match=r"rank 1 did not arrive at Communicator\(\) within 0.2 s \(rank 0 waited\)"):
        Communicator(0, 2, memory, join_timeout=0.2)


# --- the end of a group

X = np.ones((2, 64), np.float32)


def reduce_once(comm, count=1):
    """A GPU's kernels say what is wrong after the wait for them."""
    for _ in range(count):
        out = ops.all_reduce(put(X, comm.device), comm)
    ops.synchronize(comm.device)
    comm.check()
    return float(get(out)[0, 0])


def timed_reduce(comm):
    """How long it took, and what it raised."""
    start = time.monotonic()
    with pytest.raises(GroupError) as raised:
        reduce_once(comm)
    return time.monotonic() - start, str(raised.value)


def check(comm):
    comm.check()


def test_a_process_that_was_killed():
    with Ranks(3) as ranks:
        assert ranks(reduce_once, 5) == [3.0] * 3
        ranks.send(0, timed_reduce)
        ranks.send(2, timed_reduce)
        time.sleep(0.2)
        ranks.signal(1, signal.SIGKILL)
        for rank in (0, 2):
            seconds, text = ranks.receive(rank)
            assert seconds < 5 and text == f"rank 1 (process {ranks.processes[1].pid}) has ended"
        ranks.send(0, timed_reduce)  # and for good
        assert ranks.receive(0)[0] < 0.1


def test_a_process_that_was_stopped(device):
    """It does not end, so the clock finds it."""
    with Ranks(2, device, timeout=3) as ranks:
        ranks(reduce_once, 3)
        ranks.signal(1, signal.SIGSTOP)
        ranks.send(0, timed_reduce)
        seconds, text = ranks.receive(0)
        assert 2.5 < seconds < 20
        if device == "cpu":
            assert text == "rank 1 did not arrive at all_reduce of [2, 64] float32, its call 3 within 3 s (rank 0 waited)"
        else:
            assert text == "rank 1 did not arrive at all_reduce within 3 s (a kernel of rank 0 waited)"
        ranks.signal(1, signal.SIGCONT)
        ranks.send(1, timed_reduce)  # who was late gets the same reason
        assert ranks.receive(1)[1] == text


def abort(comm, reason):
    comm.abort(reason)


def test_abort(device):
    with Ranks(2, device) as ranks:
        ranks(reduce_once)
        ranks.send(0, timed_reduce)
        time.sleep(0.1)
        ranks.send(1, abort, "the user has had enough")
        assert ranks.receive(1) is None
        assert ranks.receive(0)[1] == "the user has had enough"
        for rank in range(2):
            ranks.send(rank, check)
            error = ranks.receive(rank)
            assert isinstance(error, GroupError) and str(error) == "the user has had enough"


def test_check_sees_a_process_that_has_ended():
    with Ranks(2) as ranks:
        ranks(reduce_once)
        ranks.signal(1, signal.SIGKILL)
        ranks.processes[1].wait()
        ranks.send(0, check)
        assert str(ranks.receive(0)) == f"rank 1 (process {ranks.processes[1].pid}) has ended"


def other_calls(comm):
    with pytest.raises(GroupError) as raised:
        if comm.rank == 0:
            ops.all_reduce(X, comm)
        else:
            ops.all_gather(X[:, :32], comm)
    return str(raised.value)


def test_ranks_that_make_different_calls():
    with Ranks(2) as ranks:
        first, second = ranks(other_calls)
        assert first == second
        assert "all_reduce of [2, 64] float32, its call 0" in first
        assert "all_gather of [2, 32] float32, its call 0" in first


def watch_kernel(comm):
    """As an engine waits for a GPU: it looks at the group meanwhile. How long it took, and what was raised."""
    start, event = time.monotonic(), Event()
    ops.all_reduce(put(X, comm.device), comm)
    event.record()
    with pytest.raises(GroupError) as raised:
        while not event.query():
            comm.check()
        comm.check()
    event.synchronize()
    return time.monotonic() - start, str(raised.value)


@pytest.mark.gpu
def test_a_kernel_whose_peer_was_killed(cuda):
    """Somebody finds it: check(), once the process is gone (its driver may wait for this kernel, on one GPU), or the
    kernel's clock. The kernel leaves, and the GPU goes on working."""
    with Ranks(2, cuda, timeout=2) as ranks:
        ranks(reduce_once)
        ranks.send(0, watch_kernel)
        time.sleep(0.5)
        ranks.signal(1, signal.SIGKILL)
        seconds, text = ranks.receive(0)
        assert seconds < 8
        assert text in (f"rank 1 (process {ranks.processes[1].pid}) has ended",
                        "rank 1 did not arrive at all_reduce within 2 s (a kernel of rank 0 waited)")  # fmt: skip
        ranks.send(0, timed_reduce)
        assert ranks.receive(0)[0] < 0.5


def reduce_on_two_streams(comm, launched):
    """launched: a file that rank 0 makes when it has launched both of its calls, for which the others wait."""
    x, streams = put(X, comm.device), [Stream(comm.device) for _ in range(2)]
    outs = [put(X, comm.device) for _ in range(2)]  # one that is dropped would be freed, which waits for the GPU
    start = time.monotonic()
    while comm.rank and not os.path.exists(launched) and time.monotonic() - start < 20:
        time.sleep(0.01)
    time.sleep(0.5 * comm.rank)  # both are on the GPU by then
    with pytest.raises(GroupError) as raised:
        for i in range(2):
            ops.all_reduce(x, comm, out=outs[i], stream=streams[i if comm.rank == 0 else 0])
        if comm.rank == 0:
            Path(launched).touch()
        ops.synchronize(comm.device)
        comm.check()
    return str(raised.value)


@pytest.mark.gpu
def test_two_kernels_at_once(cuda, tmp_path):
    """Of one communicator, which has one set of mailboxes: nothing that they leave can be trusted."""
    with Ranks(2, cuda, timeout=10) as ranks:
        ranks(reduce_once)
        first, second = ranks(reduce_on_two_streams, str(tmp_path / "launched"))
        assert first == second == "all_reduce: two calls of rank 0 ran at the same time, on streams that nobody has ordered"


@pytest.mark.gpu
def test_ranks_of_one_process_on_a_gpu(cuda, memory):
    def join(rank):
        with pytest.raises(ValueError, match="are one process, and CUDA opens no memory of its own process"):
            Communicator(rank, 2, memory, cuda)

    in_threads(join, range(2))


@pytest.mark.gpu
@pytest.mark.alone
def test_memory_of_the_gpu_is_given_back(cuda, memory):
    Communicator(0, 1, memory, cuda).close()
    free = ops.memory_info(cuda)[0]
    for _ in range(20):
        memory_of_its_own = os.memfd_create("own")
        comm = Communicator(0, 1, memory_of_its_own, cuda)
        ops.all_reduce(put(X, cuda), comm)
        comm.close()
        os.close(memory_of_its_own)
    assert free - ops.memory_info(cuda)[0] < 32 << 20


def make_calls(comm, counts):
    return reduce_once(comm, counts[comm.rank])


def test_a_rank_that_makes_one_call_fewer():
    with Ranks(2, timeout=3) as ranks, pytest.raises(GroupError, match="rank 1 did not arrive at all_reduce of .*, its call 4"):
        ranks(make_calls, (5, 4))


def test_one_call_at_a_time(memory):
    """Of one communicator: the second thread is refused."""
    comms = join_in_threads(memory, 2)
    waiting = threading.Thread(target=lambda: ops.all_reduce(X, comms[0]))
    waiting.start()
    time.sleep(0.1)
    with pytest.raises(ValueError, match="comm: another thread is in a call with it"):
        ops.all_reduce(X, comms[0])
    with pytest.raises(ValueError, match="close: another thread is in a call"):
        comms[0].close()
    ops.all_reduce(X, comms[1])
    waiting.join()


def test_other_threads_run_while_a_rank_waits(memory):
    comms = join_in_threads(memory, 2)
    results = []
    waiting = threading.Thread(target=lambda: results.append(ops.all_reduce(X, comms[0])))
    waiting.start()
    start, count = time.monotonic(), 0
    while time.monotonic() - start < 0.2:
        count += 1
    assert count > 1000 and not results
    ops.all_reduce(X, comms[1])
    waiting.join()
    assert len(results) == 1


def test_a_communicator_is_of_one_device(memory):
    comm = Communicator(0, 1, memory)
    assert sys.getrefcount(comm) == 2
    with pytest.raises(TypeError, match="reason: must be a str, not 5"):
        comm.abort(5)
    if ops.build_info()["cuda_devices"]:
        with pytest.raises(BufferError, match="x is on cuda:0 but comm is of cpu:0"):
            ops.all_reduce(put(X, "cuda:0"), comm)
