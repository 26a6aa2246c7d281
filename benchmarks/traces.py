"""Request traces: what replay_trace.py, serve_trace.py and tests/test_replay.py replay.

Format, one JSON object a line: {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}.
An id stands for the content of 512 tokens together with all that came before them; equal ids, equal content.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ID_TOKENS = 512


@dataclass(frozen=True)
class Request:
    seconds: float  # of its arrival
    input_length: int
    output_length: int
    hash_ids: list[int]


def load_requests(path: str | Path) -> list[Request]:
    """In the order of the file."""
    with open(path) as lines:
        requests = [json.loads(line) for line in lines if line.strip()]
    return [Request(r["timestamp"] / 1e3, r["input_length"], r["output_length"], r["hash_ids"]) for r in requests]


def load(path: str | Path) -> list[tuple[int, list[int]]]:
    """[(input_length, hash_ids)] in the order of the file."""
    return [(request.input_length, request.hash_ids) for request in load_requests(path)]


def generate(rng: np.random.Generator, num_requests: int) -> list[tuple[int, list[int]]]:
    """A small trace of the same kind: conversations that go on, sharing system prompts."""
    requests, conversations, next_id = [], [], 0
    for _ in range(num_requests):
        if conversations and rng.random() < 0.7:
            ids = conversations[rng.integers(len(conversations))]
            ids = list(ids[: rng.integers(1, len(ids) + 1)])
        else:
            ids = []
        new = int(rng.integers(1, 4))
        ids = ids + list(range(next_id, next_id + new))
        next_id += new
        conversations.append(ids)
        requests.append((len(ids) * ID_TOKENS - int(rng.integers(0, ID_TOKENS)), ids))
    return requests


def generate_requests(rng: np.random.Generator, num_requests: int, per_second: float = 20.0) -> list[Request]:
    """The same, arriving at random, with an output each."""
    arrivals = np.cumsum(rng.exponential(1 / per_second, num_requests))
    trace = generate(rng, num_requests)
    return [
        Request(float(seconds), length, int(rng.integers(1, 60)), ids)
        for seconds, (length, ids) in zip(arrivals, trace, strict=True)
    ]


def token_ids(request: Request, vocab_size: int) -> list[int]:
    """The prompt for a model of this vocabulary: 512 random tokens for every id, cut to the length."""
    parts = [np.random.default_rng(i).integers(vocab_size, size=ID_TOKENS) for i in request.hash_ids]
    return np.concatenate(parts)[: request.input_length].tolist()


def expand(input_length: int, hash_ids: list[int]) -> np.ndarray:
    """The prompt's token ids: 512 distinct ones for every id, cut to the length."""
    tokens = np.add.outer(np.array(hash_ids, np.int32) * ID_TOKENS, np.arange(ID_TOKENS, dtype=np.int32)).ravel()
    return tokens[:input_length]


def reusable_tokens(trace: list[tuple[int, list[int]]], block_size: int) -> int:
    """Hit tokens with an unbounded pool, from the ids alone: whole pages that an earlier request has filled.

    An id names its content and all before it, so a page was seen if its last token lies in what an earlier request has
    of that id. A request's last id may be cut short: `filled` says how far each id has been computed in whole pages.
    """
    filled: dict[int, int] = {}
    hits = 0
    for input_length, hash_ids in trace:
        whole = input_length // block_size * block_size
        hit = 0
        for index, name in enumerate(hash_ids):
            start = index * ID_TOKENS
            known = filled.get(name, start)
            hit = min(known, whole)
            if known < start + ID_TOKENS:
                break
        hits += hit // block_size * block_size
        for index, name in enumerate(hash_ids):
            end = min((index + 1) * ID_TOKENS, whole)
            filled[name] = max(filled.get(name, index * ID_TOKENS), end)
    return hits
