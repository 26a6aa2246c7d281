"""Models by their names on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")
FILES = [
    "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json",
    "tokenizer_config.json", "chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja",
]  # fmt: skip


def model_folder(model: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder of a model: `model` itself, or the folder into which huggingface_hub puts a name such as
    "Qwen/Qwen3-0.6B".

    A folder of that name, if there is one, is taken first. What the hub's cache lacks is downloaded, with a progress
    bar; HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE have their effect. `revision`: a branch, a tag or a commit;
    None: the newest.

    FileNotFoundError: neither a folder nor a model of the hub. PermissionError: the model needs a login.
    ConnectionError: the hub cannot be reached, and the cache lacks the model.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    name = os.fspath(model)
    if not isinstance(name, str) or not HUB_NAME.fullmatch(name):
        raise FileNotFoundError(f"{name}: no such folder, and no name of a model on a hub (owner/name)")
    try:
        from huggingface_hub import errors, snapshot_download
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{name}: no such folder; a model of the hub needs huggingface_hub (pip install pagedkv[hub])"
        ) from error
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=FILES))
    except errors.GatedRepoError:
        raise PermissionError(f"{name}: the hub lets in only users whom the model's owner has accepted") from None
    except errors.RevisionNotFoundError:
        raise FileNotFoundError(f"{name}: the hub has no revision {revision!r} of it") from None
    except errors.RepositoryNotFoundError:
        raise FileNotFoundError(f"{name}: no such folder, and no such model on the hub (or it needs a login)") from None
    except errors.LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if isinstance(error.__cause__, errors.OfflineModeIsEnabled) else "no connection"
        raise ConnectionError(f"{name}: not in the hub's cache, and the hub cannot be asked ({why})") from error
    except Exception as error:  # of the hub's answer, or of the library that the client uses for HTTP
        first = (str(error).splitlines() or [""])[0]
        raise ConnectionError(f"{name}: the download failed: {type(error).__name__}: {first}") from error
