from __future__ import annotations

import os

import psutil
import pytest
import torch

from e2e_vl.engine import launch
from e2e_vl.engine.launch import make_accelerator, processes_asked_for, start_all_processes


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("python bin/accelerate launch --num_processes 2 tools/train.py --config x --num_processes 5", 2),
        ("python bin/accelerate launch --cpu --num_processes=3 tools/train.py", 3),
        ("python -m accelerate.commands.launch --num_processes 4 --main_process_port 1 tools/train.py", 4),
        ("python bin/accelerate-launch --num_processes 2 tools/train.py", 2),
        ("python bin/accelerate launch tools/train.py --num_processes 2", 1),
        ("python bin/accelerate launch --num_processes 8 --num_machines 2 tools/train.py", 1),
        ("python tools/train.py --num_processes 2", 1),
        ("bash", 1),
        ("", 1),
    ],
)
def test_processes_that_accelerate_was_asked_for(command, number):
    assert processes_asked_for(command.split()) == number


@pytest.fixture
def executed(monkeypatch) -> list[list[str]]:
    """Commands that would have replaced this process."""
    commands = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: commands.append(arguments))
    monkeypatch.setattr("sys.argv", ["tools/train.py", "--config", "x"])
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return commands


def launched_by(monkeypatch, command: str) -> None:
    monkeypatch.setattr(psutil.Process, "parent", lambda self: self)
    monkeypatch.setattr(psutil.Process, "cmdline", lambda self: command.split())


def test_the_script_starts_again_with_all_processes(executed, monkeypatch):
    launched_by(monkeypatch, "python bin/accelerate launch --num_processes 2 tools/train.py --config x")
    start_all_processes()
    [command] = executed
    assert command[1:3] == ["-m", "torch.distributed.run"]
    assert command[-6:] == ["--nproc_per_node", "2", "--", "tools/train.py", "--config", "x"]


@pytest.mark.parametrize("reason", ["one process", "already started", "a GPU"])
def test_nothing_is_started_where_nothing_is_missing(executed, monkeypatch, reason):
    number = 1 if reason == "one process" else 2
    launched_by(monkeypatch, f"python bin/accelerate launch --num_processes {number} tools/train.py --config x")
    if reason == "already started":
        monkeypatch.setenv("LOCAL_RANK", "0")
    if reason == "a GPU":
        monkeypatch.delenv("ACCELERATE_USE_CPU")
        monkeypatch.setattr(launch.torch.accelerator, "is_available", lambda: True)
    start_all_processes()
    assert executed == []


@pytest.mark.usefixtures("on_cpu")
def test_the_accelerator_is_on_the_cpu_where_the_environment_says_so():
    accelerator = make_accelerator("no")
    assert (accelerator.device.type, accelerator.num_processes) == ("cpu", 1)


@pytest.mark.parametrize(("processes", "threads"), [("1", 4), ("2", 2), ("8", 1)])
def test_processes_of_accelerate_share_all_cores(monkeypatch, processes, threads):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # what `accelerate launch` leaves
        make_accelerator("no")
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
