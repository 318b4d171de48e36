"""How much memory the processes of a pre-training run need to read data that are larger than the memory."""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import psutil
import torch

from e2e_vl.config import load_config
from e2e_vl.data.loading.batches import BatchLoader
from e2e_vl.data.loading.grouping import GroupedBatchSampler
from e2e_vl.engine.build import build_model
from e2e_vl.engine.build_data import build_collate, build_examples, build_tokenizer
from e2e_vl.synthetic.conceptual_writer import RECORDS_PER_SHARD, CaptionedImage, write_shards
from e2e_vl.synthetic.corpus_writer import draw_lines
from e2e_vl.synthetic.scenes import SceneConfig
from e2e_vl.text import build_vocabulary
from measuring import CONFIGS, fresh_process, machine_facts

CONFIG = CONFIGS / "memory.yaml"
MIB = 2**20
_BLOCK_LINES = 2_000  # different lines of the corpus, which repeats them
_IMAGE_SIDE = 48  # height and width of the images, pixels
_SAMPLES = 100  # measurements of a run


def benchmark_memory(
    folder: Path,
    *,
    corpus_mib: int = 2048,
    records: int = 200_000,
    batches: int = 1000,
    images_per_batch: int = 8,
    workers: int = 2,
) -> dict[str, Any]:
    """Read batches of captions from shards with texts of a corpus, and watch the resident memory of all processes.

    The files are written into the folder, where they stay; files of an earlier call with the same sizes are used again,
    but their indices are made anew. Everything is measured in a fresh process, so that the memory of the writers and of
    the caller does not count.

    Args:
        folder: where the files are written: `corpus_mib` MiB and about 4 KiB for each record.
        corpus_mib: size of the text corpus.
        records: images with captions.
        batches: batches that are read.
        images_per_batch: captions in a batch; each caption brings one text of the corpus.
        workers: processes that read.

    Returns:
        `machine`, `settings`, `files` (MiB), `seconds` (`index`: the first opening of the files, `batches`), and
        `memory` in MiB of resident memory: `start` (main process with everything imported and the model built),
        `index` (its peak while the index was made), and for `main` and each of `workers` the `peak` and the `growth`
        from the end of the first quarter of the batches to the end of the last.

    Raises:
        ValueError: a size that is not positive.
        RuntimeError: the measuring process died.
    """
    if min(corpus_mib, records, batches, images_per_batch) < 1 or workers < 0:
        raise ValueError("Sizes of the corpus, records, batches and images per batch must be positive.")
    reading = {"images_per_batch": images_per_batch, "workers": workers}
    files = write_files(folder, corpus_mib, records)
    # The tokenizer is a file's and the detector random: nothing is read from or written into a run directory.
    words = [*files.words(**reading), "detector.weights=null"]
    with fresh_process(_measure, words, batches) as (_, receiver):
        return {
            "machine": machine_facts(torch.device("cpu")),
            "settings": {"corpus_mib": corpus_mib, "records": records, "batches": batches, **reading},
            "files": files.sizes(),
            **receiver.recv(),
        }


@dataclasses.dataclass(frozen=True)
class Files:
    """The files that are read: a text corpus, a folder of shards, and the vocabulary of both."""

    corpus: Path
    shards: Path
    vocabulary: Path

    def words(self, *, images_per_batch: int, workers: int) -> list[str]:
        """The settings of a run of configs/benchmark/memory.yaml that reads these files."""
        return [
            f"data.root={self.corpus.parent}",
            f"data.files.corpus={self.corpus.name}",
            f"data.files.shards={self.shards.name}",
            f"data.vocabulary={self.vocabulary}",
            f"data.workers={workers}",
            f"train.images_per_batch={images_per_batch}",
        ]

    def sizes(self) -> dict[str, float]:
        """MiB of the corpus and of the shards."""
        shards = sum(path.stat().st_size for path in self.shards.glob("*.tar"))
        return {"corpus": round(self.corpus.stat().st_size / MIB, 1), "shards": round(shards / MIB, 1)}


