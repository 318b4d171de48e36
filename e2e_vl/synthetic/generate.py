"""Generate synthetic scenes and write them as a data set in official file formats.

Layout under the output folder:

    images/train2014/COCO_train2014_000000000001.jpg    all splits, as in the release
    <format>/                                           one folder per format, see its class in `WRITERS`
    <format>/shortcuts.json                             what rules reach that do not read everything (shortcuts.py)
    synthetic.json                                      written last: settings, formats and statistics

A scene depends only on the seed, its split and its index in the split. More training scenes do not change the
validation scenes, and neither the number of processes nor the chosen formats change any file. Settings of the rendering
change the pixels of the images and nothing else.

To add a format, write a `FormatWriter` and add it to `WRITERS`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import signal
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import msgspec
from filelock import FileLock
from tqdm import tqdm

from detector.errors import MissingPackageError, UserError
from detector.io import read_json
from e2e_vl.synthetic.base import FormatWriter, ObjectRecord, Recipe, ScenePosition, SceneRecord, draw_detections
from e2e_vl.synthetic.coco import (
    COCOAnnotationsWriter,
    COCOCaptionsWriter,
    COCODetectionWriter,
    MAttNetDetectionsWriter,
    RefCOCOPlusWriter,
)
from e2e_vl.synthetic.conceptual import ConceptualWriter, CorpusWriter, ShardsWriter
from e2e_vl.synthetic.config import ImitatedDetectorConfig, LanguageConfig, RenderingConfig, SceneConfig
from e2e_vl.synthetic.gqa import GQAWriter
from e2e_vl.synthetic.grounding import MDETRWriter, ODVGWriter
from e2e_vl.synthetic.language import draw_captions, draw_references, draw_without_target
from e2e_vl.synthetic.lxmert import LxmertWriter
from e2e_vl.synthetic.nlvr2 import PairWriter
from e2e_vl.synthetic.parquet import ParquetWriter
from e2e_vl.synthetic.phrases import EntitiesWriter, PhrasesWriter, VisualGenomeWriter
from e2e_vl.synthetic.scenes import SceneGraph, degrade, draw_scene
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
    "mdetr": MDETRWriter,
    "odvg": ODVGWriter,
    "refcoco+_parquet": ParquetWriter,
}
FORMATS = tuple(WRITERS)
VERSION = 7  # increment when the same settings give different files
STAMP = "synthetic.json"
_UNFINISHED = "synthetic.json.unfinished"
_MAX_CHUNK = 16  # scenes per task of a process
_IMAGE_OPTIONS = {"jpg": [cv2.IMWRITE_JPEG_QUALITY, 95], "png": [cv2.IMWRITE_PNG_COMPRESSION, 3]}


def writable_formats() -> list[str]:
    """Return the formats whose packages are installed."""
    names = []
    for name, writer in WRITERS.items():
        with contextlib.suppress(MissingPackageError):
            writer.require_packages()
            names.append(name)
    return names


class OtherFilesError(UserError):
    """The folder to draw into has files that were not drawn."""


def make_scenes(
    output: Path,
    *,
    scenes: Mapping[str, int],
    seed: int = 0,
    config: SceneConfig | None = None,
    language: LanguageConfig | None = None,
    detections: ImitatedDetectorConfig | None = None,
    rendering: RenderingConfig | None = None,
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
        rendering: how it looks; None for the default.
        image_format: "jpg" (quality 95) or "png".
        formats: which of `FORMATS` to write; None for all whose packages are installed.
        workers: number of processes that draw; 0 draws in this process.

    Returns:
        the content of `synthetic.json`: "version", "settings", "formats" and "statistics".
    """
    recipe = Recipe(
        dict(scenes),
        seed,
        image_format,
        config or SceneConfig(),
        language or LanguageConfig(),
        detections or ImitatedDetectorConfig(),
        rendering or RenderingConfig(),
    )
    requested = set(writable_formats() if formats is None else formats)
    unknown = sorted(requested - set(WRITERS))
    if unknown:
        raise UserError(f"formats must be some of {', '.join(WRITERS)}; found {unknown[0]!r}")
    for name in requested:
        WRITERS[name].require_packages()
    output = Path(output)
    settings = msgspec.json.decode(msgspec.json.encode(recipe))
    # folders of earlier versions, which had no such settings, are the same
    if recipe.rendering == RenderingConfig():
        del settings["rendering"]
    if recipe.detections.iou is None:
        del settings["detections"]["iou"]
    start = {"version": VERSION, "settings": settings}
    output.parent.mkdir(parents=True, exist_ok=True)
    # concurrent runs draw the data once; a worker that runs its parent's script again, because the script has no
    # `if __name__ == "__main__":`, would wait for its parent forever
    is_main_process = sys.modules["__mp_main__"] is sys.modules["__main__"]
    with FileLock(output.with_name(f".{output.name}.lock"), blocking=is_main_process):
        finished = _finished_stamp(output, start)
        finished_formats = set() if finished is None else set(finished["formats"])
        missing = requested - finished_formats
        if not missing:
            return finished
        unfinished = output / _UNFINISHED
        images = output / "images" / "train2014"
        images.mkdir(parents=True, exist_ok=True)
        if finished is None:
            unfinished.write_text(json.dumps(start), encoding="utf-8")
        else:
            logger.info("%s lacks %s; they are added.", output, ", ".join(sorted(missing)))
        writers = {name: writer(recipe) for name, writer in WRITERS.items() if name in missing}
        make = partial(_make_scene, recipe=recipe, writers=writers, with_image=finished is None)
        drawn = _number(_map_scenes(make, _positions(recipe, images), workers))
        for name, writer in writers.items():
            (output / name).mkdir(exist_ok=True)
            drawn_for_format = [replace(scene, drawn=scene.drawn[name]) for scene in drawn]
            writer.write(output / name, drawn_for_format)
            write_shortcuts(output / name, drawn_for_format, recipe)
        all_formats = missing | finished_formats
        stamp = {
            **start,
            "formats": [name for name in WRITERS if name in all_formats],
            "statistics": _statistics(drawn),
        }
        unfinished.write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(output / STAMP)
        return stamp


