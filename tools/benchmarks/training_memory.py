"""How much memory all processes of a pre-training run take, step by step: model, optimiser and data workers."""

from __future__ import annotations

import dataclasses
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from safetensors.torch import save_file

from e2e_vl.config import load_config
from e2e_vl.engine.build import build_detector
from e2e_vl.engine.train import train
from e2e_vl.run_files import read_log
from measuring import fresh_process, machine_facts
from reading_memory import MIB, write_files

KINDS = ("rss", "pss", "uss")  # resident; shared pages divided by the number of sharers; without shared pages
_SAMPLES = 100  # of a run
_POLL_SECONDS = 0.05


def benchmark_training_memory(
    config_file: Path,
    folder: Path,
    *,
    sizes: list[tuple[int, int]],
    steps: int,
    images_per_batch: int,
    workers: int,
) -> dict[str, Any]:
    """Train on files of several sizes, one run after the other, and watch the memory of all processes from outside.

    Every run does what tools/train.py does, in a fresh process on the CPU; its folder is removed. The files stay (see
    `write_files`).

    Args:
        config_file: YAML file of a pre-training run on shards with a corpus.
        folder: where the files are written.
        sizes: (MiB of the corpus, images with captions) of each run.
        steps: optimiser steps of each run.
        images_per_batch: captions in a batch; each caption brings one text of the corpus.
        workers: processes that read.

    Returns:
        `machine`, `settings`, and `cases`: for each size `corpus_mib`, `records`, `files` (MiB), `start` (MiB,
        resident, with everything imported), `seconds`, `steps` [S], the measured steps, and `main` and each of
        `workers` with `rss`, `pss` and `uss`, lists [S] in MiB, and a `summary` of them (see `summary`).

    Raises:
        ValueError: a size that is not positive, or what the run raises about settings and data.
        RuntimeError: the training process died.
    """
    if min(steps, images_per_batch, *(number for pair in sizes for number in pair)) < 1 or workers < 0:
        raise ValueError("Sizes of the corpus, records, steps and images per batch must be positive.")
    reading = {"images_per_batch": images_per_batch, "workers": workers}
    cases = []
    for corpus_mib, records in sizes:
        files = write_files(folder, corpus_mib, records)
        run = folder / f"run_{os.getpid()}_{len(cases)}"
        detector = folder / "detector.safetensors"
        words = [*files.words(**reading), f"output={run}", f"detector.weights={detector}"]
        words += [f"train.max_steps={steps}", f"train.log_every={max(steps // _SAMPLES, 1)}"]
        _write_detector(config_file, words, detector)
        cases.append({"corpus_mib": corpus_mib, "records": records, "files": files.sizes(), **_run(config_file, words)})
    return {
        "machine": machine_facts(torch.device("cpu")),
        "settings": {"config": str(config_file), "steps": steps, **reading},
        "cases": cases,
    }


def summary(steps: list[int], values: dict[str, list[float]]) -> dict[str, float]:
    """One process in numbers, MiB: the resident `peak`, and for each kind an `early` and a `late` value and `growth`.

    Early is the median from 20 to 30 % of the steps, when pools of allocators and caches have filled; late is the
    median of the last 10 %. Medians, because the memory of a step depends on its longest text and number of regions.
    """
    early = [row for row, step in enumerate(steps) if 0.2 * steps[-1] < step <= 0.3 * steps[-1]] or [0]
    late = [row for row, step in enumerate(steps) if step > 0.9 * steps[-1]]
    result = {"peak": max(values["rss"])}
    for kind in KINDS:
        first, last = (statistics.median(values[kind][row] for row in rows) for rows in (early, late))
        result |= {f"{kind}_early": round(first, 1), f"{kind}_late": round(last, 1)}
        result[f"{kind}_growth"] = round(last - first, 1)
    return result


