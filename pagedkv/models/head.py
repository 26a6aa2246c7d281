"""A model's head: from hidden states to logits, and to tokens."""

from __future__ import annotations

from pagedkv import Tensor, ops
from pagedkv.ops import Communicator

from .linear import Linear
from .share import ranges_of


class Head:
    """One weight, [vocab_size, hidden_size]. Of several ranks each has some rows of it, as many as all but the last."""

    def __init__(self, linear: Linear, vocab_rows: int, vocab_size: int, comm: Communicator | None) -> None:
        self.linear, self.comm, self._vocab_size = linear, comm, vocab_size
        ((self._first, end),) = ranges_of(vocab_rows)
        self._num_tokens = end - self._first

    def allocate_logits(self, num_rows: int, device: str) -> Tensor:
        """Memory for logits of so many rows; what else they need is kept."""
        if self.comm is None:
            return ops.empty((num_rows, self._vocab_size), "float32", device)
        width = self._first // self.comm.rank if self.comm.rank else self._num_tokens  # of all but the last rank
        self._candidates = ops.empty(num_rows, "int64", device)
        self._part = ops.empty((num_rows, width), "float32", device)
        self._gathered = ops.empty((num_rows, width * self.comm.size), "float32", device)
        return self._gathered[:, : self._vocab_size]

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        if self.comm is None:
            return self.linear.product(hidden, out=out)
        num_rows = len(hidden)
        assert out.data_ptr() == self._gathered.data_ptr(), "the first rows of allocate_logits()"
        part = self._part[:num_rows]
        self.linear.product(hidden, out=part[:, : self._num_tokens])
        ops.all_gather(part, self.comm, out=self._gathered[:num_rows])
        return out

    def sample(
        self, hidden: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, *, logits: Tensor, out: Tensor
    ) -> Tensor:
        (weight,) = self.linear.weights
        numbers = {"temperatures": temperatures, "seeds": seeds, "positions": positions}
        options = weight.arguments | numbers
        options |= {"weight_is_constant": True, "batch_invariant": self.linear.batch_invariant}
        if self.comm is None:
            return ops.sample_linear(hidden, **options, logits=logits, out=out)
        shape, candidates = (len(hidden), self._num_tokens), self._candidates[: len(hidden)]
        part = self._part.view(-1)[: shape[0] * shape[1]].view(shape)
        ops.linear_candidates(hidden, **options, first_token=self._first, logits=part, out=candidates)
        return ops.sample_candidates(candidates, self.comm, out=out)
