"""ChatTemplate beside transformers' apply_chat_template: the same text and the same token ids for random conversations.

What differs on purpose is the subject of tests here and of test_chat.py: text parts are joined for templates that would
lose them, tool calls' JSON texts become dicts for templates that fail on texts, each message must have a role, and tools
are schemas, not functions.
"""

from __future__ import annotations

import random

import pytest
from chat_samples import TAKES_LISTS, TEMPLATES, TOOLS, Sent, joined, random_chat

from pagedkv.engine.text.chat import ChatTemplate
from pagedkv.engine.text.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
OPTIONS = [{}, {}, {"enable_thinking": False}, {"enable_thinking": True}, {"date_string": "1 Jan"}, {"bos_token": ""}]
DOCUMENTS = [{"title": "T", "text": "one\ntwo"}]
NUM_CHATS = 160


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """transformers' tokenizer and the engine's, of one file: a token a byte, and tokens that are tags."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tokenizer")
    letters = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **SPECIAL)
    return theirs, Tokenizer(folder)


def rendered(write, *args, **options):
    """The text, or None where it is refused."""
    try:
        return write(*args, **options)
    except Exception as error:  # theirs raises what Jinja raises, or what it likes
        return None if type(error) is not AssertionError else pytest.fail(str(error))


def compare(both, chat, template, options, wanted_chat=None) -> str | None:
    """Returns the text after it was found equal; None where both refuse the chat."""
    (theirs, ours), wanted = both, wanted_chat or chat
    expected = rendered(theirs.apply_chat_template, wanted, chat_template=template, tokenize=False, **options)
    alone = options | {"continue_final_message": False}
    if expected is None and rendered(theirs.apply_chat_template, wanted, chat_template=template, tokenize=False, **alone) is None:
        wanted = with_content(wanted)
        expected = rendered(theirs.apply_chat_template, wanted, chat_template=template, tokenize=False, **options)
    got = rendered(ChatTemplate({"default": template}, SPECIAL).render, chat, **options)
    assert got == expected
    if got is not None:
        ids = theirs.apply_chat_template(wanted, chat_template=template, return_dict=False, **options)
        assert ours.encode(got, add_special_tokens=False) == ids
    return got


def with_content(chat):
    """The wanted difference: for a template that fails, an empty text where there is none."""
    return [{**m, "content": "" if m.get("content") is None else m["content"]} for m in joined(chat, ("system", "user", "assistant", "tool"))]


@pytest.mark.parametrize("name", TEMPLATES)
def test_random_conversations(both, name, seed):
    rng, roles, num_texts = random.Random(seed), TAKES_LISTS.get(name, ()), 0
    print("seed", seed)
    for i in range(NUM_CHATS):
        chat = random_chat(rng, simple=i % 4 == 0)
        options = {"add_generation_prompt": rng.random() < 0.5, "tools": rng.choice([None, None, [], TOOLS, TOOLS[:1]])}
        options |= rng.choice(OPTIONS) | rng.choice([{}, {"documents": DOCUMENTS}])
        if "keys of arguments" in name:
            chat = with_dicts(chat)  # theirs fails on texts
        num_texts += compare(both, chat, TEMPLATES[name], options, joined(chat, roles)) is not None
    assert num_texts >= NUM_CHATS // 20  # those that refuse most chats, too


def with_dicts(chat):
    """The chat without tool calls whose arguments are texts."""
    return [m for m in joined(chat, ("system", "user", "assistant", "tool")) if "str" not in kinds_of_arguments(m)]


def kinds_of_arguments(message):
    calls = [call.model_dump() if isinstance(call, Sent) else call for call in message.get("tool_calls") or []]
    return [type(call["function"]["arguments"]).__name__ for call in calls]


@pytest.mark.parametrize("name", [name for name in TEMPLATES if "content" in TEMPLATES[name]])  # theirs refuses the rest
def test_going_on_with_the_last_message(both, name, seed):
    """Its text may end in whitespace, which some templates trim; it may be a part of a list, or what was thought."""
    rng, roles, num_texts = random.Random(seed + 1), TAKES_LISTS.get(name, ()), 0
    print("seed", seed + 1)
    for i in range(NUM_CHATS // 2):
        chat = random_chat(rng, simple=i % 2 == 0)
        text = rng.choice(["The sum is", "The sum is ", "ok \n", "", "\n x", "<think>\nso", "<think>a</think>b "])
        last = {"role": "assistant", "content": rng.choice([text, text, [{"type": "text", "text": text}]])}
        field = True
        if rng.random() < 0.2:
            last[rng.choice(["reasoning_content", "reasoning", "thinking"])], field = "so ", "reasoning_content"
        options = {"continue_final_message": field, "add_generation_prompt": False, **rng.choice(OPTIONS)}
        chat = (with_dicts(chat) if "keys of arguments" in name else chat) + [last]
        num_texts += compare(both, chat, TEMPLATES[name], options, joined(chat, roles)) is not None
    assert num_texts >= (0 if name == "loops and macros" else NUM_CHATS // 40)  # which writes no content


# --- what is different on purpose


@pytest.mark.parametrize("content", [[{"type": "text", "text": "Hello"}], ({"type": "text", "text": "Hello"},), ["Hello"]])
def test_parts_are_joined_for_templates_that_lose_them(both, content):
    chat = [{"role": "user", "content": content}]
    for name, template in TEMPLATES.items():
        text = ChatTemplate({"default": template}, SPECIAL).render(chat, add_generation_prompt=False)
        plain = ChatTemplate({"default": template}, SPECIAL).render([{"role": "user", "content": "Hello"}], add_generation_prompt=False)
        assert text == plain or name in TAKES_LISTS, name
        assert "Hello" in text or name == "loops and macros" or content == ["Hello"]
    part = [{"role": "user", "content": {"type": "text", "text": "Hello"}}]  # in no list
    assert "Hello" in ChatTemplate({"default": TEMPLATES["plain ChatML"]}, {}).render(part)
    several = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]}]
    assert ChatTemplate({"default": TEMPLATES["plain ChatML"]}, {}).render(several, add_generation_prompt=False) == (
        "<|im_start|>user\na\nb\nc<|im_end|>\n"
    )
    assert ChatTemplate({"default": "{{ messages[0].content }}|"}, {}).render([{"role": "user", "content": []}]) == "|"


def test_a_part_that_would_be_lost_is_refused():
    image = [{"role": "user", "content": [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(ValueError, match=r"messages\[0\]: part 1 of its content is \{'type': 'image_url'.* the template leaves out"):
        ChatTemplate({"default": TEMPLATES["plain ChatML"]}, {}).render(image)
    for name in ("Qwen3: tools, thinking, grouped results of tools", "plain ChatML", "trims"):  # no text is beside it
        for part in ({"type": "document", "title": "x"}, {"type": "text"}, {"type": "text", "text": 5}, {"type": "text", "text": None}, 5, None, ["a"]):
            with pytest.raises(ValueError, match=r"messages\[1\]: part 0 of its content is .* the template leaves out"):
                ChatTemplate({"default": TEMPLATES[name]}, {}).render([{"role": "user", "content": "x"}, {"role": "user", "content": [part]}])
    chat = [{"role": "user", "content": [{"type": "image"}]}]
    taken = ChatTemplate({"default": TEMPLATES["takes lists: a loop over parts"]}, {}).render(chat, add_generation_prompt=False)
    assert taken == "<user><|image|></s>\n"
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    taken = ChatTemplate({"default": TEMPLATES["takes lists: a loop over parts"]}, {}).render(chat, add_generation_prompt=False)
    assert taken == "<user><|image|>what?</s>\n"


def test_a_result_of_a_tool_that_is_a_dict(both):
    """A template that takes it writes it; one that would write nothing, as Qwen3's own, is no silent loss."""
    chat = [{"role": "user", "content": "x"}, {"role": "tool", "content": {"temp": 5}}, {"role": "user", "content": "y"}]
    for name, template in TEMPLATES.items():
        if name in ("Qwen3: tools, thinking, grouped results of tools", "takes lists: a macro"):
            with pytest.raises(ValueError, match=r"messages\[1\]: content is \{'temp': 5\}, which the template leaves out"):
                ChatTemplate({"default": template}, SPECIAL).render(chat)
        else:
            compare(both, chat, template, {"add_generation_prompt": False})


