"""What the machine does to a run becomes one sentence, and a signal that comes at the start ends it at once."""

from __future__ import annotations

import errno
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

from e2e_vl.cli.common import StoppedRunError, says_errors
from e2e_vl.run.stopping import StopRequest, faults_as_sentences, is_disk_full

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:525] Read error [127.0.0.1]:4210: Connection reset by peer"


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError, "raise train.accumulate"),
        (MemoryError(), MemoryError, "out of memory on cpu"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"), MemoryError, "out of memory"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), OSError, "a data worker died"),
        (RuntimeError(GLOO), OSError, "process 1 lost the others"),
        (OSError(errno.ENOSPC, "No space left on device", "log.jsonl"), OSError, r"is full \(log.jsonl\); make room"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), OSError, "the disk or a quota is full"),
        (Exception("No space left on device (os error 28)"), OSError, "the disk or a quota is full"),
    ],
)
def test_a_fault_is_one_sentence_with_its_remedy(error, kind, sentence):
    accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=2, process_index=1)
    with pytest.raises(kind, match=sentence) as caught, faults_as_sentences(accelerator, "Go on with --resume."):
        raise error
    assert "\n" not in str(caught.value) and str(caught.value).endswith("Go on with --resume.")
    assert caught.value.__cause__ is error
    assert says_errors(lambda: (_ for _ in ()).throw(caught.value))() == 2


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), OSError("x.json: no such file"), KeyError("a")])
def test_other_errors_stay_what_they_are(error):
    accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=1, process_index=0)
    with pytest.raises(type(error)) as caught, faults_as_sentences(accelerator, "where"):
        raise error
    assert caught.value is error and not is_disk_full(error)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_at_once_where_nothing_is_lost_and_waits_otherwise(number, status):
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with StopRequest() as stop:
            with pytest.raises(StoppedRunError, match=f"stopped by {number.name}; --resume") as caught:
                os.kill(os.getpid(), number)
            assert caught.value.status == status
            stop.at_once = False
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # as a launcher does
            assert stop.number == number
            stop._came_at -= 3
            with pytest.raises(StoppedRunError):
                os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_who_ignores_a_signal_goes_on_ignoring_it():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.number is None
    finally:
        signal.signal(signal.SIGHUP, before)
