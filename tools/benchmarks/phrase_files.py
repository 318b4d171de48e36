"""What reading phrases costs: files of Flickr30K Entities per image, and Visual Genome's file of region graphs.

    python tools/benchmarks/phrase_files.py --folder DIR --images 31783

It writes files of that number of images into the folder, unless they are there: 14 sentences with two phrases and 7
boxes per image, and 50 regions with two words per image. It prints the processor time and the memory of reading them,
beside the time to decode and resize one photo, which every group of texts needs too. (The operating system keeps files
that were just written in memory; a disk that has to be read first adds its own time.)
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm.auto import tqdm

from e2e_vl.data.flickr30k import read_annotation, read_sentences
from e2e_vl.data.refcoco import NounPhrases
from e2e_vl.data.visual_genome import read_region_graphs

NOUNS = ("clock", "man", "tree", "car", "sidewalk", "shirt", "window", "sign", "building", "street")
SENTENCES, BOXES, REGIONS = 14, 7, 50  # per image
WITH_OBJECT = 0.4  # share of the words that name an object


def write_entities(folder: Path, images: int) -> None:
    """Sentences and annotations of some images."""
    generator = random.Random(0)
    for name in ("Sentences", "Annotations"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for image in tqdm(range(images), desc="writing", unit="image", leave=False):
        lines, objects = [], []
        for number in range(SENTENCES):
            one, other = (f"[/EN#{generator.randrange(BOXES)}/other the {noun}]" for noun in generator.sample(NOUNS, 2))
            lines.append(f"{one} number {number} next to {other}\n")
        for chain in range(BOXES):
            x, y = generator.randrange(300), generator.randrange(300)
            sides = {"xmin": x, "ymin": y, "xmax": x + 90, "ymax": y + 70}
            box = "".join(f"<{name}>{value}</{name}>" for name, value in sides.items())
            objects.append(f"<object><name>{chain}</name><bndbox>{box}</bndbox></object>\n")
        (folder / "Sentences" / f"{image}.txt").write_text("".join(lines))
        size = "<size><width>640</width><height>480</height><depth>3</depth></size>"
        text = f"<annotation><filename>{image}.jpg</filename>{size}\n{''.join(objects)}</annotation>\n"
        (folder / "Annotations" / f"{image}.xml").write_text(text)


def write_graphs(path: Path, images: int) -> None:
    """Region graphs of some images."""
    generator = random.Random(0)
    with path.open("w") as file:
        for image in tqdm(range(images), desc="writing", unit="image", leave=False):
            regions = [_region(image * REGIONS + number, image, generator) for number in range(REGIONS)]
            file.write(("[" if image == 0 else ", ") + json.dumps({"regions": regions, "image_id": image}))
        file.write("]")


def _region(number: int, image: int, generator: random.Random) -> dict[str, Any]:
    nouns = generator.sample(NOUNS, 2)
    words, synsets, objects = "the {} is near the big {}".format(*nouns), [], []
    for noun in nouns:
        start, synset = words.index(noun), f"{noun}.n.01"
        place = {"entity_idx_start": start, "entity_idx_end": start + len(noun)}
        synsets.append({**place, "entity_name": noun, "synset_name": synset})
        if generator.random() < WITH_OBJECT:
            box = {side: generator.randint(1, 300) for side in "xywh"}
            objects.append({"object_id": 2 * number + len(objects), "name": noun, "synsets": [synset], **box})
    own = {"region_id": number, "image_id": image, "phrase": words, "x": 421, "y": 57, "width": 82, "height": 139}
    return {**own, "synsets": synsets, "objects": objects, "relationships": []}


def seconds(work: Callable[[], Any]) -> float:
    """Processor time of some work."""
    before = time.process_time()
    work()
    return time.process_time() - before


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files, read them, print what it costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for the files that are written")
    parser.add_argument("--images", type=int, default=31783)
    options = parser.parse_args(argv)
    folder, images = options.folder / str(options.images), options.images
    if not (folder / "complete").exists():
        write_entities(folder, images)
        write_graphs(folder / "region_graphs.json", images)
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (480, 640, 3), dtype=np.uint8)).save(folder / "a.jpg")
        (folder / "complete").touch()

    def read_photo() -> None:
        for _ in range(20):
            np.asarray(Image.open(folder / "a.jpg").convert("RGB").resize((800, 600), Image.Resampling.BILINEAR))

    def read_all() -> None:
        for image in range(images):
            read_sentences(folder / "Sentences" / f"{image}.txt")
            read_annotation(folder / "Annotations" / f"{image}.xml")

    def read_when_needed() -> None:
        phrases = NounPhrases(folder / "Sentences", folder / "Annotations")
        for image in range(some):
            for words in said[image]:
                phrases.of(image, words)

    some = min(images, 500)
    said = [[one.words for one in read_sentences(folder / "Sentences" / f"{n}.txt")] for n in range(some)]
    print(f"one photo of 640 x 480, decoded and resized: {1000 * seconds(read_photo) / 20:.1f} ms")
    print(f"all sentences and annotations, as flickr30k reads them at its start: {seconds(read_all):.1f} s")
    needed = seconds(read_when_needed)
    print(f"phrases of {SENTENCES} expressions of an image, as refcoco reads them: {1000 * needed / some:.2f} ms")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path = folder / "region_graphs.json"
    spent = seconds(lambda: read_region_graphs(path))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"region graphs of {path.stat().st_size / 2**20:.0f} MiB: {spent:.1f} s, {peak / 1024:.0f} MiB more memory")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