def draw_memory(result: dict[str, Any], path: Path) -> None:
    """Write a PNG with curves of all runs: resident and unshared (USS) memory of the main process and the workers."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    main_axes, worker_axes = figure.subplots(1, 2)
    for number, case in enumerate(result["cases"]):
        name = f"{case['corpus_mib']} MiB, {case['records']} records"
        groups = ((main_axes, [case["main"]]), (worker_axes, case["workers"]))
        for axes, processes in groups:
            for row, process in enumerate(processes):
                for kind, style in (("rss", "-"), ("uss", "--")):
                    label = f"{kind.upper()}, {name}" if row == 0 else None
                    axes.plot(case["steps"], process[kind], style, color=f"C{number}", label=label, linewidth=1)
    for axes, title in ((main_axes, "main process"), (worker_axes, "each data worker")):
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.set_ylabel("MiB")
        axes.set_ylim(bottom=0)
        if axes.lines:
            axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(path)


def _write_detector(config_file: Path, words: list[str], path: Path) -> None:
    """Write a detector with random values: shards come without boxes, so a detector has to propose them."""
    config = load_config(config_file, words)
    torch.manual_seed(config.seed)
    detector = build_detector(dataclasses.replace(config, detector=dataclasses.replace(config.detector, weights=None)))
    save_file(detector.state_dict(), path)


def _run(config_file: Path, words: list[str]) -> dict[str, Any]:
    """One run in a process of its own, measured each time that it has written a line into its log."""
    run = Path(load_config(config_file, words).output)
    begin = time.perf_counter()
    try:
        with fresh_process(_train, config_file, words) as (process, receiver):
            start = receiver.recv()
            steps, measured = _watch(process, run / "log.jsonl")
            message = receiver.recv()
    finally:
        shutil.rmtree(run, ignore_errors=True)
    if message is not None:
        raise ValueError(message)
    if not steps:
        raise ValueError("The run was over before its memory could be measured; give more steps.")
    main, *workers = measured.values()
    for values in measured.values():
        values["summary"] = summary(steps, values)
    return {
        "start": round(start / MIB, 1),
        "seconds": round(time.perf_counter() - begin, 1),
        "steps": steps,
        "main": main,
        "workers": workers,
    }


def _train(sender: Any, config_file: Path, words: list[str]) -> None:
    """In a process of its own: send the memory that the imports took, train, and send the error of the run or None."""
    sender.send(psutil.Process().memory_info().rss)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    message = None
    try:
        train(load_config(config_file, words))
    except (ValueError, OSError) as error:
        message = str(error)
    sender.send(message)


def _watch(process: Any, log: Path) -> tuple[list[int], dict[int, dict[str, list[float]]]]:
    """The measured steps, and the memory in MiB at each of them, of the main process and then of each worker."""
    steps: list[int] = []
    measured: dict[int, dict[str, list[float]]] = {}
    size = 0
    while process.is_alive():
        time.sleep(_POLL_SECONDS)
        if not log.is_file() or log.stat().st_size == size:
            continue
        size = log.stat().st_size
        lines = [line for line in read_log(log) if line["kind"] == "train"]
        found = _memory(process.pid)
        if not lines or not found or lines[-1]["step"] in steps or (measured and set(found) != set(measured)):
            continue  # the run is over: its workers have ended
        steps.append(lines[-1]["step"])
        for pid, values in found.items():
            for kind in KINDS:
                measured.setdefault(pid, {}).setdefault(kind, []).append(round(values[kind] / MIB, 1))
    return steps, measured


def _memory(pid: int) -> dict[int, dict[str, int]]:
    """Bytes of each kind, by process: a process and the workers that it forked; empty if one of them has just ended."""
    try:
        main = psutil.Process(pid)
        command = main.cmdline()
        workers = sorted((one for one in main.children() if one.cmdline() == command), key=lambda one: one.pid)
        found = {one.pid: one.memory_full_info()._asdict() for one in (main, *workers)}
    except psutil.Error:
        return {}
    # only Linux divides shared pages
    return {pid: {kind: values.get(kind, values["uss"]) for kind in KINDS} for pid, values in found.items()}


def show(result: dict[str, Any]) -> int:
    """Print a table in Markdown, MiB; returns the exit status."""
    settings = result["settings"]
    print(f"{settings['steps']} steps of {settings['images_per_batch']} captions and as many texts of the corpus, MiB:")
    print("| corpus | records | process | RSS peak | RSS late | RSS growth | PSS late | USS late | USS growth |")
    print("|---:|---:|---|---:|---:|---:|---:|---:|---:|")
    for case in result["cases"]:
        rows = {"main": case["main"]} | {f"worker {number}": one for number, one in enumerate(case["workers"])}
        for name, process in rows.items():
            values = process["summary"]
            print(
                f"| {case['files']['corpus']:.0f} | {case['records']} | {name} | {values['peak']:.0f} | "
                f"{values['rss_late']:.0f} | {values['rss_growth']:+.1f} | {values['pss_late']:.0f} | "
                f"{values['uss_late']:.0f} | {values['uss_growth']:+.1f} |"
            )
    for case in result["cases"]:
        print(f"{case['records']} records: {case['start']:.0f} MiB with everything imported, {case['seconds']:.0f} s")
    return 0
