"""How long `e2e-vl check-data` takes on files of full size, and how much memory."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import psutil

from check_files import WRITERS
from e2e_vl.cli import check_data

_POLL_SECONDS = 0.5


def benchmark_check(folder: Path, kinds: list[str], share: float) -> dict[str, Any]:
    """Write the files of each kind into the folder, unless they are there, and check them, each kind in a new process.

    Args:
        kinds: names of `check_files.WRITERS`.
        share: of the full size.

    Returns:
        `share` and `cases`: each with `kind`, `texts`, `problems`, `seconds`, `own_seconds` and `forked_seconds`, what
        the processor worked for the process and for those that it forked (user and system), and `mib`, the peak of the
        resident memory of the process and of what those that it forked did not share with it.
    """
    forks = multiprocessing.get_context("fork")  # the imports are there already
    cases = []
    for kind in kinds:
        place = folder / f"{kind}_{share:g}"
        if not (place / "run.yaml").is_file():
            WRITERS[kind](place, share)
        with ProcessPoolExecutor(1, forks) as pool:
            pid = pool.submit(os.getpid).result()
            run = pool.submit(_check, place)
            peak = 0.0
            while wait([run], _POLL_SECONDS).not_done:
                peak = max(peak, _memory(pid))
            case = run.result()
        case["mib"] = max(case["mib"], peak)
        found = json.loads((place / "found.json").read_text(encoding="utf-8"))
        texts = sum(split["texts"] for split in found["splits"])
        cases.append({"kind": kind, "texts": texts, "problems": len(found["problems"]), **case})
    return {"share": share, "cases": cases}


def _check(place: Path) -> dict[str, float]:
    began = time.perf_counter()
    before = _processor_seconds()
    check_data.main(["--config", str(place / "run.yaml"), "--json", str(place / "found.json")])
    own, forked = (after - at_first for after, at_first in zip(_processor_seconds(), before, strict=True))
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": time.perf_counter() - began, "own_seconds": own, "forked_seconds": forked, "mib": mib}


def _processor_seconds() -> tuple[float, float]:
    """Of this process, and of those that it forked and that have ended."""
    found = os.times()
    return found.user + found.system, found.children_user + found.children_system


def _memory(pid: int) -> float:
    """MiB that a process and those that it forked have at present; pages that they share count once."""
    try:
        main = psutil.Process(pid)
        forked = [one.memory_full_info().uss for one in main.children()]
        return (main.memory_info().rss + sum(forked)) / 2**20
    except psutil.Error:  # one has just ended
        return 0.0


def show(result: dict[str, Any]) -> int:
    """Print a table in Markdown; returns the exit status."""
    print("| files | texts | problems | seconds | of the processor | of forked processes | MiB at most |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for line in _rows(result):
        print(line)
    return 0


def _rows(result: dict[str, Any]) -> Iterator[str]:
    for case in result["cases"]:
        yield (
            f"| {case['kind']} | {case['texts']:,} | {case['problems']:,} | {case['seconds']:.0f} | "
            f"{case['own_seconds']:.0f} | {case['forked_seconds']:.0f} | {case['mib']:,.0f} |"
        )
