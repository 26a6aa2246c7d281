"""The page at /: what the engine tells of itself, who may see it, and the page in a browser."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import extra_serve  # noqa: F401
import httpx
import numpy as np
import pytest
from browser import CHROMIUM, browser
from served import COMPLETIONS, DEMO, CountingClient, model_of, serving, wait_for, write_long_model

import pagedkv.serve.page
from pagedkv import LLM, AsyncEngine, SamplingParams
from pagedkv.cli import command_line
from pagedkv.engine.requests import view

HTML = (Path(pagedkv.serve.__file__).parent / "page.html").read_text()
PLACES = 3
KEY = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_long_model(tmp_path_factory.mktemp("model") / "demo", 30_000)
    with LLM(
        folder, device="cpu", dtype="float32", block_size=4, num_blocks=16_000, max_num_seqs=PLACES, seed=0
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def url(llm):
    with serving(AsyncEngine(llm)) as (url, _):
        yield url


@contextmanager
def endless(url, *prompts):
    """Answers on their way, which end with the context."""
    is_over = threading.Event()

    def read(prompt):
        body = {"prompt": prompt, "max_tokens": 29_000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}{COMPLETIONS}", json=body, timeout=30) as response:
            for _ in response.iter_raw():
                if is_over.is_set():
                    return

    with ThreadPoolExecutor(len(prompts)) as threads:
        done = [threads.submit(read, each) for each in prompts]
        try:
            counts = min(PLACES, len(prompts)), max(0, len(prompts) - PLACES)
            wait_for(lambda: (state_of(url)["num_running"], state_of(url)["num_waiting"]) == counts)
            yield
        finally:
            is_over.set()
    for each in done:
        each.result()


def state_of(url, **headers) -> dict:
    """Of this moment: a view is kept for a second, which no test waits for."""
    response = httpx.get(f"{url}/page/state", headers=headers, timeout=30)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(pagedkv.serve.page, "FRESH", 0.0)


# --- what the engine tells


@pytest.mark.parametrize("num_tables", [0, 1, 7, 40])
def test_runs_of_pages(seed, num_tables):
    """Tables that share beginnings, as a tree has them, against a count page by page."""
    rng, tables = random.Random(seed), []
    pages = iter(rng.sample(range(100_000), 5000))
    for _ in range(num_tables):
        parent = rng.choice([[], *tables])
        tables.append(parent[: rng.randrange(len(parent) + 1)] + [next(pages) for _ in range(rng.choice((0, 1, 60)))])
    users = {page: sum(page in table for table in tables) for table in tables for page in table}
    runs = view.page_runs([np.array(table, np.int32) for table in tables])
    assert len(runs) == num_tables
    for table, of_table in zip(tables, runs):
        at, before = 0, None
        for first, count, number in of_table:
            assert first == table[at] and {users[page] for page in table[at : at + count]} == {number} and number != before
            at, before = at + count, number
        assert at == len(table)


def test_a_view_is_of_that_moment(llm, url):
    shared, lengths = "1+1=2 " * 40, (3, 50, 9)
    with endless(url, *(shared + "7" * length for length in lengths), "1+1=", "2+2="):
        states = [state_of(url) for _ in range(3)]
        for state in states:
            assert (state["num_running"], state["num_waiting"]) == (PLACES, 2)
            assert (state["block_size"], state["num_blocks"], state["model"]) == (4, 16_000, "demo")
            own = shared_pages = 0
            seen = {}
            for each in state["running"]:
                assert sum(count for _, count, _ in each["runs"]) * 4 >= each["computed"] >= each["prompt_tokens"]
                assert each["computed"] - each["prompt_tokens"] - each["new_tokens"] in (-1, 0, 1)
                assert 0 <= each["cached"] <= each["prompt_tokens"] and each["max_tokens"] == 29_000
                own += sum(count for _, count, users in each["runs"] if users == 1)
                seen |= {first: count for first, count, users in each["runs"] if users > 1}
            shared_pages = sum(seen.values())
            assert own + shared_pages == state["num_used"], "every page in use is somebody's"
            assert [each["runs"] for each in state["waiting"]] == [[], []]
        sums = [(state["time"], state["new_tokens"], *state["between_tokens"]) for state in states]
        assert sums == sorted(sums) and sums[0] < sums[-1]
        runs, waits = (httpx.get(f"{url}/page/explain", params={"id": states[-1][name][0]["id"]}) for name in ("running", "waiting"))
        assert "runs: " in runs.json()["text"]
        assert "all 3 places (max_num_seqs) are taken" in waits.json()["text"]
    wait_for(lambda: state_of(url)["num_used"] == 0)
    state = state_of(url)
    assert state["running"] == state["waiting"] == [] and state["hit_tokens"] > 0 and state["first_token"][1] >= 3


def test_a_view_lists_a_bounded_number(monkeypatch, llm, url):
    monkeypatch.setattr(view, "MAX_RUNNING", 2)
    monkeypatch.setattr(view, "MAX_WAITING", 1)
    with endless(url, *["1+1="] * (PLACES + 2)):
        state = state_of(url)
        assert [state["num_running"], state["num_waiting"], len(state["running"]), len(state["waiting"])] == [PLACES, 2, 2, 1]


def test_views_of_an_engine_are_refused_once_it_is_closed():
    with LLM(DEMO, device="cpu", num_blocks=64) as llm:
        assert llm.view().num_blocks == 64 and llm.view().running == []
    with pytest.raises(RuntimeError, match="closed"):
        llm.view()


def test_a_cancelled_view_disturbs_nobody(llm):
    """It is in the engine's inbox, or is being taken: a step goes on, and later views are whole."""

    async def run():
        engine = AsyncEngine(llm)
        for _ in range(50):
            task = asyncio.ensure_future(engine.view())
            await asyncio.sleep(0)
            task.cancel()
        assert await engine.explain("nobody") is None
        return await engine.view()

    expected = llm.generate("473+89=", SamplingParams(temperature=0), use_tqdm=False)[0].text
    assert asyncio.run(run()).num_blocks == 16_000
    assert llm.generate("473+89=", SamplingParams(temperature=0), use_tqdm=False)[0].text == expected


