"""Calls of tools, thoughts and shapes of answers over HTTP: forced ones of a random model, and what a client makes of any."""

from __future__ import annotations

import json
import re

import extra_serve  # noqa: F401
import httpx
import pytest
import tool_models
from served import CHAT, COMPLETIONS, post, serving
from tool_models import (
    ARGUMENTS,
    CALL,
    CUSTOM,
    FUNCTIONS,
    JSON_SCHEMA,
    PLAIN,
    QWEN3,
    SAID,
    TEMPLATES_BY_NAME,
    THINKING,
    TOOLS,
    of_whole,
    put_together,
    saying,
)

from pagedkv import AsyncEngine
from pagedkv.engine.requests.prompts import ids_of
from pagedkv.engine.text.tokenizer import Tokenizer
from pagedkv.serve.model import ServedModel

MESSAGES = [{"role": "user", "content": "Hi"}]


folder, llm = tool_models.folder, tool_models.llm


@pytest.fixture(scope="module", params=["hermes", "qwen3_coder", "llama3_json", "mistral", "thinking"])
def random_model(request, llm):
    """The random model with a family's template."""
    pytest.importorskip("xgrammar")
    template = TEMPLATES_BY_NAME.get(request.param, THINKING)
    with serving(AsyncEngine(llm), ServedModel.of_engine(llm, ["demo"], template)) as (url, _), httpx.Client(base_url=url, timeout=60) as http:
        yield request.param, http


def check_call(name, arguments):
    values = json.loads(arguments)
    if name == "get_weather":
        assert list(values) == ["city", "days"] and len(values["city"].strip()) <= 5 and type(values["days"]) is int
    else:
        assert name == "get_time" and values["zone"] in ("utc", "cet")


# --- forced by a grammar


NAMED = {"type": "function", "function": {"name": "get_time"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.mark.parametrize("choice", ["required", NAMED, ALLOWED], ids=["required", "named", "allowed"])
def test_calls_that_are_asked_for(random_model, choice):
    """Whatever the model is: each answer is calls of the tools, with arguments of their schemas."""
    name, http = random_model
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 1500}
    whole = [of_whole(each) for each in post(http, CHAT, **body)["choices"]]
    streamed = put_together(http.post(CHAT, json=body | {"stream": True}).text)
    assert [streamed[i] for i in range(3)] == whole
    for each in whole:
        if each["finish_reason"] == "length":  # thoughts of a random model, or one call after another
            continue
        assert each["finish_reason"] == "tool_calls" and each["content"] == "" and each["calls"], each
        for call in each["calls"]:
            check_call(*call)
        if choice != "required":
            assert [call[0] for call in each["calls"]] == ["get_time"]
        if name not in ("hermes", "thinking"):
            assert each["reasoning_content"] == ""
    assert any(each["finish_reason"] == "tool_calls" for each in whole)


def test_one_call_at_a_time(random_model):
    _, http = random_model
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0, "n": 4, "seed": 1, "max_tokens": 1500}
    counts = [len(of_whole(each)["calls"]) for each in post(http, CHAT, **body)["choices"] if each["finish_reason"] != "length"]
    assert counts and set(counts) == {1}


def test_a_schema_after_thoughts(random_model):
    name, http = random_model
    for tools in ({}, {"tools": TOOLS}):
        body = {"messages": MESSAGES, "response_format": JSON_SCHEMA, "temperature": 1.0, "n": 3, "seed": 3, "max_tokens": 1500} | tools
        answer = post(http, CHAT, **body)
        found = [of_whole(each) for each in answer["choices"]]
        assert put_together(http.post(CHAT, json=body | {"stream": True}).text) == dict(enumerate(found))
        ended = [each for each in found if each["finish_reason"] != "length"]
        assert ended
        for each in ended:
            assert bool(each["calls"]) != bool(each["content"]), each
            if each["content"]:
                assert 0 <= json.loads(each["content"])["age"] <= 99
            for call in each["calls"]:
                check_call(*call)
        if name == "thinking":
            assert all(each["reasoning_content"] for each in ended)
            details = answer["usage"]["completion_tokens_details"]
            texts = sum(len(each["reasoning_content"]) for each in found)
            assert 0 < details["reasoning_tokens"] <= answer["usage"]["completion_tokens"] and texts > 0


