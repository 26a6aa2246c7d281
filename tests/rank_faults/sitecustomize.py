"""What goes wrong in a rank of a test's engine: its process imports this at its start, by PYTHONPATH (see rank_engine.py).

RANK_FAULT is "rank kind number fault": at its number-th record of that kind, the rank's fault comes.
"""

import os
import signal
import sys
import time


def fail(fault: str) -> None:
    if fault.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, fault))
    elif fault == "hang":
        time.sleep(1000)
    elif fault == "exit":
        print("these are my last words", file=sys.stderr, flush=True)
        os._exit(7)
    else:
        raise {"MemoryError": MemoryError, "ValueError": ValueError}[fault](f"{fault} of a test" + "!" * (1 << 18))


def install() -> None:
    rank, kind, number, fault = os.environ["RANK_FAULT"].split()
    here = sys.orig_argv[sys.orig_argv.index("pagedkv.engine.rank") + 1]
    if here != rank:
        return
    if kind == "start":
        fail(fault)
    from pagedkv.parallel.ring import Kind, Reader

    receive, left = Reader.receive, [int(number)]

    def failing_receive(self):
        record = receive(self)
        if record is not None and record.kind == Kind[kind]:
            left[0] -= 1
            if left[0] == 0:
                fail(fault)
        return record

    Reader.receive = failing_receive


if "pagedkv.engine.rank" in sys.orig_argv and os.environ.get("RANK_SECONDS"):
    from pagedkv.parallel import watch

    watch.STEP_SECONDS = float(os.environ["RANK_SECONDS"])
if "pagedkv.engine.rank" in sys.orig_argv and os.environ.get("RANK_FAULT"):
    install()
