"""Generates synthetic scenes and writes them as a data set in official file formats.

Layout under the output folder:

    images/train2014/COCO_train2014_000000000001.jpg    all splits, as in the release
    <format>/                                           one folder per format, see its class in `WRITERS`
    <format>/shortcuts.json                             what rules reach that do not read everything (shortcuts.py)
    synthetic.json                                      written last: settings, formats and statistics

A scene depends only on the seed, its split and its index in the split. More training scenes do not change the
validation scenes, and neither the number of processes nor the chosen formats change any file.

To add a format, write a `FormatWriter` and add it to `WRITERS`.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import signal
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import msgspec
from filelock import FileLock
from tqdm import tqdm

from detector.errors import UserError
from detector.io import read_json
from e2e_vl.synthetic.base import FormatWriter, ObjectRecord, Recipe, ScenePlace, SceneRecord, draw_detections
from e2e_vl.synthetic.coco import (
    COCOAnnotationsWriter,
    COCOCaptionsWriter,
    COCODetectionWriter,
    MAttNetDetectionsWriter,
    RefCOCOPlusWriter,
)
from e2e_vl.synthetic.conceptual import ConceptualWriter, CorpusWriter, ShardsWriter
from e2e_vl.synthetic.config import ImitatedDetectorConfig, LanguageConfig, SceneConfig
from e2e_vl.synthetic.gqa import GQAWriter
from e2e_vl.synthetic.language import draw_captions, draw_references, draw_without_target
from e2e_vl.synthetic.lxmert import LxmertWriter
from e2e_vl.synthetic.nlvr2 import PairWriter
from e2e_vl.synthetic.phrases import EntitiesWriter, PhrasesWriter, VisualGenomeWriter
from e2e_vl.synthetic.scenes import SceneGraph, draw_scene
from e2e_vl.synthetic.shortcuts import write_shortcuts
from e2e_vl.synthetic.vcr import VCRWriter
from e2e_vl.synthetic.vqa import VQAWriter

logger = logging.getLogger(__name__)

WRITERS: dict[str, type[FormatWriter]] = {
    "refcoco+": RefCOCOPlusWriter,
    "refcoco+_phrases": PhrasesWriter,
    "detections": MAttNetDetectionsWriter,
    "annotations": COCOAnnotationsWriter,
    "detection": COCODetectionWriter,
    "captions": COCOCaptionsWriter,
    "shards": ShardsWriter,
    "conceptual": ConceptualWriter,
    "corpus": CorpusWriter,
    "vqa": VQAWriter,
    "vcr": VCRWriter,
    "gqa": GQAWriter,
    "nlvr2": PairWriter,
    "flickr30k": EntitiesWriter,
    "lxmert": LxmertWriter,
    "visual_genome": VisualGenomeWriter,
}
FORMATS = tuple(WRITERS)
VERSION = 6  # increment when the same settings give different files
STAMP = "synthetic.json"
_UNFINISHED = "synthetic.json.unfinished"
_MAX_CHUNK = 16  # scenes per task of a process
_IMAGE_OPTIONS = {"jpg": [cv2.IMWRITE_JPEG_QUALITY, 95], "png": [cv2.IMWRITE_PNG_COMPRESSION, 3]}


def make_scenes(
    output: Path,
    *,
    scenes: Mapping[str, int],
    seed: int = 0,
    config: SceneConfig | None = None,
    language: LanguageConfig | None = None,
    detections: ImitatedDetectorConfig | None = None,
    image_format: str = "jpg",
    formats: Collection[str] | None = None,
    workers: int = 0,
) -> dict[str, Any]:
    """Write the data set, unless the folder already contains it.

    Missing formats are added to a finished folder; its images and other files are not changed. A lock beside the folder
    prevents two processes from writing it at the same time.

    Args:
        output: folder to write to; new, empty, or one of a finished or interrupted run with the same settings.
        scenes: number of scenes per split, for example {"train": 3500, "val": 200}.
        config, language, detections: what is drawn, said and detected; None for the defaults.
        image_format: "jpg" (quality 95) or "png".
        formats: which of `FORMATS` are wanted; None for all.
        workers: number of processes that draw; 0 draws in this process.

    Returns:
        the content of `synthetic.json`: "version", "settings", "formats" and "statistics".
    """
    what = (config or SceneConfig(), language or LanguageConfig(), detections or ImitatedDetectorConfig())
    recipe = Recipe(dict(scenes), seed, image_format, *what)
    wanted = set(WRITERS if formats is None else formats)
    if unknown := sorted(wanted - set(WRITERS)):
        raise UserError(f"formats must be some of {', '.join(WRITERS)}; found {unknown[0]!r}")
    output = Path(output)
    start = {"version": VERSION, "settings": msgspec.json.decode(msgspec.json.encode(recipe))}
    output.parent.mkdir(parents=True, exist_ok=True)
    # concurrent runs draw the data once; a worker that runs its parent's script again, because the script has no
    # `if __name__ == "__main__":`, would wait for its parent forever
    with FileLock(
        output.with_name(f".{output.name}.lock"), blocking=sys.modules["__mp_main__"] is sys.modules["__main__"]
    ):
        finished = _finished_stamp(output, start)
        missing = wanted - set(finished["formats"] if finished else ())
        if not missing:
            return finished
        unfinished, images = output / _UNFINISHED, output / "images" / "train2014"
        images.mkdir(parents=True, exist_ok=True)
        if finished is None:
            unfinished.write_text(json.dumps(start), encoding="utf-8")
        else:
            logger.info("%s lacks %s; they are added.", output, ", ".join(sorted(missing)))
        writers = {name: writer(recipe) for name, writer in WRITERS.items() if name in missing}
        make = partial(_make_scene, recipe=recipe, writers=writers, with_image=finished is None)
        numbered = [(split, number) for split, count in recipe.scenes.items() for number in range(count)]
        places = [
            ScenePlace(split, number, image_id, images / f"COCO_train2014_{image_id:012d}.{image_format}")
            for image_id, (split, number) in enumerate(numbered, start=1)
        ]
        drawn = []
        annotation_id, sentence_id = 1, 0
        for scene in _map_scenes(make, places, workers):
            drawn.append(replace(scene, first_annotation_id=annotation_id, first_sentence_id=sentence_id))
            annotation_id += len(scene.objects)
            sentence_id += len(scene.references) + len(scene.without_target)
        for name, writer in writers.items():
            (output / name).mkdir(exist_ok=True)
            own = [replace(scene, drawn=scene.drawn[name]) for scene in drawn]
            writer.write(output / name, own)
            write_shortcuts(output / name, own, recipe)
        every = missing.union(finished["formats"] if finished else ())
        stamp = {**start, "formats": [name for name in WRITERS if name in every], "statistics": _statistics(drawn)}
        unfinished.write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(output / STAMP)
        return stamp


def _finished_stamp(output: Path, start: dict[str, Any]) -> dict[str, Any] | None:
    """The stamp of a folder that already has this data; None when the scenes are still to be drawn."""
    if not output.exists() or not any(output.iterdir()):
        return None
    path = next((output / name for name in (STAMP, _UNFINISHED) if (output / name).exists()), None)
    if path is None:
        raise UserError(f"{output} is not empty and was not written by this tool: choose another output folder")
    stamp = read_json(path, dict[str, Any])
    found = {"version": stamp["version"], **stamp["settings"]}
    wanted = {"version": start["version"], **start["settings"]}
    differing = sorted(key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key))
    if differing:
        raise UserError(
            f"{output} has data of other settings ({', '.join(differing)}): remove the folder or choose another one"
        )
    return stamp if path.name == STAMP else None


def _map_scenes(
    function: Callable[[ScenePlace], SceneRecord], places: list[ScenePlace], workers: int
) -> list[SceneRecord]:
    bar = partial(tqdm, total=len(places), desc="scenes", unit="scene", delay=1)
    if workers == 0:
        return list(bar(map(function, places)))
    # spawn, not fork: the caller may have running threads (torch)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_start_drawing) as pool:
        chunk = max(1, min(_MAX_CHUNK, len(places) // (2 * workers)))
        return list(bar(pool.map(function, places, chunksize=chunk)))


def _start_drawing() -> None:
    """Set up a process that draws."""
    cv2.setNumThreads(1)
    # Ctrl-C reaches all processes of a terminal; the main process ends the others
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _make_scene(
    place: ScenePlace, *, recipe: Recipe, writers: Mapping[str, FormatWriter], with_image: bool
) -> SceneRecord:
    """Draw a scene, optionally write its image, and return its texts and annotations, without ids."""
    rng = recipe.generator(place.split, place.number)
    scene = draw_scene(recipe.scene, rng)
    graph = SceneGraph(scene)
    # the three share a generator, so their order must not change
    references = draw_references(graph, recipe.language, rng)
    captions = draw_captions(graph, rng)
    detections = draw_detections(scene, recipe.detections, rng)
    own = recipe.generator(place.split, place.number, "no target")
    without_target = draw_without_target(graph, references, recipe.language.no_target, recipe.scene.values, own)
    if with_image:
        options = _IMAGE_OPTIONS[recipe.image_format]
        _, encoded = cv2.imencode(place.image_file.suffix, scene.image[..., ::-1], options)
        place.image_file.write_bytes(encoded)
    record = SceneRecord(
        **vars(place),
        size=scene.image.shape[:2],
        objects=[ObjectRecord.from_object(item) for item in scene.objects],
        references=references,
        without_target=without_target,
        captions=captions,
        detections=detections,
        drawn={},
    )
    return replace(record, drawn={name: writer.draw(record, graph) for name, writer in writers.items()})


def _statistics(scenes: Sequence[SceneRecord]) -> dict[str, Any]:
    said = [reference for scene in scenes for reference in scene.references]
    families = Counter(reference.expression.family for reference in said)
    return {
        "images": dict(Counter(scene.split for scene in scenes)),
        "objects_per_image": round(sum(len(scene.objects) for scene in scenes) / len(scenes), 3),
        "expressions_per_image": round(len(said) / len(scenes), 3),
        "families": {name: round(count / len(said), 4) for name, count in sorted(families.items())},
    }