# --- who may see it


class ViewClient(CountingClient):
    """Takes its time for a view, or never gives one."""

    num_views, problem, is_stuck = 0, None, False

    async def view(self):
        self.num_views += 1
        await asyncio.sleep(60 if self.is_stuck else 0.2)
        if self.problem is not None:
            raise self.problem
        return view.EngineView(1.0, 0, 0, 4, 8, 0, 0, [], [], 0, 0, 0, (0.0, 0), (0.0, 0))

    async def explain(self, request_id):
        raise RuntimeError("the engine's process has ended")


@contextmanager
def serving_client(**options):
    client = ViewClient()
    with serving(client, model_of(), **options) as (url, _), httpx.Client(base_url=url, timeout=30) as http:
        yield client, http


def test_nobody_looks_and_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(pagedkv.serve.page, "FRESH", 30.0)
    with serving_client() as (client, http):
        for path in ("/", "/health", "/metrics"):
            assert http.get(path).status_code == 200
        assert client.num_views == 0
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda _: state_of(str(http.base_url).rstrip("/")), range(8)))
        assert client.num_views == 1 and all(each == found[0] for each in found)


def test_an_engine_that_gives_no_view_is_no_hanging_page(monkeypatch):
    monkeypatch.setattr(pagedkv.serve.page, "PATIENCE", 0.3)
    with serving_client() as (client, http):
        client.problem = RuntimeError("the engine's process has ended")
        for path in ("/page/state", "/page/explain?id=1"):
            response = http.get(path)
            assert response.status_code == 503 and "has ended" in response.json()["error"]["message"]
        client.problem = None
        assert http.get("/page/state").status_code == 200
        client.is_stuck = True
        response = http.get("/page/state")
        assert response.status_code == 503 and "in a step" in response.json()["error"]["message"]


def test_keys(llm):
    with serving(AsyncEngine(llm), api_keys=["secret"]) as (url, _):
        assert httpx.get(f"{url}/").text == HTML, "it asks for the key"
        for path in ("/page/state", "/page/explain?id=1", "/page/"):
            assert httpx.get(url + path).status_code == 401
            assert httpx.get(url + path, headers={"authorization": "Bearer other"}).status_code == 401
        assert state_of(url, **KEY)["num_running"] == 0
        assert httpx.get(f"{url}/page/explain?id=1", headers=KEY).json() == {"id": "1", "text": None}


def test_wrong_requests(url):
    assert httpx.get(f"{url}/page/explain").json()["error"]["param"] == "id"
    assert httpx.get(f"{url}/page/explain?id=").json() == {"id": "", "text": None}
    assert httpx.post(f"{url}/page/state").status_code == 405


def test_it_can_be_switched_off(llm, monkeypatch):
    with serving(AsyncEngine(llm), with_page=False) as (url, _):
        for path in ("/", "/page/state", "/page/explain?id=1"):
            assert httpx.get(url + path).status_code == 404
    for words, with_page in ([], True), (["--no-page"], False):
        given = []
        monkeypatch.setattr("pagedkv.serve.supervisor.Supervisor.__init__", lambda self, listener, front, count: given.append(front))
        monkeypatch.setattr("pagedkv.serve.supervisor.Supervisor.run", lambda *each: asyncio.sleep(0, 0))
        command_line.run(["serve", "model", "--port", "0", *words])
        assert given[0].app["with_page"] == with_page


