"""pagedkv batch: each request of a file is answered once, also after a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import extra_serve  # noqa: F401
import pytest
from served import DEMO, ENGINE

from pagedkv import LLM, SamplingParams, cli
from pagedkv.serve.batch import AnswerFile, RequestFile

OPTIONS = ["--model", str(DEMO), "--device", "cpu", "--num-blocks", "400"]


def line(custom_id, url="/v1/completions", **body):
    return {"custom_id": str(custom_id), "method": "POST", "url": url, "body": body}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    assert len({row["custom_id"] for row in rows}) == len(rows) and len({row["id"] for row in rows}) == len(rows)
    return {row["custom_id"]: row["response"] for row in rows}


def run(capsys, *words):
    code = cli.main(["batch", *map(str, words), *OPTIONS])
    return code, capsys.readouterr().err.splitlines()[-1]


def test_answers_of_every_kind(tmp_path, capsys):
    messages = [{"role": "user", "content": "473+89="}]
    (tmp_path / "template").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    requests = write(tmp_path / "in", [
        line("a", prompt="473+89=", model="any"), line("b", "/v1/chat/completions", messages=messages), line("c", "/v1/responses", input="473+89="),
        line("d", "/v1/messages", messages=messages, max_tokens=9), line("e", "/v1/embeddings", input="1"), line("f", prompt=""), line("é", prompt=["1+1=", "2+2="], n=2, temperature=1),
    ])  # fmt: skip
    code, said = run(capsys, requests, "-o", tmp_path / "out", "--chat-template", tmp_path / "template")
    assert (code, said) == (0, "pagedkv batch: 5 answered, 2 refused or failed, 0 were there")
    found = read(tmp_path / "out")
    body = {name: response["body"] for name, response in found.items()}
    assert {name: response["status_code"] for name, response in found.items()} == dict.fromkeys(
        "abcdé", 200
    ) | dict.fromkeys("ef", 400)
    assert body["a"]["choices"][0]["text"] == body["b"]["choices"][0]["message"]["content"] == "562"
    assert body["a"]["model"] == "any"
    assert body["c"]["output"][0]["content"][0]["text"] == body["d"]["content"][0]["text"] == "562"
    assert len(body["é"]["choices"]) == 4
    assert "the prompt is empty" in body["f"]["error"]["message"]
    assert "is no embedding model" in body["e"]["error"]["message"]
    before = (tmp_path / "out").read_bytes()
    assert run(capsys, requests, "-o", tmp_path / "out") == (0, "pagedkv batch: 0 answered, 0 refused or failed, 7 were there")
    assert (tmp_path / "out").read_bytes() == before


def test_a_run_that_is_killed_goes_on(tmp_path, capsys):
    """Twice, and the second time within a line."""
    prompts = [f"{a}+{b}=" for a in range(30) for b in range(20)]
    with LLM(DEMO, **ENGINE) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False)
    requests = write(tmp_path / "in", [line(i, prompt=prompt, max_tokens=40, ignore_eos=True, temperature=0) for i, prompt in enumerate(prompts)])
    out = tmp_path / "out"
    counts = [0]
    for _ in range(2):
        command = [sys.executable, "-m", "pagedkv", "batch", str(requests), "-o", str(out), "--at-a-time", "8", *OPTIONS]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            end = time.monotonic() + 60
            while not out.exists() or out.read_bytes().count(b"\n") < counts[-1] + 20:
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.01)
            process.kill()
        counts.append(out.read_bytes().count(b"\n"))
        assert counts[-1] < len(prompts), "it was too fast for the test"
        with open(out, "ab") as file:
            file.write(b'{"id":"batch_req_1","custom_id":"5')
    code, said = run(capsys, requests, "-o", out)
    assert code == 0
    assert said == f"pagedkv batch: {len(prompts) - counts[-1]} answered, 0 refused or failed, {counts[-1]} were there"
    found = read(out)
    pairs = [(found[str(i)]["body"], output) for i, output in enumerate(outputs)]
    assert all(body["usage"]["completion_tokens"] == 40 for body, _ in pairs)
    same = sum(body["choices"][0]["text"][:3] == output.text[:3] for body, output in pairs)
    assert same > 0.95 * len(prompts)  # the rounding of other batches turns the rest


@pytest.mark.parametrize(("rows", "text"), [
    (["{"], "in:1: no JSON"), ([line("a", prompt="\ud800")], "in:1: no JSON"), ([json.dumps(line("a", top_p=9)).replace("9", "NaN")], "in:1: no JSON"), (["[]"], "in:1: no JSON object"), ([line("a"), {"url": "/v1/completions", "body": {}}], "in:2: custom_id is None"),
    ([line("a"), "", line("a")], "in:3: custom_id is 'a', as in a line before"), ([line("a", "/v1/files")], "in:1: POST /v1/files is not served"),
    ([line("a") | {"method": "GET"}], "GET /v1/completions is not served"), ([line("a") | {"body": None}], "body is missing"), ([line("a", stream=True)], "stream is true"),
], ids=str)  # fmt: skip
def test_wrong_requests_are_named_before_anything_is_done(tmp_path, capsys, rows, text):
    (tmp_path / "in").write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    code, said = run(capsys, tmp_path / "in", "-o", tmp_path / "out")
    assert code == 1 and text in said and not (tmp_path / "out").exists()


def test_the_model_that_the_requests_name(tmp_path, capsys):
    for rows, text in (([line("a", prompt="1")], "the requests name no model"), ([line("a", model="x"), line("b", model="y")], "the requests name x, y")):
        write(tmp_path / "in", rows)
        assert cli.main(["batch", str(tmp_path / "in"), "-o", str(tmp_path / "out")]) == 1
        assert f"--model is missing: {text}" in capsys.readouterr().err
    write(tmp_path / "in", [line("a", model=str(DEMO), prompt="1+1=")])
    assert cli.main(["batch", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--device", "cpu"]) == 0
    assert read(tmp_path / "out")["a"]["body"]["choices"][0]["text"] == "2"


def test_a_pipe_of_requests_is_refused(tmp_path, capsys):
    """It would be empty when the answers are to be given, after its lines have been checked."""
    os.mkfifo(tmp_path / "pipe")
    code, said = run(capsys, tmp_path / "pipe", "-o", tmp_path / "out")
    assert code == 1 and "pipe: a pipe, but" in said and not (tmp_path / "out").exists()


def test_files_of_answers_that_are_others(tmp_path):
    requests = RequestFile(write(tmp_path / "in", [line("a"), line("b")]))
    a = '{"id":"batch_req_1","custom_id":"a"}\n'
    c = a.replace('"a"', '"c"')
    for rows, text in (([a, '{"id":"batch_req_1"}\n'], "out:2: custom_id is None, which is none"), ([a.replace('"a"', "[]")], r"custom_id is \[\], which"), ([c], "custom_id is 'c', which is none"),
                       ([a, a], "out:2: custom_id is 'a', as in"), (['{"id":"batch_req_1\n', a], "out:1: no JSON"), ([a, "my notes"], "out:2: no answer of a batch"),
                       ([(tmp_path / "in").read_text()], "out:1: no answer of a batch"), ([json.dumps(line("a"))], "out:1: no answer of a batch")):
        content = "".join(rows)
        (tmp_path / "out").write_text(content)
        with pytest.raises(ValueError, match=text):
            AnswerFile(tmp_path / "out", requests.ids)
        assert (tmp_path / "out").read_text() == content
    with pytest.raises(ValueError, match="/dev/full: no file that answers can be kept in"):
        AnswerFile(Path("/dev/full"), requests.ids)
    (tmp_path / "out").unlink()
    answers = AnswerFile(tmp_path / "out", requests.ids)
    with pytest.raises(ValueError, match="another process writes it"):
        AnswerFile(tmp_path / "out", requests.ids)
    answers.add("a", 200, {"x": 1})
    answers.close()
    again = AnswerFile(tmp_path / "out", requests.ids)
    assert again.done == {"a"}
    again.close()


def test_a_full_disk_leaves_no_half_of_a_line(tmp_path, monkeypatch):
    answers = AnswerFile(tmp_path / "out", {"a": None, "b": None})
    answers.add("a", 200, {})
    size, write_all = (tmp_path / "out").stat().st_size, os.write

    def some(file, data):
        if len(data) < 60:
            raise OSError(28, "No space left on device")
        return write_all(file, data[:50])

    monkeypatch.setattr(os, "write", some)
    with pytest.raises(OSError, match="No space"):
        answers.add("b", 200, {"text": "x" * 100})
    assert (tmp_path / "out").stat().st_size == size and answers.done == {"a"}
    answers.close()
