"""Temporary."""

from typing import Any


class ChatTemplate:
    @staticmethod
    def from_folder(f: Any) -> Any: ...
