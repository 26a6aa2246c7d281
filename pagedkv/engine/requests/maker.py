"""Makes a Request of what a caller gives: checked, encoded, and with a sequence for each answer."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

from pagedkv.checks import check_int
from pagedkv.models.spec import Spec

from ..sampling_params import RequestOutputKind, SamplingParams
from ..scheduling.scheduler import Scheduler
from ..scheduling.sequence import Call, Sequence, private_salt
from ..text.tokenizer import Tokenizer
from .prompts import Prompt, encode, read_prompt
from .request import Receiver, Request


class RequestMaker:
    """Works in the caller's thread; any thread may call it.

    Args:
        default_params: of requests without params
        seed: starts the generator of seeds for requests without one; None: the operating system's randomness
        find: the unfinished request with an id, or None
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        spec: Spec,
        scheduler: Scheduler,
        default_params: SamplingParams,
        seed: int | None,
        find: Callable[[str], Request | None],
    ) -> None:
        self._tokenizer, self._spec, self._scheduler, self._find = tokenizer, spec, scheduler, find
        self._default_params = default_params
        self._random = random.Random(seed)
        self._sequence_ids = itertools.count()
        self._request_ids = itertools.count()

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        receiver: Receiver,
        call: Call,
        *,
        priority: int = 0,
        salt: bytes = b"",
        output_kind: RequestOutputKind | None = None,
        request_id: str | None = None,
        wants_embedding: bool = False,
        name: str = "prompt",
    ) -> Request:
        """A request that is not queued yet.

        Args:
            receiver: gets its outputs
            call: the batch that it belongs to
            output_kind: None: that of params
            request_id: None: a number
            name: what messages call the prompt

        A wrong type or option raises. A prompt that cannot be encoded becomes the error of its request.
        """
        start_time = time.perf_counter()
        params = self._default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params is {params!r} but must be SamplingParams")
        if request_id is not None and not isinstance(request_id, str):
            raise TypeError(f"request_id is {request_id!r} but must be a string")
        priority = check_int("priority", priority, -(2**31), 2**31 - 1)
        if not isinstance(salt, bytes):
            raise TypeError(f"salt is {salt!r} but must be bytes")
        request_id = self._free_id() if request_id is None else request_id
        text, served = read_prompt(name, prompt)
        token_ids, error = encode(name, served, self._tokenizer, self._spec.vocab_size)
        kind = params.output_kind if output_kind is None else output_kind
        shown = served if text is None else text
        request = Request(request_id, shown, token_ids, params, receiver, kind, self._tokenizer, start_time)
        max_tokens = self._scheduler.max_tokens(len(token_ids), params.max_tokens)
        ids = [next(self._sequence_ids) for _ in range(params.num_sequences)]
        if params.prompt_logprobs is not None:  # which come from computing the prompt, not from the cache
            salt = private_salt(salt)
        for index, id in enumerate(ids):
            seq = Sequence(
                id, [] if error else token_ids, params, self._seed(params, index), self._spec.eos_token_ids,
                start_time, max_tokens=max_tokens, call=call, priority=priority, salt=salt,
            )  # fmt: skip
            seq.owner, seq.index, seq.wants_embedding, seq.error = request, index, wants_embedding, error
            if index > 0:
                seq.prompt_logprobs = None  # those of the first answer hold for all
            request.sequences.append(seq)
        return request

    def _free_id(self) -> str:
        """The next number that no caller took as an id."""
        while True:
            request_id = str(next(self._request_ids))
            if self._find(request_id) is None:
                return request_id

    def _seed(self, params: SamplingParams, index: int) -> int:
        """The seed of an answer: the i-th answer to a request with a seed has that seed + i."""
        drawn = self._random.getrandbits(63) if params.seed is None else params.seed + index
        return (drawn + 2**63) % 2**64 - 2**63
