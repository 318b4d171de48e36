"""The terminal of a command: output that may lose its reader, and the signals that end a command."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TextIO

from detector.errors import StoppedRunError

HANG_UP = getattr(signal, "SIGHUP", signal.SIGTERM)  # Windows has no SIGHUP
STOP_SIGNALS = tuple(dict.fromkeys((signal.SIGTERM, signal.SIGINT, HANG_UP)))
READER_GONE = (errno.EPIPE, errno.EIO)  # of a pipe, and of a terminal
LAUNCHED = "E2E_VL_LAUNCHED"  # environment variable of the processes that `--num-processes` starts
LOST_PROCESS = 75  # exit status of a process whose group lost another one
Handler = Callable[[int, FrameType | None], None]


class LastingStream:
    """A text stream that goes silent once its reader has gone.

    Without it, the progress bar of `e2e-vl train 2>&1 | tee log` would end the run with a BrokenPipeError, before the
    checkpoint, when the terminal is closed. The file descriptor then leads to `os.devnull`, so that libraries, child
    processes and the interpreter at its exit can go on writing, too.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._silenced():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._silenced():
            self._stream.flush()

    @contextlib.contextmanager
    def _silenced(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in READER_GONE:
                raise
            with contextlib.suppress(OSError, AttributeError):  # a stream without a file descriptor
                handle = os.open(os.devnull, os.O_WRONLY)
                os.dup2(handle, self._stream.fileno())
                os.close(handle)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Make a context (or decorator) in which nothing that is printed can fail because its reader has gone."""
    if isinstance(sys.stdout, LastingStream) and isinstance(sys.stderr, LastingStream):
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere:  # noqa: PTH123
        before = sys.stdout, sys.stderr
        # Python sets a stream to None that was closed before it started
        sys.stdout = LastingStream(sys.stdout or nowhere)
        sys.stderr = LastingStream(sys.stderr or nowhere)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.stdout, sys.stderr = before


@contextlib.contextmanager
def handling_signals(handle: Handler) -> Iterator[None]:
    """Make a context in which STOP_SIGNALS call `handle`, except ignored ones (under nohup, in the background)."""
    previous = {}
    if threading.current_thread() is threading.main_thread():  # Python allows handlers in no other thread
        for number in STOP_SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: a handler that Python cannot restore
                previous[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


RETRY_SECONDS = 0.05  # until a signal whose error was dropped is raised again
PATIENCE = 2.0  # seconds; launchers forward signals, so that one Ctrl-C may arrive twice in quick succession


def signal_main_thread(number: int) -> None:
    """Send a signal to the main thread, from any thread; it interrupts a system call in which the main thread waits."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident, number)
    else:  # Windows
        signal.raise_signal(number)


@contextlib.contextmanager
def stopped_by_signals(advice: str = "") -> Iterator[None]:
    """Make a context in which STOP_SIGNALS raise an error at once, so that half-written files are deleted.

    Ctrl-C raises KeyboardInterrupt as always, the others StoppedRunError. A signal within PATIENCE after another one
    would only interrupt the cleaning up, and is ignored. Python drops the error if it is raised in a finaliser (as they
    run in thousands while regular expressions are compiled); the signal is then raised again.
    """
    arrivals: list[float] = []
    previous_hook = sys.unraisablehook

    def stop(number: int, frame: FrameType | None) -> None:
        arrivals.append(time.monotonic())
        if len(arrivals) > 1 and arrivals[-1] - arrivals[-2] < PATIENCE:
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise make_stopped_error(number, advice)

    def handle_dropped_error(dropped: sys.UnraisableHookArgs) -> None:
        error = dropped.exc_value
        if isinstance(error, KeyboardInterrupt | StoppedRunError):
            arrivals.clear()
            number = error.status - 128 if isinstance(error, StoppedRunError) else signal.SIGINT
            # later, because an error that is raised in this function would be dropped, too
            timer = threading.Timer(RETRY_SECONDS, signal_main_thread, (number,))
            timer.daemon = True
            timer.start()
        else:
            previous_hook(dropped)

    sys.unraisablehook = handle_dropped_error
    try:
        with handling_signals(stop):
            yield
    finally:
        sys.unraisablehook = previous_hook


def make_stopped_error(number: int, advice: str) -> StoppedRunError:
    """Return the exception of a command that a signal stopped; the exit status is 128 + the signal, as in shells.

    Only the main process has a message.
    """
    is_main = os.environ.get("RANK", "0") == "0"
    message = f"stopped by {signal.Signals(number).name}. {advice}".rstrip()
    return StoppedRunError(message if is_main else "", 128 + number)
