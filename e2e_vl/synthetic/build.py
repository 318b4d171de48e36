"""Writes a RefCOCO+-style data set of drawn scenes in the official formats.

Layout under the output folder; a format is a folder beside ``images``, and only those asked for are written:

    images/train2014/COCO_train2014_000000000001.jpg    all splits, as in the release
    refcoco+/instances.json                              COCO frame, with attributes (see ``coco``)
    refcoco+/refs(unc).p                                 REFER pickle; each sentence also has its ``family``
    detections/refcoco+_unc/res101_coco_minus_refer_notime_dets.json
    annotations/instances_train2014.json, captions_train2014.json
    detection/instances_<split>.json                     COCO, the images of one split each
    captions/captions_<split>.json                       COCO, the images of one split each
    shards/<split>/00000.tar, 00000_stats.json           one caption per image, as img2dataset writes them
    conceptual/<split>.json, <split>_frcnn.json          the same as the official VL-BERT code has them, with
    conceptual/<split>_image.zip, <split>_frcnn.zip      images, and detected boxes with class distributions
    corpus/corpus.doc                                    text without images
    vqa/v2_OpenEnded_mscoco_<split>_questions.json, vqa/v2_mscoco_<split>_annotations.json
    vcr/<split>.jsonl, vcr/vcr1images/                   VCR (see ``vcr``)
    synthetic.json                                       written last: settings, formats and statistics

A scene depends only on the seed, the name of its split and its number in it: more training scenes leave the
validation scenes as they are, and neither the number of processes nor the formats asked for change any file.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from tqdm import tqdm

from e2e_vl.synthetic import coco, conceptual, refer
from e2e_vl.synthetic.captions import draw_captions
from e2e_vl.synthetic.corpus import write_corpus
from e2e_vl.synthetic.detections import DetectionConfig, draw_detections, write_detections
from e2e_vl.synthetic.language import as_typed
from e2e_vl.synthetic.relations import SceneFacts
from e2e_vl.synthetic.sampling import LanguageConfig, draw_references
from e2e_vl.synthetic.scenes import Scene, SceneConfig, draw_scene
from e2e_vl.synthetic.vcr import VCRWriter
from e2e_vl.synthetic.vcr import draw_questions as draw_vcr_questions
from e2e_vl.synthetic.vqa import draw_questions, vqa_statistics, write_vqa

logger = logging.getLogger(__name__)

FORMATS = (
    "refcoco+",
    "detections",
    "annotations",
    "detection",
    "captions",
    "shards",
    "conceptual",
    "corpus",
    "vqa",
    "vcr",
)
VERSION = 5  # raise it when the same settings give other files
CORPUS_LINES_PER_SCENE = 4
STAMP = "synthetic.json"
_UNFINISHED = "synthetic.json.unfinished"
_IMAGE_FORMATS = {"jpg": [cv2.IMWRITE_JPEG_QUALITY, 95], "png": [cv2.IMWRITE_PNG_COMPRESSION, 3]}
_MAX_CHUNK = 16  # scenes handed to a process at once


@dataclass(frozen=True)
class _Job:
    """One scene to be made: its place in the data set and its file."""

    split: str
    number: int
    path: Path


def make_scenes(
    output: Path,
    *,
    scenes: Mapping[str, int],
    seed: int = 0,
    config: SceneConfig | None = None,
    language: LanguageConfig | None = None,
    detections: DetectionConfig | None = None,
    image_format: str = "jpg",
    formats: Collection[str] | None = None,
    workers: int = 0,
    progress: bool = True,
) -> dict[str, Any]:
    """Write the data set, or do nothing when the folder already holds it.

    Formats that a finished folder lacks are added; its images and other files stay as they are.

    Args:
        output: folder to write to; new, empty, or one of a finished or interrupted run with the same settings.
        scenes: number of scenes per split, for example {"train": 3500, "val": 200}.
        seed: of everything drawn.
        config, language, detections: what is drawn, said and detected; None for the defaults.
        image_format: "jpg" (quality 95) or "png".
        formats: which of ``FORMATS`` are wanted; None for all.
        workers: processes that draw; 0 draws in this process.
        progress: whether a progress bar is shown.

    Returns:
        the content of ``synthetic.json``: "version", "settings", "formats" and "statistics" (see ``_statistics``).

    Raises:
        ValueError: a setting is impossible, or the folder holds other data.
    """
    config, language, detections = (
        config or SceneConfig(),
        language or LanguageConfig(),
        detections or DetectionConfig(),
    )
    wanted = set(FORMATS if formats is None else formats)
    _check(scenes, seed, image_format, wanted, workers)
    settings = _as_json(
        {
            "scenes": dict(scenes),
            "seed": seed,
            "image_format": image_format,
            "scene": asdict(config),
            "language": asdict(language),
            "detections": asdict(detections),
        }
    )
    output = Path(output)
    finished = _look_into(output, settings)
    present = set() if finished is None else set(finished.get("formats", FORMATS))  # older stamps name none
    if finished is not None and wanted <= present:
        return finished

    images_folder = output / "images" / "train2014"
    images_folder.mkdir(parents=True, exist_ok=True)
    if finished is None:
        (output / _UNFINISHED).write_text(json.dumps({"version": VERSION, "settings": settings}), encoding="utf-8")
    else:
        logger.info("%s lacks %s; they are added.", output, ", ".join(sorted(wanted - present)))
    places = [(split, number) for split, count in scenes.items() for number in range(count)]
    jobs = [
        _Job(split, number, images_folder / coco.image_file_name(image_id, image_format))
        for image_id, (split, number) in enumerate(places, start=1)
    ]
    added = frozenset(wanted - present)
    make = partial(
        _make_scene,
        seed=seed,
        config=config,
        language=language,
        detections=detections,
        formats=added,
        with_image=finished is None,
    )
    with _mapped(make, jobs, workers) as made:
        records = list(tqdm(made, total=len(jobs), desc="scenes", unit="scene", disable=not progress))

    dataset = _Dataset(added)
    for job, record in zip(jobs, records, strict=True):
        dataset.add(job, record)
    dataset.write(output, np.random.default_rng([seed, 0]))
    if "corpus" in added:
        corpus_rng = np.random.default_rng([seed, zlib.crc32(b"corpus")])
        write_corpus(output / "corpus" / "corpus.doc", config, corpus_rng, lines=CORPUS_LINES_PER_SCENE * len(jobs))
    statistics = _statistics(jobs, records)
    if "vqa" in added:
        statistics["vqa"] = vqa_statistics([question for record in records for question in record["questions"]])
    elif "vqa" in present:
        statistics["vqa"] = finished["statistics"]["vqa"]
    held = [name for name in FORMATS if name in wanted | present]
    stamp = {"version": VERSION, "settings": settings, "formats": held, "statistics": statistics}
    unfinished = output / _UNFINISHED
    unfinished.write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(output / STAMP)
    return stamp


def _check(scenes: Mapping[str, int], seed: int, image_format: str, formats: set[str], workers: int) -> None:
    if sum(scenes.values()) < 1 or min(scenes.values()) < 0 or not all(scenes):
        raise ValueError(
            f"scenes must name splits and their numbers of scenes, at least one in all; found {dict(scenes)}"
        )
    if seed < 0:
        raise ValueError(f"seed must not be negative; found {seed}")
    if workers < 0:
        raise ValueError(f"workers must not be negative; found {workers}")
    if unknown := sorted(formats - set(FORMATS)):
        raise ValueError(f"formats must be some of {', '.join(FORMATS)}; found {unknown[0]!r}")
    if image_format not in _IMAGE_FORMATS:
        raise ValueError(f"image_format must be one of {', '.join(_IMAGE_FORMATS)}; found {image_format!r}")


def _as_json(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings as they come back from a JSON file: tuples as lists."""
    return json.loads(json.dumps(settings))


