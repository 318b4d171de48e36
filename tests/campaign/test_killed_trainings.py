"""Trainings that are killed, stopped, damaged, without disk space or doubled end as the undisturbed one, bit for bit.

`pytest -m campaign` disturbs each kind 20 times; the tests without the mark are the short form of it.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaign.disturbed import SETTINGS, STEPS, Ended, differences, train_disturbed

TIMES = 20


@pytest.fixture(scope="module")
def words(tiny_words) -> list[str]:
    return [*tiny_words, *SETTINGS]


@pytest.fixture(scope="module")
def undisturbed(words, tmp_path_factory) -> tuple[Path, Ended]:
    """The run directory of one process, and how it ended."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = train_disturbed([*words, f"output={folder / 'run'}"], folder)
    assert ended.statuses == [0], ended.texts[0][-3000:]
    return folder / "run", ended


@pytest.fixture(scope="module")
def undisturbed_two(words, tmp_path_factory) -> tuple[Path, Ended]:
    """The same of two processes."""
    folder = tmp_path_factory.mktemp("undisturbed_two")
    ended = train_disturbed([*words, f"output={folder / 'run'}"], folder, processes=2)
    assert ended.statuses == [0, 0], ended.texts[0][-3000:]
    return folder / "run", ended


def disturb_often(
    words: list[str], folder: Path, expected: tuple[Path, Ended], times: int, *, seed: int, **options
) -> list[Ended]:
    """Disturb trainings `times` times, at random moments, resuming each time; each that ends is compared.

    A last one, which nothing disturbs any more, ends too.
    """
    run, ended = expected
    draw, done, ends, trainings = random.Random(seed), 0, [], 0
    while done < times or not ends or ends[-1].statuses[0] != 0:
        # resumed ones have fewer moments, so that many would end undisturbed
        victim = draw.randrange(len(ended.statuses))
        moments = ended.moments // 2 if victim == 0 else STEPS  # the others write nothing
        moment = draw.randint(1, moments) if done < times else None
        resume = ["--resume"] if (folder / "run").exists() else []
        one = [*words, f"output={folder / 'run'}", *resume]
        ends.append(
            train_disturbed(one, folder, processes=len(ended.statuses), moment=moment, victim=victim, **options)
        )
        done += ends[-1].statuses[victim] != 0
        assert not any("Traceback" in text for text in ends[-1].texts), ends[-1].texts
        if not any(ends[-1].statuses):
            assert differences(folder / "run", run) == []
            assert not [path for path in (folder / "run").rglob(".*") if path.name != ".lock"]
            trainings += 1
            shutil.rmtree(folder / "run")
    print(f"disturbed {done} times, {trainings} trainings ended equal")
    return ends


def test_a_few_killed_trainings_end_as_the_undisturbed_one(words, undisturbed, tmp_path):
    ends = disturb_often(words, tmp_path, undisturbed, 2, seed=1)
    assert [one.statuses for one in ends if one.statuses != [0]] == [[-signal.SIGKILL]] * 2


@pytest.mark.campaign
def test_killed_trainings_end_as_the_undisturbed_one(words, undisturbed, tmp_path):
    disturb_often(words, tmp_path, undisturbed, TIMES, seed=2)


@pytest.mark.campaign
def test_killed_trainings_of_two_processes_end_as_the_undisturbed_one(words, undisturbed_two, tmp_path):
    """Only one is killed; the other one ends by itself, with a sentence."""
    for one in disturb_often(words, tmp_path, undisturbed_two, TIMES, seed=3):
        assert all(status != 0 for status in one.statuses) or not any(one.statuses)


