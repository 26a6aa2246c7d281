"""For tests of chats with tools: a random model whose tokens are characters and tags, templates, and a client that says
what a test wants it to."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from chat_samples import TEMPLATES
from checkpoints import write_model
from served import events_of, serving
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from pagedkv import LLM
from pagedkv.engine.outputs import CompletionOutput, EngineCounters, EngineStats, RequestMetrics, RequestOutput
from pagedkv.engine.requests.prompts import ids_of
from pagedkv.engine.sampling_params import RequestOutputKind, SamplingParams
from pagedkv.engine.text.tokenizer import Tokenizer as ModelTokenizer
from pagedkv.serve.model import ServedModel

TAGS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>",
    "\n\n", '{"name": "',
]
CHARACTERS = [*map(chr, range(32, 127)), "\n"]
SPECIAL = ["<|im_end|>", "<|im_start|>", "<unk>", "[TOOL_CALLS]", "[ARGS]"]
END = len(CHARACTERS) + len(TAGS)

QWEN3 = TEMPLATES["Qwen3: tools, thinking, grouped results of tools"]
THINKING = QWEN3.replace("{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n' }}")  # opened by the prompt
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
CODER = PLAIN + "{# <tool_call><function=name> #}"
LLAMA3 = PLAIN + '{# {"name": "...", "parameters": {...}} #}'
MISTRAL = PLAIN + "{# [TOOL_CALLS] #}"
TEMPLATES_BY_NAME = {"hermes": QWEN3, "qwen3_coder": CODER, "llama3_json": LLAMA3, "mistral": MISTRAL}

WEATHER = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["city", "days"], "additionalProperties": False}
TIME = {"type": "object", "properties": {"zone": {"enum": ["utc", "cet"]}}, "required": ["zone"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "parameters": TIME}},
]  # fmt: skip
# The same as /v1/responses and /v1/messages have them.
FUNCTIONS = [{"type": "function", "name": each["function"]["name"], "parameters": each["function"]["parameters"], "strict": False} for each in TOOLS]
CUSTOM = [{"name": each["function"]["name"], "input_schema": each["function"]["parameters"]} for each in TOOLS]
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}
HI = [{"role": "user", "content": "Hi"}]
PERSON = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["age"], "additionalProperties": False}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
SAID = f"<think>\nThe weather.\n</think>\n\nI look.\n{CALL}\n<tool_call>\n{{\"name\": \"get_time\", \"arguments\": {{\"zone\": \"utc\"}}}}\n</tool_call>"
ARGUMENTS = ['{"city": "Paris", "days": 3}', '{"zone": "utc"}']


def write_tool_model(folder: Path) -> Path:
    vocab = {text: i for i, text in enumerate([*CHARACTERS, *TAGS])}
    write_model(folder, generation={"eos_token_id": END}, vocab_size=END + len(SPECIAL), max_position_embeddings=4096)
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAGS])
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Take both fixtures into a file of tests by assigning them to these names there."""
    return write_tool_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, device="cpu", block_size=16, num_blocks=3000, max_num_seqs=16, seed=0) as llm:
        yield llm


class ScriptedClient:
    """say(params, index) is what an answer says; it comes in pieces of random length, each of which counts as a token."""

    def __init__(self, say) -> None:
        self.say, self.rng, self.seen = say, random.Random(0), []
        self.num_running = 0

    async def generate(self, prompt, params=None, request_id=None, *, lora_request=None, priority=0, salt=b""):
        self.seen.append((prompt, params))
        self.num_running += 1
        try:
            parts = []
            for index in range(params.n):
                text, finish, stop = self.say(params, index), "stop", None
                if isinstance(text, tuple):
                    text, finish, stop = text
                if isinstance(text, Exception):
                    raise text
                at = 0
                while params.output_kind is RequestOutputKind.DELTA and len(text) - at > 1 and self.rng.random() < 0.95:
                    end = min(at + self.rng.choice((1, 1, 2, 3, 8, 40)), len(text))
                    parts.append((index, text[at:end], None, None))
                    at = end
                parts.append((index, text[at:], finish, stop))
            if params.output_kind is RequestOutputKind.DELTA:
                for i, part in enumerate(parts):
                    yield self._output(prompt, [part], i == len(parts) - 1)
            else:
                yield self._output(prompt, parts, True)
        finally:
            self.num_running -= 1

    def _output(self, prompt, parts, is_last):
        ids = [3] if isinstance(prompt, str) else list(ids_of(prompt))
        outputs = [CompletionOutput(index, text, [3], None, None, finish, stop) for index, text, finish, stop in parts]
        return RequestOutput("0", None, ids, None, outputs, is_last, None, 0, RequestMetrics(0.0, 0.0, 0.0, 0))

    def stats(self) -> EngineStats:
        pool = {"used": 0, "num_blocks": 1, "lookup_tokens": 0, "hit_tokens": 0}
        return EngineStats(self.num_running, 0, 0, 0, EngineCounters(), pool, {}, {}, {})

    def health(self) -> None:
        pass


def model_of(folder, template=QWEN3, **options):
    params = SamplingParams(temperature=0, max_tokens=None)
    return ServedModel(["demo"], folder, ModelTokenizer(folder), params, 4096, END + 5, template, **options)


def saying(folder, say, template=QWEN3, **options):
    client = ScriptedClient(say if callable(say) else lambda params, index: say)
    return serving(client, model_of(folder, template, **options)), client


def put_together(text: str) -> dict[int, dict]:
    """Of a stream, as OpenAI's clients do it."""
    choices: dict[int, dict] = {}
    for chunk in events_of(text):
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            whole = choices.setdefault(choice["index"], {"content": "", "reasoning_content": "", "calls": []})
            assert "finish_reason" not in whole, "nothing follows the end"
            delta = choice["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for name in ("content", "reasoning_content"):
                whole[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(whole["calls"]):
                    assert call["type"] == "function" and call["id"] and call["function"]["name"]
                    whole["calls"].append([call["function"]["name"], ""])
                else:
                    assert call["index"] == len(whole["calls"]) - 1 and set(call) == {"index", "function"}
                whole["calls"][-1][1] += call["function"]["arguments"]
            if choice["finish_reason"]:
                whole["finish_reason"] = choice["finish_reason"]
    return choices


def of_whole(choice: dict) -> dict:
    message = choice["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    assert message.get("reasoning") == message.get("reasoning_content")
    if message["content"] is None:
        assert calls or message["reasoning_content"]
    return {"content": message["content"] or "", "reasoning_content": message.get("reasoning_content", ""), "calls": calls, "finish_reason": choice["finish_reason"]}
