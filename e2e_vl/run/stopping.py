"""How a run ends before its time: signals that ask it to stop, and faults that become one sentence."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Self

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from detector.errors import DiskError
from e2e_vl.cli.common import StoppedRunError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PATIENCE = 2.0  # seconds; launchers pass Ctrl-C on, so that it comes twice at nearly the same time
PEER_IS_GONE = ("gloo/", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
NO_SPACE = ("No space left", "os error 28", "File too large", "os error 27", "quota", "failed writing file")
NO_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory")


def exit_status(number: int) -> int:
    """Status of a process that a signal ended, as shells have it: 143 for SIGTERM, 130 for Ctrl-C, 129 for SIGHUP."""
    return 128 + number


class StopRequest:
    """While it is entered, SIGTERM, Ctrl-C and SIGHUP ask the run to save a checkpoint and to end.

    Attributes:
        number: of the signal that came; None: none did.
        at_once: nothing would be lost, so a signal ends the run where it is.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.at_once = True
        self._came_at = 0.0
        self._owner = os.getpid()
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or in the background
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a data worker; the run itself decides when workers end
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        comes_again = self.number is not None and time.monotonic() - self._came_at > PATIENCE
        if self.at_once or comes_again:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            name = signal.Signals(number).name
            raise StoppedRunError(
                f"stopped by {name}; --resume continues from the newest checkpoint", exit_status(number)
            )
        if self.number is None:
            self.number, self._came_at = number, time.monotonic()
            if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
                os.write(2, b"\nsaving a checkpoint after this step; Ctrl-C again stops at once\n")

    def together(self, accelerator: Accelerator) -> int | None:
        """The number of a signal that came to any process; to be called on every process."""
        return max(gather_object([self.number or 0])) or None


def let_workers_die() -> None:
    """The death of a data worker shows where its batch is waited for, not in the middle of something else.

    torch raises it from a signal handler, anywhere. To be called once a worker has given a batch.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@contextlib.contextmanager
def all_or_none(accelerator: Accelerator, on_fault: Callable[[], object] = lambda: None) -> Iterator[None]:
    """A fault on any process (files, numbers, workers, memory, code) ends all: one raises it, the others say nothing.

    Args:
        on_fault: called on every process before it leaves.
    """
    caught: Exception | None = None
    try:
        yield
    except Exception as error:
        if is_lost_process(error):  # who is gone hears nothing
            raise
        caught = error
    failed = gather_object([accelerator.process_index] if caught is not None else [])
    if not failed:
        return
    on_fault()
    if caught is not None and accelerator.process_index == failed[0]:
        raise caught
    raise SystemExit(2)


@contextlib.contextmanager
def faults_as_sentences(accelerator: Accelerator, where: str) -> Iterator[None]:
    """What the machine does to a run (dead workers, lost processes, no memory) as an error with one sentence.

    Args:
        where: what a user does about it after the remedy.
    """
    try:
        yield
    except Exception as error:  # of a full disk, tokenizers raise nothing more special
        sentence = _sentence(error, accelerator, where)
        if sentence is None:
            raise
        raise sentence from error


def _sentence(error: Exception, accelerator: Accelerator, where: str) -> Exception | None:
    text = " ".join(str(error).split())
    if isinstance(error, OSError | ValueError) and getattr(error, "errno", None) is None:
        return None  # it is a sentence already
    if is_disk_full(error):
        place = f" ({error.filename})" if getattr(error, "filename", None) else ""
        return DiskError(f"the disk or a quota is full{place}; make room. {where}")
    if not isinstance(error, RuntimeError | MemoryError):
        return None
    if is_out_of_memory(error):
        return MemoryError(
            f"out of memory on {accelerator.device} ({text[:160] or 'no details'}); raise train.accumulate, lower "
            f"data.texts_per_image, or set train.activation_checkpointing=true. {where}"
        )
    if "DataLoader worker" in text:
        return ChildProcessError(
            f"a data worker died ({text[:160]}), as when the system has too little memory; lower data.workers. {where}"
        )
    if accelerator.num_processes > 1 and is_lost_process(error):
        return ConnectionError(
            f"process {accelerator.process_index} lost the others, of which one has ended; its own message says why. "
            f"{where}"
        )
    return None


def is_lost_process(error: BaseException) -> bool:
    """Whether another process of the run is gone."""
    return isinstance(error, torch.distributed.DistError) or any(word in str(error) for word in PEER_IS_GONE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was too little memory, of the device or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in NO_MEMORY)


def is_disk_full(error: BaseException) -> bool:
    """Whether nothing more could be written: the disk or a quota is full, or a file is too large."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return True
    return any(word in str(error) for word in NO_SPACE)
