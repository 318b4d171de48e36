"""Files for pre-training that are larger than the memory: a text corpus and captioned images in shards."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from e2e_vl.synthetic.conceptual import RECORDS_PER_SHARD, CaptionedImage, draw_lines, write_shards
from e2e_vl.synthetic.scenes import SceneConfig
from e2e_vl.text import build_vocabulary

MIB = 2**20
_BLOCK_LINES = 2_000  # different lines of the corpus, which repeats them
_IMAGE_SIDE = 48  # height and width of the images, pixels


def write_files(folder: Path, corpus_mib: int, records: int) -> tuple[list[str], dict[str, float]]:
    """Write a corpus of `corpus_mib` MiB and `records` captioned images, or keep existing files of these sizes.

    Their indices are removed: reading the files makes them anew.

    Returns:
        The settings of a run of configs/benchmark/memory.yaml that reads these files, and the MiB of the `corpus` and
        of the `shards`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paragraphs = draw_lines(SceneConfig(), np.random.default_rng(0))
    lines = [next(paragraphs) for _ in range(_BLOCK_LINES)]
    corpus, shards, vocabulary = folder / f"corpus_{corpus_mib}.txt", folder / f"shards_{records}", folder / "vocab.txt"
    if not corpus.is_file() or corpus.stat().st_size < corpus_mib * MIB:
        _write_corpus(corpus, corpus_mib, lines)
    if len(list(shards.glob("*.tar"))) != -(-records // RECORDS_PER_SHARD):
        _write_records(shards, records, lines)
    build_vocabulary(lines, vocabulary)
    for index in (folder / "index").glob("*.npy"):
        index.unlink()
    words = [f"data.root={folder}", f"data.vocabulary={vocabulary}"]
    words += [f"data.files.corpus={corpus.name}", f"data.files.shards={shards.name}"]
    sizes = {"corpus": corpus.stat().st_size, "shards": sum(path.stat().st_size for path in shards.glob("*.tar"))}
    return words, {name: round(size / MIB, 1) for name, size in sizes.items()}


def _write_corpus(path: Path, mib: int, lines: list[str]) -> None:
    block = ("\n".join(lines) + "\n").encode()
    with path.open("wb") as file:
        while file.tell() < mib * MIB:
            file.write(block)


def _write_records(shards: Path, records: int, lines: list[str]) -> None:
    """Shards of small images; the records share a few of them."""
    rng = np.random.default_rng(1)
    size = (_IMAGE_SIDE, _IMAGE_SIDE)
    pictures = [shards.with_name(f"picture_{number}.jpg") for number in range(8)]
    for path in pictures:
        cv2.imwrite(str(path), rng.integers(0, 255, (*size, 3), dtype=np.uint8))
    images = [
        CaptionedImage(pictures[i % len(pictures)], size, lines[i % len(lines)].partition(".")[0], [], [])
        for i in range(records)
    ]
    write_shards(shards, images)