# --- the file


def test_the_file_is_alone_and_trusts_no_text(url):
    found = httpx.get(f"{url}/")
    assert found.text == HTML and found.headers["content-type"].startswith("text/html")
    policy = found.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "http" not in policy
    assert policy.count("sha256-") == 2 and "connect-src 'self'" in policy
    rest = HTML.replace("http://www.w3.org/2000/svg", "")  # the name of SVG's elements, which nobody fetches
    assert "//" not in re.sub(r"//( |$)", "", rest, flags=re.MULTILINE), "no other host"
    for word in (
        "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", " style=", "Storage",
        "cookie",
    ):
        assert word not in HTML, word
    assert not re.search(r"\son\w+=", HTML), "no handlers in the markup, which the policy forbids"
    assert HTML.count("\n") <= 500


# --- in a browser

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def ask_by_keyboard(tab, text) -> str:
    """The answer."""
    tab.evaluate("document.getElementById('message').focus()")
    tab.write(text)
    tab.press("Enter", text="\r")
    tab.until("document.getElementById('log').hasAttribute('aria-busy') || document.querySelector('.assistant')")
    tab.until("!document.getElementById('log').hasAttribute('aria-busy')")
    return tab.evaluate("[...document.querySelectorAll('.assistant > .text')].at(-1).textContent")


@needs_browser
def test_a_running_request_is_shown_and_explained(tab, llm, url):
    tab.errors.clear()
    prompt = "12+34=46 " * 9
    num_shared = len(llm.tokenizer.encode(prompt)) // 4
    with endless(url, *[prompt] * (PLACES + 1)):
        tab.open(url)
        tab.until(f"document.querySelectorAll('#requests li').length === {PLACES + 1}")
        assert tab.text("h1") == "pagedkv demo" and tab.text("#status") == "busy"
        assert tab.text("#requests-text").startswith("3 run, 1 wait.")
        text = tab.text("#pool-text")
        assert text.startswith("Of 16,000 pages of 4 tokens ") and f"({num_shared} by several answers)" in text
        assert tab.evaluate("document.getElementById('pool').getAttribute('aria-label')") == text
        tab.until("Number(document.querySelector('figure b').textContent.replaceAll(',', '')) > 0")  # tokens/s
        tab.evaluate("[...document.querySelectorAll('#requests button')].at(-1).focus()")
        tab.press("Enter", text="\r")
        told = tab.until("[...document.querySelectorAll('#requests pre')].at(-1).textContent")
        assert told.startswith("answer 0: waits behind 0 others: all 3 places (max_num_seqs) are taken")
        drawn = tab.evaluate("[...new Set(cells)].filter(each => each.hue !== undefined).map(each => [each.kind, each.owners.length])")
        assert drawn == [["shared", PLACES]] + [["own", 1]] * PLACES
        assert len(set(tab.evaluate("cells.map(each => each.colour)"))) >= PLACES + 2, "and what is free"
    tab.until("document.getElementById('status').textContent === 'idle'")
    tab.until("document.querySelectorAll('#requests li').length === 1")  # that which has the focus stays
    assert "has ended" in tab.text("#requests")
    assert tab.errors == []


@needs_browser
def test_an_answer_arrives(tab, llm, url):
    tab.errors.clear()
    long = "5+5=10 " * 9 + "473+89="
    ids = llm.tokenizer.encode(long)
    num_found = len(ids) // 4 * 4
    expected = llm.generate(long, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False, salt=b"other")[0].text
    tab.open(url)
    assert ask_by_keyboard(tab, "473+89=") == "562"
    tab.evaluate("document.getElementById('kind').value = 'text'")
    assert ask_by_keyboard(tab, long) == expected
    assert ask_by_keyboard(tab, long) == expected
    tab.until("document.querySelectorAll('.turn:last-child mark').length === 2")
    parts = tab.evaluate("[...document.querySelectorAll('.turn:last-child mark')].map(each => [each.className, each.textContent])")
    assert parts == [["hit", llm.tokenizer.decode(ids[:num_found])], ["", llm.tokenizer.decode(ids[num_found:])]]
    tab.evaluate("document.getElementById('tokens').value = 2")
    assert ask_by_keyboard(tab, "473+89=") == "56"
    assert "cut: it has as many tokens as it may have" in tab.text(".turn:last-child")
    tab.evaluate("document.getElementById('tokens').value = 100000000")
    ask_by_keyboard(tab, "473+89=" * 5000)
    assert "30,000" in tab.text(".turn:last-child .error") or "30000" in tab.text(".turn:last-child .error")
    tab.errors = [each for each in tab.errors if "400" not in each.get("text", "")]
    assert tab.errors == []


