"""The launcher of `--num-processes`: settings, signals and exit statuses. tests/run/test_launch.py trains with it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from detector.errors import UserError
from e2e_vl.cli import processes
from e2e_vl.cli.processes import add_process_options, process_settings, run_command, run_in_processes, start_processes

# Scripts that a process runs: RANK is its number.
SLEEP = "time.sleep(30)"
FAIL = f"sys.exit(7) if RANK == 1 else {SLEEP}"
KILLED = f"os.kill(os.getpid(), 9) if RANK == 1 else {SLEEP}"
STOPPED = "sys.exit(75) if RANK == 0 else (time.sleep(0.2), sys.exit(143))"  # before the processes have met
LOST = "sys.exit(75) if RANK == 0 else (time.sleep(0.2), sys.exit(2))"
SAVE = (
    "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.1 * RANK), print('saved', RANK), sys.exit(143))); "
    "open(os.path.join(os.environ['FOLDER'], str(RANK)), 'w').close(); time.sleep(30)"
)


def script(text: str) -> list[str]:
    return [sys.executable, "-c", f"import os, signal, sys, time; RANK = int(os.environ['RANK']); {text}"]


@pytest.mark.parametrize(
    ("text", "status"),
    [("pass", 0), (FAIL, 7), (KILLED, 137), (LOST, 2), (STOPPED, 143)],
    ids=["done", "fails", "killed", "lost", "stopped"],
)
def test_the_status_is_that_of_the_process_that_failed_first(text, status, monkeypatch, capfd):
    monkeypatch.setattr(processes, "PATIENCE", 0.3)
    assert start_processes(script(text), 2, {"MASTER_PORT": "1"}) == status
    assert ("process 1 was ended by SIGKILL" in capfd.readouterr().err) == (status == 137)


def signal_when_ready(folder: Path, processes: int, number: int) -> None:
    """Send a signal to this process when as many processes have made a file."""
    while len(list(folder.iterdir())) < processes:
        time.sleep(0.02)
    os.kill(os.getpid(), number)


def test_a_signal_is_passed_on_and_all_may_save(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(processes, "PATIENCE", 0.0)
    threading.Thread(target=signal_when_ready, args=(tmp_path, 3, signal.SIGTERM)).start()
    assert start_processes(script(SAVE), 3, {"MASTER_PORT": "1", "FOLDER": str(tmp_path)}) == 143
    assert capfd.readouterr().out.count("saved") == 3


@pytest.mark.usefixtures("default_signals")
def test_a_command_that_saves_is_waited_for(tmp_path, monkeypatch):
    """`e2e-vl reproduce` and Ctrl-C."""
    text = SAVE.replace("SIGTERM", "SIGINT").replace("143", "130")
    monkeypatch.setenv("FOLDER", str(tmp_path / "ready"))
    monkeypatch.setenv("RANK", "1")
    (tmp_path / "ready").mkdir()
    threading.Thread(target=signal_when_ready, args=(tmp_path / "ready", 1, signal.SIGINT)).start()
    with (tmp_path / "printed").open("w") as file:
        assert run_command(script(text), file) == 130
    assert (tmp_path / "printed").read_text() == "saved 1\n"


def settings_of(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_process_options(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("text", "words", "number", "environment"),
    [
        ("distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: bf16\ngpu_ids: 0,1", [], 8, "0,1"),
        ("distributed_type: NO\nnum_processes: 8", ["--num-processes", "2"], 2, None),
    ],
)
def test_the_file_of_accelerate_says_how_many(tmp_path: Path, text, words, number, environment):
    (tmp_path / "accelerate.yaml").write_text(f"{text}\nmain_process_port: 29501\n")
    args = settings_of("--accelerate-config", str(tmp_path / "accelerate.yaml"), *words)
    processes_started, variables = process_settings(args)
    assert (processes_started, variables["MASTER_PORT"]) == (number, "29501")
    assert variables.get("CUDA_VISIBLE_DEVICES") == environment


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("distributed_type: FSDP", "distributed_type FSDP is not supported"),
        ("num_machines: 2", "is for one machine; use `accelerate launch`"),
        ("num_processes: 0", "The number of processes is 0"),
        ("- 1", "is not a file of `accelerate config`"),
    ],
)
def test_what_the_launcher_cannot_do_is_refused(tmp_path: Path, text, message):
    (tmp_path / "accelerate.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        process_settings(settings_of("--accelerate-config", str(tmp_path / "accelerate.yaml")))


def test_a_process_that_was_started_does_not_start_others(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    args = settings_of("--num-processes", "2")
    with pytest.raises(UserError, match="use it without `accelerate launch`"):
        run_in_processes(args, "train", [])
    monkeypatch.setenv("E2E_VL_LAUNCHED", "1")
    assert run_in_processes(args, "train", []) is None
