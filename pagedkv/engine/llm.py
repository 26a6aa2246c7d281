"""LLM: an Engine for callers that wait: whole answers, answers as they grow, chats and embeddings."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Generator, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import closing
from queue import SimpleQueue
from typing import Any, Unpack

from pagedkv.checks import check_names
from pagedkv.progress import progress_bar

from .engine import EMBED, Engine
from .lora_request import LoRARequest
from .outputs import EmbeddingOutput, RequestOutput
from .requests.adapters import lora_of_each
from .requests.prompts import Prompt, Prompts, is_chat, list_of_chats, list_of_prompts, params_of_each
from .requests.request import Request, Update
from .sampling_params import RequestOutputKind, SamplingParams
from .text.chat import ChatOptions, encode_chats

logger = logging.getLogger(__name__)
IndexedOutputs = Generator[tuple[int, Any], None, None]  # RequestOutputs or EmbeddingOutputs
FINAL_ONLY = RequestOutputKind.FINAL_ONLY
Message = Mapping[str, Any]  # {"role": ..., "content": ...}


class LLM(Engine):
    __doc__ = f"""{Engine.__doc__}
    Callers in several threads share the steps: a batch delays nobody else's short request by more than a step.
    """

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | SequenceOf[LoRARequest | None] | None = None,
        priority: int = 0,
        salt: bytes = b"",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Returns one output per prompt, in order.

        prompts: a list of texts, of lists of token ids, or of dicts with "prompt" (a text) or "prompt_token_ids"; one
        text or dict is one prompt.

        sampling_params: one for all prompts, or a list of one for each; None: default_params, which the model's makers
        recommend. An answer with finish_reason "length" was cut: it has max_tokens, or fills the model's length.

        lora_request: the adapter of all prompts, or a list of one (or None) for each.

        A request that cannot be served has finish_reason "error" and its exception in `error`; the others go on.
        `priority` and `salt` are those of Engine.add_request().
        """
        all_prompts = list_of_prompts(prompts)
        params = params_of_each(sampling_params, self.default_params, len(all_prompts))
        loras = lora_of_each(lora_request, len(all_prompts))
        outputs = self._generate(all_prompts, params, loras, output_kind=FINAL_ONLY, priority=priority, salt=salt)
        return self._all(outputs, len(all_prompts), use_tqdm)

    def stream(
        self,
        prompt: Prompt | SequenceOf[Message],
        params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        salt: bytes = b"",
        **options: Unpack[ChatOptions],
    ) -> Iterator[RequestOutput]:
        """Yields the answer as it grows: each output holds what is new; the last one has finish_reason.

        `prompt` may also be a chat, with the options of chat(). Leaving the loop early ends the request.
        """
        text: Any = prompt
        check_names("stream()", options, list(ChatOptions.__annotations__))
        if is_chat(prompt):
            text = encode_chats(self.folder, self.tokenizer, [prompt], options)[0]
        defaults = {"continue_final_message": False}
        given = [name for name, value in options.items() if value is not None and value is not defaults.get(name)]
        if given and not is_chat(prompt):
            raise TypeError(f"{', '.join(given)}: for chats, but the prompt is no list of messages")
        params = self.default_params if params is None else params
        kind = RequestOutputKind.DELTA
        outputs = self._generate(
            [text], [params], [lora_request], name="prompt", output_kind=kind, priority=priority, salt=salt
        )
        return self._stream(outputs)

    @staticmethod
    def _stream(outputs: IndexedOutputs) -> Iterator[RequestOutput]:
        with closing(outputs):
            for _, output in outputs:
                yield output

    def chat(
        self,
        messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | SequenceOf[LoRARequest | None] | None = None,
        priority: int = 0,
        salt: bytes = b"",
        use_tqdm: bool = True,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Returns the model's answer to a chat, which is a list of messages ({"role", "content"}), or to each of a list
        of chats.

        Args:
            tools, add_generation_prompt, continue_final_message: see ChatTemplate.render()
            enable_thinking: whether the model thinks before it answers, for templates that have this switch; None: what
                the template does without it
            chat_template: instead of that of the model's folder
            chat_template_kwargs: other variables of the template

        The other options are those of generate().
        """
        prompts = encode_chats(self.folder, self.tokenizer, list_of_chats(messages), options)
        return self.generate(
            prompts, sampling_params, lora_request=lora_request, priority=priority, salt=salt, use_tqdm=use_tqdm
        )

    def embed(
        self,
        prompts: Prompts,
        *,
        lora_request: LoRARequest | SequenceOf[LoRARequest | None] | None = None,
        priority: int = 0,
        salt: bytes = b"",
        use_tqdm: bool = True,
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
        loras = lora_of_each(lora_request, len(all_prompts))
        outputs = self._generate(
            all_prompts, [EMBED] * len(all_prompts), loras, wants_embedding=True, priority=priority, salt=salt
        )
        return self._all(outputs, len(all_prompts), use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """`default_params`, by vLLM's name."""
        return self.default_params

    def _generate(
        self,
        prompts: list[Prompt],
        params: list[SamplingParams],
        loras: list[LoRARequest | None],
        *,
        name: str = "prompts[{}]",
        **options: Any,
    ) -> IndexedOutputs:
        """The outputs of a batch of requests, as they come, and which of the requests each is of.

        A wrong argument raises at once. The requests are queued with the first next(), and what has not ended is
        aborted when the iterator is closed. The options are those of Engine._prepare(), with `name` for each index.
        """
        mailbox: SimpleQueue[Update] = SimpleQueue()
        requests: list[Request] = []
        for i, (prompt, one, lora) in enumerate(zip(prompts, params, loras, strict=True)):
            call = requests[0].sequences[0].call if requests else None
            request = self._prepare(prompt, one, mailbox, call, name=name.format(i), lora_request=lora, **options)
            requests.append(request)
        return self._outputs(requests, mailbox)

    def _outputs(self, requests: list[Request], mailbox: SimpleQueue[Update]) -> IndexedOutputs:
        by_key = {request.key: (i, request) for i, request in enumerate(requests)}
        num_left, process = len(requests), os.getpid()
        try:
            self._core.submit(requests)
            if self._core.holds:
                logger.warning("requests wait until another thread ends it: the engine %s", self._book.obstacle)
            while num_left:
                self._core.refuse_own_thread()
                if os.getpid() != process:
                    raise RuntimeError("these answers are of the process that this one was forked from")
                update = mailbox.get()
                num_left -= update.is_last
                index, request = by_key[update.key]
                yield index, request.output(update)
        finally:  # after an error or an interrupt no request keeps pages
            self._core.abort(requests)

    @staticmethod
    def _all(outputs: IndexedOutputs, count: int, use_tqdm: bool) -> list[Any]:
        """The last outputs of so many requests, in their order."""
        in_order: list[Any] = [None] * count
        start, num_tokens = time.perf_counter(), 0
        with closing(outputs), progress_bar(count, "requests", "req", is_shown=bool(use_tqdm)) as bar:
            for index, output in outputs:
                in_order[index] = output
                if bar is not None:
                    if isinstance(output, RequestOutput):
                        num_tokens += sum(len(one.token_ids) for one in output.outputs)
                        speed = num_tokens / (time.perf_counter() - start)
                        bar.set_postfix_str(f"{speed:,.0f} new tokens/s", refresh=False)
                    bar.update()
        failed = [(i, output.error) for i, output in enumerate(in_order) if output.error is not None]
        if failed:
            i, error = failed[0]
            logger.warning(
                "%d of %d requests failed, the first of them prompts[%d]: %s: %s",
                len(failed), count, i, type(error).__name__, str(error),  # a handler may keep what it gets
            )  # fmt: skip
        return in_order
