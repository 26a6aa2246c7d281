"""Checks of values that people give. The error for a wrong one names the argument and says what is right."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, TypeGuard

MAX_INT = 2**31 - 1


def hint_of(name: str, known: SequenceOf[str]) -> str:
    """What may have been meant by a name that is not known, for the end of a message."""
    near = get_close_matches(name[:100], known, 1)  # in a time that grows with its length
    return f"; did you mean {near[0]!r}?" if near else ""


def check_names(owner: str, given: Iterable[str], known: SequenceOf[str]) -> None:
    """Raises TypeError for an option that does not exist, and names the one that may have been meant."""
    for name in given:
        if name not in known:
            raise TypeError(f"{owner} has no option {name!r}{hint_of(name, known)}")


def check_float(name: str, value: object, lowest: float, highest: float, *, is_open: bool) -> float:
    """The value as a float. Raises unless it is a number within the bounds (NaN is not); is_open: above the lowest."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r} but must be a number")
    number: Any = value  # an int may be too large for a float
    if not lowest <= number <= highest or (is_open and number == lowest):
        above = "above" if is_open else "at least"
        raise ValueError(f"{name} is {value} but must be {above} {lowest:g} and at most {highest:g}")
    return float(number)


def check_int(name: str, value: object, lowest: int, highest: int = 2**63 - 1) -> int:
    """The value as an int. Raises unless it is an integer (NumPy's too) within the bounds."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r} but must be an integer")
    number = int(value)
    if not lowest <= number <= highest:
        bounds = f"at least {lowest}" if number < lowest else f"at most {highest}"
        raise ValueError(f"{name} is {number} but must be {bounds}")
    return number


def _is_list(value: object) -> TypeGuard[Iterable[Any]]:
    """A text is none, nor is an array without dimensions."""
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes)) and getattr(value, "ndim", 1) > 0


def check_ids(name: str, ids: object) -> tuple[int, ...]:
    """Token ids as a tuple of ints."""
    if not _is_list(ids):
        raise TypeError(f"{name} is {ids!r} but must be a list of token ids")
    return tuple(check_int(f"{name}[{i}]", value, 0, MAX_INT) for i, value in enumerate(ids))


def check_texts(name: str, texts: object) -> tuple[str, ...]:
    """The texts as a tuple; an empty one raises."""
    if not _is_list(texts):
        raise TypeError(f"{name} is {texts!r} but must be a list of strings")
    checked = tuple(texts)
    for i, text in enumerate(checked):
        if not isinstance(text, str):
            raise TypeError(f"{name}[{i}] is {text!r} but must be a string")
        if not text:
            raise ValueError(f"{name}[{i}] is empty")
    return checked
