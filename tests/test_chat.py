"""Chats: what must be refused, where templates are found, and LLM.chat on a copy of the demo model. (What templates write
is compared with transformers in test_chat_parity.py.)"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from chat_samples import Data, Sent

import pagedkv
from pagedkv import LLM, SamplingParams
from pagedkv.engine.text.chat import MAX_CHARS, ChatTemplate, template_of

DEMO_MODEL = Path(pagedkv.__file__).parent / "data" / "demo_model"
CHATS = [
    [{"role": "user", "content": "Hi <there> \u00e9\u4e2d\U0001f600\n"}],
    [
        {"role": "system", "content": "  Be brief. "},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2", "tool_calls": [{"name": "add", "arguments": {"a": 1, "b": [1, None]}}]},
        {"role": "user", "content": "and 2+2?"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def test_going_on_with_the_last_message():
    template = ChatTemplate({"default": "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"}, {})
    messages = [*CHATS[1], {"role": "assistant", "content": "The sum is "}]
    assert template.render(messages, continue_final_message=True).endswith("2+2?;assistant: The sum is ")
    messages[-1]["content"] = ""
    assert template.render(messages, continue_final_message=True).endswith("assistant: ")
    with pytest.raises(ValueError, match="needs add_generation_prompt=False"):
        template.render(messages, continue_final_message=True, add_generation_prompt=True)
    messages[-1]["content"] = None
    with pytest.raises(ValueError, match="the last message has no text as its content"):
        ChatTemplate({"default": "{{ messages[-1].content }}"}, {}).render(messages, continue_final_message=True)
    for field in ("reasoning_content", "thoughts"):
        with pytest.raises(ValueError, match=f"the last message has no text as its {field}"):
            template.render(CHATS[1], continue_final_message=field)
    messages[-1]["content"] = "abc"
    for cut in ("x", "{{ messages[-1].content[1:] }}"):
        with pytest.raises(ValueError, match="leaves out the last message or some of it"):
            ChatTemplate({"default": cut}, {}).render(messages, continue_final_message=True)


FAILING = {
    "raises": ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
    "a syntax error": ("{% for %}", "TemplateSyntaxError"),
    "a wrong type": ("{{ 1 + 'a' }}", "TypeError"),
    "a division by zero": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "a missing attribute of nothing": ("{{ nothing.more }}", "UndefinedError"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "classes": ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    "globals": ("{{ raise_exception.__globals__ }}", "SecurityError"),
    "import": ("{{ strftime_now.__globals__['os'] }}", "SecurityError"),
    "changes the messages": ("{{ messages.append(1) }}", "SecurityError"),
    "a long text": ("{{ 'ab' * 10 ** 10 }}", "SecurityError"),
    "a long list": ("{{ (3 * [1, 2, 3] * 10 ** 9) | length }}", "SecurityError"),
    "a long number": ("{{ 10 ** (10 ** 9) }}", "SecurityError"),
    "a long product": ("{% set big = 2 ** 40000 %}{{ (big * big) % 2 }}", "SecurityError"),
    "format strings": ("{{ '{0.__class__}'.format(1) }}", "SecurityError"),
    "files": ("{% include '/etc/passwd' %}", "TypeError"),
    "range": ("{% for i in range(10000000) %}{% endfor %}", "OverflowError"),
    "a flood": ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", f"more than {MAX_CHARS:,} characters"),
}


@pytest.mark.parametrize("name", FAILING)
def test_templates_that_fail_or_leave_the_sandbox(name):
    template, message = FAILING[name]
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(ValueError, match="the chat template failed: .*" + message):
        ChatTemplate({"default": template}, {}).render(messages)
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "messages, error, message",
    [
        ("Hello", TypeError, "messages is 'Hello' but must be a list"),
        (None, TypeError, "messages is None"),
        ([], ValueError, "messages is empty"),
        ([{"role": "user"}, "x"], TypeError, r"messages\[1\] is 'x' but must be a dict"),
        ([{"content": "x"}], ValueError, r"messages\[0\]: role is None"),
        ([{"role": 3, "content": "x"}], ValueError, r"messages\[0\]: role is 3"),
        ([{"role": "tool", "content": 562}], TypeError, r"messages\[0\]: content is 562 but must be a text, or a list"),
        ([{"role": "user", "content": b"x"}], TypeError, r"messages\[0\]: content is b'x' but must be a text"),
        ({"role": "user", "content": "x"}, TypeError, "messages is {'role'"),
        ([["role", "user"]], TypeError, r"messages\[0\] is \['role'"),
    ],
)
def test_bad_messages(messages, error, message):
    with pytest.raises(error, match=message):
        ChatTemplate({"default": "x"}, {}).render(messages)


def write(folder: Path, **files) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        path = folder / name.replace("__", "/").replace("_json", ".json").replace("_jinja", ".jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def test_where_templates_are_found(tmp_path):
    def rendered(folder, **options):
        return ChatTemplate.from_folder(folder).render(CHATS[0], **options)

    config = {"chat_template": "config {{ eos_token }}", "eos_token": {"content": "<e>"}, "bos_token": None}
    assert rendered(write(tmp_path / "a", tokenizer_config_json=config)) == "config <e>"
    assert rendered(write(tmp_path / "b", chat_template_json={"chat_template": "json"})) == "json"
    both = write(tmp_path / "c", tokenizer_config_json=config, chat_template_jinja="jinja {{ eos_token }}")
    assert rendered(both) == "jinja <e>"
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    several = write(tmp_path / "d", tokenizer_config_json={"chat_template": named}, additional_chat_templates__rag_jinja="three")
    assert [rendered(several), rendered(several, tools=TOOLS), rendered(several, template="rag")] == ["one", "two", "three"]
    assert rendered(several, template="{{ messages|length }}") == "1"
    again = {"tokenizer_config_json": {"chat_template": named}, "chat_template_json": {"chat_template": "json"}}
    for i, file in enumerate(("chat_template_jinja", "additional_chat_templates__default_jinja")):  # nothing of older files
        saved_again = write(tmp_path / f"g{i}", **again | {file: "four"})
        assert [rendered(saved_again), rendered(saved_again, tools=TOOLS)] == ["four", "four"]
    with pytest.raises(ValueError, match="no chat template in the model's folder"):
        rendered(write(tmp_path / "e"))
    with pytest.raises(ValueError, match="tokenizer_config.json: "):
        rendered(write(tmp_path / "f", tokenizer_config_json="{"))


@pytest.mark.parametrize("value", [5, True, [5], [["a", "b"]], [{"name": "default"}], [{"template": "x"}], {"default": 5}])
def test_templates_that_are_none_name_their_file(tmp_path, value):
    with pytest.raises(ValueError, match="tokenizer_config.json: chat_template must be a text, or a list of objects with name and template"):
        ChatTemplate.from_folder(write(tmp_path, tokenizer_config_json={"chat_template": value}))


def test_a_template_that_is_no_text_names_its_file(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{{ x }}")
    with pytest.raises(ValueError, match="chat_template.jinja: 'utf-8' codec"):
        ChatTemplate.from_folder(tmp_path)


IMAGES = [[{"image": "x.png"}], [{"type": "text", "text": "1"}, {"image_url": "x"}], [{"video": ["x"]}], {"type": "input_audio", "input_audio": {}}]


@pytest.mark.parametrize("content", IMAGES)
def test_images_are_refused_whatever_the_template_writes(chatty, content):
    """That of a model with eyes writes a token for an image, which a model without them takes for text."""
    template = "{% for part in messages[0].content %}{% if 'image' in part %}<|image_pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    with LLM(chatty, device="cpu") as llm:
        with pytest.raises(ValueError, match=r"messages\[0\]: part . of its content is of type '(image|video|input_audio).*': only text is read"):
            llm.chat([{"role": "user", "content": content}], chat_template=template)
        result = [{"role": "tool", "content": {"profile": 3, "image": "saved", "type": "file"}}]  # an object of the tool's own
        answer = llm.chat(result, chat_template="{{ messages[0].content.profile }}+1=", use_tqdm=False)[0]
        assert llm.tokenizer.decode(answer.prompt_token_ids) == "3+1="


def test_a_template_is_read_when_its_files_change(tmp_path):
    shutil.copy(DEMO_MODEL / "tokenizer_config.json", tmp_path)
    for text in ("one", "two", "three"):
        (tmp_path / "chat_template.jinja").write_text(text)
        first = template_of(tmp_path)
        assert first.templates == {"default": text} and template_of(tmp_path) is first
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("four")
    assert template_of(tmp_path).templates == {"default": "three", "rag": "four"}
    (tmp_path / "chat_template.jinja").unlink()
    assert template_of(tmp_path).templates == {"rag": "four"}


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """The model that adds, with a template: a chat's last message is the prompt."""
    folder = shutil.copytree(DEMO_MODEL, tmp_path_factory.mktemp("chat") / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}{% if add_generation_prompt %}={% endif %}")
    return folder


