"""Models by their names on the hub: the real client, beside a stand-in of the hub on loopback.

Each case runs in a process of its own, because the client reads its settings when it is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import pagedkv

pytest.importorskip("huggingface_hub")
DEMO_MODEL = Path(pagedkv.__file__).parent / "data" / "demo_model"
UNNEEDED = (
    "README.md", "pytorch_model.bin", "consolidated.safetensors", "consolidated-00001-of-00002.safetensors",
    "consolidated.safetensors.index.json", "params.json", "tekken.json",
)  # fmt: skip
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ANSWER = """
import sys
from pagedkv import LLM, SamplingParams
try:
    with LLM(sys.argv[1], device="cpu", block_size=4, num_blocks=64, revision=sys.argv[2] or None) as llm:
        print(llm.generate("12+34=", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0].text)
except Exception as error:
    print(type(error).__name__, error)
"""


class Hub(ThreadingHTTPServer):
    """Has demo/model, and demo/shards, whose weights are in two files; demo/gated and demo/secret are refused;
    demo/broken ends in the middle of its weights."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {path.name: path.read_bytes() for path in DEMO_MODEL.iterdir() if path.is_file()}
        self.files |= dict.fromkeys(UNNEEDED, b"not needed")
        self.files |= {"checkpoint-9/model.safetensors": b"not needed", "modules.json": b"[]", "special_tokens_map.json": b"{}"}
        self.shards = {f"model-0000{i}-of-00002.safetensors": b"" for i in (1, 2)}
        index = {"weight_map": {f"tensor {i}": name for i, name in enumerate(self.shards)}}
        self.shards["model.safetensors.index.json"] = json.dumps(index).encode()
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


    def files_of(self, name: str) -> dict[str, bytes]:
        return self.files if name != "demo/shards" else {k: v for k, v in self.files.items() if k != "model.safetensors"} | self.shards


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"X_Repo_Commit": COMMIT, "Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        parts = path.removeprefix("/api/models").strip("/").split("/")
        name = "/".join(parts[:2])
        if name == "demo/secret":
            return self.answer(401, X_Error_Code="RepoNotFound")
        if name == "demo/gated":
            return self.answer(403, X_Error_Code="GatedRepo")
        if name not in ("demo/model", "demo/broken", "demo/shards"):
            return self.answer(404, X_Error_Code="RepoNotFound")
        if "nowhere" in parts:
            return self.answer(404, X_Error_Code="RevisionNotFound")
        if path.startswith("/api/models"):
            return self.api(parts)
        content = self.server.files_of(name)["/".join(parts[4:])]
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        if name == "demo/broken" and parts[-1] == "model.safetensors" and self.command == "GET":
            self.answer(200, content[:1000], Content_Length=str(len(content)), ETag=etag)
            return self.close_connection_now()
        return self.answer(200, content, ETag=etag)

    do_HEAD = do_GET

    def api(self, parts: list[str]) -> None:
        if "tree" in parts:
            listing = [{"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                       for name, content in self.server.files_of("/".join(parts[:2])).items()]  # fmt: skip
            return self.answer(200, json.dumps(listing).encode(), Content_Type="application/json")
        siblings = [{"rfilename": name} for name in self.server.files_of("/".join(parts[:2]))]
        model = {"id": "/".join(parts[:2]), "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
        return self.answer(200, json.dumps(model).encode(), Content_Type="application/json")

    def close_connection_now(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.close()


@pytest.fixture(scope="module")
def hub():
    server = Hub()
    yield server
    server.shutdown()


def settings_of(home: Path, endpoint: str) -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE", "PYTHONPATH"))}
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_ETAG_TIMEOUT": "5"}
    return environment | {"PYTHONPATH": str(Path(pagedkv.__file__).parents[1]), "NO_PROXY": "127.0.0.1"}


def ask(name: str, home: Path, endpoint: str, revision: str = "", **settings: str) -> tuple[str, str]:
    environment = settings_of(home, endpoint) | settings
    command = [sys.executable, "-c", ANSWER, name, revision]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=home)
    return done.stdout.strip(), done.stderr


def test_a_model_is_downloaded_once(hub, tmp_path):
    text, progress = ask("demo/model", tmp_path, hub.url)
    assert text == "46" and "%" in progress, "no progress bar"
    fetched = {each.rpartition("/")[2] for each in hub.asked if each.startswith("GET /demo")}
    assert {"model.safetensors", "modules.json", "special_tokens_map.json"} <= fetched
    assert not fetched & set(UNNEEDED) and not any("checkpoint-9" in each for each in hub.asked)
    before = len(hub.asked)
    assert ask("demo/model", tmp_path, hub.url, HF_HUB_OFFLINE="1")[0] == "46" and len(hub.asked) == before
    assert ask("demo/model", tmp_path, "http://127.0.0.1:9")[0] == "46", "the cache is enough without network"
    assert ask("demo/model", tmp_path, hub.url, revision=COMMIT)[0] == "46"


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("demo/nothing", {}, "FileNotFoundError demo/nothing: no such folder, and no such model on the hub"),
        ("demo/secret", {}, "FileNotFoundError demo/secret: no such folder, and no such model on the hub"),
        ("demo/gated", {}, "PermissionError demo/gated: the hub lets in only users whom"),
        ("demo/broken", {"HF_HUB_DOWNLOAD_TIMEOUT": "2"}, "ConnectionError demo/broken: the download failed: "),
        ("demo/model", {"revision": "nowhere"}, "FileNotFoundError demo/model: the hub has no revision 'nowhere' of it"),
        ("demo/model", {"HF_HUB_OFFLINE": "1"}, "ConnectionError demo/model: not in the hub's cache, and the hub cannot be asked"),
        ("demo/model", {"endpoint": "http://127.0.0.1:9"}, "ConnectionError demo/model: not in the hub's cache, and the hub cannot be asked"),
        ("nowhere", {}, "FileNotFoundError nowhere: no such folder, and no name of a model on a hub (owner/name)"),
        ("../a/b", {}, "FileNotFoundError ../a/b: no such folder, and no name"),
        ("", {}, "FileNotFoundError "),
    ],
)  # fmt: skip
def test_errors(hub, tmp_path, name, options, message):
    text, _ = ask(name, tmp_path, options.pop("endpoint", hub.url), **options)
    assert text.startswith(message) and "\n" not in text


DOWNLOAD = "import sys, huggingface_hub; huggingface_hub.snapshot_download(sys.argv[1], allow_patterns=sys.argv[2:])"
COMPLETE = ["config.json", "*.safetensors", "tokenizer.json"]


@pytest.mark.parametrize(
    "name, patterns, answer",
    [
        ("demo/model", COMPLETE, "46"),
        ("demo/model", COMPLETE[:2], "lacks a part of it, and the hub cannot be asked (HF_HUB_OFFLINE is set): no tokenizer.json"),
        ("demo/shards", [*COMPLETE[::2], "*.index.json", "model-00001*"], "names 'model-00002-of-00002.safetensors', which is not"),
        ("demo/shards", [*COMPLETE[::2], "model-00002*"], "model-00002-of-00002.safetensors is one of several files, whose"),
    ],
)  # fmt: skip
def test_what_another_program_has_downloaded(hub, tmp_path, name, patterns, answer):
    """The client refuses a folder that lacks any file of our patterns. A model needs three of them."""
    environment = settings_of(tmp_path, hub.url)
    subprocess.run([sys.executable, "-c", DOWNLOAD, name, *patterns], env=environment, check=True, timeout=300, cwd=tmp_path)
    text, errors = ask(name, tmp_path, hub.url, HF_HUB_OFFLINE="1")
    if answer == "46":
        assert text == answer
        assert "demo/model: not all of its files are in the hub's cache (HF_HUB_OFFLINE is set)" in errors
        assert ask(name, tmp_path, "http://127.0.0.1:9")[0] == answer  # without a connection
    else:
        assert text.startswith(f"ConnectionError {name}: the hub's cache lacks a part of it") and answer in text


def test_a_folder_counts_before_the_hub(hub, tmp_path):
    shutil.copytree(DEMO_MODEL, tmp_path / "demo" / "gated")
    before = len(hub.asked)
    assert ask("demo/gated", tmp_path, hub.url)[0] == "46" and len(hub.asked) == before


def test_folders_of_the_shell(tmp_path):
    """~ where the shell has left it, an empty name, a file, None."""
    shutil.copytree(DEMO_MODEL, tmp_path / "models" / "demo")
    assert ask("~/models/demo", tmp_path, "", HOME=str(tmp_path))[0] == "46"
    assert ask("", tmp_path, "")[0] == "FileNotFoundError model is '': neither a folder, nor a name of a model on a hub (owner/name)"
    file = tmp_path / "models" / "demo" / "config.json"
    assert ask(str(file), tmp_path, "")[0].startswith(f"NotADirectoryError {file}: a file; model must be the folder")
    assert ask("~nobody-here/x", tmp_path, "")[0].startswith("FileNotFoundError ~nobody-here/x: no such folder")
    with pytest.raises(TypeError, match="model is None but must be a folder, or a name on the Hugging Face hub"):
        pagedkv.LLM(None)