def test_strict_tools_in_free_text(llm):
    """Random text that begins a call has to go on with one."""
    pytest.importorskip("xgrammar")
    tools = [{"type": "function", "function": each["function"] | {"strict": True}} for each in TOOLS]
    with serving(AsyncEngine(llm), ServedModel.of_engine(llm, ["demo"], QWEN3)) as (url, _), httpx.Client(base_url=url, timeout=60) as http:
        token = post(http, "/tokenize", prompt="<tool_call>", add_special_tokens=False)["tokens"]
        assert len(token) == 1
        body = {"messages": MESSAGES, "tools": tools, "n": 6, "temperature": 1.0, "seed": 9, "max_tokens": 250, "logit_bias": {token[0]: 3}}
        found = [of_whole(each) for each in post(http, CHAT, **body)["choices"]]
        calls = [call for each in found for call in (each["calls"] if each["finish_reason"] == "tool_calls" else each["calls"][:-1])]
        assert calls
        for call in calls:
            check_call(*call)


@pytest.mark.parametrize(("options", "pattern"), [
    ({"response_format": {"type": "json_object"}}, None),
    ({"response_format": {"type": "regex", "regex": "[ab]{3}-[0-9]+x"}}, "[ab]{3}-[0-9]+x"),
    ({"response_format": {"type": "grammar", "grammar": 'root ::= "x" [0-9]{3} "y"'}}, "x[0-9]{3}y"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"structured_outputs": {"regex": "[0-9]{2}"}}, "[0-9]{2}"),
    ({"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "abc"}}}}, "abc"),
], ids=str)  # fmt: skip
def test_shapes_of_answers(llm, options, pattern):
    pytest.importorskip("xgrammar")
    with serving(AsyncEngine(llm), ServedModel.of_engine(llm, ["demo"], PLAIN)) as (url, _), httpx.Client(base_url=url, timeout=60) as http:
        body = {"temperature": 1.0, "seed": 2, "max_tokens": 400} | options
        texts = [post(http, CHAT, messages=MESSAGES, **body)["choices"][0]["message"]["content"]]
        texts += [post(http, COMPLETIONS, prompt="Hi", **body)["choices"][0]["text"]]
        for text in texts:
            assert re.fullmatch(pattern, text) if pattern else text.startswith("{"), text


def test_shapes_after_thoughts(random_model):
    """Each kind as a part of a structural tag, where thoughts or calls may come, too."""
    _, http = random_model
    for shape, pattern in (({"regex": "[ab]{3}"}, "[ab]{3}"), ({"choice": ["yes", "no"]}, "yes|no"), ({"grammar": 'root ::= "x" [0-9]'}, "x[0-9]"),
                           ({"json": {"enum": [1, "q"]}, "disable_any_whitespace": True}, '1|"q"'), ({"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "z"}}}, "z")):
        body = {"messages": MESSAGES, "tools": TOOLS, "structured_outputs": shape, "temperature": 1.0, "seed": 6, "n": 2, "max_tokens": 700}
        found = [of_whole(each) for each in post(http, CHAT, **body)["choices"] if each["finish_reason"] != "length"]
        assert found
        for each in found:
            assert each["calls"] or re.fullmatch(pattern, each["content"].strip()), (shape, each)


# --- read from what a model says


@pytest.mark.parametrize("number", range(3))
def test_calls_and_thoughts_of_several_answers(folder, number):
    """n answers at a time, each cut anywhere."""
    texts = [SAID, "Nothing to do.\n", CALL, "<think>\nhm"]
    server, client = saying(folder, lambda params, index: (texts[index], "length" if index == 3 else "stop", None))
    client.rng.seed(number)
    with server as (url, _), httpx.Client(base_url=url) as http:
        body = {"messages": MESSAGES, "tools": TOOLS, "n": 4, "temperature": 1}
        found = [of_whole(each) for each in post(http, CHAT, **body)["choices"]]
        both = [["get_weather", ARGUMENTS[0]], ["get_time", ARGUMENTS[1]]]
        assert found == [
            {"content": "I look.", "reasoning_content": "The weather.", "calls": both, "finish_reason": "tool_calls"},
            {"content": "Nothing to do.\n", "reasoning_content": "", "calls": [], "finish_reason": "stop"},
            {"content": "", "reasoning_content": "", "calls": both[:1], "finish_reason": "tool_calls"},
            {"content": "", "reasoning_content": "hm", "calls": [], "finish_reason": "length"},
        ]  # fmt: skip
        assert put_together(http.post(CHAT, json=body | {"stream": True}).text) == dict(enumerate(found))
        one = post(http, CHAT, **body | {"parallel_tool_calls": False})["choices"][0]
        assert of_whole(one)["calls"] == both[:1]
        prompt, _ = client.seen[0]
        assert '"get_time"' in Tokenizer(folder).decode(prompt)


@pytest.mark.parametrize("template", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize(("finish", "stop"), [("stop", None), ("stop", "Pa"), ("length", None)], ids=str)
def test_an_answer_that_ends_within_a_call(folder, finish, stop, template):
    """Cut anywhere: no API tells of a finished call unless its arguments are JSON; whole and streamed alike."""
    said = CALL if template == "hermes" else "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    calls_said, ends = 0, []
    server, _ = saying(folder, lambda params, index: (said[: ends[-1]], finish, stop), TEMPLATES_BY_NAME[template])
    with server as (url, _), httpx.Client(base_url=url) as http:
        for end in range(len("<tool_call>"), len(said), 5 if template == "hermes" else 9):
            ends.append(end)
            body = {"messages": MESSAGES, "tools": TOOLS}
            found = of_whole(post(http, CHAT, **body)["choices"][0])
            assert put_together(http.post(CHAT, json=body | {"stream": True}).text) == {0: found}
            is_whole = bool(found["calls"]) and found["calls"][0][1].endswith("}")
            calls_said += is_whole
            assert found["finish_reason"] == ("tool_calls" if is_whole and finish == "stop" else finish)
            response = post(http, "/v1/responses", input="Hi", tools=FUNCTIONS)
            assert response["status"] == ("incomplete" if finish == "length" else "completed")
            assert [each["status"] for each in response["output"] if each["type"] == "function_call"] == ["completed" if is_whole else "incomplete"] * len(found["calls"])
            message = post(http, "/v1/messages", max_tokens=9, messages=MESSAGES, tools=CUSTOM)
            ended = "max_tokens" if finish == "length" else "stop_sequence" if stop else "tool_use" if is_whole else "end_turn"
            assert message["stop_reason"] == ended
            if is_whole:
                assert json.loads(found["calls"][0][1]) == {"city": "Paris", "days": 3} == message["content"][0]["input"]
        assert calls_said


def test_no_calls_where_none_are_wanted(folder):
    server, client = saying(folder, SAID)
    with server as (url, _), httpx.Client(base_url=url) as http:
        for more in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
            found = of_whole(post(http, CHAT, messages=MESSAGES, **more)["choices"][0])
            assert found["calls"] == [] and found["content"] == SAID.partition("</think>\n\n")[2]
            assert found["finish_reason"] == "stop"
            assert "get_time" not in Tokenizer(folder).decode(client.seen[-1][0])
        post(http, CHAT, messages=MESSAGES, tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}})
        text = Tokenizer(folder).decode(client.seen[-1][0])
        assert "get_time" in text and "get_weather" not in text


def test_whether_the_prompt_has_begun_the_thoughts(folder):
    told = {"content": "I say.", "reasoning_content": "I think.", "calls": [], "finish_reason": "stop"}
    untold = {"content": "I think.\n</think>\n\nI say.", "reasoning_content": "", "calls": [], "finish_reason": "stop"}
    for template, said, more, expected in [
        (THINKING, "I think.\n</think>\n\nI say.", {}, told),
        (QWEN3, "<think>\nI think.\n</think>\n\nI say.", {}, told),
        (QWEN3, "I think.\n</think>\n\nI say.", {"chat_template_kwargs": {"enable_thinking": False}}, untold),
        (QWEN3, "I think.\n</think>\n\nI say.", {"reasoning_effort": "none"}, untold),
        (PLAIN, "I think.\n</think>\n\nI say.", {}, untold),
    ]:
        with saying(folder, said, template)[0] as (url, _), httpx.Client(base_url=url) as http:
            body = {"messages": MESSAGES} | more
            assert of_whole(post(http, CHAT, **body)["choices"][0]) == expected
            assert put_together(http.post(CHAT, json=body | {"stream": True}).text)[0] == expected
            warning = http.post(CHAT, json=body | {"reasoning_effort": "high"}).headers["x-pagedkv-warning"]
            assert warning == "without effect: reasoning_effort"
    goes_on = [*MESSAGES, {"role": "assistant", "content": "<think>\nI "}]
    with saying(folder, "think.\n</think>\n\nI say.", "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}")[0] as (url, _), httpx.Client(base_url=url) as http:
        found = of_whole(post(http, CHAT, messages=goes_on, continue_final_message=True)["choices"][0])
        assert found == told | {"reasoning_content": "think."}


def test_formats_by_option(folder):
    for options, said, calls, thoughts in [
        ({"tool_call_parser": "qwen3_coder"}, "<function=get_time>\n<parameter=zone>\nutc\n</parameter>\n</function>", [["get_time", '{"zone": "utc"}']], ""),
        ({"tool_call_parser": "hermes", "reasoning_parser": "none"}, SAID, [["get_weather", ARGUMENTS[0]], ["get_time", ARGUMENTS[1]]], ""),
        ({"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}, SAID, [["get_weather", ARGUMENTS[0]], ["get_time", ARGUMENTS[1]]], "The weather."),
    ]:
        with saying(folder, said, PLAIN, **options)[0] as (url, _), httpx.Client(base_url=url) as http:
            found = of_whole(post(http, CHAT, messages=MESSAGES, tools=TOOLS)["choices"][0])
            assert found["calls"] == calls and found["reasoning_content"] == thoughts
    with saying(folder, SAID, PLAIN)[0] as (url, _), httpx.Client(base_url=url) as http:
        assert "--tool-call-parser" in post(http, CHAT, 400, messages=MESSAGES, tools=TOOLS)["error"]["message"]


def test_special_tokens_stay_where_they_mean_something(folder):
    server, client = saying(folder, '[TOOL_CALLS][{"name": "get_time", "arguments": {"zone": "cet"}}]', TEMPLATES_BY_NAME["mistral"])
    with server as (url, _), httpx.Client(base_url=url) as http:
        choice = post(http, CHAT, messages=MESSAGES, tools=TOOLS)["choices"][0]
        assert of_whole(choice)["calls"] == [["get_time", '{"zone": "cet"}']]
        assert len(choice["message"]["tool_calls"][0]["id"]) == 9
        strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
        assert http.post(CHAT, json={"messages": MESSAGES, "tools": strict}).headers["x-pagedkv-warning"] == "without effect: tools.strict"
        client.seen.pop()
        post(http, CHAT, messages=MESSAGES)
        assert [params.skip_special_tokens for _, params in client.seen] == [False, True]


def test_messages_without_content_or_calls(folder):
    """null beside calls, as OpenAI's clients send an answer back, where templates take the content apart (those of QwQ
    and of the first Qwen3 do); an empty list of calls, where they count them (Llama 3.2's)."""
    template = (
        "{% for m in messages %}{% if 'tool_calls' in m %}{{ m.tool_calls[0].id }}{{ raise_exception('no calls') if m.tool_calls | length != 1 }}"
        "{% endif %}[{{ m.content.split('</think>')[-1] }}]{% endfor %}{# <tool_call> #}"
    )
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1"},
        {"role": "assistant", "tool_calls": [call]}, {"role": "assistant", "content": "b", "tool_calls": []},
    ]  # fmt: skip
    server, client = saying(folder, "x", template)
    with server as (url, _), httpx.Client(base_url=url) as http:
        post(http, CHAT, messages=history, tools=TOOLS)
        assert Tokenizer(folder).decode(client.seen[0][0], skip_special_tokens=False) == "[a]c1[][]c1[][b]"


@pytest.mark.parametrize(("arguments", "expected"), [
    ('{"city": "Rome"}', "city=Rome;"), ("", ""), ("null", ""), (None, ""), ('{"city": "Ro', 'invalid_json={"city": "Ro;'), ("[1]", "invalid_json=[1];"),
], ids=str)  # fmt: skip
def test_arguments_that_are_no_object(folder, arguments, expected):
    """A client sends a call back that was cut: templates that go through the arguments, as Qwen3-Coder's, need some."""
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}."
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    server, client = saying(folder, "x", template)
    with server as (url, _), httpx.Client(base_url=url) as http:
        post(http, CHAT, messages=[*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call]}])
        assert Tokenizer(folder).decode(ids_of(client.seen[-1][0])) == expected + "."


def test_messages_of_the_system_where_one_is_allowed(folder):
    """Agents have instructions in several messages, and remind the model later; templates as Qwen3.5's refuse that."""
    template = (
        "{% for m in messages %}{{ raise_exception('system') if m.role == 'system' and not loop.first }}{{ m.role[0] }}:"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endif %} {% endfor %}"
    )
    server, client = saying(folder, "x", template)
    parts = [{"type": "text", "text": "e"}, {"type": "text", "text": "f"}]
    with server as (url, _), httpx.Client(base_url=url) as http:
        said = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, {"role": "user", "content": "c"}, {"role": "system", "content": "d"}]
        for history, expected in ((said, "s:a\n\nb u:c u:d "), (said[2:], "u:c u:d "), (said[:1] + said[2:3], "s:a u:c "),
                                  ([{"role": "system", "content": parts}, *said[1:3]], "s:e;f;b; u:c ")):
            post(http, CHAT, messages=history)
            assert Tokenizer(folder).decode(ids_of(client.seen[-1][0]), skip_special_tokens=False) == expected
        post(http, "/v1/responses", input=said[1:3], instructions="a")
        assert Tokenizer(folder).decode(ids_of(client.seen[-1][0])) == "s:a\n\nb u:c "


