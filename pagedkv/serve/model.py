"""What a server knows of the model beside its engine: names, the tokenizer, the chat template, defaults, limits."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

from pagedkv.engine import Engine
from pagedkv.engine.lora_request import LoRARequest
from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.engine.text.chat import ChatOptions, ChatTemplate, encode_chats, template_of
from pagedkv.engine.text.tokenizer import Tokenizer

from .errors import ApiError, of_request
from .formats import CALL_FORMATS, THINK_END, CallFormat, find_call_format

# What a request may not set by chat_template_kwargs: render()'s own parameters, and the variables that it fills in.
RESERVED = ({"self", *signature(ChatTemplate.render).parameters} - {"options"}) | {"chat_template"}


@dataclass(eq=False)
class ServedModel:
    """names: what clients call it, the first of which answers show; chat_template: instead of the folder's; adapters:
    by names of their own, which clients ask for as for models."""

    names: list[str]
    folder: Path
    tokenizer: Tokenizer
    default_params: SamplingParams
    max_model_len: int
    vocab_size: int
    chat_template: str | None = None
    adapters: dict[str, LoRARequest] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    tool_call_parser: str = "auto"  # of CALL_FORMATS, or by the template
    reasoning_parser: str = "auto"  # "qwen3": there are thoughts, "none": there are none, or by the template

    @classmethod
    def of_engine(
        cls, engine: Engine, names: list[str], chat_template: str | None = None,
        adapters: dict[str, LoRARequest] | None = None,
    ) -> ServedModel:  # fmt: skip
        return cls(
            names, engine.folder, engine.tokenizer, engine.default_params, engine.max_model_len,
            engine.config.vocab_size, chat_template, adapters or {},
        )  # fmt: skip

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def makes_embeddings(self) -> bool:
        """Whether the folder is that of an embedding model (of sentence-transformers)."""
        return (self.folder / "modules.json").is_file()

    @property
    def all_names(self) -> list[str]:
        return [*self.names, *self.adapters]

    def check_name(self, name: str | None) -> str:
        """The name that the answer shows: a request without one gets the model itself."""
        if name is not None and name not in self.all_names:
            text = f"there is no model {name[:200]!r}; served is {', '.join(map(repr, self.all_names))}"
            raise ApiError(404, text, param="model", code="model_not_found")
        return self.name if name is None else name

    def describe(self, name: str) -> dict[str, Any]:
        return {
            "id": name, "object": "model", "created": self.created, "owned_by": "pagedkv", "root": self.name,
            "parent": self.name if name in self.adapters else None, "max_model_len": self.max_model_len,
        }  # fmt: skip

    # --- texts. What takes time here is called in another thread.

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any] | None,
        add_generation_prompt: bool | None,
        continue_final_message: bool | None,
        tools: list[dict[str, Any]] | None = None,
    ) -> Any:
        """See encode_chats()."""
        for name in variables or {}:
            if name in RESERVED:
                text = f"chat_template_kwargs holds {name!r}, which is no variable of a template"
                raise ApiError(400, text, param="chat_template_kwargs")
        options: ChatOptions = {
            "chat_template": self.chat_template, "chat_template_kwargs": variables,
            "add_generation_prompt": add_generation_prompt, "continue_final_message": bool(continue_final_message),
            "tools": tools,
        }  # fmt: skip
        try:
            (prompt,) = encode_chats(self.folder, self.tokenizer, [messages], options)
        except (TypeError, ValueError, RecursionError, FileNotFoundError) as error:
            raise of_request(error) from error
        return prompt

    def call_format(self, template: str) -> CallFormat | None:
        """How calls are written; None: the template says nothing of it that is known."""
        if self.tool_call_parser != "auto":
            return CALL_FORMATS[self.tool_call_parser]
        return find_call_format(template)

    def has_thoughts(self, template: str) -> bool:
        if self.reasoning_parser != "auto":
            return self.reasoning_parser != "none"
        return THINK_END in template

    def template(self, tools: object) -> str:
        """The text of the chat template."""
        try:
            return template_of(self.folder).find(self.chat_template, tools)
        except (OSError, ValueError) as error:
            raise of_request(error) from error

    def token_id(self, text: str) -> int | None:
        """Of a text that is a token by itself."""
        return self.tokenizer.library.token_to_id(text) if self.tokenizer.exists else None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.check_tokenizer()
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except ValueError as error:
            raise of_request(error) from error

    def decode(self, token_ids: list[int]) -> str:
        self.check_tokenizer()
        for token in token_ids:
            if not 0 <= token < self.vocab_size:
                raise ApiError(400, f"tokens holds {token}, which is not in 0..{self.vocab_size - 1}", param="tokens")
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def check_tokenizer(self) -> None:
        if not self.tokenizer.exists:
            raise ApiError(400, "the model has no tokenizer.json: there are no texts, only token ids")

    def token_text(self, token_id: int) -> str:
        """What the token is within a text: "\\ufffd" where it holds a part of a character."""
        if not self.tokenizer.exists:
            return f"token_id:{token_id}"
        return self.tokenizer.decode([token_id], skip_special_tokens=False, goes_on=True)

    def token_bytes(self, token_id: int) -> bytes | None:
        """None: it is a part of a character, and nobody knows which."""
        table = self.tokenizer.bytes_of_tokens if self.tokenizer.exists else None
        if table is not None:
            return table[token_id]
        text = self.token_text(token_id)
        return None if "\ufffd" in text else text.encode()
