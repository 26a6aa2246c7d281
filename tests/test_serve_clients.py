"""What the clients of OpenAI and Anthropic, and openai-agents, make of answers."""

from __future__ import annotations

import asyncio
import json
from typing import get_args

import extra_serve  # noqa: F401
import httpx
import pytest
import tool_models
from served import DEMO, ENGINE, TEMPLATE, post, serving
from tool_models import CALL, CUSTOM, FUNCTIONS, HI, PATCH, PLAIN, SAID, TOOLS, saying

from pagedkv import LLM, AsyncEngine
from pagedkv.engine.requests.prompts import ids_of
from pagedkv.engine.text.tokenizer import Tokenizer
from pagedkv.serve.model import ServedModel

folder, llm = tool_models.folder, tool_models.llm


def test_the_client_of_openai(folder):
    openai = pytest.importorskip("openai")
    with saying(folder, SAID)[0] as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions.create(model="demo", messages=HI, tools=TOOLS, tool_choice="auto")
        message = chat.choices[0].message
        assert message.reasoning_content == "The weather." and [each.function.name for each in message.tool_calls] == ["get_weather", "get_time"]
        with client.chat.completions.stream(model="demo", messages=HI, tools=TOOLS) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.delta" in kinds and final.finish_reason == "tool_calls"
        assert [json.loads(each.function.arguments) for each in final.message.tool_calls] == [{"city": "Paris", "days": 3}, {"zone": "utc"}]
        response = client.responses.create(model="demo", input="Hi", tools=FUNCTIONS)
        assert response.output_text == "I look." and response.output[2].name == "get_weather"
        with client.responses.stream(model="demo", input="Hi", tools=FUNCTIONS) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert events[-1].type == "response.completed" and final.output_text == "I look."
        assert json.loads(final.output[3].arguments) == {"zone": "utc"}
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            client.responses.create(model="demo", input="Hi", previous_response_id="x")


@pytest.mark.parametrize("limit", [99, None])
def test_answers_have_all_that_the_types_of_the_clients_ask_for(folder, limit):
    """The clients themselves leave out what is missing, and fail where a program reads it."""
    openai, anthropic, pydantic = (pytest.importorskip(name) for name in ("openai", "anthropic", "pydantic"))

    def check(kind, body: bytes) -> None:
        pydantic.TypeAdapter(kind).validate_json(body, strict=True)

    def check_events(union, text: str) -> None:
        kinds = {name: kind for kind in get_args(get_args(union)[0]) for name in get_args(kind.model_fields["type"].annotation)}
        events = [each.partition("data: ")[2] for each in text.split("\n\n") if each]
        for each in events:
            check(kinds[json.loads(each)["type"]], each.encode())

    with saying(folder, SAID if limit else (SAID[:-30], "length", None))[0] as (url, _), httpx.Client(base_url=url) as http:
        body = {"messages": HI, "tools": TOOLS, "max_tokens": limit}
        check(openai.types.chat.ChatCompletion, http.post("/v1/chat/completions", json=body).content)
        for chunk in http.post("/v1/chat/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}).text.split("\n\n")[:-2]:
            check(openai.types.chat.ChatCompletionChunk, chunk.removeprefix("data: ").encode())
        body = {"input": "Hi", "tools": FUNCTIONS, "max_output_tokens": limit}
        check(openai.types.responses.Response, http.post("/v1/responses", json=body).content)
        check_events(openai.types.responses.ResponseStreamEvent, http.post("/v1/responses", json=body | {"stream": True}).text)
        body = {"messages": HI, "tools": CUSTOM, "max_tokens": 99}
        check(anthropic.types.Message, http.post("/v1/messages", json=body).content)
        check_events(anthropic.types.RawMessageStreamEvent, http.post("/v1/messages", json=body | {"stream": True}).text)


def test_custom_tools_by_the_client_of_openai(folder):
    openai = pytest.importorskip("openai")
    said = '<tool_call>{"name": "apply_patch", "arguments": {"input": "+a\\n\\"b\\""}}</tool_call>'
    server, seen = saying(folder, said)
    with server as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        custom = {"type": "custom", "custom": {"name": "apply_patch", "format": {"type": "text"}}}
        options = {"model": "demo", "messages": HI, "tools": [custom], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [custom]}}}
        choice = client.chat.completions.create(**options).choices[0]
        (call,) = choice.message.tool_calls
        assert type(call).__name__ == "ChatCompletionMessageCustomToolCall"
        assert call.custom.input == '+a\n"b"' and choice.finish_reason == "tool_calls"
        deltas = [
            each
            for chunk in client.chat.completions.create(**options, stream=True)
            for each in chunk.choices[0].delta.tool_calls or []
        ]
        assert (deltas[0].type, deltas[0].custom["name"], "".join(each.custom["input"] for each in deltas)) == (
            "custom",
            "apply_patch",
            '+a\n"b"',
        )
        client.chat.completions.create(
            model="demo",
            tools=[custom],
            messages=[*HI, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "ok"}],
        )
        text = Tokenizer(folder).decode(ids_of(seen.seen[-1][0]))
        assert '{"name": "apply_patch", "arguments": {"input": "+a\\n\\"b\\""}}' in text
        with client.responses.stream(model="demo", input="Hi", tools=[PATCH]) as stream:
            kinds = [type(each).__name__ for each in stream]
            final = stream.get_final_response()
        assert {"ResponseCustomToolCallInputDeltaEvent", "ResponseCustomToolCallInputDoneEvent"} <= set(kinds)
        assert type(final.output[0]).__name__ == "ResponseCustomToolCall" and final.output[0].input == '+a\n"b"'
        with pytest.raises(openai.BadRequestError, match="must have a name"):
            client.chat.completions.create(model="demo", messages=HI, tools=[{"type": "custom", "custom": {"format": {"type": "y"}}}])