def test_llm_chat(chatty):
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(chatty, device="cpu", block_size=4, num_blocks=64) as llm:
        chats = [[{"role": "user", "content": text}] for text in ("12+34", "40+2")]
        outputs = llm.chat(chats, params, use_tqdm=False)
        assert [output.text for output in outputs] == ["46", "42"]
        assert [output.prompt_token_ids for output in outputs] == [llm.tokenizer.encode(f"{c[0]['content']}=") for c in chats]
        assert llm.chat(chats[0], params, use_tqdm=False)[0].text == "46"
        streamed = list(llm.stream(chats[0], params))
        assert "".join(output.outputs[0].text for output in streamed) == "46" and len(streamed) > 1
        going_on = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "12+34="}]
        options = {"add_generation_prompt": False, "continue_final_message": True}
        assert llm.chat(going_on, params, use_tqdm=False, **options)[0].text == "46"
        assert llm.chat(chats[0], params, use_tqdm=False, chat_template="5+5=")[0].text == "10"
        assert llm.chat(going_on, params, use_tqdm=False, continue_final_message=True)[0].text == "46"
        assert [each.text for each in llm.stream(going_on, params, continue_final_message=True)][-1] is not None
        switch = {"chat_template": "{% if enable_thinking is defined and not enable_thinking %}5{% endif %}5+5="}
        texts = [llm.chat(chats[0], params, use_tqdm=False, **switch, **more)[0].text for more in (
            {}, {"enable_thinking": True}, {"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}})]  # fmt: skip
        assert texts == ["10", "10", "60", "60"]
        assert "".join(each.text for each in llm.stream(chats[0], params, **switch, enable_thinking=False)) == "60"
        with pytest.raises(ValueError, match="enable_thinking is False but the chat template has no such switch"):
            llm.chat(chats[0], params, enable_thinking=False)
        with pytest.raises(TypeError, match="enable_thinking is 'no' but must be"):
            llm.chat(chats[0], params, **switch, enable_thinking="no")
        with pytest.raises(TypeError, match="enable_thinking, continue_final_message: for chats, but the prompt is no"):
            llm.stream("1+1=", params, enable_thinking=False, continue_final_message=True)
        with pytest.raises(ValueError, match="the chat template failed: SecurityError"):
            llm.chat(chats[0], params, use_tqdm=False, chat_template="{{ ''.__class__ }}")
        with pytest.raises(TypeError, match="messages"):
            llm.chat("12+34", params)
        with pytest.raises(ValueError, match=r"messages\[0\]: part 0 of its content is of type 'image_url': only text is read"):
            llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], params)
        with pytest.raises(ValueError, match="messages is empty"):
            llm.chat([], params)


def test_which_of_many_chats_is_wrong(chatty):
    """A note of the error tells it; the error of one chat has none."""
    good, bad = [{"role": "user", "content": "1+1="}], [{"role": "user", "content": "\ud800"}]
    with LLM(chatty, device="cpu", block_size=4, num_blocks=64) as llm:
        for wrong, error in ((bad, UnicodeEncodeError), ([], ValueError), ("1+1=", TypeError)):
            with pytest.raises(error) as raised:
                llm.chat([good, good, wrong, good])
            assert raised.value.__notes__ == ["in messages[2], of 4 chats"]
        with pytest.raises(UnicodeEncodeError) as raised:
            llm.chat(bad)
        assert not hasattr(raised.value, "__notes__")


def test_a_relative_folder_stays_the_one_it_was(chatty, monkeypatch, tmp_path):
    """Its files are read again later: templates, pooling, weights after a sleep."""
    monkeypatch.chdir(chatty.parent)
    with LLM(chatty.name, device="cpu", block_size=4, num_blocks=64) as llm:
        monkeypatch.chdir(tmp_path)
        assert llm.chat([{"role": "user", "content": "12+34"}], SamplingParams(temperature=0), use_tqdm=False)[0].text == "46"
        assert llm.folder == chatty


def test_messages_of_clients(chatty):
    """Objects, null content and parts give the answer of the plain dict; one chat or several, whole or streamed."""
    params, plain = SamplingParams(temperature=0, max_tokens=8), {"role": "user", "content": "12+34"}
    nothing = {"role": "assistant", "content": None, "tool_calls": None, "refusal": None, "reasoning": "hm"}
    ways = [[plain], [Sent(**plain)], [Data(**plain)], (Sent(**nothing), Sent(**plain)), [{"role": "user", "content": [{"type": "text", "text": "12+34"}]}],
            [Sent(role="user", content=[Sent(type="text", text="12+34")])], SimpleNamespace(messages=[plain])]  # fmt: skip
    with LLM(chatty, device="cpu", block_size=4, num_blocks=64) as llm:
        for chat in ways:
            assert llm.chat(chat, params, use_tqdm=False)[0].text == "46"
            assert "".join(output.text for output in llm.stream(chat, params)) == "46"
        assert [output.text for output in llm.chat(ways, params, use_tqdm=False)] == ["46"] * len(ways)
        with pytest.raises(TypeError, match=r"prompts\[0\] has 'content': .*; messages are for chat"):
            llm.generate([plain], params)