def _look_into(output: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The stamp of a folder that already holds this data; None when it is to be written."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file, not a folder: choose another output folder")
    if not output.exists() or not any(output.iterdir()):
        return None
    for name in (STAMP, _UNFINISHED):
        path = output / name
        if not path.exists():
            continue
        try:
            stamp = json.loads(path.read_text(encoding="utf-8"))
            found = {"version": stamp["version"], **stamp["settings"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} cannot be read ({error}): remove the folder {output} and start again") from error
        wanted = {"version": VERSION, **settings}
        differing = sorted(key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key))
        if differing:
            raise ValueError(
                f"{output} holds synthetic data made with other settings ({', '.join(differing)}): remove the folder "
                "or choose another one"
            )
        return stamp if name == STAMP else None
    raise ValueError(f"{output} is not empty and was not written by this tool: choose another output folder")


@contextmanager
def _mapped(function: Any, jobs: list[_Job], workers: int) -> Iterator[Iterator[dict[str, Any]]]:
    """``map`` in this process or over several, in order."""
    if workers == 0:
        yield map(function, jobs)
        return
    # Spawned, not forked: the caller may have threads running (torch).
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=cv2.setNumThreads, initargs=(1,)) as pool:
        chunk = max(1, min(_MAX_CHUNK, len(jobs) // (2 * workers)))
        yield pool.map(function, jobs, chunksize=chunk)


def _make_scene(
    job: _Job,
    *,
    seed: int,
    config: SceneConfig,
    language: LanguageConfig,
    detections: DetectionConfig,
    formats: frozenset[str],
    with_image: bool,
) -> dict[str, Any]:
    """Draw a scene, write its image if asked to, and return what is said and annotated about it in these formats."""
    rng = np.random.default_rng([seed, zlib.crc32(job.split.encode()), job.number])
    scene = draw_scene(config, rng)
    facts = SceneFacts(scene)
    extension = job.path.suffix[1:]
    if with_image and not cv2.imwrite(str(job.path), scene.image[..., ::-1], _IMAGE_FORMATS[extension]):
        raise OSError(f"{job.path} cannot be written")
    record = {
        "size": scene.image.shape[:2],
        "objects": [(item.look, _xywh(item.box), item.area, coco.polygons(item.visible)) for item in scene.objects],
        "references": [
            (item.target, item.sentence, as_typed(item.sentence, rng), item.expression.family)
            for item in draw_references(facts, language, rng)
        ],
        "captions": (captions := draw_captions(facts, rng)),
        "detections": (found := draw_detections(scene, detections, rng)),
        "baselines": _baselines(scene),
    }
    if formats & {"shards", "conceptual"}:
        record["conceptual"] = conceptual.draw_caption(captions, found, _generator(job, seed, "conceptual"))
    if "vqa" in formats:
        record["questions"] = draw_questions(facts, config, _generator(job, seed, "vqa"))
    if "vcr" in formats:
        record["vcr"] = draw_vcr_questions(facts, _generator(job, seed, "vcr"), families=language.vcr_families)
    return record


def _generator(job: _Job, seed: int, name: str) -> np.random.Generator:
    """A format's own generator for one scene: what it draws leaves the other files as they are."""
    return np.random.default_rng([seed, zlib.crc32(job.split.encode()), job.number, zlib.crc32(name.encode())])


def _xywh(box: tuple[int, int, int, int]) -> list[float]:
    x1, y1, x2, y2 = box
    return [float(x1), float(y1), float(x2 - x1), float(y2 - y1)]


class _Dataset:
    """Collects the records of all scenes, gives them their ids, and writes them in some formats."""

    def __init__(self, formats: frozenset[str]) -> None:
        self.formats = formats
        self.images: list[dict[str, Any]] = []
        self.splits: dict[str, set[int]] = {}  # image ids
        self.annotations: list[dict[str, Any]] = []
        self.refs: list[dict[str, Any]] = []
        self.captions: dict[int, list[str]] = {}
        self.detections: dict[int, list[dict[str, Any]]] = {}
        self.conceptual: dict[str, list[conceptual.CaptionedImage]] = {}  # by split
        self.questions: dict[str, list[tuple[int, list[dict[str, Any]]]]] = {}  # of each split, by image id
        self.vcr = VCRWriter()
        self._sentences = 0

    def add(self, job: _Job, record: dict[str, Any]) -> None:
        image_id = len(self.images) + 1
        height, width = record["size"]
        self.images.append(coco.image_record(image_id, job.path.name, height, width))
        self.splits.setdefault(job.split, set()).add(image_id)
        annotations = [
            coco.annotation_record(number, image_id, *entry)
            for number, entry in enumerate(record["objects"], start=len(self.annotations) + 1)
        ]
        self.annotations += annotations
        said: dict[int, list[dict[str, Any]]] = {}
        for target, sentence, raw, family in record["references"]:
            entry = refer.sentence_record(self._sentences, sentence, raw, family)
            said.setdefault(target, []).append(entry)
            self._sentences += 1
        for target, sentences in said.items():
            ref = refer.ref_record(len(self.refs), annotations[target], job.path.name, job.split, sentences)
            self.refs.append(ref)
        self.captions[image_id] = record["captions"]
        self.detections[image_id] = record["detections"]
        if "conceptual" in record:
            captioned = conceptual.CaptionedImage(job.path, (height, width), **record["conceptual"])
            self.conceptual.setdefault(job.split, []).append(captioned)
        if "questions" in record:
            self.questions.setdefault(job.split, []).append((image_id, record["questions"]))
        if "vcr" in record:
            self.vcr.add(job.split, job.path, record)

    def write(self, output: Path, rng: np.random.Generator) -> None:
        if "refcoco+" in self.formats:
            coco.write_instances(output / "refcoco+" / "instances.json", self.images, self.annotations)
            refer.write_refs(output / "refcoco+" / "refs(unc).p", self.refs)
        if "detections" in self.formats:
            name = "res101_coco_minus_refer_notime_dets.json"
            write_detections(output / "detections" / "refcoco+_unc" / name, self.detections, rng)
        if "annotations" in self.formats:
            coco.write_instances(output / "annotations" / "instances_train2014.json", self.images, self.annotations)
            coco.write_captions(output / "annotations" / "captions_train2014.json", self.images, self.captions)
        for split in self.splits:
            self._write_split(output, split)
        self.vcr.write(output)

    def _write_split(self, output: Path, split: str) -> None:
        image_ids = self.splits[split]
        images = [image for image in self.images if image["id"] in image_ids]
        if "detection" in self.formats:
            annotations = [entry for entry in self.annotations if entry["image_id"] in image_ids]
            coco.write_instances(output / "detection" / f"instances_{split}.json", images, annotations)
        if "captions" in self.formats:
            captions = {image_id: self.captions[image_id] for image_id in sorted(image_ids)}
            coco.write_captions(output / "captions" / f"captions_{split}.json", images, captions)
        if "shards" in self.formats:
            conceptual.write_shards(output / "shards" / split, self.conceptual[split])
        if "conceptual" in self.formats:
            conceptual.write_official(output / "conceptual", split, self.conceptual[split])
        if "vqa" in self.formats:
            write_vqa(output / "vqa", split, self.questions[split])


def _baselines(scene: Scene) -> dict[str, int]:
    """What someone would choose who does not read the sentence: indices of objects."""
    boxes = np.array([item.box for item in scene.objects], float)
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    h, w = scene.image.shape[:2]
    return {
        "biggest": int(np.argmax([item.area for item in scene.objects])),
        "most_central": int(np.argmin(np.linalg.norm(centres - (w / 2, h / 2), axis=1))),
    }


def _statistics(jobs: list[_Job], records: list[dict[str, Any]]) -> dict[str, Any]:
    """Numbers about the data: sizes, shares of the families, and the accuracy of choices that ignore the sentence."""
    said = [(reference, record) for record in records for reference in record["references"]]
    families = Counter(family for (_, _, _, family), _ in said)
    refs = sum(len({target for target, *_ in record["references"]}) for record in records)
    blind = {
        name: round(float(np.mean([record["baselines"][name] == target for (target, *_), record in said])), 4)
        for name in ("biggest", "most_central")
    }
    return {
        "images": dict(Counter(job.split for job in jobs)),
        "objects_per_image": round(float(np.mean([len(record["objects"]) for record in records])), 3),
        "refs_per_image": round(refs / len(records), 3),
        "expressions_per_image": round(len(said) / len(records), 3),
        "words_per_expression": round(float(np.mean([len(item[1].split()) for item, _ in said])), 3),
        "families": {name: round(count / len(said), 4) for name, count in sorted(families.items())},
        "blind_accuracy": blind
        | {"chance": round(float(np.mean([1 / len(record["objects"]) for _, record in said])), 4)},
    }