def is_unfinished(output: Path) -> bool:
    """Return whether the drawing of a data set was interrupted."""
    return (output / _UNFINISHED).exists() and not (output / STAMP).exists()


def _positions(recipe: Recipe, images: Path) -> list[ScenePosition]:
    """Return the positions of all scenes of the data set, whose image files lie in a folder."""
    positions: list[ScenePosition] = []
    for split, count in recipe.scenes.items():
        for number in range(count):
            image_id = len(positions) + 1
            image_file = images / f"COCO_train2014_{image_id:012d}.{recipe.image_format}"
            positions.append(ScenePosition(split, number, image_id, image_file))
    return positions


def _number(scenes: Iterable[SceneRecord]) -> list[SceneRecord]:
    """Set the ids of the annotations and sentences of all scenes."""
    numbered = []
    annotation_id = 1
    sentence_id = 0
    for scene in scenes:
        numbered.append(replace(scene, first_annotation_id=annotation_id, first_sentence_id=sentence_id))
        annotation_id += len(scene.objects)
        sentence_id += len(scene.references) + len(scene.without_target)
    return numbered


def _finished_stamp(output: Path, start: dict[str, Any]) -> dict[str, Any] | None:
    """Return the stamp of a folder that already has this data; None when the scenes are still to be drawn."""
    if not output.exists() or not any(output.iterdir()):
        return None
    is_finished = (output / STAMP).exists()
    if not is_finished and not (output / _UNFINISHED).exists():
        raise OtherFilesError(f"{output} is not empty and was not written by this tool: choose another output folder")
    stamp = read_json(output / (STAMP if is_finished else _UNFINISHED), dict[str, Any])
    earlier = {"version": stamp["version"], **stamp["settings"]}
    now = {"version": start["version"], **start["settings"]}
    differing = sorted(key for key in earlier.keys() | now.keys() if earlier.get(key) != now.get(key))
    if differing:
        raise UserError(
            f"{output} has data of other settings ({', '.join(differing)}): remove the folder or choose another one"
        )
    return stamp if is_finished else None


def _map_scenes(
    function: Callable[[ScenePosition], SceneRecord], positions: list[ScenePosition], workers: int
) -> list[SceneRecord]:
    bar = partial(tqdm, total=len(positions), desc="scenes", unit="scene", delay=1)
    if workers == 0:
        return list(bar(map(function, positions)))
    # spawn, not fork: the caller may have running threads (torch)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_start_drawing) as pool:
        chunk = max(1, min(_MAX_CHUNK, len(positions) // (2 * workers)))
        return list(bar(pool.map(function, positions, chunksize=chunk)))


def _start_drawing() -> None:
    """Set up a process that draws."""
    cv2.setNumThreads(1)
    # Ctrl-C reaches all processes of a terminal; the main process ends the others
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _make_scene(
    position: ScenePosition, *, recipe: Recipe, writers: Mapping[str, FormatWriter], with_image: bool
) -> SceneRecord:
    """Draw a scene, optionally write its image, and return its texts and annotations, without ids."""
    rng = recipe.generator(position.split, position.number)
    scene = draw_scene(recipe.scene, rng, recipe.rendering.palette)
    graph = SceneGraph(scene)
    # the three share a generator, so their order must not change
    references = draw_references(graph, recipe.language, rng)
    captions = draw_captions(graph, rng)
    detections = draw_detections(scene, recipe.detections, rng)
    no_target_rng = recipe.generator(position.split, position.number, "no target")
    without_target = draw_without_target(
        graph, references, recipe.language.no_target, recipe.scene.values, no_target_rng
    )
    if with_image:
        options = _IMAGE_OPTIONS[recipe.image_format]
        noise_rng = recipe.generator(position.split, position.number, "noise")
        image = degrade(scene.image, recipe.rendering, noise_rng)
        _, encoded = cv2.imencode(position.image_file.suffix, image[..., ::-1], options)
        position.image_file.write_bytes(encoded)
    record = SceneRecord(
        **vars(position),
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
    num_objects = sum(len(scene.objects) for scene in scenes)
    families: Counter[str] = Counter()
    for scene in scenes:
        families.update(reference.expression.family for reference in scene.references)
    num_expressions = families.total()
    return {
        "images": dict(Counter(scene.split for scene in scenes)),
        "objects_per_image": round(num_objects / len(scenes), 3),
        "expressions_per_image": round(num_expressions / len(scenes), 3),
        "families": {name: round(count / num_expressions, 4) for name, count in sorted(families.items())},
    }
