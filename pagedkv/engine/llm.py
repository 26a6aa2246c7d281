"""LLM: an Engine for callers that wait: whole answers, answers as they grow, chats and embeddings."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from functools import cached_property
from queue import SimpleQueue
from typing import Any

from pagedkv.models.pooling import read_normalizes
from pagedkv.progress import progress_bar

from . import embedding
from .engine import Engine
from .outputs import EmbeddingOutput, RequestOutput
from .requests.prompts import Prompt, Prompts, is_chat, list_of_chats, list_of_prompts, params_of_each
from .requests.request import Increment, Request
from .sampling_params import RequestOutputKind, SamplingParams
from .scheduling.sequence import Call
from .text.chat import encode_chats

logger = logging.getLogger(__name__)
Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Mailbox = SimpleQueue[Increment]  # of one call


class LLM(Engine):
    __doc__ = f"""{Engine.__doc__}
    Callers in several threads share the steps: a batch delays nobody else's short request by more than a step.
    """

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        priority: int = 0,
        salt: bytes = b"",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Returns one output per prompt, in order.

        prompts: a list of texts, of lists of token ids, or of dicts with "prompt" (a text) or "prompt_token_ids"; one
        text or dict is one prompt.

        sampling_params: one for all prompts, or a list of one for each; None: default_params, which the model's makers
        recommend. An answer with finish_reason "length" was cut: it has max_tokens, or fills the model's length.

        A request that cannot be served has finish_reason "error" and its exception in `error`; the others go on.
        `priority` and `salt` are those of Engine.add_request().
        """
        all_prompts = list_of_prompts(prompts)
        params = params_of_each(sampling_params, self.default_params, len(all_prompts))
        return self._run(all_prompts, params, priority=priority, salt=salt, use_tqdm=use_tqdm)

    def stream(
        self,
        prompt: Prompt | SequenceOf[Message],
        params: SamplingParams | None = None,
        *,
        tools: SequenceOf[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        priority: int = 0,
        salt: bytes = b"",
    ) -> Iterator[RequestOutput]:
        """Yields the answer as it grows: each output holds what is new; the last one has finish_reason.

        `prompt` may also be a chat, with the options of chat(). Leaving the loop early ends the request.
        """
        text: Any = prompt
        options: dict[str, Any] = {
            "tools": tools, "enable_thinking": enable_thinking, "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs, "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message or None,
        }  # fmt: skip
        given = {name: value for name, value in options.items() if value is not None}
        if is_chat(prompt):
            text = encode_chats(self.folder, self.tokenizer, [prompt], **given)[0]
        elif given:
            raise TypeError(f"{', '.join(given)}: for chats, but the prompt is no list of messages")
        mailbox: Mailbox = SimpleQueue()
        kind = RequestOutputKind.DELTA
        request = self._maker.make(text, params, mailbox, Call(), priority=priority, salt=salt, output_kind=kind)
        return self._follow(request, mailbox)

    def _follow(self, request: Request, mailbox: Mailbox) -> Iterator[RequestOutput]:
        try:
            self._core.submit([request])
            while True:
                output = self._core.receive(mailbox)
                yield output
                if output.finished:
                    return
        finally:
            self._core.abort([request])

    def chat(
        self,
        messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        tools: SequenceOf[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        priority: int = 0,
        salt: bytes = b"",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Returns the model's answer to a chat, which is a list of messages ({"role", "content"}), or to each of a list
        of chats.

        Args:
            enable_thinking: whether the model thinks before it answers, for templates that have this switch, as Qwen3's
                has; None: what the template does without it
            chat_template: instead of that of the model's folder
            chat_template_kwargs: other variables of the template

        The other options are those of ChatTemplate.render(), and of generate().
        """
        chats = list_of_chats(messages)
        options: dict[str, Any] = {
            "tools": tools, "enable_thinking": enable_thinking, "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs, "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }  # fmt: skip
        params = params_of_each(sampling_params, self.default_params, len(chats))
        prompts: list[Prompt] = [*encode_chats(self.folder, self.tokenizer, chats, **options)]
        return self._run(prompts, params, priority=priority, salt=salt, use_tqdm=use_tqdm)

    def embed(
        self, prompts: Prompts, *, priority: int = 0, salt: bytes = b"", use_tqdm: bool = True
    ) -> list[EmbeddingOutput]:
        """Returns for every prompt the last hidden state of its last token, normalised to length 1: float32
        [hidden_size].

        That is how the models Qwen3-Embedding are used (https://arxiv.org/abs/2506.05176); their tokenizer adds the
        token whose hidden state is taken. An output with `error` has an empty vector.

        What the folder's modules.json and 1_Pooling/config.json say counts: without a Normalize module the vector
        keeps its length; another pooling than the last token's raises NotImplementedError. Prompts for kinds of texts
        (config_sentence_transformers.json) are not added.
        """
        all_prompts = list_of_prompts(prompts)
        normalizes, params = self._normalizes, [embedding.PARAMS] * len(all_prompts)
        outputs = self._run(all_prompts, params, priority=priority, salt=salt, use_tqdm=use_tqdm, wants_embedding=True)
        return list(map(embedding.with_length_1, outputs)) if normalizes else outputs

    @cached_property
    def _normalizes(self) -> bool:
        """Whether a vector's length becomes 1; raises where the folder asks for another pooling than ours."""
        return read_normalizes(self.folder)

    def get_default_sampling_params(self) -> SamplingParams:
        """`default_params`, by vLLM's name."""
        return self.default_params

    def _run(
        self,
        prompts: list[Prompt],
        params: list[SamplingParams],
        *,
        use_tqdm: bool,
        **options: Any,
    ) -> list[Any]:
        """Serves the prompts until all have ended. The options are those of RequestMaker.make()."""
        mailbox: Mailbox = SimpleQueue()
        call = Call()
        requests = [
            self._maker.make(
                prompt, one, mailbox, call, **options, output_kind=RequestOutputKind.FINAL_ONLY, name=f"prompts[{i}]"
            )
            for i, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]
        outputs: dict[str, RequestOutput | EmbeddingOutput] = {}
        try:
            self._core.submit(requests)
            start, num_tokens = time.perf_counter(), 0
            with progress_bar(len(requests), "requests", "req", is_shown=bool(use_tqdm)) as bar:
                for _ in requests:
                    output = self._core.receive(mailbox)
                    outputs[output.request_id] = output
                    if bar is not None:
                        if isinstance(output, RequestOutput):
                            num_tokens += sum(len(one.token_ids) for one in output.outputs)
                            speed = num_tokens / (time.perf_counter() - start)
                            bar.set_postfix_str(f"{speed:,.0f} new tokens/s", refresh=False)
                        bar.update()
        finally:  # after an error or an interrupt no request keeps pages
            self._core.abort(requests)
        in_order = [outputs[request.id] for request in requests]
        failed = [(i, output.error) for i, output in enumerate(in_order) if output.error is not None]
        if failed:
            i, error = failed[0]
            logger.warning(
                "%d of %d requests failed, the first of them prompts[%d]: %s: %s",
                len(failed), len(in_order), i, type(error).__name__, str(error),  # a handler may keep what it gets
            )  # fmt: skip
        return in_order