def test_shapes_by_the_client_of_openai(llm):
    openai, pydantic = pytest.importorskip("openai"), pytest.importorskip("pydantic")
    pytest.importorskip("xgrammar")

    class Person(pydantic.BaseModel):
        age: int = pydantic.Field(ge=0, le=99)

    with serving(AsyncEngine(llm), ServedModel.of_engine(llm, ["demo"], PLAIN)) as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        options = {"model": "demo", "temperature": 1.0}
        chat = client.chat.completions.parse(messages=HI, response_format=Person, max_tokens=500, seed=1, **options)
        assert 0 <= chat.choices[0].message.parsed.age <= 99
        response = client.responses.parse(input="Hi", text_format=Person, max_output_tokens=500, extra_body={"seed": 1}, **options)
        assert 0 <= response.output_parsed.age <= 99


def test_the_client_of_anthropic(folder):
    anthropic = pytest.importorskip("anthropic")
    with saying(folder, SAID)[0] as (url, _), anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        options = {"model": "demo", "max_tokens": 99, "messages": HI, "tools": CUSTOM, "tool_choice": {"type": "auto"}}
        message = client.messages.create(**options)
        assert [each.type for each in message.content] == ["thinking", "text", "tool_use", "tool_use"] and message.stop_reason == "tool_use"
        with client.messages.stream(**options) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == "I look." and final.content[2].input == {"city": "Paris", "days": 3}
        assert final.stop_reason == "tool_use"
        assert (
            client.messages.count_tokens(model="demo", messages=HI, tools=CUSTOM).input_tokens
            == message.usage.input_tokens
        )
        with pytest.raises(anthropic.NotFoundError, match="there is no model"):
            client.messages.create(**options | {"model": "other"})


