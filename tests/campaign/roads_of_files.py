"""All the ways on which this project reads files that are not images or weights, found through its own lists.

A road reads drawn files as a whole. Which files it opens is noted while it reads good ones, so that none has to be
named.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from e2e_vl.analysis.captions import read_conllu
from e2e_vl.config import BoxSource, DataSettings, load_config
from e2e_vl.data.answer_lists import read_answers
from e2e_vl.data.base import Wants, open_options
from e2e_vl.data.features import RegionFeatures, open_features, write_tsv
from e2e_vl.data.image_loader import open_boxes_of
from e2e_vl.data.overlap import PhotoIds, read_visual_genome
from e2e_vl.data.user_inputs import list_images, read_boxes, read_given_boxes
from e2e_vl.run.build import DATASETS
from e2e_vl.samples import AnnotatedObjects, CandidateBoxes, ChoiceText, Sample, ScoredAnswers
from e2e_vl.synthetic import make_scenes
from e2e_vl.text import build_vocabulary, load_tokenizer
from tests.data.drawn_metadata import write_metadata

CONFIGS = Path(__file__).parents[2] / "configs" / "tiny"
SCENES = {"train": 3, "val": 2}
IMAGES = (".jpg", ".png", ".lock")
BINARY = (*IMAGES, ".zip", ".tar", ".npy", ".h5", ".lmdb", ".safetensors", ".bin", ".pkl")  # of roads of their own
PHOTOS, INSTANCES = "images/train2014", "detection/instances_{split}.json"
LXMERT = {"images": PHOTOS, "features": "lxmert/{split}_obj36.tsv", "detections": "lxmert/{split}_obj36.tsv"}
GENOME = {"images": "visual_genome", "image_data": "visual_genome/image_data_{split}.json"}
# settings that no shipped config has for drawn scenes: reader -> files, options and a source of boxes
MORE: tuple[tuple[str, dict[str, str], dict[str, Any], str], ...] = (
    ("captions", {"shards": "shards/{split}"}, {"source": "shards"}, "online"),
    (
        "captions",
        dict.fromkeys(("captions", "detections", "features"), "unpacked/{split}_frcnn.json"),
        {"source": "json_lines"},
        "precomputed",
    ),
    (
        "captions",
        {"captions": "captions/captions_{split}.json", "images": PHOTOS, "metadata": "more/metadata"},
        {"min_object_score": 0.25},
        "gt",
    ),
    ("scored_questions", LXMERT | {"questions": "lxmert/{split}_vqa.json"}, {}, "precomputed"),
    ("listed_pairs", LXMERT | {"examples": "lxmert/{split}_nlvr2.json"}, {}, "detections"),
    (
        "gqa",
        {
            "images": PHOTOS,
            "questions": "gqa/questions/{split}_questions.json",
            "choices": "gqa/eval/{part}_choices.json",
            "scene_graphs": "gqa/sceneGraphs/{part}_sceneGraphs.json",
        },
        {"grounding": True, "image_name": "COCO_train2014_{id:0>12}.jpg"},
        "gt",
    ),
    ("visual_genome", GENOME | {"regions": "visual_genome/region_descriptions_{split}.json"}, {}, "online"),
    (
        "visual_genome",
        GENOME | {"questions": "more/question_answers_{split}.json"},
        {"texts": "questions"},
        "online",
    ),
    ("coco_detection", {"images": PHOTOS, "instances": INSTANCES}, {}, "gt"),
    (
        "joined",
        {},
        {
            "parts": {
                "said": {
                    "name": "captions",
                    "files": {"captions": "captions/captions_{split}.json", "images": PHOTOS},
                    "config": {"source": "coco"},
                    "splits": {name: name for name in SCENES},
                }
            }
        },
        "online",
    ),
)


@dataclasses.dataclass(frozen=True)
class Road:
    """One way to read files below a folder."""

    name: str
    dataset: str | None  # the key of DATASETS
    read: Callable[[Path], None]
    is_binary: bool = False  # its archives, indices and stores are damaged, too
    unheard: tuple[str, ...] = ()  # files that a library opens, without a word to Python


class NonsenseError(AssertionError):
    """A reader accepted nonsense."""


def draw(root: Path) -> Path:
    """Drawn files of all formats, and those of other readers."""
    make_scenes(root, scenes=SCENES)
    (root / "unpacked").mkdir()
    for split in SCENES:
        (root / "unpacked" / f"{split}_frcnn.json").write_bytes(
            (root / "conceptual" / f"{split}_frcnn.json").read_bytes()
        )
        for kind in ("image", "frcnn"):
            with zipfile.ZipFile(root / "conceptual" / f"{split}_{kind}.zip") as archive:
                archive.extractall(root / "unpacked" / f"{split}_{kind}")
    more = root / "more"
    more.mkdir()
    for split in SCENES:
        images = json.loads((root / "visual_genome" / f"image_data_{split}.json").read_bytes())
        asked = [{"id": row["image_id"], "qas": [_asked(row["image_id"], n) for n in range(2)]} for row in images]
        (more / f"question_answers_{split}.json").write_text(json.dumps(asked))
    (more / "metadata").mkdir()
    for split in SCENES:
        write_metadata(root / INSTANCES.format(split=split), more / "metadata")
    rng = np.random.default_rng(0)
    corners = np.array([[1, 2, 30, 40], [5, 6, 20, 50]], dtype=np.float32)
    regions = [RegionFeatures(str(one), (64, 64), corners, rng.random((2, 4), np.float32)) for one in range(3)]
    write_tsv(more / "features.tsv", regions, {"detector": "drawn"})
    build_vocabulary(["a red box", "two dogs"], more / "vocab.txt")
    load_tokenizer(more / "vocab.txt").save_pretrained(str(more / "tokenizer"))
    (more / "answers.txt").write_text("yes\nno\n")
    (more / "image_data.json").write_text('[{"image_id": 1, "width": 3, "height": 4, "coco_id": 5, "flickr_id": null}]')
    (more / "ids.json").write_text('["VG_100K/3.jpg", "COCO_val2014_000000000005.jpg", {"image_id": 3, "coco_id": 4}]')
    (more / "boxes.json").write_text(
        '{"boxes": [[1, 2, 30, 40]], "names": ["cup"], "segms": [[[[1, 2], [3, 4], [5, 6]]]]}'
    )
    return root


def _asked(image_id: int, number: int) -> dict[str, Any]:
    return {"qa_id": 10 * image_id + number, "question": f"What is {number}?", "answer": "A dog."}


def all_roads() -> list[Road]:
    """Every reader of DATASETS under the settings of the shipped configs, and the readers that are none of these."""
    return [*_of_configs(), *(_of_settings(*one) for one in MORE), *_others()]


def opened_files(road: Road, root: Path) -> list[Path]:
    """The files below the folder that a road opens, without images, and without archives if others damage them."""
    opened = _OPENED.watch(root)
    road.read(root)
    _OPENED.watch(None)
    opened |= {root / name for name in road.unheard}
    left_out = IMAGES if road.is_binary else BINARY
    return sorted(path for path in opened if path.suffix not in left_out and path.is_file())


class _Opened:
    """Notes the files that are opened below a folder."""

    def __init__(self) -> None:
        self.root: str | None = None
        self.found: set[Path] = set()
        self.is_listening = False

    def watch(self, root: Path | None) -> set[Path]:
        if not self.is_listening:
            sys.addaudithook(self.hear)
            self.is_listening = True
        self.root, self.found = None if root is None else f"{root}{os.sep}", set()
        return self.found

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and self.root is not None and isinstance(arguments[0], str | os.PathLike):
            name = os.fspath(arguments[0])
            if isinstance(name, str) and name.startswith(self.root):
                self.found.add(Path(name))


_OPENED = _Opened()


def _of_configs() -> Iterator[Road]:
    for path in sorted(CONFIGS.glob("*.yaml")):
        config = load_config(path, ["output=unused"])
        data, sources = config.data, [config.data.boxes.train, *config.eval.boxes]
        if path.stem == "precomputed":  # its features are extracted by a detector
            continue
        splits = [data.train_split, *data.eval_splits]
        yield Road(path.stem, data.name, _reading(data, splits, list(dict.fromkeys(map(BoxSource, sources)))))


def _of_settings(name: str, files: Mapping[str, str], options: Mapping[str, Any], boxes: str) -> Road:
    settings = DataSettings(name=name, root="unused", files=dict(files), config=dict(options))
    splits = [f"{split}_balanced" for split in SCENES] if name == "gqa" else list(SCENES)
    title = f"{name} of {', '.join(files)}"
    return Road(f"{title} with boxes {boxes}", name, _reading(settings, splits, [BoxSource(boxes)]))


def _reading(settings: DataSettings, splits: list[str], sources: list[BoxSource]) -> Callable[[Path], None]:
    def read(root: Path) -> None:
        own = dataclasses.replace(settings, root=str(root))
        for split in splits:
            for boxes in sources:
                _read_split(own, split, boxes, training=split == splits[0])

    return read


def _read_split(settings: DataSettings, split: str, boxes: BoxSource, *, training: bool) -> None:
    kind = DATASETS[settings.name]
    files, options = open_options(kind, settings)
    phrases = bool({"phrases", "region_graphs", "regions"} & set(settings.files))
    has_objects = "instances" in settings.files
    dataset = kind.open(files, options, split, Wants(boxes, objects=has_objects, training=training, phrases=phrases))
    reader = open_boxes_of(dataset, settings, boxes)
    for group in dataset.groups:
        sample = dataset.sample(group)
        check_sample(sample)
        for image in sample.images:
            if reader is not None and image.boxes is None:
                check_candidates(reader.read(image.id))
    list(dataset.truths())
    list(dataset.image_ids())
    if dataset.corpus is not None:
        require(all(isinstance(line, str) for line in dataset.corpus), "a line of the corpus is not a text")
    words = kind.texts_of(files, options, split)
    require(all(isinstance(one, str) for one in words), "a text for the vocabulary is not a text")


def _others() -> Iterator[Road]:
    """Readers of files that no data set reads by itself."""
    yield Road("features", None, lambda root: _features(root / "more" / "features.tsv"))
    yield Road("vocabulary", None, lambda root: _words(root / "more" / "vocab.txt"))
    yield Road("tokenizer", None, lambda root: _words(root / "more" / "tokenizer"))
    for name in ("lxmert/trainval_label2ans.json", "lxmert/all_ans.json", "more/answers.txt"):
        yield Road(name, None, lambda root, name=name: _texts(read_answers(root / name)))
    yield Road("parses", None, lambda root: _parses(root / "flickr30k" / "parses" / "train.conllu"))
    yield Road(
        "photos of Visual Genome", None, lambda root: _ids(read_visual_genome(root / "more/image_data.json").values())
    )
    for name in ("more/ids.json", "more/image_data.json", "detection/instances_train.json"):
        yield Road(f"photos {name}", None, lambda root, name=name: _ids(PhotoIds().of_list(root / name, "vg")))
    yield Road("images", None, lambda root: _listed(root / "detection/instances_train.json", root / PHOTOS))
    for name in ("detection/instances_train.json", "detections/refcoco+_unc/res101_coco_minus_refer_notime_dets.json"):
        yield Road(f"given {name}", None, lambda root, name=name: _given(root / name))
    yield Road("boxes of a user", None, lambda root: check_objects(read_boxes([str(root / "more" / "boxes.json")])))


def _features(path: Path) -> None:
    store = open_features(path)
    for image_id in store.ids:
        found = store[image_id]
        check_boxes(found.boxes)
        check_size(found.image_size)
        require(np.isfinite(found.features).all(), "a feature is not finite")


def _words(path: Path) -> None:
    pieces = load_tokenizer(path).encode("a red box")
    require(all(isinstance(piece, int) for piece in pieces), "wordpieces are not numbers")


def _texts(found: list[str]) -> None:
    require(all(isinstance(one, str) for one in found), "an answer is not a text")


def _parses(path: Path) -> None:
    for sentence in read_conllu(path):
        require(all(-1 <= word.governor < len(sentence) for word in sentence), "a governor is not in its sentence")


def _ids(found: Any) -> None:
    for ids in found:
        require(all(isinstance(part, str) for one in ids for part in one), "an id of a photo is not a text")


def _listed(path: Path, root: Path) -> None:
    require(all(isinstance(one.id, str) and one.id for one in list_images(path, root)), "an id is not a text")


def _given(path: Path) -> None:
    for image_id, found in read_given_boxes(path).items():
        require(isinstance(image_id, str), "an id is not a text")
        check_boxes(found.boxes)


# ---- What makes sense.


def require(holds: object, sentence: str) -> None:
    if not holds:
        raise NonsenseError(sentence)


def check_boxes(boxes: np.ndarray, *, points: bool = False) -> None:
    require(boxes.ndim == 2 and boxes.shape[1] == 4 and np.isfinite(boxes).all(), f"no boxes: {boxes}")
    sides = boxes[:, 2:] - boxes[:, :2]
    require((sides >= 0).all() if points else (sides > 0).all(), f"boxes without an area: {boxes}")


def check_size(size: tuple[int, int] | None) -> None:
    if size is not None:
        require(all(type(side) is int and 0 < side < 2**31 for side in size), f"no size of an image: {size}")


def check_objects(objects: AnnotatedObjects) -> None:
    check_boxes(objects.boxes)
    for name in objects.names or ():
        require(isinstance(name, str), f"no name of an object: {name!r}")
    for outlines in objects.outlines or ():
        require(all(np.isfinite(outline).all() for outline in outlines), "an outline is not finite")


def check_candidates(found: CandidateBoxes) -> None:
    check_boxes(found.boxes, points=True)  # a detector's boxes are cut off at the borders of the image
    check_size(found.image_size)
    for values in (found.class_probs, found.detected_scores, found.detected_attribute_scores):
        if values is not None:
            require(((values >= 0) & (values <= 1.001)).all(), "a probability is not one")
    for values in (found.features, found.image_feature):
        require(values is None or np.isfinite(values).all(), "a feature is not finite")


def check_sample(sample: Sample) -> None:
    for image in sample.images:
        require(isinstance(image.id, str) and image.id, f"no id of an image: {image.id!r}")
        check_size(image.size)
        if image.objects is not None:
            check_objects(image.objects)
        if image.boxes is not None:
            check_candidates(image.boxes)
    for text in sample.texts:
        require(isinstance(text.words, str), f"no text: {text.words!r}")
        if isinstance(text, ChoiceText):
            tokens = [token for sentence in (*text.query, *text.choices) for token in sentence]
            require(all(isinstance(token, str | list | tuple) for token in tokens), "no token")
        if isinstance(text.truth, ScoredAnswers):
            require(all(0 <= score <= 1.001 for score in text.truth.scores.values()), "a score is not one")
        for name in ("answer", "family", "question", "sent"):
            value = text.metadata.get(name)
            require(value is None or isinstance(value, str), f"{name} is {value!r}")
        if text.phrases is not None:
            require(all(0 <= a < b <= len(text.words) for a, b in text.phrases.spans), "a phrase is not in its text")
            for boxes in text.phrases.boxes or ():
                check_boxes(boxes, points=True)
