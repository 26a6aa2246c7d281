"""Which chat templates a model's folder has: in files of their own, or in JSON, as older ones have them."""

from __future__ import annotations

from pathlib import Path

from pagedkv.models.files import read_json


def read_templates(folder: Path) -> dict[str, str]:
    """By name, from chat_template.jinja and additional_chat_templates/, tokenizer_config.json or chat_template.json.
    Where the first two have a default, the others do not count."""
    alone = folder / "chat_template.jinja"
    templates = {"default": _text_of(alone)} if alone.is_file() else {}
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        templates[path.stem] = _text_of(path)
    if "default" in templates:
        return templates
    older = _named_templates(folder / "tokenizer_config.json") or _named_templates(folder / "chat_template.json")
    return older | templates


def _text_of(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error}") from None


def _named_templates(path: Path) -> dict[str, str]:
    """Of a JSON file: one template, or several by their names."""
    value = read_json(path, missing={}).get("chat_template") or {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        value = {each.get("name"): each.get("template") for each in value}
    if not isinstance(value, dict) or not all(isinstance(each, str) for pair in value.items() for each in pair):
        raise ValueError(f"{path}: chat_template must be a text, or a list of objects with name and template")
    return value
