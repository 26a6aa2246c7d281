"""What a router knows of the prompts that a replica has computed: digests of spans of tokens."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Container
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Ids = array[int]
else:
    Ids = array  # before Python 3.12 it says nothing of what it holds
SPAN = 64  # tokens of a span: several pages, of which nobody here needs to know the size


def spans_of(token_ids: Ids, salt: bytes) -> list[bytes]:
    """A digest for each whole span of a prompt and all that is before it. Every process computes the same."""
    tokens, digest, found = memoryview(token_ids).cast("B"), blake2b(blake2b(salt).digest(), digest_size=16), []
    size = SPAN * token_ids.itemsize
    for end in range(size, len(tokens) + 1, size):
        digest.update(tokens[end - size : end])
        found.append(digest.digest())
    return found


def count_known(spans: list[bytes], known: Container[bytes]) -> int:
    """How many tokens the spans have that are known. A span is known only where all before it are."""
    return SPAN * bisect_left(range(len(spans)), True, key=lambda i: spans[i] not in known)


class Life:
    """One life of a replica, from a start to its death: what was sent to it, and what has not come back.

    Args:
        table_tokens: how many tokens of prompts are remembered, of those that were sent last
    """

    def __init__(self, table_tokens: int) -> None:
        self.queued = 0  # tokens of prompts that it was sent and has to compute, of requests without an output
        self.running = 0  # requests that have not ended
        self._coming: Counter[bytes] = Counter()  # spans of requests without an output
        # The youngest is the last. A prompt's first span is made younger than its second, and so on: so where a span is
        # known, all before it are, and what is forgotten first of a prompt is its end.
        self._table: OrderedDict[bytes, None] = OrderedDict()
        self._size = max(table_tokens // SPAN, 1)

    def estimate(self, spans: list[bytes]) -> int:
        """How many tokens it has or will have, as far as one knows without asking: it may have evicted some."""
        return count_known(spans, self._table)

    def known(self, spans: list[bytes], told: int) -> int:
        """How many it has or will have, where it has said that it has `told` now."""
        return max(told, count_known(spans, self._coming))

    def send(self, spans: list[bytes], num_tokens: int) -> None:
        """Notes a request of which it has to compute this many tokens."""
        self.running += 1
        self.queued += num_tokens
        self._coming.update(spans)
        for span in reversed(spans):
            self._table[span] = None
            self._table.move_to_end(span)
        while len(self._table) > self._size:
            self._table.popitem(last=False)

    def arrive(self, spans: list[bytes], num_tokens: int) -> None:
        """Notes that such a request is computed, or has ended before."""
        self.queued -= num_tokens
        for span in spans:
            self._coming[span] -= 1
            if not self._coming[span]:
                del self._coming[span]
