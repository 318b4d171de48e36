"""What it takes to read annotations of full size, and what a data worker adds to it in a quarter of an epoch."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from check_files import WRITERS
from detector.io import read_yaml
from e2e_vl.config import DataSettings
from e2e_vl.data.base import VLDataset, Wants, open_options
from e2e_vl.data.storage.record_errors import NotedErrors
from measuring import ROOT

EPOCH = 0.25  # the part of an epoch that the worker reads
STRIDE = 1_000_003  # a prime number: every group once, here and there, without a list of them
ARCHIVED = 3_300_000  # images of Conceptual Captions


def write_archived(folder: Path, share: float) -> None:
    """Conceptual Captions as the official VL-BERT code has them: JSON lines, and one archive with all images."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{number:08d}.jpg" for number in range(int(ARCHIVED * share))]
    with (folder / "train.json").open("w", encoding="utf-8") as file:
        for name in names:
            words = ["a", "dog", "on", "the", "table", name[:8]]
            file.write(json.dumps({"image": f"train_image.zip@/{name}", "caption": words}) + "\n")
    with zipfile.ZipFile(folder / "train_image.zip", "w") as archive:
        for name in names:
            archive.writestr(name, b"no image, but bytes")
    settings = read_yaml(Path(__file__).with_name("check_settings.yaml"))
    content = {
        "output": "unused",
        "detector": {"config": str(ROOT / "configs" / "detector" / "vl_bert_R_101.yaml")},
        "encoder": {"name": settings["encoder"]},
        "task": {"name": settings["archived_task"]},
        "data": {
            "name": settings["archived"],
            "config": {"source": "json_lines"},
            "root": str(folder),
            "files": {"captions": "{split}.json"},
            "boxes": {"train": "online"},
        },
        "eval": {"boxes": ["online"]},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")


KINDS = {**WRITERS, "archived": write_archived}


def benchmark_start(folder: Path, kinds: list[str], share: float) -> dict[str, Any]:
    """Write the files of each kind into the folder, unless they are there, and measure each kind in a new process.

    Args:
        kinds: names of `KINDS`.
        share: of the full size.

    Returns:
        `share` and `cases`: each with `kind` and what `measure_start` returns.
    """
    cases = []
    for kind in kinds:
        place = folder / f"{kind}_{share:g}"
        if not (place / "run.yaml").is_file():
            KINDS[kind](place, share)
        for index in (place / "index").glob("*"):
            index.unlink()  # it is the first start
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            cases.append({"kind": kind, **pool.apply(measure_config, (place / "run.yaml",))})
    return {"share": share, "cases": cases}


def measure_config(path: Path) -> dict[str, float]:
    """`measure_start` of the training split of a config."""
    from e2e_vl.config import (
        BoxSource,  # late: these import torch
        load_config,
    )
    from e2e_vl.run.build import named_parts, wants_of

    config = load_config(path)
    wants = wants_of(config, BoxSource(config.data.boxes.train), training=True)
    return measure_start(named_parts(config).dataset, config.data, config.data.train_split, wants)


def measure_start(kind: type[VLDataset], settings: DataSettings, split: str, wants: Wants) -> dict[str, float]:
    """Open a split in this process, then read facts about a quarter of it in a forked one; images are not read.

    Broken records of the generated files are left out.

    Returns:
        `texts`; `seconds` and `cpu_seconds` to open the split; `peak_mib` of that and `main_mib` after it, both
        resident and without what the process had before; `worker_mib`, the memory that the forked process wrote
        into after a quarter of an epoch, so that it has copies of its own (without pages of files that it read), and
        `worker_cpu_seconds` per 1000 texts.
    """
    before = _memory("Rss")
    started, cpu = time.perf_counter(), time.process_time()
    files, options = open_options(kind, settings, NotedErrors())
    dataset = kind.open(files, options, split, wants)
    del files
    found = {"texts": len(dataset), "seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu}
    found["peak_mib"] = _peak() - before
    found["main_mib"] = _memory("Rss") - before
    return found | _worker(dataset)


def _worker(dataset: VLDataset) -> dict[str, float]:
    """What a forked process does in a quarter of an epoch."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        before, cpu = _memory("Private_Dirty"), time.process_time()
        number, texts = len(dataset.groups), 0
        for row in range(int(EPOCH * number)):
            own = tuple(dataset.groups[row * STRIDE % number])
            texts += len(own)
            for image in dataset.sample(own).images:
                image.locate()  # reads from an archive
        seconds = 1000 * (time.process_time() - cpu) / max(texts, 1)
        told = {"worker_mib": _memory("Private_Dirty") - before, "worker_cpu_seconds": seconds}
        os.write(writing, json.dumps(told).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        told = json.loads(file.read())
    os.waitpid(child, 0)
    return told


def _memory(what: str) -> float:
    """MiB of this process (Linux)."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
    return sum(int(number) for number in re.findall(rf"^{what}:\s+(\d+) kB", lines, re.MULTILINE)) / 1024


def _peak() -> float:
    """The most MiB that this process ever had (Linux); `getrusage` would count the program that started it, too."""
    line = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    return int(line[1]) / 1024


def show(result: dict[str, Any]) -> int:
    """Print a table in Markdown; returns the exit status."""
    print("| files | texts | seconds | of the processor | MiB at most | MiB then | a worker adds MiB |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for line in _rows(result):
        print(line)
    return 0


def _rows(result: dict[str, Any]) -> Iterator[str]:
    for case in result["cases"]:
        yield (
            f"| {case['kind']} | {case['texts']:,} | {case['seconds']:.0f} | {case['cpu_seconds']:.0f} | "
            f"{case['peak_mib']:,.0f} | {case['main_mib']:,.0f} | {case['worker_mib']:,.0f} |"
        )
