"""Work on many items, spread over forked processes where it takes long; what comes out is in the order of the items.

A forked process has everything that was read before it began, so nothing but results is sent. It shares this memory
only until it touches it: Python counts the references to an object within the object. So it may end up with a copy.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TypeVar

PATIENCE = 2.0  # seconds of work that are not worth further processes
MEMORY = 4 << 30  # bytes that forked processes may need together, unless their number is given
Item = TypeVar("Item")
Found = TypeVar("Found")


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def affordable() -> int:
    """One process for each core, but no more than keep within `MEMORY` if each copies what this one has."""
    import resource  # systems that cannot fork lack it

    return max(min(cores(), MEMORY // (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)), 1)


def in_order(work: Callable[[Item], Found], items: Sequence[Item], processes: int | None) -> Iterator[Found]:
    """`work(item)` of each item.

    This process begins alone. Once it has worked for `PATIENCE` and as much is left, it forks, and from then on only
    receives: process p of P has every P-th item, and waits when it is ahead. No process is forked by a process that may
    not have any (a daemonic one), nor on other systems than Linux, whose libraries do not expect it.

    Args:
        processes: at most that many at once; 1: none is forked; None: as `affordable` says.

    Raises:
        ChildProcessError: a process has ended before its work was done.
    """
    began = time.perf_counter()
    may_fork = sys.platform == "linux" and not multiprocessing.current_process().daemon
    for done, item in enumerate(items):
        spent = time.perf_counter() - began
        left = spent * (len(items) - done) / max(done, 1)
        if may_fork and done and min(spent, left) >= PATIENCE:
            number = affordable() if processes is None else processes
            if number > 1:
                yield from _forked(work, items[done:], min(number, len(items) - done))
                return
            may_fork = False
        yield work(item)


def _forked(work: Callable[[Item], Found], items: Sequence[Item], processes: int) -> Iterator[Found]:
    forks = multiprocessing.get_context("fork")
    workers: list[tuple[BaseProcess, Connection]] = []
    try:
        for number in range(processes):
            receive, send = forks.Pipe(duplex=False)
            own = items[number::processes]
            worker = forks.Process(target=_send_all, args=(work, own, receive, send), daemon=True)
            workers.append((worker, receive))
            worker.start()
            send.close()  # the worker alone holds it now, so that its end is the end of the pipe
        for place in range(len(items)):
            worker, receive = workers[place % processes]
            try:
                found = receive.recv()
            except (EOFError, OSError):
                raise ChildProcessError(_how_it_ended(worker)) from None
            yield found
    finally:
        for worker, receive in workers:
            receive.close()
            if worker.pid is not None:
                worker.terminate()
                worker.join()


def _send_all(work: Callable[[Item], Found], items: Sequence[Item], receive: Connection, send: Connection) -> None:
    receive.close()  # so that nobody is left to write to when the first process has ended
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        for item in items:
            send.send(work(item))


def _how_it_ended(worker: BaseProcess) -> str:
    worker.join()
    code = worker.exitcode or 0
    how = f"with status {code}, and what it wrote stands above"
    if code < 0:
        known = {one.value: one.name for one in signal.Signals}
        how = f"by the signal {known.get(-code, -code)}, as when memory is short"
    return f"Process {worker.pid}, which read a part of the records, was ended {how}; try --processes 1."
