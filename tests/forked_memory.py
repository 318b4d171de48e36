"""How much memory a forked process copies."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

SMAPS = Path("/proc/self/smaps_rollup")  # only Linux tells the unshared pages


def unshared_kib() -> int:
    """KiB of the pages that this process shares with no other one."""
    lines = SMAPS.read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def growth_in_a_fork(look: Callable[[], object]) -> int:
    """KiB of pages that a forked process no longer shares once it has called `look`."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        before = unshared_kib()
        look()
        os.write(writing, str(unshared_kib() - before).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        grown = int(file.read())
    os.waitpid(process, 0)
    return grown
