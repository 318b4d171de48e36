"""Output whose reader has gone, and the signals of a command."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from tqdm.auto import tqdm

from detector.errors import StoppedRunError
from e2e_vl.terminal import LastingStream, lasting_output, stopped_by_signals


def test_output_goes_on_without_its_reader(monkeypatch: pytest.MonkeyPatch):
    """`train 2>&1 | tee log` when the terminal is closed: of the printing, of the bar, and of the flush at the end."""
    read, write = os.pipe()
    with open(write, "w", encoding="utf-8") as stream:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        with lasting_output():
            print("first", flush=True)
            assert os.read(read, 100) == b"first\n"
            os.close(read)
            print("second", flush=True)
            list(tqdm(range(3), mininterval=0))
            os.write(stream.fileno(), b"what a library prints")
            print("last")
        assert sys.stdout is stream


class Vanished(io.StringIO):
    """A terminal that has gone: no descriptor, and every write fails."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))


def test_only_a_lost_reader_is_forgiven():
    for number in (errno.EPIPE, errno.EIO):
        print("text", file=LastingStream(Vanished(number)), flush=True)
    with pytest.raises(OSError, match="No space left"):
        print("text", file=LastingStream(Vanished(errno.ENOSPC)))


def test_closed_streams_are_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stderr", None)  # `2>&-`
    with lasting_output():
        list(tqdm(range(3), mininterval=0))


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGTERM, StoppedRunError), (signal.SIGHUP, StoppedRunError), (signal.SIGINT, KeyboardInterrupt)],
)
def test_a_signal_ends_a_command_and_its_echo_does_not_disturb(tmp_path: Path, number: int, error: type[BaseException]):
    before = signal.getsignal(number)
    with pytest.raises(error), stopped_by_signals("Repeat the command."):
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)
            (tmp_path / "cleaned").touch()
    assert (tmp_path / "cleaned").exists() and signal.getsignal(number) is before


class Finalised:
    """Sends a signal when it is deleted: the error that its handler raises is dropped by Python."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)
        time.sleep(0)  # handlers run between two instructions


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, StoppedRunError), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_during_a_finaliser_ends_a_command(number: int, error: type[BaseException]):
    before = sys.unraisablehook
    with pytest.raises(error), stopped_by_signals():
        Finalised(number)
        time.sleep(10)
    assert sys.unraisablehook is before
