"""Trainings of two processes that the real `accelerate launch` starts, of which something is killed, end as others do.

On a machine without GPUs too: `--multi_gpu` starts the processes, and ACCELERATE_USE_CPU keeps them on the CPU.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.campaign.disturbed import CONFIG, SETTINGS, STEPS, differences, train_disturbed

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "tools" / "train.py"
LAUNCH = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0")
TIMES = 5
SECONDS = 600  # after which a launch hangs


@pytest.fixture(scope="module")
def words(tiny_words) -> list[str]:
    return [*tiny_words, *SETTINGS, "train.log_every=1"]


@pytest.fixture(scope="module")
def undisturbed(words, tmp_path_factory) -> Path:
    """Of two forked processes, which cost less and do the same."""
    folder = tmp_path_factory.mktemp("forked")
    assert_ends(words, folder)
    return folder / "run"


def assert_ends(words: list[str], folder: Path, *more: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # as launched processes have it, so that threads are as many
        ended = train_disturbed([*words, f"output={folder / 'run'}", *more], folder, processes=2)
    assert ended.statuses == [0, 0], ended.texts


def launch(
    words: list[str], folder: Path, disturb: Callable[[psutil.Process], None] | None = None, *, line: int = 0
) -> tuple[int, str]:
    """Launch a training into `folder / "run"`, which goes on if it has begun, and wait until nothing of it is left.

    Args:
        disturb: given the launcher once the log has `line` lines, unless the training has ended before.

    Returns:
        The launcher's exit status, and what all have printed.
    """
    run, printed = folder / "run", folder / "printed.txt"
    resume = ["--resume"] if run.exists() else []
    command = [sys.executable, *LAUNCH, str(TRAIN), "--config", str(CONFIG), *words, f"output={run}", *resume]
    names = ("ACCELERATE_MIXED_PRECISION", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    end = time.monotonic() + SECONDS
    with printed.open("wb") as file:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file)
        launcher, log = psutil.Process(process.pid), run / "log.jsonl"
        while disturb is not None and process.poll() is None:
            if log.is_file() and log.read_bytes().count(b"\n") >= line:
                workers = launcher.children(recursive=True)
                disturb(launcher)
                psutil.wait_procs(workers, end - time.monotonic())
                break
            assert time.monotonic() < end, printed.read_text()[-3000:]
            time.sleep(0.005)
        status = process.wait(end - time.monotonic())
    return status, printed.read_text(encoding="utf-8", errors="replace")


def kill_worker(launcher: psutil.Process) -> None:
    """One of the two processes that train."""
    workers = [one for one in launcher.children() if str(TRAIN) in one.cmdline()]
    assert len(workers) == 2
    random.Random(os.getpid()).choice(workers).kill()


def terminate(launcher: psutil.Process) -> None:
    """As a batch system ends a job."""
    launcher.send_signal(signal.SIGTERM)


def said_by_us(text: str) -> list[str]:
    """Lines of tracebacks that go through our code; the launcher prints its own when a process ends with an error."""
    return [line for line in text.splitlines() if f'File "{ROOT}' in line]


def assert_saved(run: Path, text: str) -> None:
    """SIGTERM came to the launcher alone, and all of the run said where it goes on."""
    newest = sorted((run / "checkpoints").iterdir())[-1]
    assert "stopped by SIGTERM after step" in text and f"--resume continues from {newest}" in text, text


def test_a_launched_training_that_is_terminated_ends_as_the_undisturbed_one(words, undisturbed, tmp_path):
    status, text = launch(words, tmp_path, terminate, line=1)
    assert status != 0 and not said_by_us(text), text
    assert_saved(tmp_path / "run", text)
    assert_ends(words, tmp_path, "--resume")
    assert differences(tmp_path / "run", undisturbed) == []


@pytest.mark.campaign
@pytest.mark.parametrize("disturb", [kill_worker, terminate])
def test_launched_trainings_end_as_the_undisturbed_one(words, undisturbed, tmp_path, disturb):
    """Disturbed at random lines of the log, until each has ended."""
    draw, done, ended = random.Random(8), 0, 0
    run = tmp_path / "run"
    while done < TIMES or run.exists():
        before = len((run / "log.jsonl").read_bytes().splitlines()) if (run / "log.jsonl").exists() else 0
        line = draw.randint(before + 1, max(STEPS, before + 1))
        status, text = launch(words, tmp_path, disturb if done < TIMES else None, line=line)
        assert not said_by_us(text), text
        done += status != 0
        if status == 0:
            assert differences(run, undisturbed) == []
            shutil.rmtree(run)
            ended += 1
        elif disturb is terminate and f"report: {run / 'report.html'}" in text:  # the signal came behind the last step
            assert differences(run, undisturbed) == []
        elif disturb is terminate:
            assert_saved(run, text)
    print(f"disturbed {done} times, {ended} trainings ended equal")
    assert ended
