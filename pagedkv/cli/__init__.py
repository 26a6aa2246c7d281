"""The command pagedkv. An error is one line on stderr and exit code 1 (2: wrong usage; 130: Ctrl-C)."""

import signal


def main(argv: list[str] | None = None) -> int:
    """The exit code, for sys.exit() in the main thread."""
    try:
        from . import command_line  # here, so that Ctrl-C during imports ends as any other

        return command_line.run(argv)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more, on the way out, would be a traceback
        return 130