def test_tokens_of_a_conversation_are_those_of_the_chat(folder):
    template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}{# <tool_call> #}"
    )
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"days":3}'}}
    history = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "c"}]
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    server, client = saying(folder, "x", template)
    with server as (url, _), httpx.Client(base_url=url) as http:
        for options in ({"tools": strict}, {"tools": []}, {}, {"continue_final_message": True}):
            post(http, CHAT, messages=history, **options)
            assert post(http, "/tokenize", messages=history, **options)["tokens"] == ids_of(client.seen[-1][0])
        text = Tokenizer(folder).decode(client.seen[0][0])
        assert text.endswith('system:auser:bassistant:{"days": 3}tool:c') and "strict" not in text


def test_a_conversation_with_calls(folder):
    """What a client sends back is written as the model has said it."""
    history = [
        {"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "reasoning_content": "I think.", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Paris", "days": 3}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
    ]  # fmt: skip
    server, client = saying(folder, "It is sunny.")
    with server as (url, _), httpx.Client(base_url=url) as http:
        assert of_whole(post(http, CHAT, messages=history, tools=TOOLS)["choices"][0])["content"] == "It is sunny."
        text = Tokenizer(folder).decode(client.seen[0][0], skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nBe brief.") and f"<think>\nI think.\n</think>\n\n{CALL}<|im_end|>" in text
    assert text.endswith("<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


REFUSED = [
    ({"tools": [{"type": "web_search"}]}, "tools", "tools[0] is of type 'web_search'"),
    ({"tools": [{"type": "custom", "custom": 3}]}, "tools", "tools[0]: custom is '3'"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "no function of tools"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}]}, "messages", "must have a name and an input"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "its name is 'a b'"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "two tools with the name 'get_weather'"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}, "tools", "no JSON schema"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "must be one of auto, none, required"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "no function of tools"),
    ({"tools": TOOLS, "tool_choice": ALLOWED | {"allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice", "must have a mode, auto or required, and tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}], "tool_choice": "required"}, "tools", "xgrammar says"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema is missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "response_format", "xgrammar says"),
    ({"response_format": {"type": "regex", "regex": "("}}, "response_format", "xgrammar says"),
    ({"structured_outputs": {"regex": "("}, "response_format": {"type": "text"}}, "structured_outputs", "xgrammar says"),
    ({"response_format": JSON_SCHEMA, "structured_outputs": {"regex": "a"}}, "structured_outputs", "both given"),
    ({"structured_outputs": {"jsons": {}}}, "structured_outputs", "did you mean 'json'?"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "json and regex"),
    ({"structured_outputs": {"structural_tag": {"type": "structural_tag"}}}, "structured_outputs", "no JSON of this kind"),
    ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages", "no list of calls"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "text"), REFUSED, ids=[text for _, _, text in REFUSED])
def test_what_is_wrong_is_named(llm, body, param, text):
    pytest.importorskip("xgrammar")
    with serving(AsyncEngine(llm), ServedModel.of_engine(llm, ["demo"], QWEN3)) as (url, _), httpx.Client(base_url=url) as http:
        for more in ({}, {"stream": True}):
            error = post(http, CHAT, 400, **{"messages": MESSAGES} | body | more)["error"]
            assert text in error["message"] and error["param"] == param
            assert text != "xgrammar says" or error["message"].startswith(param)
