"""Records from the first rank to the others, by memory that they share.

The memory is a file without a name (memfd): a cell for each rank, in which it says how far it is, and some slots for
records, which are used in turn. A slot is written again when all readers have done what its record says. For each
reader there is a socket, whose bell rings once for a record. So a reader that has nothing to do sleeps, and learns at
once that the writer is gone. The other way the socket carries answers.

A record is a header (its number, the step, a kind, a few integers, a digest) and up to two arrays of bytes.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

NUM_SLOTS = 8
NUM_FIELDS = 12
CELL_BYTES = 64
CELL_WORDS = CELL_BYTES // 8
ALIGN = 64  # of the arrays, in bytes
HEADER = struct.Struct(f"<QQQqqi{NUM_FIELDS}i")  # number, step, digest, sizes of the arrays, kind, fields
HEADER_BYTES = -(-HEADER.size // ALIGN) * ALIGN
BELL = b"\1"
MOST_ANSWER = 1 << 17  # bytes of a message, ...
MOST_WORDS = MOST_ANSWER // 8  # ... and characters of an error's, which have up to four


class Kind(IntEnum):
    """What a record tells the readers to do."""

    PART = 0  # of the bytes of a call, which does not fit into one
    CALL = 1  # a function, of which each reader answers the result
    SWAP_OUT = 2
    SWAP_IN = 3
    COPY = 4
    STEP = 5
    TOKENS = 6  # of the step, which the first rank has sampled
    LOGITS = 7  # of some rows of the step's hidden states


class Record(NamedTuple):
    number: int
    step: int
    kind: int
    fields: list[int]
    arrays: tuple[np.ndarray, np.ndarray]  # uint8; in the ring: they change when the record is done


class Cell(NamedTuple):
    """How far a rank is."""

    done: int  # the number of the last record that it has done
    step: int
    kind: Kind  # of the record that it works on, or has done last


def ring_bytes(num_ranks: int, slot_bytes: int) -> int:
    cells = -(-num_ranks * CELL_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
    return cells + NUM_SLOTS * _slot_size(slot_bytes)


def _aligned(end: int) -> int:
    return -(-end // ALIGN) * ALIGN


def _slot_size(slot_bytes: int) -> int:
    """With the header, and room to align two arrays."""
    return -(-(HEADER_BYTES + slot_bytes + 2 * ALIGN) // mmap.PAGESIZE) * mmap.PAGESIZE


class Ring:
    """What both sides do. slot_bytes: of the arrays of a record, together."""

    def __init__(self, fd: int, num_ranks: int, slot_bytes: int) -> None:
        self.slot_bytes, self.number = slot_bytes, 0  # of the last record
        memory = mmap.mmap(fd, ring_bytes(num_ranks, slot_bytes))
        whole = np.frombuffer(memory, np.uint8)
        size = _slot_size(slot_bytes)
        first = len(whole) - NUM_SLOTS * size
        self._slots = [whole[first + i * size : first + (i + 1) * size] for i in range(NUM_SLOTS)]
        self._words = [slot.view(np.uint64) for slot in self._slots]
        self._cells = memoryview(memory)[: num_ranks * CELL_BYTES].cast("q")
        self._others = range(CELL_WORDS, len(self._cells), CELL_WORDS)

    def cell(self, rank: int) -> Cell:
        at = rank * CELL_WORDS
        return Cell(self._cells[at], self._cells[at + 1], Kind(self._cells[at + 2]))

    def _mark(self, rank: int, done: int, step: int, kind: int) -> None:
        cells, at = self._cells, rank * CELL_WORDS
        cells[at + 1], cells[at + 2] = step, kind
        cells[at] = done  # last: the writer may use the slot again

    def _digest(self, turn: int, sizes: Sequence[int]) -> int:
        """A sum of what a slot holds behind its header: another one where it was written too early."""
        end = _aligned(HEADER_BYTES + sizes[0]) + sizes[1]
        return int(np.add.reduce(self._words[turn][HEADER_BYTES // 8 : -(-end // 8)]))


class Writer(Ring):
    """The first rank's. wait: called again and again while a reader is behind; it raises when that takes too long."""

    def __init__(self, fd: int, bells: Sequence[socket.socket], slot_bytes: int, wait: Callable[[float], None]) -> None:
        super().__init__(fd, len(bells) + 1, slot_bytes)
        self.step, self._bells, self._wait = 0, bells, wait

    def send(self, kind: Kind, fields: Sequence[int] = (), *arrays: np.ndarray) -> None:
        """Tells the readers; at most two arrays, contiguous ones of any dtype."""
        number, turn = self.number + 1, (self.number + 1) % NUM_SLOTS
        self._wait_for(number - NUM_SLOTS)
        if kind is Kind.STEP:
            self.step += 1
        self._mark(0, number, self.step, kind)
        slot, end, sizes = self._slots[turn], HEADER_BYTES, [0, 0]
        for i, array in enumerate(arrays):
            flat = array.reshape(-1).view(np.uint8)
            start, sizes[i] = _aligned(end), len(flat)
            end = start + len(flat)
            if end > len(slot):
                raise ValueError(f"a record of {end} bytes but a slot has {len(slot)}")
            slot[start:end] = flat
        digest, rest = self._digest(turn, sizes), (0,) * (NUM_FIELDS - len(fields))
        HEADER.pack_into(slot.data, 0, number, self.step, digest, *sizes, kind, *fields, *rest)
        self.number = number  # from here on readers may know of it
        for bell in self._bells:
            bell.send(BELL)

    def send_call(self, name: str, args: tuple[Any, ...]) -> None:
        data = np.frombuffer(pickle.dumps((name, args), protocol=5), np.uint8)
        last = (len(data) - 1) // self.slot_bytes * self.slot_bytes
        for start in range(0, last, self.slot_bytes):
            self.send(Kind.PART, (), data[start : start + self.slot_bytes])
        self.send(Kind.CALL, (), data[last:])

    def send_rows(self, kind: Kind, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Tells of rows in pieces that fit, and yields each after it was sent."""
        count = max(1, self.slot_bytes // max(1, rows.nbytes // max(1, len(rows))))
        for start in range(0, len(rows), count):
            piece = np.ascontiguousarray(rows[start : start + count])
            self.send(kind, (len(piece),), piece)
            yield piece

    def _wait_for(self, number: int) -> None:
        """Until all readers have done this record."""
        start: float | None = None
        for at in self._others:
            while self._cells[at] < number:
                start = start or time.monotonic()
                self._wait(time.monotonic() - start)


class Reader(Ring):
    """Another rank's."""

    def __init__(self, fd: int, bell: socket.socket, rank: int, num_ranks: int, slot_bytes: int) -> None:
        super().__init__(fd, num_ranks, slot_bytes)
        self.rank, self._bell, self._parts = rank, bell, list[bytes]()

    def receive(self) -> Record | None:
        """Waits for the next record; None: the writer is gone."""
        try:
            if not self._bell.recv(1):
                return None
        except ConnectionResetError:
            return None
        number = self.number = self.number + 1
        turn = number % NUM_SLOTS
        slot = self._slots[turn]
        given, step, digest, size, other, kind, *fields = HEADER.unpack_from(slot.data)
        middle = _aligned(HEADER_BYTES + size)
        if given != number or self._digest(turn, (size, other)) != digest:
            raise RuntimeError(f"record {number} is not what was sent: the slot has {given}")
        self._mark(self.rank, number - 1, step, kind)
        arrays = slot[HEADER_BYTES : HEADER_BYTES + size], slot[middle : middle + other]
        return Record(number, step, kind, fields, arrays)

    def done(self, record: Record) -> None:
        self._mark(self.rank, record.number, record.step, record.kind)

    def call_of(self, record: Record) -> tuple[str, tuple[Any, ...]] | None:
        """The name and arguments of a call; None: more of it comes."""
        self._parts.append(record.arrays[0].tobytes())
        if record.kind == Kind.PART:
            return None
        data, self._parts = b"".join(self._parts), []
        name, args = pickle.loads(data)  # of the process that has started this one
        return name, args

    def answer(self, message: Any) -> None:
        self._bell.send(pickle.dumps(message))


def memory_file(name: str, size: int = 0) -> int:
    """Anonymous memory, which ends with the last process that has it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd
