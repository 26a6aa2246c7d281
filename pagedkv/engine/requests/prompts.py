"""Checks of what LLM and generate() are given. The error for a wrong value says what is right."""

from __future__ import annotations

import reprlib
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from operator import index
from typing import Any

from pagedkv._C import _pack_ids
from pagedkv.checks import check_int

from ..sampling_params import SamplingParams
from ..text.messages import is_message
from ..text.tokenizer import LONG_TEXT, Tokenizer

Prompt = str | SequenceOf[int] | Mapping[str, Any]  # a dict: {"prompt": text} or {"prompt_token_ids": ids}
Prompts = str | Mapping[str, Any] | SequenceOf[Prompt]  # one, or a list


def list_of_prompts(prompts: Prompts) -> list[Prompt]:
    """A text or a dict is one prompt. Other iterables than lists and arrays are refused: a set has no order, and a
    file's lines or an iterator's items are hardly meant to be prompts."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    is_list = isinstance(prompts, SequenceOf) and not isinstance(prompts, (bytes, bytearray, memoryview))
    if not is_list and not (hasattr(prompts, "__dlpack__") and getattr(prompts, "ndim", 1) > 0):
        raise TypeError(f"prompts is {reprlib.repr(prompts)} but must be a string or a list of prompts")
    return list(prompts)


def read_prompt(name: str, prompt: Prompt) -> tuple[str | None, str | SequenceOf[int]]:
    """A prompt's text to be shown, and its text or token ids to be served. A dict may have both."""
    if not isinstance(prompt, Mapping):
        return (prompt, prompt) if isinstance(prompt, str) else (None, prompt)
    given = {key: value for key, value in prompt.items() if value is not None}
    unknown = sorted(map(str, given.keys() - {"prompt", "prompt_token_ids"}))
    if unknown or not given:
        raise TypeError(
            f"{name} has {unknown[0] if unknown else 'nothing'!r}: a dict holds 'prompt', a text, or 'prompt_token_ids'"
            + ("; messages are for chat()" if "role" in given else "")
        )
    text, ids = given.get("prompt"), given.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise TypeError(f"{name}['prompt'] is {text!r} but must be a text")
    if isinstance(ids, (str, Mapping)):
        raise TypeError(f"{name}['prompt_token_ids'] is {ids!r} but must be a list of token ids")
    return text, given["prompt"] if ids is None else ids


def shown(prompt: Prompt) -> tuple[str | None, list[int]]:
    """A prompt's text and token ids, as an output has them that was made without an engine."""
    text, served = read_prompt("prompt", prompt)
    return text, [] if isinstance(served, str) else list(served)


def check_type(prompt: Any) -> None:
    """Of a prompt that is no dict."""
    if isinstance(prompt, (int, bytes)) or not hasattr(prompt, "__len__"):
        raise TypeError(
            f"a prompt is a string or a list of token ids, not {prompt!r} (one prompt of token ids: [[1, 2, 3]])"
        )


def ids_of(prompt: Any) -> list[int]:
    """Of what encode_chats() returns."""
    ids: list[int] = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
    return ids


def takes_long(prompt: Prompt, params: SamplingParams | None, lora_request: object) -> bool:
    """Whether a request takes milliseconds to prepare, for which no event loop should wait: its text is long, an
    adapter may have to be read, or a grammar compiled."""
    _, served = read_prompt("prompt", prompt)
    is_long = hasattr(served, "__len__") and len(served) > LONG_TEXT
    has_grammar = isinstance(params, SamplingParams) and params.structured_outputs is not None
    return is_long or lora_request is not None or has_grammar


def is_chat(prompt: Any) -> bool:
    """Whether the prompt is a list of messages, neither a text nor token ids."""
    messages = getattr(prompt, "messages", prompt)
    return isinstance(messages, SequenceOf) and len(messages) > 0 and is_message(messages[0])


def list_of_chats(messages: Any) -> list[Any]:
    """A list of chats. One chat is a list of messages."""
    messages = getattr(messages, "messages", messages)
    if not isinstance(messages, SequenceOf) or isinstance(messages, (str, bytes)):
        raise TypeError(f"messages is {messages!r} but must be a list of messages, or a list of such lists")
    return [messages] if not messages or is_message(messages[0]) else list(messages)


def check_request(params: Any, request_id: Any, priority: Any, salt: Any) -> int:
    """Raises for a wrong type or number; returns the priority as an int."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"params is {params!r} but must be SamplingParams")
    if request_id is not None and not isinstance(request_id, str):
        raise TypeError(f"request_id is {request_id!r} but must be a string")
    number = check_int("priority", priority, -(2**31), 2**31 - 1)
    if not isinstance(salt, bytes):
        raise TypeError(f"salt is {salt!r} but must be bytes")
    return number


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError where an option names a token that the model does not have."""
    for name in ("allowed_token_ids", "logit_bias", "stop_token_ids"):
        for token in getattr(params, name) or ():
            if token >= vocab_size:
                raise ValueError(f"{name} holds token id {token}, which is not in 0..{vocab_size - 1}")


def params_of_each(
    given: SamplingParams | SequenceOf[SamplingParams] | None, default: SamplingParams, count: int
) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or default] * count
    if not isinstance(given, SequenceOf) or isinstance(given, str):
        raise TypeError(f"sampling_params is {given!r} but must be SamplingParams, or a list of them")
    params = list(given)
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling_params for {count} prompts")
    for one in params:
        if not isinstance(one, SamplingParams):
            raise TypeError(f"sampling_params holds {one!r}, which is no SamplingParams")
    return params


def encode(
    name: str, prompt: str | SequenceOf[int], tokenizer: Tokenizer, vocab_size: int
) -> tuple[array[int] | list[int], ValueError | None]:
    """The token ids of a prompt, and the error if they are wrong. A prompt of the wrong type raises TypeError, whose
    message calls it `name`. The first step waits for this: 144,000 ids take 1 ms, and 10 ms in a loop of Python."""
    if isinstance(prompt, str):
        _ = tokenizer.library  # what is wrong with its files is no error of the prompt
        try:
            prompt = tokenizer.encode(prompt)
        except ValueError as error:
            return [], error
    check_type(prompt)
    try:
        given = tuple(prompt)
        try:
            return array("i", _pack_ids(given, vocab_size)), None
        except (TypeError, ValueError):
            token_ids = list(map(index, given))
    except TypeError as error:
        raise TypeError(f"{name} holds no token ids: {error}") from None
    bad = next(token for token in token_ids if not 0 <= token < vocab_size)
    return token_ids, ValueError(f"token id {bad} is not in 0..{vocab_size - 1}")
