"""Models by their names on the Hugging Face hub."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from .files import CheckpointError, find_weights

HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")
FILES = [
    "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json",
    "chat_template.jinja", "additional_chat_templates/*.jinja", "modules.json", "*_Pooling/config.json",
    "sentence_bert_config.json", "adapter_config.json",
]  # fmt: skip
IGNORED = [
    "*/*.safetensors", "*/*.safetensors.index.json",  # of other formats, or saved while the model was trained
    "consolidated*",  # the same weights a second time, in Mistral's own format
]  # fmt: skip

logger = logging.getLogger("pagedkv.engine")


def model_folder(model: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder of a model: `model` itself, or the folder into which huggingface_hub puts a name such as
    "Qwen/Qwen3-0.6B".

    A folder of that name, if there is one, is taken first. What the hub's cache lacks is downloaded, with a progress
    bar; HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE have their effect. `revision`: a branch, a tag or a commit;
    None: the newest.

    Where the hub cannot be asked, a model in the cache is taken if it has its configuration, weights and tokenizer; a
    warning names what else is missing.

    FileNotFoundError: neither a folder nor a model of the hub. PermissionError: the model needs a login.
    ConnectionError: the hub cannot be reached, and the cache lacks the model or a part of it.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(f"model is {model!r} but must be a folder, or a name on the Hugging Face hub")
    name = os.fspath(model)
    if not name:
        raise FileNotFoundError(f"model is {name!r}: neither a folder, nor a name of a model on a hub (owner/name)")
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        return folder.absolute()  # files in it are read later, too
    if folder.exists():
        raise NotADirectoryError(f"{name}: a file; model must be the folder of a model, or a name on a hub")
    if not HUB_NAME.fullmatch(name):
        raise FileNotFoundError(f"{name}: no such folder, and no name of a model on a hub (owner/name)")
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=FILES, ignore_patterns=IGNORED))
    except errors.GatedRepoError:
        raise PermissionError(f"{name}: the hub lets in only users whom the model's owner has accepted") from None
    except errors.RevisionNotFoundError:
        raise FileNotFoundError(f"{name}: the hub has no revision {revision!r} of it") from None
    except errors.RepositoryNotFoundError:
        raise FileNotFoundError(f"{name}: no such folder, and no such model on the hub (or it needs a login)") from None
    except errors.LocalEntryNotFoundError as error:
        cause = error.__cause__
        why = f"it answers with {type(cause).__name__}" if isinstance(cause, errors.HfHubHTTPError) else "no connection"
        why = "HF_HUB_OFFLINE is set" if isinstance(cause, errors.OfflineModeIsEnabled) else why
        found = getattr(error, "snapshot_path", None)  # since 1.22: some of our files are there
        if found is None:
            raise ConnectionError(f"{name}: not in the hub's cache, and the hub cannot be asked ({why})") from error
        lacking = _lacking(Path(found))
        if lacking is not None:
            raise ConnectionError(
                f"{name}: the hub's cache lacks a part of it, and the hub cannot be asked ({why}): {lacking}"
            ) from error
        logger.warning("%s: not all of its files are in the hub's cache (%s): %s", name, why, error)
        return Path(found)
    except Exception as error:  # of the hub's answer, or of the library that the client uses for HTTP
        first = (str(error).splitlines() or [""])[0]
        raise ConnectionError(f"{name}: the download failed: {type(error).__name__}: {first}") from error


def _lacking(folder: Path) -> str | None:
    """What is not there, of that without which a model can not be served."""
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            return f"no {name}"
    try:
        find_weights(folder)
    except (CheckpointError, FileNotFoundError) as error:
        return str(error)
    return None