@pytest.mark.campaign
@pytest.mark.parametrize("processes", [1, 2])
def test_stopped_trainings_end_as_the_undisturbed_one(words, request, tmp_path, processes):
    expected = request.getfixturevalue("undisturbed" if processes == 1 else "undisturbed_two")
    ends = disturb_often(
        words, tmp_path, expected, TIMES // 2, seed=4, disturb=lambda: os.kill(os.getpid(), signal.SIGTERM)
    )
    # before the first step a process ends at once, and the other one loses it
    assert {status for one in ends for status in one.statuses} <= ({0, 143} if processes == 1 else {0, 2, 143})


def damage(checkpoint: Path, draw: random.Random) -> str:
    """Flip a bit of a random file, cut it, or remove it; returns what was done."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and "best" not in path.parts)
    path, kind = draw.choice(files), draw.choice(["flipped", "cut", "removed"])
    content = bytearray(path.read_bytes())
    if kind == "removed":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(content[: draw.randrange(len(content))])
    else:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
    return f"{path.relative_to(checkpoint)} {kind}"


def damaged_and_resumed(words: list[str], undisturbed: Path, folder: Path, draw: random.Random) -> None:
    shutil.copytree(undisturbed, folder / "run")
    (folder / "run" / "metrics.json").unlink()
    newest = sorted((folder / "run" / "checkpoints").iterdir())[-1]
    what = damage(newest, draw)
    ended = train_disturbed([*words, f"output={folder / 'run'}", "--resume"], folder)
    assert ended.statuses == [0], (what, ended.texts[0][-2000:])
    # a removed step.json is a checkpoint that was never finished
    said = "damaged (" in ended.texts[0] or what == "step.json removed"
    assert said, (what, ended.texts[0])
    assert differences(folder / "run", undisturbed) == [], what
    shutil.rmtree(folder / "run")


def test_a_damaged_checkpoint_is_passed_over(words, undisturbed, tmp_path):
    damaged_and_resumed(words, undisturbed[0], tmp_path, random.Random(5))


@pytest.mark.campaign
def test_damaged_checkpoints_are_passed_over(words, undisturbed, tmp_path):
    draw = random.Random(6)
    for _ in range(TIMES):
        damaged_and_resumed(words, undisturbed[0], tmp_path, draw)


@contextlib.contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    """A file system in memory; where mounting is not permitted, the test is skipped."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a file system is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.campaign
def test_trainings_on_a_full_disk_end_as_the_undisturbed_one(words, undisturbed, tmp_path):
    """At a random moment something else fills the disk; there is room again when the run goes on."""
    run, ended = undisturbed
    draw = random.Random(7)
    with small_disk(tmp_path / "disk", 64) as disk:
        filler = disk / "filler"

        def fill() -> None:
            with filler.open("wb") as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(2**16))
                    file.flush()

        for _ in range(TIMES):
            moment = draw.randint(1, ended.moments // 2)
            first = train_disturbed([*words, f"output={disk / 'run'}"], tmp_path, moment=moment, disturb=fill)
            assert first.statuses == [2] and "Traceback" not in first.texts[0], first.texts[0][-2000:]
            filler.unlink()
            again = train_disturbed([*words, f"output={disk / 'run'}", "--resume"], tmp_path)
            assert again.statuses == [0], again.texts[0][-2000:]
            assert differences(disk / "run", run) == []
            shutil.rmtree(disk / "run")


def test_of_two_runs_at_once_one_is_refused(words, undisturbed, tmp_path):
    """The second one is started while the first one is at work."""
    run, ended = undisturbed
    (tmp_path / "second").mkdir()
    one = [*words, f"output={tmp_path / 'run'}"]
    pipe = os.pipe()

    def start_second() -> None:
        second = train_disturbed(one, tmp_path / "second")
        os.write(pipe[1], f"{second.statuses[0]} {'in use by another training (process' in second.texts[0]}".encode())

    first = train_disturbed(one, tmp_path, moment=ended.moments // 3, disturb=start_second)
    statuses = os.read(pipe[0], 100).decode().split()
    assert first.statuses == [0] and statuses == ["2", "True"]
    assert differences(tmp_path / "run", run) == []
