"""How much memory all processes of a pre-training run take, step by step: model, optimiser and data workers."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from safetensors.torch import save_file

from detector.errors import UserError
from e2e_vl.config import load_config
from e2e_vl.data.batching import BatchLoader, GroupedBatchSampler
from e2e_vl.io import RunLog, read_log
from e2e_vl.run.build import build_detector, build_run, resolve
from e2e_vl.run.train import train
from measuring import machine_facts, peak_mib
from memory_files import MIB, write_files

KINDS = ("rss", "pss", "uss")  # resident; shared pages divided by the number of sharers; without shared pages
_SAMPLES = 100  # of a run
_POLL_SECONDS = 0.05
Row = tuple[int, dict[int, dict[str, float]]]  # a step, and by process the MiB of each kind


def benchmark_memory(
    config_file: Path,
    folder: Path,
    *,
    sizes: list[tuple[int, int]],
    steps: int,
    images_per_batch: int,
    workers: int,
    training: bool,
) -> dict[str, Any]:
    """Pre-train on files of several sizes, one run after the other, and watch the memory of all processes from outside.

    Every run is in a fresh process on the CPU, so that the memory of the writers and of the caller does not count. It
    does what tools/train.py does, or only reads the batches; its folder is removed. The files stay (see `write_files`).

    Args:
        config_file: YAML file of a pre-training run on shards with a corpus.
        folder: where the files are written: the MiB of the corpora and about 4 KiB for each record.
        sizes: (MiB of the corpus, images with captions) of each run.
        steps: optimiser steps of each run, or batches that are read.
        images_per_batch: captions in a batch; each caption brings one text of the corpus.
        workers: processes that read.
        training: whether the model is trained; otherwise it is only built, and batches are read.

    Returns:
        `machine`, `settings`, and `cases`: for each size `corpus_mib`, `records`, `files` (MiB), `start` (MiB,
        resident, with everything imported), `seconds`, `steps` [S], the measured steps, and `main` and each of
        `workers` with `rss`, `pss` and `uss`, lists [S] in MiB, and a `summary` of them (see `summary`). Without
        training also `index`, the resident peak (MiB) until the model was built and the files were opened for the first
        time, `seconds_index`, which this took, and `seconds_batches`, which the batches took.

    Raises:
        ValueError: a size that is not positive, or what the run raises about settings and data.
        RuntimeError: the measured process died.
    """
    what = "steps" if training else "batches"
    if min(steps, images_per_batch, *(number for pair in sizes for number in pair)) < 1 or workers < 0:
        raise UserError(f"Sizes of the corpus, records, {what} and images per batch must be positive.")
    cases = []
    for corpus_mib, records in sizes:
        words, files = write_files(folder, corpus_mib, records)
        run = folder / f"run_{os.getpid()}_{len(cases)}"
        detector = folder / "detector.safetensors"
        words += [f"data.workers={workers}", f"output={run}", f"detector.weights={detector}"]
        words += [f"train.images_per_batch={images_per_batch}", f"train.max_steps={steps}"]
        words += [f"train.log_every={max(steps // _SAMPLES, 1)}"]
        _write_detector(config_file, words, detector)
        measured = _measure(_train if training else _read, config_file, words, run)
        cases.append({"corpus_mib": corpus_mib, "records": records, "files": files, **measured})
    settings = {"config": str(config_file), what: steps, "images_per_batch": images_per_batch, "workers": workers}
    return {"machine": machine_facts(torch.device("cpu")), "settings": settings, "cases": cases}


def _write_detector(config_file: Path, words: list[str], path: Path) -> None:
    """Write a detector with random values: shards come without boxes, so a detector has to propose them."""
    config = load_config(config_file, [*words, "detector.weights=null"])
    torch.manual_seed(config.seed)
    save_file(build_detector(config).state_dict(), path)


def _measure(
    action: Callable[[Path, list[str]], dict[str, float]], config_file: Path, words: list[str], folder: Path
) -> dict[str, Any]:
    """One run in a process of its own, measured each time that it has written a line into its log."""
    begin = time.perf_counter()
    try:
        # Spawned, not forked: it must not inherit the memory of this process.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            pid, start = pool.submit(_begin).result()
            run = pool.submit(action, config_file, words)
            rows = _watch(run, pid, folder / "log.jsonl")
            found = run.result()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not rows:
        raise UserError("The run was over before its memory could be measured; give more steps.")
    steps = [step for step, _ in rows]
    processes = [{kind: [memory[one][kind] for _, memory in rows] for kind in KINDS} for one in rows[0][1]]
    main, *workers = ({**values, "summary": summary(steps, values)} for values in processes)
    seconds = round(time.perf_counter() - begin, 1)
    return {"start": start, **found, "seconds": seconds, "steps": steps, "main": main, "workers": workers}


def _begin() -> tuple[int, float]:
    """In the process that is measured: its id, and the resident MiB that the imports took."""
    multiprocessing.set_start_method(None, force=True)  # a spawned process would spawn its workers, not fork them
    os.environ["ACCELERATE_USE_CPU"] = "true"
    return os.getpid(), round(psutil.Process().memory_info().rss / MIB, 1)


def _train(config_file: Path, words: list[str]) -> dict[str, float]:
    train(load_config(config_file, words))
    return {}


def _read(config_file: Path, words: list[str]) -> dict[str, float]:
    """Read the batches that training would read, with the log of a training run."""
    begin = time.perf_counter()
    config = resolve(load_config(config_file, words))
    run = build_run(config)
    index, opened = peak_mib(), time.perf_counter()
    sampler = GroupedBatchSampler(run.train_data.groups, config.train.images_per_batch, 1)
    loader = BatchLoader(run.train_data, sampler, run.collate, workers=config.data.workers, keep_workers=True)
    log = Path(config.output) / "log.jsonl"
    log.parent.mkdir(parents=True)
    lines = RunLog(log, enabled=True)
    step, epoch = 0, 0
    while step < config.train.max_steps:
        sampler.set_epoch(epoch)
        for _ in itertools.islice(loader, config.train.max_steps - step):
            step += 1
            if step % config.train.log_every == 0:
                lines.write(step, "train", {})
        epoch += 1
    seconds = {"seconds_index": opened - begin, "seconds_batches": time.perf_counter() - opened}
    return {"index": index, **{name: round(value, 1) for name, value in seconds.items()}}


def _watch(run: Future, pid: int, log: Path) -> list[Row]:
    """The measured steps; the main process is the first of each, then come its workers."""
    rows: list[Row] = []
    size = 0
    while not run.done():
        time.sleep(_POLL_SECONDS)
        if not log.is_file() or log.stat().st_size == size:
            continue
        size = log.stat().st_size
        steps = [line["step"] for line in read_log(log) if line["kind"] == "train"]
        found = _memory(pid)
        if steps and found and (not rows or (steps[-1] > rows[-1][0] and found.keys() == rows[0][1].keys())):
            rows.append((steps[-1], found))  # otherwise the run is over: its workers have ended
    return rows


def _memory(pid: int) -> dict[int, dict[str, float]]:
    """MiB of each kind, by process: a process and the workers that it forked; empty if one of them has just ended."""
    try:
        main = psutil.Process(pid)
        command = main.cmdline()
        workers = sorted((one for one in main.children() if one.cmdline() == command), key=lambda one: one.pid)
        found = {one.pid: one.memory_full_info()._asdict() for one in (main, *workers)}
    except psutil.Error:
        return {}
    if not all(values["uss"] for values in found.values()):  # a process that is just ending has no pages left
        return {}
    # only Linux divides shared pages
    return {
        pid: {kind: round(values.get(kind, values["uss"]) / MIB, 1) for kind in KINDS} for pid, values in found.items()
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
        for axes, processes in ((main_axes, [case["main"]]), (worker_axes, case["workers"])):
            for row, process in enumerate(processes):
                for kind, style in (("rss", "-"), ("uss", "--")):
                    label = f"{kind.upper()}, {name}" if row == 0 else None
                    axes.plot(case["steps"], process[kind], style, color=f"C{number}", label=label, linewidth=1)
    for axes, title in ((main_axes, "main process"), (worker_axes, "each data worker")):
        axes.set(title=title, xlabel="step", ylabel="MiB", ylim=(0, None))
        if axes.lines:
            axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(path)


def show(result: dict[str, Any]) -> int:
    """Print a table in Markdown, MiB; returns the exit status."""
    settings = result["settings"]
    number = f"{settings['steps']} steps" if "steps" in settings else f"{settings['batches']} batches"
    print(f"{number} of {settings['images_per_batch']} captions and as many texts of the corpus, MiB:")
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
        if "index" in case:
            print(f"  {case['index']} MiB at most and {case['seconds_index']} s to build the model and index the files")
            print(f"  {case['seconds_batches']} s to read the batches")
    return 0
