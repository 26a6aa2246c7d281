"""Progress bars that no interrupt in one thread can spoil for others."""

from __future__ import annotations

import sys
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from pagedkv.optional import load

if TYPE_CHECKING:
    from tqdm import tqdm


def progress_bar(
    total: int, desc: str, unit: str, *, is_shown: bool | None = None, is_scaled: bool = False
) -> AbstractContextManager[tqdm | None]:
    """A bar for `total` things, each of which is an update(); None where none is shown.

    is_shown: None: where stderr is a terminal
    is_scaled: units are counted in thousands, millions, ...: bytes in GB/s
    """
    if is_shown is False or sys.stderr is None:  # closed
        return nullcontext()
    disable = None if is_shown is None else False
    bar: AbstractContextManager[tqdm | None] = _bar_type()(
        total=total, desc=desc, unit=unit, unit_scale=is_scaled, disable=disable, dynamic_ncols=True
    )
    return bar


of_thread = threading.local()  # bar_type: see _bar_type()


def _bar_type() -> Any:
    """tqdm's own bar for a notebook or a terminal, but for what all bars of a process share.

    An interrupt within tqdm may leave its lock taken, and every other thread's next bar would wait for ever. So each
    thread has its own lock, which it may take again, and no thread watches the bars. Bars of several threads share the
    line of a terminal.
    """
    if not hasattr(of_thread, "bar_type"):
        base: Any = load("tqdm.auto").tqdm

        class Bar(base):  # type: ignore[misc]
            _lock = threading.RLock()
            _instances: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()
            monitor_interval = 0

        of_thread.bar_type = Bar
    return of_thread.bar_type