@needs_browser
def test_comments_of_a_silent_stream_are_passed_over(tab, url):
    tab.open(url)
    text = json.dumps(': keep-alive\n\ndata: {"a": 1}\n\n: keep-alive\n\ndata: {"a": 2}\n\ndata: [DONE]\n\n')
    found = tab.evaluate(f"(async () => {{ const all = []; for await (const each of eventsOf(new Response({text}))) all.push(each.a); return all; }})()")
    assert found == [1, 2]


@needs_browser
def test_an_answer_is_stopped(tab, url, llm):
    tab.open(url)
    tab.evaluate("document.getElementById('kind').value = 'text'; document.getElementById('message').focus()")
    monster = "1+1=2 " * 50
    with endless(url, *[monster] * PLACES):  # so that the next one waits
        tab.write(monster)
        tab.press("Enter", text="\r")
        wait_for(lambda: state_of(url)["num_waiting"] == 1)
        tab.evaluate("document.getElementById('message').focus()")
        tab.press("Escape")
        tab.until("document.querySelector('.turn:last-child').textContent.endsWith('stopped')")
        wait_for(lambda: state_of(url)["num_waiting"] == 0)


@needs_browser
def test_thinking_is_folded(tab, url):
    """By what a server would send: the demo model has no thoughts."""
    tab.open(url)
    cases = {
        "<think>\nlong\n</think>\n\nshort": ("long", "short"), "<think>still": ("still", ""), "plain <b>text</b>": ("", "plain <b>text</b>"),
        "<think>\n\n</think>\n\nshort": ("", "short"), "a </think> b": ("", "a </think> b"),
    }  # fmt: skip
    for text, expected in cases.items():
        chunks = [{"choices": [{"delta": {"content": each}}]} for each in text]
        script = f"""(async () => {{
            ask = async () => new Response({json.dumps(chunks)}.map(each => "data: " + JSON.stringify(each) + "\\n\\n").join(""));
            await answer("question", new AbortController().signal);
            const box = document.querySelector(".turn:last-child"), fold = box.querySelector("details");
            return [fold.hidden, fold.open, fold.querySelector(".text").textContent, box.querySelector(":scope > .text").textContent];
        }})()"""
        assert tab.evaluate(script) == [not expected[0], False, *expected], text


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(tab, url, scheme):
    tab.prefer(scheme)
    tab.resize(360, 740, is_phone=True)
    with endless(url, "1+1="):
        tab.open(url)
        tab.until("document.querySelectorAll('#requests li').length === 1")
        assert tab.evaluate("document.documentElement.scrollWidth") == 360
        small = "[...document.querySelectorAll('button')].filter(each => each.offsetParent && each.offsetHeight < 36).length"
        assert tab.evaluate(small) == 0
        back, text = (tab.evaluate(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color"))
        dark = [sum(map(int, re.findall(r"\d+", each)[:3])) < 384 for each in (back, text)]
        assert dark == [scheme == "dark", scheme == "light"]


@needs_browser
def test_controls_have_names(tab, url):
    """As the browser tells screen readers."""
    tab.open(url)
    nodes = tab.do("Accessibility.getFullAXTree")["nodes"]
    named = [(each["role"]["value"], each.get("name", {}).get("value", "")) for each in nodes if not each["ignored"]]
    for role, name in named:
        assert name or role not in ("button", "textbox", "combobox", "checkbox", "spinbutton", "image", "region"), role
    assert {name for role, name in named if role == "region"} == {"Pool", "The last two minutes", "Requests", "Chat"}
    assert ("log", "conversation") in named and "status" in {role for role, _ in named}


@needs_browser
def test_the_key_is_asked_for(tab, llm):
    with serving(AsyncEngine(llm), api_keys=["secret"]) as (url, _):
        tab.open(url)
        tab.until("document.activeElement.id === 'key'")
        for key, is_right in (("wrong", False), ("secret", True)):
            tab.write(key)
            tab.press("Enter", text="\r")
            wanted = "=== 'idle'" if is_right else ".includes('missing or wrong')"
            tab.until(f"document.getElementById('status').textContent{wanted} && document.getElementById('keys').hidden === {str(is_right).lower()}")
        assert ask_by_keyboard(tab, "473+89=") == "562"
        assert tab.evaluate("JSON.stringify([document.cookie, Object.keys(localStorage), location.href])").count("secret") == 0
        tab.open(url)
        tab.until("document.activeElement.id === 'key'")  # it was nowhere but in the page