def test_arguments_as_text_become_dicts_where_the_template_fails():
    template = TEMPLATES["keys of arguments"]
    for given in ({"a": 1, "q": "<\u00e9>"}, '{"a": 1, "q": "<\u00e9>"}'):
        calls = [{"type": "function", "function": {"name": "f", "arguments": given}}]
        chat = [{"role": "user", "content": [{"type": "text", "text": "x"}]}, {"role": "assistant", "content": "", "tool_calls": calls}]
        assert ChatTemplate({"default": template}, {}).render(chat) == "user:x;assistant:<call f><a>1</a><q><\u00e9></q></call>;"
    for bad in ("no JSON", "[1]"):  # of a call that was cut, which a client sends back
        calls[0]["function"]["arguments"] = bad
        assert f"<call f><invalid_json>{bad}</invalid_json></call>" in ChatTemplate({"default": template}, {}).render(chat)


def test_absent_content_is_an_empty_text_where_the_template_fails():
    """As OpenAI's clients send calls back; lists of calls that are empty, too."""
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "assistant", "content": "y", "tool_calls": []}]
    taken_apart = "{% for m in messages %}[{{ m.content.split('</think>')[-1] }}]{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}{% endfor %}"
    assert ChatTemplate({"default": taken_apart}, {}).render(chat) == '[x][]{"a": 1}[y]'
    both = taken_apart.replace("arguments", "arguments.items() | list")
    assert ChatTemplate({"default": both}, {}).render(chat) == "[x][][('a', 1)][y]"
    counted = "{% for m in messages %}{% if 'tool_calls' in m and m.tool_calls | length != 1 %}{{ raise_exception('no') }}{% endif %}<{{ m.content }}>{% endfor %}"
    assert ChatTemplate({"default": counted}, {}).render(chat) == "<x><><y>"
    kept = "{% for m in messages %}{{ m.content is defined }} {% endfor %}"
    assert ChatTemplate({"default": kept}, {}).render(chat) == "True False True "


