"""Finds the request that makes steps fail.

A step computes many requests, and its error does not say whose it is. So those that ran are tried again in two groups,
one after the other, and a group that fails is halved. A request that fails alone is the one. A group passes, and so is
cleared, when each of its requests has ended or has two more tokens: one of a step with a prompt, one of a decode.
"""

from __future__ import annotations

from .request import Request

TOKENS_TO_PASS = 2


class FaultSearch:
    def __init__(self) -> None:
        self._groups: list[list[Request]] = []  # the last one is being tried
        self._goals: dict[Request, int] = {}  # tokens with which a request of that group passes

    def find_culprit(self, running: list[Request]) -> Request | None:
        """A step has failed in which these ran. Returns the request that is to blame, if that is known."""
        failed = self._groups.pop() if self._groups else None
        if failed is not None and len(failed) == 1:
            return failed[0]
        suspects = running if failed is None else failed
        middle = len(suspects) // 2
        self._groups += [group for group in (suspects[:middle], suspects[middle:]) if group]
        return None

    def has_passed(self) -> bool:
        """Whether the group that is being tried has passed; then it is no group any more."""
        if not self._groups or not all(self._passes(request) for request in self._groups[-1]):
            return False
        self._groups.pop()
        return True

    def next_group(self) -> list[Request] | None:
        """The requests that may run now; None: all, and the search is over."""
        while self._groups:
            group = self._groups[-1] = [request for request in self._groups[-1] if not request.is_finished]
            if group:
                self._goals = {request: _num_tokens(request) + TOKENS_TO_PASS for request in group}
                return group
            self._groups.pop()
        return None

    def _passes(self, request: Request) -> bool:
        return request.is_finished or _num_tokens(request) >= self._goals[request]


def _num_tokens(request: Request) -> int:
    return sum(len(seq.new_tokens) for seq in request.sequences)
