"""What the bodies of requests may hold: read from JSON, checked, and made into the engine's own options.

A field is served, or accepted without an effect (OpenAI's clients send some that ask for nothing of a model), or
refused with the reason. What is in none of the three lists is refused with the nearest name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import msgspec

from pagedkv.checks import hint_of
from pagedkv.engine.sampling_params import MAX_LOGPROBS, RequestOutputKind, SamplingParams

from .errors import ApiError, of_request

T = TypeVar("T")


@dataclass(kw_only=True)
class StreamOptions:
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # without effect: it hides the lengths of chunks
    continuous_usage_stats: bool | None = None


@dataclass(kw_only=True)
class Generation:
    """What completions and chats have in common. None, and null in JSON: not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    # SamplingParams has the rest by the same names.
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    skip_special_tokens: bool | None = None
    # structured.py makes the option of the engine of these.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None


@dataclass(kw_only=True)
class CompletionRequest(Generation):
    prompt: Any = None
    logprobs: int | None = None
    echo: bool | None = None


@dataclass(kw_only=True)
class ChatRequest(Generation):
    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


@dataclass(kw_only=True)
class EmbeddingRequest:
    input: Any = None
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None  # those that the vectors have
    priority: int | None = None
    cache_salt: str | None = None


@dataclass(kw_only=True)
class TokenizeRequest:
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


@dataclass(kw_only=True)
class DetokenizeRequest:
    model: str | None = None
    tokens: list[int] | None = None


WITHOUT_EFFECT = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "access_programs", "include", "cache_control", "diagnostics", "inference_geo", "speed", "user_profile_id",
    "workspace_id", "betas", "context_management", "client_metadata", "max_tool_calls", "personality",
    "prompt_cache_options", "verbosity", "billing_policy", "fallback_credit_token",
)  # fmt: skip
# Values that ask for nothing beyond what is served anyway; any other one is refused.
ONLY: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "modalities": (["text"],), "echo": (False,), "suffix": ("",), "best_of": (1,), "audio": (), "prediction": (),
    "web_search_options": (), "chat_template": (), "documents": ([],), "dimensions": (), "prompt_logprobs": (),
    "use_beam_search": (False,), "moderation": (), "previous_response_id": (), "conversation": (), "prompt": (),
    "background": (False,), "mcp_servers": ([],), "container": (), "image": (), "top_logprobs": (0,),
    "background_options": (), "thread": (), "compaction": (), "fallbacks": ("default", []),
}  # fmt: skip
MAX_TEXTS = 1024  # each costs time for every token, of the thread that makes everybody's steps
OF_PARAMS = {each.name for each in fields(SamplingParams) if each.init} & {each.name for each in fields(Generation)}
OF_PARAMS -= {"structured_outputs"}


def json_object(body: bytes) -> dict[str, Any]:
    try:
        given = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: no UTF-8
        raise ApiError(400, f"the body is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise ApiError(400, "the body is no JSON object")
    return given


def read(body: bytes, kind: type[T]) -> tuple[T, list[str]]:
    """The request, and the names of its fields that have no effect."""
    given = json_object(body)
    given = {name: value for name, value in given.items() if value is not None}
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]  # a dataclass
    ignored = [name for name in given if name in WITHOUT_EFFECT and name not in known]
    for name, value in given.items():
        if name not in known and name not in ignored:
            _check_other(name, value, known)
    options = given.get("stream_options")
    if isinstance(options, dict):
        for name in options:
            _check_known(f"stream_options.{name}", [f"stream_options.{each.name}" for each in fields(StreamOptions)])
    try:
        request: T = msgspec.convert({name: given[name] for name in known if name in given}, kind, str_keys=True)
    except (msgspec.MsgspecError, RecursionError) as error:
        message, _, where = str(error).partition(" - at ")
        path = re.search(r"\$\.([^`]+)", where)  # `$.stop[0]`, or `key` in `$.logit_bias`
        param = path[1] if path else None
        raise ApiError(400, f"{param or 'the body'}: {message}", param=param) from None
    return request, ignored


def _check_other(name: str, value: Any, known: list[str]) -> None:
    if name not in ONLY:
        _check_known(name, known)
    elif not any(type(value) is type(each) and value == each for each in ONLY[name]):
        raise ApiError(400, f"{name} is not served", param=name, code="unsupported_parameter")


def _check_known(name: str, known: list[str]) -> None:
    if name not in known:
        text = f"there is no field {name[:100]!r}{hint_of(name, known)}"
        raise ApiError(400, text, param=name[:100], code="unknown_parameter")


def params_of(
    request: Generation, default: SamplingParams, vocab_size: int, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The default's options, and those that the request gives in their place."""
    for name in ("stop", "bad_words", "stop_token_ids", "allowed_token_ids", "logit_bias"):
        value, most = getattr(request, name), MAX_TEXTS if name in ("stop", "bad_words") else vocab_size
        if value is not None and not isinstance(value, str) and len(value) > most:
            raise ApiError(400, f"{name} has {len(value):,} entries but may have {most:,}", param=name)
    given = {name: getattr(request, name) for name in OF_PARAMS if getattr(request, name) is not None}
    if request.top_p == 0:  # OpenAI allows it, for the most likely token alone
        given["top_p"] = 1e-9
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
        text = f"logprobs is {logprobs} but must be at least 0 and at most {MAX_LOGPROBS}"
        raise ApiError(400, text, param="logprobs")
    try:
        return replace(default, **(given | {"max_tokens": max_tokens, "logprobs": logprobs, "output_kind": kind}))
    except (TypeError, ValueError, OverflowError) as error:
        raise of_request(error) from None


def check_stream_options(request: Generation) -> StreamOptions:
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options is given but stream is not true", param="stream_options")
    return request.stream_options or StreamOptions()


def prompts_of(name: str, value: Any) -> list[str | list[int]]:
    """A text, a list of token ids, or a list of either."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _are_ids(value):
            return [value]
        if all(isinstance(each, str) or (isinstance(each, list) and _are_ids(each)) for each in value):
            return value
    missing = " is missing: it" if value is None else ""
    raise ApiError(400, f"{name}{missing} must be a text, a list of token ids, or a list of these", param=name)


def _are_ids(value: list[Any]) -> bool:
    return set(map(type, value)) <= {int}


def salt_of(cache_salt: str | None) -> bytes:
    """msgspec lets no half of a surrogate pair through."""
    return (cache_salt or "").encode()


def check_messages(messages: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if not messages:
        raise ApiError(400, "messages is missing or empty", param="messages")
    return messages
