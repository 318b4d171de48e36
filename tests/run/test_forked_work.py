"""Work in forked processes gives what one process gives, in its order; one that dies is named."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest

from e2e_vl.run import forked_work
from e2e_vl.run.forked_work import affordable, cores, in_order

ITEMS = list(range(11))


@pytest.fixture
def impatient(monkeypatch) -> None:
    """Processes are forked for any work."""
    monkeypatch.setattr(forked_work, "PATIENCE", 0.0)


def test_results_come_in_the_order_of_the_items(impatient):
    found = list(in_order(lambda item: (item * item, os.getpid()), ITEMS, 3))
    assert [square for square, _ in found] == [item * item for item in ITEMS]
    first, *others = [pid for _, pid in found]
    assert first == os.getpid(), "this process begins"
    assert len(set(others)) == 3 and first not in others
    assert others[:3] == others[3:6], "each has every third item"


@pytest.mark.parametrize("processes", [1, 4])
def test_little_work_is_done_by_one_process(processes):
    assert set(in_order(lambda _: os.getpid(), ITEMS, processes)) == {os.getpid()}
    assert list(in_order(str, [], processes)) == []


def test_one_process_never_forks(impatient):
    assert set(in_order(lambda _: os.getpid(), ITEMS, 1)) == {os.getpid()}


def test_as_many_processes_as_memory_allows(impatient, monkeypatch):
    monkeypatch.setattr(forked_work, "cores", lambda: 3)
    monkeypatch.setattr(forked_work, "MEMORY", 1 << 60)
    assert len(set(in_order(lambda _: os.getpid(), ITEMS, None))) == 1 + 3
    monkeypatch.setattr(forked_work, "MEMORY", 1 << 20)
    assert affordable() == 1 and set(in_order(lambda _: os.getpid(), ITEMS, None)) == {os.getpid()}


def test_a_daemonic_process_does_not_fork(impatient, monkeypatch):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    assert set(in_order(lambda _: os.getpid(), ITEMS, 2)) == {os.getpid()}


def test_what_was_read_before_is_there(impatient):
    known: dict[int, int] = {}

    def work(item: int) -> int:
        known[item] = item  # in the memory of its own process only
        return len(known)

    assert list(in_order(work, ITEMS, 2)) == [1, *(number for pair in range(5) for number in (pair + 2,) * 2)]
    assert list(known) == [0]


def test_a_process_that_is_killed_is_one_sentence(impatient):
    first = os.getpid()

    def work(item: int) -> int:
        if item == 5 and os.getpid() != first:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    found = []
    with pytest.raises(ChildProcessError, match="was ended by the signal SIGKILL, as when memory is short; try"):
        found.extend(in_order(work, ITEMS, 2))
    assert found == [0, 1, 2, 3, 4]
    assert not multiprocessing.active_children()


def test_a_process_that_fails_tells_its_status(impatient, capfd):
    first = os.getpid()

    def work(item: int) -> int:
        if os.getpid() != first:
            raise RuntimeError("a mistake in the program")
        return item

    with pytest.raises(ChildProcessError, match="was ended with status 1, and what it wrote stands above"):
        list(in_order(work, ITEMS, 2))
    assert "RuntimeError: a mistake in the program" in capfd.readouterr().err


def test_who_stops_listening_ends_the_processes(impatient):
    results = in_order(lambda _: bytes(10**6), ITEMS, 2)  # more than a pipe holds, so the processes wait
    assert [len(next(results)) for _ in range(3)] == [10**6] * 3
    assert len(multiprocessing.active_children()) == 2
    results.close()
    assert not multiprocessing.active_children()


def test_there_is_a_core():
    assert 1 <= cores() <= os.cpu_count()
