"""Records from one writer to several readers: what arrives is what was sent, in order, and nobody waits for ever."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time

import numpy as np
import pytest

from pagedkv.parallel.ring import NUM_FIELDS, NUM_SLOTS, Kind, Reader, Writer, memory_file, ring_bytes


def wait_a_little(seconds: float) -> None:
    assert seconds < 20, "a reader has stopped"
    time.sleep(1e-5)


class Ends:
    """A writer, and its readers."""

    def __init__(self, num_readers: int = 2, slot_bytes: int = 1000, wait=wait_a_little) -> None:
        fd = memory_file("a test", ring_bytes(num_readers + 1, slot_bytes))
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(num_readers)]
        self.bells = [ours for ours, _ in pairs]
        self.writer = Writer(fd, self.bells, slot_bytes, wait)
        self.readers = [Reader(fd, bell, i + 1, num_readers + 1, slot_bytes) for i, (_, bell) in enumerate(pairs)]
        self.sockets = [each for pair in pairs for each in pair]
        os.close(fd)

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.sockets:
            each.close()


def random_records(rng: np.random.Generator, count: int, slot_bytes: int) -> list[tuple[int, list[int], list[np.ndarray]]]:
    records = []
    for _ in range(count):
        first = int(rng.integers(0, slot_bytes + 1))
        sizes = [[], [first], [first, int(rng.integers(0, slot_bytes - first + 1))]][rng.integers(0, 3)]
        fields = rng.integers(-(2**31), 2**31, rng.integers(0, NUM_FIELDS + 1)).tolist()
        arrays = [rng.integers(0, 256, size).astype(np.uint8) for size in sizes]
        records.append((int(rng.integers(Kind.SWAP_OUT, Kind.LOGITS + 1)), fields, arrays))
    return records


@pytest.mark.parametrize("slot_bytes", [0, 1, 63, 1000])
def test_what_arrives_is_what_was_sent(slot_bytes):
    """Many times around the ring, with readers that are late by turns."""
    rng = np.random.default_rng(slot_bytes)
    records, problems = random_records(rng, 400, slot_bytes), []
    with Ends(slot_bytes=slot_bytes) as ends:

        def read(reader: Reader) -> None:
            try:
                delays = np.random.default_rng(reader.rank).random(len(records)) < 0.05
                steps = 0
                for i, (kind, fields, arrays) in enumerate(records):
                    record = reader.receive()
                    steps += kind == Kind.STEP
                    assert (record.number, record.step, record.kind) == (i + 1, steps, kind)
                    assert record.fields == fields + [0] * (NUM_FIELDS - len(fields))
                    assert ends.writer.cell(reader.rank) == (i, steps, kind)
                    if delays[i]:
                        time.sleep(1e-3)
                    for found, sent in zip(record.arrays, [*arrays, *[np.empty(0, np.uint8)] * 2], strict=False):
                        np.testing.assert_array_equal(found, sent)
                    reader.done(record)
                    assert ends.writer.cell(reader.rank).done == i + 1
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=read, args=(reader,)) for reader in ends.readers]
        for thread in threads:
            thread.start()
        for kind, fields, arrays in records:
            if problems:
                raise problems[0]
            ends.writer.send(Kind(kind), fields, *arrays)
        for thread in threads:
            thread.join(30)
    if problems:
        raise problems[0]


def test_a_writer_waits_for_the_last_reader():
    waits = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise TimeoutError("too long")
        slow.done(slow.receive())

    with Ends(wait=wait) as ends:
        fast, slow = ends.readers
        for _ in range(NUM_SLOTS):
            ends.writer.send(Kind.STEP)
            fast.done(fast.receive())
        assert not waits
        ends.writer.send(Kind.STEP)
        assert len(waits) == 1
        fast.done(fast.receive())
        waits += [0.0]
        with pytest.raises(TimeoutError):
            ends.writer.send(Kind.STEP)
        assert ends.writer.number == NUM_SLOTS + 1, "what was not sent is no record"


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 5000])
def test_calls_of_any_size(size):
    content = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8).tobytes()
    with Ends(1) as ends:
        (reader,) = ends.readers
        ends.writer.send_call("function", (content, 7))
        while (call := reader.call_of(record := reader.receive())) is None:
            assert record.kind == Kind.PART
            reader.done(record)
        assert call == ("function", (content, 7))
        reader.answer(("answer", [1, "two"]))
        assert pickle.loads(ends.bells[0].recv(1 << 16)) == ("answer", [1, "two"])


def test_rows_in_pieces():
    rows = np.arange(2 * 300, dtype=np.int32).reshape(300, 2)
    with Ends(1) as ends:
        (reader,), found = ends.readers, []
        for piece in ends.writer.send_rows(Kind.COPY, rows):
            record = reader.receive()
            found.append(record.arrays[0].view(np.int32).reshape(-1, 2).copy())
            np.testing.assert_array_equal(piece, found[-1])
            reader.done(record)
        assert len(found) == 3 and (np.concatenate(found) == rows).all()


def test_a_record_that_was_written_over_is_noticed():
    with Ends(1) as ends:
        (reader,) = ends.readers
        ends.writer.send(Kind.STEP, (), np.arange(100, dtype=np.uint8))
        ends.writer._slots[1][-3000:] = 5
        ends.writer._slots[1][200:300] = 5
        with pytest.raises(RuntimeError, match="record 1 is not what was sent"):
            reader.receive()
        ends.writer.send(Kind.STEP)
        ends.writer._slots[2][:8] = 0
        with pytest.raises(RuntimeError, match="record 2 is not what was sent: the slot has 0"):
            reader.receive()


def test_too_large():
    with Ends() as ends, pytest.raises(ValueError, match="a slot has"):
        ends.writer.send(Kind.STEP, (), np.empty(20_000, np.uint8))


def test_the_writer_is_gone():
    with Ends(1) as ends:
        (reader,) = ends.readers
        reader.answer(("answer", "that nobody reads"))
        ends.bells[0].close()
        assert reader.receive() is None
