"""Chat templates written for the tests, with the constructs of those that models bring along, and random conversations."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

# Each template, by what it is like. Those in TAKES_LISTS write content that is a list of parts.
TEMPLATES = {
    "Qwen3: tools, thinking, grouped results of tools": """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set state = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if state.searching and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set state.searching = false %}{%- set state.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thoughts = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > state.last_query and (loop.last or thoughts) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if call.function %}{%- set call = call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
                {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}""",
    "Hermes: arguments by tojson": """{{ bos_token }}
{%- if tools %}{{ '<|im_start|>system\\nYou may call:\\n' }}{% for t in tools %}{{ t.function | tojson(indent=2) }}
{% endfor %}{{ '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{{- '<|im_start|>' ~ m['role'] ~ '\\n' }}{% if m['content'] is defined and m['content'] %}{{ m['content'] }}{% endif %}
{%- for call in m.tool_calls or [] %}
<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "Llama 3: trims, a date, one tool call": """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|head|>system<|/head|>\\n\\nToday Date: " + date_string + "\\n" + system + eos_token }}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + eos_token }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("One tool call at once!") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}" + eos_token }}
    {%- else %}
        {{- "<|head|>ipython<|/head|>\\n\\n" }}
        {%- if message.content is mapping %}{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{%- endif %}""",
    "Mistral: roles must alternate": """{{ bos_token }}{% for m in messages %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('user and assistant must take turns') }}{% endif %}
{%- if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ m['content'] + eos_token }}{% endif %}
{%- endfor %}""",
    "Gemma: other names of roles, no system": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}
{% for message in messages %}{% set role = 'model' if message.role == 'assistant' else message.role %}
{{ '<turn>' + role + '\\n' + message['content'] | trim + '</turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}""",
    "plain ChatML": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "prints what there is": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.get('name', '') }}|{{ m.reasoning_content }}</s>{% endfor %}",
    "trims": "{% for m in messages %}[{{ m.role | upper }}] {{ (m.content or '') | trim }}{{ ' ' if not loop.last }}{% endfor %}",
    "marks what is learnt": """{% for m in messages %}{% if m.role == 'assistant' %}{{ 'A:' }}{% generation %}{% set end = eos_token %}{{ m.content }}{{ end }}{% endgeneration %}
{% else %}{{ m.role }}: {{ m.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}""",
    "keys of arguments": """{% for m in messages %}{{ m.role }}:{{ m.content }}{% for call in m.tool_calls | default([]) %}<call {{ call.function.name }}>
{%- for name, value in call.function.arguments.items() %}<{{ name }}>{{ value if value is string else value | tojson }}</{{ name }}>{% endfor %}</call>{% endfor %};{% endfor %}""",
    "JSON of all": "{{ messages | tojson }}{{ tools | tojson(sort_keys=true) }}{{ documents | tojson(indent=1) }}",
    "loops and macros": """{% macro show(m) %}[{{ m.role }}:{{ m.content | length }}]{% endmacro %}{% for m in messages if m.role != 'system' %}
{%- if loop.index > 4 %}{% break %}{% endif %}{% if not m.content %}{% continue %}{% endif %}{{ show(m) }}{{ loop.cycle('a', 'b') }}{% endfor %}""",
    "takes lists: a loop over parts": """{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}
{%- if part is string %}{{ part }}{% elif part.type == 'image' %}<|image|>{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}</s>
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}""",
    "takes lists: a macro": """{% macro content_of(content) %}{% if content is string %}{{ content | trim }}{% elif content is iterable %}{% for each in content %}{{ each['text'] }}{% endfor %}{% endif %}{% endmacro %}
{%- for m in messages %}{{ m.role + ' ' + content_of(m.content) + '\\n' }}{% endfor %}""",
    "takes lists: of the user alone": """{% for m in messages %}{{ m.role }}>{% if m.role == 'user' and m.content is not string %}{{ m.content | map(attribute='text') | join(' ') }}
{%- else %}{{ m.content }}{% endif %}
{% endfor %}""",
}  # fmt: skip
TAKES_LISTS = {
    "takes lists: a loop over parts": ("system", "user", "assistant", "tool"),
    "takes lists: a macro": ("system", "user", "assistant", "tool"),
    "takes lists: of the user alone": ("user",),
    "JSON of all": ("system", "user", "assistant", "tool"),
    "loops and macros": ("system", "user", "assistant", "tool"),  # it writes how many parts there are
}

TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "<sum> of \u00fc & b", "parameters": {
        "type": "object", "properties": {"a": {"type": "number"}, "b": {"type": ["number", "null"], "default": None}}, "required": ["a"]}}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip
