"""One training per run directory; the lock ends with its process, however that dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from e2e_vl.run.run_lock import RunLock


def hold(folder, is_held) -> None:
    with RunLock(folder):
        if os.fork() == 0:  # as a data worker: it outlives its parent for a while
            time.sleep(3)
            os._exit(0)
        is_held.set()
        time.sleep(60)


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    context = multiprocessing.get_context("fork")
    is_held = context.Event()
    process = context.Process(target=hold, args=(tmp_path / "run", is_held))
    process.start()
    assert is_held.wait(30)
    with pytest.raises(ValueError, match=rf"run is in use by another training \(process {process.pid} on .*\); wait"):
        RunLock(tmp_path / "run").__enter__()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert (tmp_path / "run" / ".lock").exists()
    with RunLock(tmp_path / "run"):
        assert (tmp_path / "run" / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    assert not list((tmp_path / "run").iterdir())


def test_a_file_is_no_run_directory(tmp_path):
    (tmp_path / "run").write_text("precious")
    with pytest.raises(ValueError, match=r"run is a file; choose another `output`"):
        RunLock(tmp_path / "run").__enter__()
    assert (tmp_path / "run").read_text() == "precious"


def test_a_lock_file_that_was_removed_meanwhile_is_made_anew(tmp_path, monkeypatch):
    """The last owner removes it after we have opened it and before we lock it."""
    import fcntl

    lock, removed = fcntl.lockf, []

    def late(handle, how):
        if not removed:
            removed.append((tmp_path / ".lock").unlink())
        lock(handle, how)

    monkeypatch.setattr("e2e_vl.run.run_lock.fcntl.lockf", late)
    with RunLock(tmp_path):
        assert removed and (tmp_path / ".lock").exists()


@pytest.mark.parametrize("kind", ["symlink", "link", "fifo", "mkdir"])
def test_a_lock_that_is_something_else_is_refused_and_nothing_is_overwritten(tmp_path, kind):
    (tmp_path / "run").mkdir()
    (tmp_path / "other").write_text("kept")
    lock = tmp_path / "run" / ".lock"
    make = {
        "symlink": lambda: lock.symlink_to(tmp_path / "other"),
        "link": lambda: os.link(tmp_path / "other", lock),
        "fifo": lambda: os.mkfifo(lock),
        "mkdir": lock.mkdir,
    }
    make[kind]()
    with (
        pytest.raises(ValueError, match=r"run/\.lock is a link, or not a file that a training made; remove it"),
        RunLock(lock.parent),
    ):
        pass
    assert (tmp_path / "other").read_text() == "kept" and lock.exists()