def test_the_loop_of_anthropics_client(folder):
    """It asks the server to keep the conversation, and goes on without that where the server says so."""
    anthropic = pytest.importorskip("anthropic")
    if not hasattr(anthropic, "beta_tool"):
        pytest.skip("no loop in this version of the package")

    @anthropic.beta_tool
    def get_time(zone: str) -> str:
        """The time."""
        return f"12 {zone}"

    def say(params, index):
        return '<tool_call>{"name": "get_time", "arguments": {"zone": "utc"}}</tool_call>' if len(client.seen) < 2 else "Noon."

    serving, client = saying(folder, say)
    with serving as (url, _), anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as theirs:
        runner = theirs.beta.messages.tool_runner(model="demo", max_tokens=99, messages=HI, tools=[get_time])
        assert [message.stop_reason for message in runner] == ["tool_use", "end_turn"]
        prompt, _ = client.seen[1]
        assert "12 utc" in Tokenizer(folder).decode(ids_of(prompt))


def test_comments_of_a_silent_stream(folder):
    """No client shows them."""
    anthropic, openai = pytest.importorskip("anthropic"), pytest.importorskip("openai")
    client = tool_models.ScriptedClient(lambda params, index: "It is sunny.")
    once = client.generate

    async def slowly(*args, **options):
        async for output in once(*args, **options):
            await asyncio.sleep(0.05)
            yield output

    client.generate = slowly
    with serving(client, tool_models.model_of(folder), keep_alive=0.02) as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as own:
        with own.chat.completions.stream(model="demo", messages=HI) as stream:
            assert stream.get_final_completion().choices[0].message.content == "It is sunny."
        with own.responses.stream(model="demo", input="Hi") as stream:
            assert stream.get_final_response().output_text == "It is sunny."
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as other, other.messages.stream(model="demo", messages=HI, max_tokens=9) as stream:
            assert "".join(stream.text_stream) == "It is sunny."
        text = httpx.post(f"{url}/v1/messages", json={"messages": HI, "max_tokens": 9, "stream": True}).text
        assert text.startswith(": keep-alive\n\n")


@pytest.mark.parametrize("api", ["responses", "chat"])
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_openai_agents(folder, api, is_stream):
    """An agent calls a tool, and answers with what that says."""
    agents, openai = pytest.importorskip("agents"), pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    asked = []

    @agents.function_tool
    def get_weather(city: str, days: int) -> str:
        asked.append((city, days))
        return "sunny"

    def say(params, index):
        assert params.structured_outputs is None or "get_weather" in params.structured_outputs.structural_tag
        return f"<think>\nhm\n</think>\n\n{CALL}" if len(client.seen) == 1 else "It is sunny."

    server, client = saying(folder, say)
    with server as (url, _):
        async def main():
            own = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            kind = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
            agent = agents.Agent(name="A", instructions="Be brief.", tools=[get_weather], model=kind("demo", own))
            if not is_stream:
                return (await agents.Runner.run(agent, "Weather in Paris?")).final_output
            result = agents.Runner.run_streamed(agent, "Weather in Paris?")
            async for _ in result.stream_events():
                pass
            return result.final_output

        assert asyncio.run(main()) == "It is sunny." and asked == [("Paris", 3)]
    text = Tokenizer(folder).decode(client.seen[1][0])
    assert "sunny\n</tool_response>" in text and '"name": "get_weather", "arguments": {"city": "Paris", "days": 3}' in text


def test_the_model_in_the_package():
    """By all three APIs, and a number by a schema."""
    pytest.importorskip("xgrammar")
    ask = [{"role": "user", "content": "473+89="}]
    with LLM(DEMO, **ENGINE) as llm, serving(AsyncEngine(llm), ServedModel.of_engine(llm, ["demo"], TEMPLATE)) as (url, _), httpx.Client(base_url=url) as http:
        number = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}
        assert post(http, "/v1/chat/completions", messages=ask, response_format=number)["choices"][0]["message"]["content"] == "562"
        assert post(http, "/v1/responses", input="473+89=")["output"][0]["content"][0]["text"] == "562"
        message = post(http, "/v1/messages", messages=ask, max_tokens=20)
        assert message["content"] == [{"type": "text", "text": "562"}] and message["usage"]["output_tokens"] == 4
        again = post(http, "/v1/messages", messages=ask, max_tokens=20)["usage"]
        assert again["input_tokens"] + again["cache_read_input_tokens"] == 7 and again["cache_read_input_tokens"] == 4