TEXTS = ["Hi", "  spaces around \n", "1+1?", "\u00e9\u4e2d\U0001f600 \u2028x", "<b>&amp;'\"\\", "two\nlines\n", "a", "\tend ",
         "<think>\nhm\n</think>\n\n4", "<tool_response>\n3\n</tool_response>", "{{ 7 * 7 }}", "<|im_end|> as text"]  # fmt: skip


class Sent:
    """What the clients of servers return: an object with model_dump(), nested ones too."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def model_dump(self) -> dict[str, Any]:
        def dumped(value: Any) -> Any:
            if isinstance(value, Sent):
                return value.model_dump()
            return [dumped(each) for each in value] if isinstance(value, list) else value

        return {name: dumped(value) for name, value in self.fields.items()}


@dataclass
class Data:
    role: str
    content: Any = None
    name: str | None = None


def random_chat(rng: random.Random, *, simple: bool = False) -> list[Any]:
    """Messages of all roles in an order that a conversation may have; simple: content is always a text."""
    chat: list[Any] = []
    if rng.random() < 0.4:
        chat.append({"role": "system", "content": _content(rng, simple)})
    for _ in range(rng.randint(1, 4)):
        chat.append({"role": "user", "content": _content(rng, simple)})
        if rng.random() < 0.25 and not simple:
            chat += _tool_turns(rng)
        chat.append(_answer(rng, simple))
    if rng.random() < 0.7:
        chat.append({"role": "user", "content": _content(rng, simple)})
    return [_as_object(rng, message) for message in chat]


def _content(rng: random.Random, simple: bool) -> Any:
    if simple or rng.random() < 0.6:
        return rng.choice(TEXTS)
    parts = [{"type": "text", "text": rng.choice(TEXTS)} for _ in range(rng.randint(1, 3))]
    return rng.choice([None, "", parts, parts, tuple(parts)])


def _answer(rng: random.Random, simple: bool) -> dict[str, Any]:
    answer = {"role": "assistant", "content": _content(rng, simple)}
    for name in ("reasoning_content", "reasoning", "thinking"):
        if rng.random() < 0.2:
            answer[name] = rng.choice([None, "", "first\n", "so it is 4"])
    if rng.random() < 0.2:
        answer |= {"refusal": None, "tool_calls": None, "audio": None, "name": rng.choice([None, "bot"])}
    return dict(rng.sample(sorted(answer.items(), key=lambda item: item[0]), len(answer)))


def _tool_turns(rng: random.Random) -> list[dict[str, Any]]:
    calls: list[Any] = []
    for number in range(rng.randint(1, 2)):
        arguments = rng.choice([{"a": 1, "b": None}, {}, {"q": "<\u00e9>", "list": [1, 2.5, True, {"x": "y"}]}])
        given = json.dumps(arguments, ensure_ascii=False) if rng.random() < 0.5 else arguments
        call = {"id": f"call_{number}", "type": "function", "function": {"name": "add", "arguments": given}}
        calls.append(Sent(**call | {"function": Sent(**call["function"])}) if rng.random() < 0.2 else call)
    results = [{"role": "tool", "tool_call_id": f"call_{i}", "content": rng.choice(["3", "", '{"sum": 3}'])} for i in range(len(calls))]
    return [{"role": "assistant", "content": rng.choice([None, "", "I shall add."]), "tool_calls": calls}, *results]


def _as_object(rng: random.Random, message: dict[str, Any]) -> Any:
    kind = rng.random()
    if kind < 0.15:
        return Sent(**message)
    if kind < 0.25 and message.keys() <= {"role", "content", "name"}:
        return Data(**message)
    return message


def joined(chat: list[Any], roles: tuple[str, ...]) -> list[dict[str, Any]]:
    """The wanted difference: the texts of parts in one text, but for messages of these roles."""
    messages = []
    for message in chat:
        fields = message.model_dump() if isinstance(message, Sent) else vars(message) if isinstance(message, Data) else message
        fields, content = dict(fields), fields.get("content")
        if isinstance(content, (list, tuple)) and fields["role"] not in roles:
            fields["content"] = "\n".join(part["text"] for part in content)
        messages.append(fields)
    return messages
