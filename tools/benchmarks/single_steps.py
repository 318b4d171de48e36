"""Time and memory of one training step, for several numbers of regions and texts, precisions, and checkpointing."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import torch
from tqdm.auto import tqdm

from e2e_vl.config import RunConfig
from e2e_vl.model import VisionLanguageModel
from e2e_vl.run.optim import build_optimizer
from e2e_vl.structures import Batch
from grouped_steps import build_batches, common_settings, with_rois
from measuring import machine_facts, print_sizes, synchronize

PRECISIONS = ("fp32", "bf16")
SAMPLE_SECONDS = 0.005


def benchmark_steps(
    config: RunConfig,
    *,
    rois: Sequence[int],
    image_size: tuple[int, int] | None,
    repetitions: int,
    warm_up: int,
    checkpointing: Sequence[bool] = (False, True),
) -> dict[str, Any]:
    """Time forward, backward and optimiser step of every combination; the model is the same one throughout.

    Args:
        config: a run with `train.images_per_batch` / `train.accumulate` images in a batch, of which each has 1 text or
            k = `data.texts_per_image`.
        rois: boxes per image.
        image_size: pad images to this (height, width), pixels.
        repetitions, warm_up: measured steps of each combination, and steps before the measured ones.
        checkpointing: without and with activation checkpointing, in this order.

    Returns:
        `machine`, `settings`, and `cases`: each with `rois`, `texts_per_image` (1 and k), `precision`,
        `activation_checkpointing`, `seconds` (median), `seconds_forward_backward` and `peak_gib`: on CPU the largest
        resident memory of the process during the steps, weights and optimiser included; on CUDA the allocator's peak.
    """
    config, run, grouped, singles = build_batches(config, image_size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = run.model.to(device).train()
    optimizer = build_optimizer(model, config.train)
    texts, cases = {1: singles[0], config.data.texts_per_image: grouped}, []
    combinations = list(itertools.product(checkpointing, PRECISIONS, rois, texts))
    for is_checkpointed, precision, number, k in tqdm(combinations, desc="combinations"):
        if is_checkpointed:  # the last half: it is never switched off again
            model.recompute_activations()
        (batch,) = with_rois([texts[k]], number, config.seed)
        seconds, peak = measure_steps(model, optimizer, batch.to(device), precision, repetitions, warm_up)
        cases.append(
            {
                "rois": number,
                "texts_per_image": k,
                "precision": precision,
                "activation_checkpointing": is_checkpointed,
                "seconds": statistics.median(whole for whole, _ in seconds),
                "seconds_forward_backward": statistics.median(part for _, part in seconds),
                "peak_gib": peak / 2**30,
            }
        )
    return {
        "machine": machine_facts(device),
        "settings": {**common_settings(config, run, grouped), "repetitions": repetitions, "warm_up": warm_up},
        "cases": cases,
    }


def measure_steps(
    model: VisionLanguageModel,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    precision: str,
    repetitions: int,
    warm_up: int,
) -> tuple[list[tuple[float, float]], int]:
    """(seconds of the step, seconds of forward and backward) of each repetition, and the peak memory in bytes."""
    device = batch.images.pixels.device
    seconds = []
    with peak_memory(device) as peak:
        for repetition in range(warm_up + repetitions):
            synchronize(device)
            started = time.perf_counter()
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
                loss = sum(loss.mean for loss in model(batch).losses.values())
            loss.backward()
            synchronize(device)
            middle = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            synchronize(device)
            if repetition >= warm_up:
                seconds.append((time.perf_counter() - started, middle - started))
    return seconds, peak[0]


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[list[int]]:
    """Yields a list of one number: after the block, the largest memory in bytes, resident, or allocated on CUDA."""
    peak = [0]
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc keeps freed memory, so that what ran before would count
        ctypes.CDLL(None).malloc_trim(0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak[0] = torch.cuda.max_memory_allocated(device)
        return
    process, finished = psutil.Process(), threading.Event()

    def watch() -> None:
        while not finished.wait(SAMPLE_SECONDS):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        finished.set()
        watcher.join()
        peak[0] = max(peak[0], process.memory_info().rss)


def show(result: dict[str, Any]) -> int:
    """Print a table in Markdown; returns the exit status."""
    print_sizes(result)
    print("| boxes | texts per image | precision | checkpointing | s per step | of it forward + backward | peak GiB |")
    print("|---:|---:|---|---|---:|---:|---:|")
    for case in result["cases"]:
        print(
            f"| {case['rois']} | {case['texts_per_image']} | {case['precision']} | "
            f"{'on' if case['activation_checkpointing'] else 'off'} | {case['seconds']:.2f} | "
            f"{case['seconds_forward_backward']:.2f} | {case['peak_gib']:.2f} |"
        )
    return 0