# --- what is the same in both, one by one


ODD = {
    "an object of the caller's is the name of its type": ({"x": object(), "when": pytest}, "{{ messages[0].x }}{{ messages[0].when }}"),
    "None within a message stays": ({"x": {"y": None}}, "{{ messages[0].x }}"),
    "numbers of NumPy": ({"x": __import__("numpy").float32(1.5), "y": __import__("numpy").bool_(False)}, "{{ messages[0].x }}{{ messages[0].y }}"),
    "the order of keys": ({"b": 1, "reasoning": "r", "a": 2}, "{{ messages[0] | tojson }}"),
    "thinking beside reasoning": ({"reasoning": "r", "thinking": "t"}, "{{ messages[0] | tojson }}"),
    "an empty thought": ({"reasoning": "", "thinking": None}, "{{ messages[0] | tojson }}"),
    "positional options of tojson": ({}, "{{ messages[0] | tojson(false, 2) }}"),
    "a wrong option of tojson": ({}, "{{ messages[0] | tojson(cls='x') }}"),
    "a namespace": ({}, "{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}{{ dict(a=n.a) }}"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_messages(both, name):
    more, template = ODD[name]
    compare(both, [{"role": "user", "content": "c", **more}], template, {})


@pytest.mark.parametrize("tools", [None, [], TOOLS, [Sent(**TOOLS[0])]])
def test_which_template_is_for_tools(both, tools):
    theirs, _ = both
    templates = {"default": "one {{ tools }}", "tool_use": "two {{ tools }}"}
    theirs.chat_template = templates
    chat = [{"role": "user", "content": "x"}]
    expected = rendered(theirs.apply_chat_template, chat, tools=tools, tokenize=False)
    theirs.chat_template = None
    got = ChatTemplate(templates, {}).render(chat, tools=tools)
    assert got == (expected or f"two {TOOLS[:1]}")  # theirs takes no tools that are objects


@pytest.mark.parametrize("tools", ["add", [len], [3], {"type": "function"}])
def test_tools_that_are_no_schemas(tools):
    with pytest.raises(TypeError, match="tools"):
        ChatTemplate({"default": "x"}, {}).render([{"role": "user", "content": "x"}], tools=tools)
