"""Writers of Conceptual Captions: webdataset shards, and the layout of the official VL-BERT code."""

from __future__ import annotations

import base64
import io
import json
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from e2e_vl.synthetic.base import CATEGORIES, CATEGORY_IDS, FormatWriter, SceneRecord, by_split
from e2e_vl.synthetic.config import SceneConfig
from e2e_vl.synthetic.language import RELATIONS, Description, ReferringExpression, to_words
from e2e_vl.synthetic.scenes import SceneGraph

RECORDS_PER_SHARD = 10_000  # img2dataset's default
FEATURE_DIM = 32
_KEY_DIGITS = 4  # of a record in its shard


@dataclass(frozen=True)
class CaptionedImage:
    """One image with one caption and the boxes of an imitated detector."""

    path: Path  # the image file
    size: tuple[int, int]  # (height, width), pixels
    caption: str
    boxes: list[list[float]]  # [x1, y1, x2, y2] in pixels
    classes: list[list[float]]  # per box, the probabilities of the background and of all categories


class _CaptionedImageWriter(FormatWriter):
    """Draws the same caption and probabilities for both formats."""

    @override
    def draw(self, scene: SceneRecord, graph: SceneGraph) -> CaptionedImage:
        """Draw a caption and class probabilities: a detection's score for its category, the rest random."""
        rng = self.recipe.generator(scene.split, scene.number, "conceptual")
        boxes = []
        classes = []
        category_ids = list(CATEGORY_IDS.values())
        for detection in scene.detections:
            x, y, width, height = detection["box"]
            boxes.append([x, y, round(x + width, 4), round(y + height, 4)])
            rest = rng.dirichlet(np.full(len(CATEGORIES), 0.3)) * (1 - detection["score"])
            column = category_ids.index(detection["category_id"]) + 1  # column 0 is the background
            probabilities = np.insert(rest, column, detection["score"])
            classes.append([round(float(value), 6) for value in probabilities])
        caption = scene.captions[rng.integers(len(scene.captions))]
        return CaptionedImage(scene.image_file, scene.size, caption, boxes, classes)


class ShardsWriter(_CaptionedImageWriter):
    """Writes `<split>/00000.tar` and `<split>/00000_stats.json` as img2dataset does.

    A shard has `KEY.jpg`, `KEY.txt` and `KEY.json` side by side.
    """

    @override
    def write(self, folder: Path, scenes: Sequence[SceneRecord]) -> None:
        for split, split_scenes in by_split(scenes).items():
            write_shards(folder / split, [scene.drawn for scene in split_scenes])


class ConceptualWriter(_CaptionedImageWriter):
    """Writes the layout of the official VL-BERT code.

    `<split>.json` and `<split>_frcnn.json` are JSON lines of an image, the words of its caption and, in the second,
    the file of its detected boxes. They name members of `<split>_image.zip` and `<split>_frcnn.zip`, which are not
    compressed.
    """

    @override
    def write(self, folder: Path, scenes: Sequence[SceneRecord]) -> None:
        for split, split_scenes in by_split(scenes).items():
            lines = []
            lines_with_boxes = []
            with (
                zipfile.ZipFile(folder / f"{split}_image.zip", "w") as images,
                zipfile.ZipFile(folder / f"{split}_frcnn.zip", "w") as regions,
            ):
                for number, scene in enumerate(split_scenes):
                    image: CaptionedImage = scene.drawn
                    image_name = f"{number:08d}{image.path.suffix}"
                    regions_name = f"{number:08d}.json"
                    images.writestr(zipfile.ZipInfo(image_name), image.path.read_bytes())
                    regions.writestr(zipfile.ZipInfo(regions_name), json.dumps(_frcnn(image)))
                    line = {"image": f"{split}_image.zip@/{image_name}", "caption": image.caption.split(" ")}
                    line_with_boxes = {**line, "frcnn": f"{split}_frcnn.zip@/{regions_name}"}
                    lines.append(json.dumps(line) + "\n")
                    lines_with_boxes.append(json.dumps(line_with_boxes) + "\n")
            (folder / f"{split}.json").write_text("".join(lines), encoding="utf-8")
            (folder / f"{split}_frcnn.json").write_text("".join(lines_with_boxes), encoding="utf-8")


