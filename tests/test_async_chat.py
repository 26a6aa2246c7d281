"""AsyncEngine's chats, embeddings and dict prompts, beside LLM's."""

from __future__ import annotations

import asyncio
import inspect

import numpy as np
import pytest
from checkpoints import write_model
from tiny_engine import GREEDY

from pagedkv import LLM, AsyncEngine

OPTIONS = {"device": "cpu", "block_size": 4, "num_blocks": 200, "max_num_seqs": 8, "seed": 0}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is defined %}t{% endif %}{% if add_generation_prompt %}={% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("model"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def llm(folder):
    with LLM(folder, **OPTIONS) as llm:
        yield llm


def last(outputs) -> list[int]:
    async def read():
        return [output async for output in outputs][-1].token_ids

    return read()


def test_chats(llm):
    chat = [{"role": "user", "content": [{"type": "text", "text": "12"}]}, {"role": "assistant", "content": "+3", "tool_calls": None}]
    ways = [{}, {"enable_thinking": False}, {"continue_final_message": True}, {"chat_template": "abc"}, {"add_generation_prompt": False},
            {"chat_template_kwargs": {"enable_thinking": True}}]  # fmt: skip
    expected = [llm.chat(chat, GREEDY, use_tqdm=False, **way)[0].token_ids for way in ways]
    assert len({tuple(tokens) for tokens in expected}) > 2

    async def main():
        engine = AsyncEngine(llm)
        answers = await asyncio.gather(*(last(engine.chat(chat, GREEDY, f"id {i}", **way)) for i, way in enumerate(ways)))
        assert answers == expected
        with pytest.raises(ValueError, match=r"messages\[0\]: role is None"):
            await last(engine.chat([{"content": "x"}], GREEDY))
        with pytest.raises(TypeError, match="messages"):
            await last(engine.chat("12+3=", GREEDY))
        left = engine.chat(chat, GREEDY, "mine")
        assert (await anext(left)).request_id == "mine"
        await left.aclose()  # which aborts it
        assert [output async for output in engine.chat(chat, GREEDY, "mine")][-1].token_ids == expected[0]
        assert len(llm._book) == 0

    asyncio.run(main())
    assert llm.manager.stats()["used"] == 0


def test_embeddings_and_dicts(llm):
    prompts = ["12+34=", [1, 2, 3], {"prompt": "abc"}, {"prompt_token_ids": [4, 5]}, {"prompt": "a" * 5000}]
    expected = llm.embed(prompts, use_tqdm=False)
    greedy = [output.token_ids for output in llm.generate(prompts[:4], GREEDY, use_tqdm=False)]

    async def main():
        engine = AsyncEngine(llm)
        got = await asyncio.gather(*map(engine.embed, prompts))
        for one, other in zip(got, expected, strict=True):
            assert (one.prompt, one.prompt_token_ids, str(one.error)) == (other.prompt, other.prompt_token_ids, str(other.error))
            np.testing.assert_allclose(one.embedding, other.embedding, atol=1e-5)
        assert "exceed max_model_len=256" in str(got[-1].error) and got[-1].embedding.size == 0
        assert np.linalg.norm(got[0].embedding) == pytest.approx(1)
        assert await asyncio.gather(*(last(engine.generate(prompt, GREEDY)) for prompt in prompts[:4])) == greedy
        waiting = asyncio.ensure_future(engine.embed("abc"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(TypeError, match="a prompt is a string or a list of token ids, not 3"):
            await engine.embed(3)

    asyncio.run(main())
    assert llm.manager.stats()["used"] == 0


def test_a_class_of_ones_own(folder):
    class Mine(AsyncEngine):
        def __init__(self, model, label, **options):
            super().__init__(model, **options)
            self.label = label

    assert "num_blocks" in inspect.signature(AsyncEngine).parameters
    assert list(inspect.signature(Mine).parameters) == ["model", "label", "options"]
    engine = Mine(folder, "x", **OPTIONS)
    assert engine.label == "x" and engine.engine.default_params.max_tokens is None
    engine.close()
