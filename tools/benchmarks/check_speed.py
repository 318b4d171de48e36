"""How long `e2e-vl check-data` takes on files of full size, and how much memory."""

from __future__ import annotations

import json
import multiprocessing
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from check_files import WRITERS
from e2e_vl.commands import check_data


def benchmark_check(folder: Path, kinds: list[str], share: float) -> dict[str, Any]:
    """Write the files of each kind into the folder, unless they are there, and check them, each kind in a new process.

    Args:
        kinds: names of `check_files.WRITERS`.
        share: of the full size.

    Returns:
        `share` and `cases`: each with `kind`, `texts`, `problems`, `seconds`, `cpu_seconds` and `mib`, the resident
        peak of the process.
    """
    forks = multiprocessing.get_context("fork")  # the imports are there already
    cases = []
    for kind in kinds:
        place = folder / f"{kind}_{share:g}"
        if not (place / "run.yaml").is_file():
            WRITERS[kind](place, share)
        with forks.Pool(1) as pool:
            case = pool.apply(_check, (place,))
        found = json.loads((place / "found.json").read_text(encoding="utf-8"))
        texts = sum(split["texts"] for split in found["splits"])
        cases.append({"kind": kind, "texts": texts, "problems": len(found["problems"]), **case})
    return {"share": share, "cases": cases}


def _check(place: Path) -> dict[str, float]:
    started, cpu = time.perf_counter(), time.process_time()
    check_data.main(["--config", str(place / "run.yaml"), "--json", str(place / "found.json")])
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "mib": mib}


def show(result: dict[str, Any]) -> int:
    """Print a table in Markdown; returns the exit status."""
    print("| files | texts | problems | seconds | of the processor | MiB at most |")
    print("|---|---:|---:|---:|---:|---:|")
    for line in _rows(result):
        print(line)
    return 0


def _rows(result: dict[str, Any]) -> Iterator[str]:
    for case in result["cases"]:
        yield (
            f"| {case['kind']} | {case['texts']:,} | {case['problems']:,} | {case['seconds']:.0f} | "
            f"{case['cpu_seconds']:.0f} | {case['mib']:,.0f} |"
        )