def write_shards(folder: Path, images: Sequence[CaptionedImage], records_per_shard: int = RECORDS_PER_SHARD) -> None:
    """Write images with captions into numbered tar files and their statistics."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, first in enumerate(range(0, len(images), records_per_shard)):
        shard = images[first : first + records_per_shard]
        with tarfile.open(folder / f"{number:05d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for row, image in enumerate(shard):
                key = f"{number:05d}{row:0{_KEY_DIGITS}d}"
                height, width = image.size
                record = {
                    "caption": image.caption,
                    "url": "",
                    "key": key,
                    "status": "success",
                    "error_message": None,
                    "width": width,
                    "height": height,
                    "original_width": width,
                    "original_height": height,
                }
                _add(tar, f"{key}.json", json.dumps(record, indent=4).encode())
                _add(tar, f"{key}{image.path.suffix}", image.path.read_bytes())
                _add(tar, f"{key}.txt", image.caption.encode())
        stats = {
            "count": len(shard),
            "successes": len(shard),
            "failed_to_download": 0,
            "failed_to_resize": 0,
            "duration": 0.0,
            "status_dict": {"success": len(shard)},
        }
        (folder / f"{number:05d}_stats.json").write_text(json.dumps(stats, indent=4), encoding="utf-8")


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _frcnn(image: CaptionedImage) -> dict[str, Any]:
    """Return the content of a file of detected boxes."""
    classes = np.array(image.classes, dtype=np.float32)
    mixing = np.random.default_rng(0).normal(size=(classes.shape[1], FEATURE_DIM))  # similar for boxes of a class
    height, width = image.size
    return {
        "image_w": width,
        "image_h": height,
        "num_boxes": len(image.boxes),
        "boxes": _base64(np.array(image.boxes)),
        "classes": _base64(classes),
        "features": _base64(np.maximum(classes @ mixing, 0)),
    }


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


# Writer of a text corpus about the drawn world: descriptions of things that no image shows.


LINES_PER_SCENE = 4
_OPERATORS = ("biggest", "smallest", "bigger", "smaller", *RELATIONS)
_FRAMES = ("there is {}", "look at {}", "i see {}", "{}", "{} is here", "this is {}")
_SENTENCES_PER_LINE = (1, 9)


class CorpusWriter(FormatWriter):
    """Writes `corpus.doc`, UTF-8: one paragraph per line, with blank lines between documents."""

    @override
    def write(self, folder: Path, scenes: Sequence[SceneRecord]) -> None:
        rng = self.recipe.generator("corpus")
        config = self.recipe.scene
        with (folder / "corpus.doc").open("w", encoding="utf-8", newline="\n") as file:
            for _ in range(LINES_PER_SCENE * len(scenes)):
                num_sentences = rng.integers(*_SENTENCES_PER_LINE)
                paragraph = " ".join(_sentence(config, rng) for _ in range(num_sentences))
                ends_document = rng.random() < 0.1
                file.write(paragraph + ("\n\n" if ends_document else "\n"))


def _sentence(config: SceneConfig, rng: np.random.Generator) -> str:
    operator = None
    if rng.random() < 0.55:
        operator = _OPERATORS[rng.integers(len(_OPERATORS))]
    has_anchor = operator in RELATIONS or (operator in ("bigger", "smaller") and rng.random() < 0.7)
    description = _description(config, rng)
    anchor = _description(config, rng) if has_anchor else None
    frame = _FRAMES[rng.integers(len(_FRAMES))]
    sentence = frame.format(to_words(ReferringExpression(description, operator, anchor), rng))
    return sentence[0].upper() + sentence[1:] + "."


def _description(config: SceneConfig, rng: np.random.Generator) -> Description:
    chances = {"size": 0.3, "texture": 0.3, "colour": 0.6, "shape": 0.8}
    attributes = {}
    for slot, chance in chances.items():
        if rng.random() < chance:
            attributes[slot] = str(rng.choice(config.values[slot]))
    return Description(**attributes)
