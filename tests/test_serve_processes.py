"""`pagedkv serve` as it is started: an engine's process, front ends, and what is left when any of them is killed."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import extra_serve  # noqa: F401
import httpx
import pytest
from served import CHAT, COMPLETIONS, events_of, streamed, wait_for, write_long_model

from pagedkv import LLM, SamplingParams

NUM_REQUESTS = int(os.environ.get("PAGEDKV_TEST_REQUESTS", "200"))
NUM_CLIENTS = 64
LENGTH = 30_000
ENDLESS = {"prompt": "1+1=", "max_tokens": LENGTH - 10, "ignore_eos": True, "stream": True}  # for seconds
HOST, FRONT_END = "pagedkv.serve.host", "pagedkv.serve.front_end"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_long_model(tmp_path_factory.mktemp("model") / "demo", LENGTH)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    return folder


class Processes:
    def __init__(self, process: subprocess.Popen, url: str) -> None:
        self.process, self.url, self.all = process, url, []
        self.all = self.of("")

    def of(self, module: str) -> list[int]:
        """Ids of the supervisor's children that run this module."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid and module in (path / "cmdline").read_text():
                    found.append(int(path.name))
            except (FileNotFoundError, ProcessLookupError):
                pass
        self.all += [each for each in found if each not in self.all]
        return found

    def living(self) -> list[int]:
        return [each for each in [self.process.pid, *self.all] if is_alive(each)]

    def figure(self, name: str) -> float:
        return self.figures()[name]

    def figures(self) -> dict[str, float]:
        lines = [line.partition("{") for line in httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()]
        return {name: float(rest.split()[-1]) for name, brace, rest in lines if brace and name[0] != "#"}

    def is_idle(self) -> bool:
        figures = self.figures()
        return not any(figures[f"vllm:{name}"] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"))


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def server(folder, *options, code=None):
    """Started, and gone at the end, whatever happened."""
    command = ["serve", str(folder), "--port", "0", "--device", "cpu", "--max-num-seqs", "32", "--num-blocks", "20000", *options]
    argv = [sys.executable, "-m", "pagedkv", *command]
    if code is not None:
        argv = [sys.executable, "-"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.extend(process.stderr))
        reader.start()
        if code is not None:
            process.stdin.write(code.format(command=command))
        process.stdin.close()
        processes = None
        try:
            line = process.stdout.readline()
            assert " serves " in line, (line, errors)
            processes = Processes(process, line.split()[2])
            processes.errors = errors
            yield processes
            process.wait(20)
        finally:
            process.kill()
            if processes is not None:
                wait_for(lambda: not processes.living(), 15)
            reader.join(5)


def stop(processes: Processes) -> None:
    processes.process.send_signal(signal.SIGTERM)
    assert processes.process.wait(20) == 0, processes.errors


# --- many clients


def descriptors(process: int) -> int:
    return len(os.listdir(f"/proc/{process}/fd"))


def memory(process: int) -> int:
    """MiB that nobody else has."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) >> 10


class Client:
    """Asks for sums, rightly and wrongly; each answer is checked."""

    KINDS = (
        "whole", "stream", "several", "chat", "leave", "leave early", "hang up", "large", "malformed",
        "unauthorised", "unknown",
    )

    def __init__(self, url: str, texts: dict[str, str]) -> None:
        self.texts = texts
        self.address = (url.split("/")[2].split(":")[0], int(url.rpartition(":")[2]))
        self.http = httpx.Client(base_url=url, headers={"authorization": "Bearer two"}, timeout=60)

    def ask(self, kind: str, prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": 40, "temperature": 0}
        post = self.http.post
        if kind == "whole":
            assert post(COMPLETIONS, json=body).json()["choices"][0]["text"] == self.texts[prompt]
        elif kind == "stream":
            assert streamed(post(COMPLETIONS, json=body | {"stream": True}))[0]["text"] == self.texts[prompt]
        elif kind == "several":
            prompts = [prompt, "1+1=", prompt]
            parts = streamed(post(COMPLETIONS, json=body | {"prompt": prompts, "stream": True}))
            assert [parts[i]["text"] for i in range(3)] == [self.texts[each] for each in prompts]
        elif kind == "chat":
            chat = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 40}
            assert post(CHAT, json=chat).json()["choices"][0]["message"]["content"] == self.texts[prompt]
        elif kind == "leave":
            with self.http.stream("POST", COMPLETIONS, json=ENDLESS) as response:
                assert next(response.iter_bytes()).startswith(b"data: ")
        elif kind in ("leave early", "hang up"):
            content = json.dumps(ENDLESS | {"stream": kind == "hang up"}).encode()
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer one\r\ncontent-length: {len(content)}\r\n\r\n"
            with socket.create_connection(self.address) as connection:
                connection.sendall(head.encode() + content[: len(content) // (2 if kind == "hang up" else 1)])
                time.sleep(0.02)
        elif kind == "large":
            answer = post(COMPLETIONS, content=b"1" * 20_000)
            assert answer.status_code == 413, answer.text
        elif kind == "malformed":
            assert post(COMPLETIONS, json=body | {"temperature": "hot"}).status_code == 400
            assert post(COMPLETIONS, content=b'{"prompt": "1').status_code == 400
            with socket.create_connection(self.address) as connection:
                connection.sendall(b"nonsense\r\n\r\n")
                assert b"400" in connection.recv(100)
        elif kind == "unauthorised":
            assert post(COMPLETIONS, json=body, headers={"authorization": "Bearer three"}).status_code == 401
        else:
            assert post(COMPLETIONS, json=body | {"model": "other"}, headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"


def test_many_clients_of_whom_some_leave_and_some_are_wrong(folder, seed):
    """Every good answer is right; no page and no descriptor stays, and memory does not grow."""
    rng = random.Random(seed)
    prompts = ["1+1=", *(f"{rng.randrange(10, 99)}+{rng.randrange(10, 99)}=" for _ in range(30))]
    with LLM(folder, device="cpu", num_blocks=400) as llm:
        answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    texts = {prompt: each.text for prompt, each in zip(prompts, answers)}
    options = [
        "--front-ends", "2", "--api-key", "one", "--api-key", "two", "--max-body-size", "10000", "--num-blocks",
        "2000",
    ]
    with server(folder, *options) as processes, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [Client(processes.url, texts) for _ in range(NUM_CLIENTS)]

        def work(count):
            jobs = [(clients[i % NUM_CLIENTS], rng.choice(Client.KINDS), rng.choice(prompts)) for i in range(count)]
            for done in [pool.submit(client.ask, *job) for client, *job in jobs]:
                done.result()
            wait_for(processes.is_idle, 30)
            for client in clients:  # their connections are kept by the server, and so are its descriptors
                client.http.close()
            clients[:] = [Client(processes.url, texts) for _ in range(NUM_CLIENTS)]

        for kind in Client.KINDS:  # each once
            clients[0].ask(kind, prompts[0])
        work(NUM_REQUESTS // 2)
        time.sleep(0.3)
        before = [(descriptors(each), memory(each)) for each in processes.all]
        work(NUM_REQUESTS)
        wait_for(lambda: all(descriptors(each) <= count for each, (count, _) in zip(processes.all, before)), 5)
        after = [memory(each) for each in processes.all]
        pool = [63 if each in processes.of(HOST) else 0 for each in processes.all]  # whose pages are memory once they are used
        assert all(new <= old + 8 + more for new, (_, old), more in zip(after, before, pool)), (before, after)
        assert processes.figure("vllm:prompt_tokens_total") > 0 and len(processes.of("")) == 3, processes.errors
        stop(processes)
    assert processes.errors == [], "".join(processes.errors)


# --- the end of each of them


def start_streams(processes: Processes, count: int) -> list[tuple[httpx.Client, httpx.Response]]:
    """Whose first part has come. Each has a client, so each has a connection."""
    streams = []
    for _ in range(count):
        http = httpx.Client(base_url=processes.url, timeout=60)
        response = http.send(http.build_request("POST", COMPLETIONS, json=ENDLESS), stream=True)
        parts = response.iter_text()
        assert next(parts).startswith("data: ")
        streams.append((response, parts))
    return streams


def test_an_engine_that_is_killed(folder):
    """The page shows the requests of all front ends. Then clients are told, and the server ends with an error."""
    with server(folder, "--front-ends", "2") as processes:
        streams = start_streams(processes, 6)
        running = httpx.get(f"{processes.url}/page/state").json()["running"]
        assert len({each["id"] for each in running}) == 6
        assert all("are sampled" in httpx.get(f"{processes.url}/page/explain?id={each['id']}").json()["text"] for each in running)
        (engine,) = processes.of(HOST)
        os.kill(engine, signal.SIGKILL)
        for _, parts in streams:
            *_, last = events_of("data: " + "".join(parts).partition("data: ")[2])
            assert last["error"]["type"] == "service_unavailable_error" and "process has ended" in last["error"]["message"]
        assert processes.process.wait(20) == 1
        assert any("ended with -9" in line for line in processes.errors)


def is_cut(parts, seconds: float = 0.5) -> bool:
    """Whether the stream ends soon, without its end."""
    start = time.monotonic()
    try:
        while time.monotonic() < start + seconds:
            next(parts)
    except httpx.RemoteProtocolError:
        return True
    return False


def test_connections_may_be_more_than_a_shell_allows(folder):
    """The limit of descriptors that many systems start with is 1,024, as many as --max-answers alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        with server(folder) as processes:
            for process in processes.of(FRONT_END):
                assert resource.prlimit(process, resource.RLIMIT_NOFILE) == (max(512, min(hard, 65536)), hard)
            stop(processes)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_answers_are_counted_over_all_front_ends(folder):
    """Whichever has taken the connections; and those of one that is killed are not."""
    with server(folder, "--front-ends", "3", "--max-answers", "7") as processes, httpx.Client(base_url=processes.url) as http:

        def status(count):
            return http.post(COMPLETIONS, json={"prompt": ["1+1="] * count, "max_tokens": 1}).status_code

        streams = start_streams(processes, 6)
        assert [status(count) for count in (8, 2, 1)] == [400, 429, 200]
        os.kill(max(processes.of(FRONT_END), key=descriptors), signal.SIGKILL)
        num_left = 6 - sum(is_cut(parts) for _, parts in streams)
        assert 0 <= num_left < 6
        http.close()

        with httpx.Client(base_url=processes.url) as other:
            wait_for(lambda: other.post(COMPLETIONS, json={"prompt": ["1+1="] * (7 - num_left), "max_tokens": 1}).status_code == 200)
            assert other.post(COMPLETIONS, json={"prompt": ["1+1="] * (8 - num_left), "max_tokens": 1}).status_code in (400, 429)
        for response, _ in streams:
            response.close()
        wait_for(lambda: processes.figure("vllm:num_requests_running") == 0)
        stop(processes)


def test_a_front_end_that_is_killed(folder):
    """Its requests end, those of others go on, and another one takes its place."""
    with server(folder, "--front-ends", "2") as processes:
        first = start_streams(processes, 4)
        victim, other = sorted(processes.of(FRONT_END), key=descriptors, reverse=True)
        os.kill(victim, signal.SIGSTOP)
        kept = start_streams(processes, 4)
        os.kill(victim, signal.SIGKILL)
        num_cut = sum(is_cut(parts) for _, parts in first)
        assert num_cut >= 2, "the victim has as many as the other one, at least"
        assert not any(is_cut(parts) for _, parts in kept)
        wait_for(lambda: processes.figure("vllm:num_requests_running") == 8 - num_cut)
        for response, _ in first + kept:
            response.close()
        wait_for(lambda: processes.figure("vllm:num_requests_running") == 0)
        wait_for(lambda: len(processes.of(FRONT_END)) == 2)
        os.kill(other, signal.SIGSTOP)
        assert httpx.post(processes.url + COMPLETIONS, json={"prompt": "473+89=", "temperature": 0}).json()["choices"][0]["text"] == "562"
        os.kill(other, signal.SIGCONT)
        assert any("ended with -9; another one starts" in line for line in processes.errors)
        stop(processes)


def test_a_supervisor_that_is_killed(folder):
    with server(folder) as processes:
        streams = start_streams(processes, 4)
        processes.process.kill()
        wait_for(lambda: not processes.living(), 10)
        for _, parts in streams:
            try:
                assert "has ended" in "".join(parts)
            except httpx.RemoteProtocolError:
                pass


@pytest.mark.parametrize(("num_signals", "options"), [(1, []), (2, []), (1, ["--drain-timeout", "1"])], ids=["drain", "stop", "timeout"])
def test_signals_while_streaming(folder, num_signals, options):
    is_cut = num_signals == 2 or bool(options)
    with server(folder, *options) as processes:
        length = ENDLESS["max_tokens"] if is_cut else 1400
        with httpx.Client(base_url=processes.url, timeout=60) as http, http.stream("POST", COMPLETIONS, json=ENDLESS | {"max_tokens": length}) as response:
            parts = response.iter_text()
            text = next(parts)
            for _ in range(num_signals):
                for each in processes.living():  # to all, as systemd and terminals do: only the supervisor's counts
                    os.kill(each, signal.SIGTERM)
                time.sleep(0.15)
            if is_cut:
                with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
                    list(parts)
            else:
                (choice,) = streamed(httpx.Response(200, text=text + "".join(parts))).values()
                assert choice["finish_reason"] == "length"
        assert processes.process.wait(20) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(processes.url)
    assert processes.errors == [], "".join(processes.errors)


def test_a_signal_before_it_is_ready_and_a_model_that_cannot_be_loaded(folder, tmp_path):
    command = [sys.executable, "-m", "pagedkv", "serve", str(folder), "--device", "cpu", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        wait_for(lambda: Processes(process, "").of(HOST))
        (engine,) = Processes(process, "").of(HOST)
        process.terminate()
        assert process.communicate(timeout=20)[0] == "" and process.returncode in (0, -signal.SIGTERM)
        wait_for(lambda: not is_alive(engine))
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    command[4] = str(tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stderr.startswith("pagedkv serve: error: ") and "nothing" in done.stderr


PROGRAM = """
from pagedkv.cli import main
import sys
sys.exit(main({command!r}))
"""


def test_a_program_from_stdin_tls_and_the_access_log(folder, tmp_path):
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl")
    key, cert, keys = (str(tmp_path / name) for name in ("key.pem", "cert.pem", "keys"))
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2"]
    subprocess.run([*command, "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    Path(keys).write_text("one\n\n two \n")
    options = [
        "--ssl-certfile", cert, "--ssl-keyfile", key, "--ssl-ca-certs", cert, "--api-key-file", keys, "--access-log",
    ]
    with server(folder, *options, code=PROGRAM) as processes:
        assert processes.url.startswith("https://")
        context = ssl.create_default_context(cafile=cert)
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):  # it has no certificate
            httpx.get(f"{processes.url}/health", verify=context)
        context.load_cert_chain(cert, key)
        with httpx.Client(base_url=processes.url, verify=context) as http:
            answer = http.post(COMPLETIONS, json={"prompt": "473+89=", "temperature": 0}, headers={"authorization": "Bearer two"})
            assert answer.json()["choices"][0]["text"] == "562"
            assert http.post(COMPLETIONS, json={"prompt": "1"}).status_code == 401
            assert http.get("/health").json()["status"] in ("idle", "busy")
            with pytest.raises(httpx.ConnectError):  # it trusts no such server
                httpx.get(processes.url)
            wait_for(lambda: any("1 x 200, 1 x 401; in work: 0" in line or "2 x 200, 1 x 401; in work: 0" in line for line in processes.errors), 3)
            stop(processes)  # it waits for no idle connection, whose end the client does not hear yet
