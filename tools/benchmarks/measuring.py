"""What all measurements share: the machine, taking turns, and how times are summed up."""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from tqdm.auto import tqdm

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs" / "benchmark"


def machine_facts(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def print_machine(machine: dict[str, Any]) -> None:
    """One line with the facts of `machine_facts`."""
    print(f"{machine['device']}, {machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}")


def print_sizes(result: dict[str, Any], texts: str = "") -> None:
    """Two lines to read: the `machine`, and the training steps with the `settings` of `common_settings`."""
    print_machine(result["machine"])
    settings = result["settings"]
    height, width = settings["image_size"]
    print(
        f"{settings['images_per_batch']} images of {height} x {width} pixels{texts}, "
        f"{settings['parameters'] / 1e6:.1f} M parameters, {settings['repetitions']} repetitions"
    )


def random_boxes(number: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """float32 [number, 4], xyxy in units of the image: top-left in its first half, sides of 10 to 50 % of its sides."""
    corners = torch.rand(number, 2, generator=generator) * 0.5
    sides = 0.1 + torch.rand(number, 2, generator=generator) * 0.4
    return torch.cat([corners, corners + sides], dim=1)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def take_turns(
    ways: dict[str, Callable[[], Any]], repetitions: int, warm_up: int, device: torch.device, label: str
) -> dict[str, list[float]]:
    """Seconds of every repetition of every way; the ways take turns, and each second repetition goes backwards."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repetition in tqdm(range(warm_up + repetitions), desc=label, leave=False):
        for name in list(ways) if repetition % 2 == 0 else list(ways)[::-1]:
            synchronize(device)
            started = time.perf_counter()
            ways[name]()
            synchronize(device)
            if repetition >= warm_up:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def spread(seconds: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """`median`, `min`, `max` and `all` seconds of every way."""
    return {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values), "all": values}
        for name, values in seconds.items()
    }


def peak_mib() -> float:
    """Highest resident MiB of this process so far, where the system tells it; elsewhere the present ones."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text(encoding="utf-8")) if status.is_file() else None
    return round((int(found[1]) * 1024 if found else psutil.Process().memory_info().rss) / 2**20, 1)