def write_files(folder: Path, corpus_mib: int, records: int) -> Files:
    """Write a corpus of `corpus_mib` MiB and `records` captioned images, or keep existing files of these sizes.

    Their indices are removed: reading the files makes them anew.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paragraphs = draw_lines(SceneConfig(), np.random.default_rng(0))
    lines = [next(paragraphs) for _ in range(_BLOCK_LINES)]
    corpus = _write_corpus(folder, corpus_mib, lines)
    shards = _write_records(folder, records, lines)
    vocabulary = folder / "vocab.txt"
    build_vocabulary(lines, vocabulary)
    for index in (folder / "index").glob("*.npy"):
        index.unlink()
    return Files(corpus, shards, vocabulary)


def _write_corpus(folder: Path, mib: int, lines: list[str]) -> Path:
    path = folder / f"corpus_{mib}.txt"
    if not path.is_file() or path.stat().st_size < mib * MIB:
        block = ("\n".join(lines) + "\n").encode()
        with path.open("wb") as file:
            while file.tell() < mib * MIB:
                file.write(block)
    return path


def _write_records(folder: Path, records: int, lines: list[str]) -> Path:
    """Shards of small images; the records share a few of them."""
    shards = folder / f"shards_{records}"
    if len(list(shards.glob("*.tar"))) == -(-records // RECORDS_PER_SHARD):
        return shards
    rng = np.random.default_rng(1)
    pictures = [folder / f"picture_{number}.jpg" for number in range(8)]
    for path in pictures:
        cv2.imwrite(str(path), rng.integers(0, 255, (_IMAGE_SIDE, _IMAGE_SIDE, 3), dtype=np.uint8))
    size = (_IMAGE_SIDE, _IMAGE_SIDE)
    images = [
        CaptionedImage(pictures[i % len(pictures)], size, lines[i % len(lines)].partition(".")[0], [], [])
        for i in range(records)
    ]
    write_shards(shards, images)
    return shards


def _measure(sender: Any, words: list[str], batches: int) -> None:
    """In a process of its own: open the files, read the batches, and send the numbers."""
    main = psutil.Process()
    config = load_config(CONFIG, words)
    tokenizer = build_tokenizer(config)
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    start = main.memory_info().rss
    begin = time.perf_counter()
    examples = build_examples(
        config, model, tokenizer, config.data.train_split, boxes=config.data.boxes.train, training=True
    )
    index_seconds = time.perf_counter() - begin
    after_index = _peak(main)
    sampler = GroupedBatchSampler(examples.groups, config.train.images_per_batch, 1)
    collate = build_collate(config, model)
    loader = BatchLoader(examples, sampler, collate, workers=config.data.workers, keep_workers=True)
    measured: dict[int, list[int]] = {}
    begin = time.perf_counter()
    for number in _numbered(sampler, loader, batches):
        if number % max(batches // _SAMPLES, 1) == 0 or number == batches - 1:
            for pid in (main.pid, *(worker.pid for worker in multiprocessing.active_children())):
                measured.setdefault(pid, []).append(psutil.Process(pid).memory_info().rss)
    seconds = time.perf_counter() - begin
    del loader  # ends the workers
    memory = {
        "start": round(start / MIB, 1),
        "index": round(after_index / MIB, 1),
        "main": _summary(measured.pop(main.pid)),
    }
    memory["workers"] = [_summary(values) for values in measured.values()]
    sender.send({"seconds": {"index": round(index_seconds, 1), "batches": round(seconds, 1)}, "memory": memory})


def _numbered(sampler: GroupedBatchSampler, loader: BatchLoader, batches: int) -> Iterator[int]:
    """0 .. `batches` - 1, one number after each batch, over as many epochs as it takes."""
    number = 0
    for epoch in range(batches):
        sampler.set_epoch(epoch)
        for _ in loader:
            yield number
            number += 1
            if number == batches:
                return


def _peak(process: psutil.Process) -> int:
    """Highest resident memory so far, bytes, where the system tells it; elsewhere the present one."""
    status = Path(f"/proc/{process.pid}/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return process.memory_info().rss


def _summary(values: list[int]) -> dict[str, float]:
    settled = values[len(values) // 4]
    return {"peak": round(max(values) / MIB, 1), "growth": round((values[-1] - settled) / MIB, 1)}


def show(result: dict[str, Any]) -> int:
    """Print a short table; returns the exit status."""
    settings, files, seconds, memory = (result[name] for name in ("settings", "files", "seconds", "memory"))
    print(f"corpus {files['corpus']} MiB, {settings['records']} images in {files['shards']} MiB of shards")
    print(f"  {'imported':20s} {memory['start']:8.1f} MiB")
    print(f"  {'peak at the index':20s} {memory['index']:8.1f} MiB, {seconds['index']} s")
    print(f"{settings['batches']} batches of {settings['images_per_batch']} captions, {seconds['batches']} s:")
    rows = {"main process": memory["main"]}
    rows |= {f"worker {number}": values for number, values in enumerate(memory["workers"])}
    for name, values in rows.items():
        print(f"  {name:20s} {values['peak']:8.1f} MiB peak, {values['growth']:+.1f} MiB growth")
    return 0
