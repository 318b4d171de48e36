"""What a user asks about one image, outside of any data set: the image, a text, maybe boxes and choices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from detector.images import ResizeRule
from e2e_vl.config import DataSettings
from e2e_vl.data.examples import ImageExample
from e2e_vl.data.files import read_json
from e2e_vl.data.images import Placement, read_image
from e2e_vl.data.vcr_files import read_polygons


@dataclasses.dataclass(frozen=True)
class GivenBoxes:
    """Candidate boxes from a user.

    Attributes:
        boxes: float64 [R, 4], xyxy in pixels of the original image.
        names: R class names; None where they are not known.
        outlines: R lists of float64 [P, 2] outlines (x, y) in pixels of the original image; None where they are not
            known.
        source: where they come from, for error messages.
    """

    boxes: np.ndarray
    names: list[str] | None = None
    outlines: list[list[np.ndarray]] | None = None
    source: str = "--boxes"

    def __len__(self) -> int:
        return len(self.boxes)


@dataclasses.dataclass(frozen=True)
class Asked:
    """One image and one text; `choices` and `answer` are for tasks that choose among texts (VCR).

    `hidden` are boxes that a pre-training run is to recognise without seeing their pixels.
    """

    image: Path
    text: str
    boxes: GivenBoxes | None = None  # None = the model's own
    choices: Sequence[str] = ()
    answer: str | None = None  # the answer that a rationale is asked for
    hidden: GivenBoxes | None = None

    def record(self) -> dict[str, Any]:
        """Plain values for the prediction."""
        return {"text_index": 0, "file_name": str(self.image), "sent": self.text}

    def refuse_choices(self, what: str) -> None:
        """Raises ValueError if there are choices or an answer although the task takes none."""
        if self.choices or self.answer is not None:
            raise ValueError(f"{what} takes neither choices nor an answer; leave --choices and --answer out.")

    def load(
        self, settings: DataSettings, channel_order: str, boxes: GivenBoxes | None, *, hides: bool = False
    ) -> tuple[ImageExample, Placement]:
        """Read the image at the size that the run evaluates at, with these candidate boxes (None: the detector's own).

        Args:
            hides: the task can answer for hidden boxes; they become `pixel_masks`.

        Raises:
            FileNotFoundError, ValueError: the image cannot be read, a box lies outside it, or boxes are hidden although
                the task cannot answer for them.
        """
        if self.hidden is not None and not hides:
            raise ValueError("Only a pre-training run says what a hidden region is; leave --hide out.")
        resize = settings.resize
        rule = ResizeRule(resize.short_edge[-1], resize.long_edge, resize.rounding)
        pixels, placement = read_image(self.image, None, rule, channel_order=channel_order)
        moved = None if boxes is None else placement.move_and_clamp_boxes(boxes.boxes, boxes.source)
        example = ImageExample(pixels, placement.original_size, str(self.image), boxes=moved)
        if self.hidden is not None:
            example.pixel_masks = placement.move_and_clamp_boxes(self.hidden.boxes, self.hidden.source)
        return example, placement


def read_boxes(words: Sequence[str], source: str = "--boxes") -> GivenBoxes:
    """Boxes from a command line: a file, or `x1,y1,x2,y2` words, each maybe with a class in front (`person:1,2,30,40`).

    A file is JSON: a list of [x1, y1, x2, y2], or an object with such a list as `boxes` and maybe class names `names`
    and outlines as `segms` (VCR's metadata files are of this kind; a score behind each box is left out); or `.npz` with
    `boxes`, as tools/extract_demo.py writes it.

    Raises:
        FileNotFoundError, ValueError: no such file, another content, or a box without area; names the box.
    """
    if len(words) == 1 and "," not in words[0]:
        path = Path(words[0]).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"{source}: {path} is no file; name one with boxes, or write x1,y1,x2,y2.")
        return _read_file(path)
    boxes, names = [], []
    for number, word in enumerate(words):
        name, _, numbers = word.rpartition(":")
        try:
            values = [float(value) for value in numbers.split(",")]
        except ValueError:
            values = []
        boxes.append(_checked(values, f"box {number} ('{word}')"))
        names.append(name)
    if any(names) and not all(names):
        raise ValueError("Some boxes have a class and others have none; write all of them as class:x1,y1,x2,y2.")
    return GivenBoxes(_stack(boxes), names if any(names) else None, source=source)


def _read_file(path: Path) -> GivenBoxes:
    names = outlines = None
    if path.suffix == ".npz":
        try:
            with np.load(path, allow_pickle=False) as content:
                rows: Any = content["boxes"].tolist()
        except (KeyError, ValueError, OSError) as error:
            raise ValueError(f"{path}: there is no array 'boxes' that can be read ({error}).") from error
    else:
        content = read_json(path, "boxes")
        rows = content
        if isinstance(content, dict):
            rows, names, outlines = (content.get(key) for key in ("boxes", "names", "segms"))
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a list of [x1, y1, x2, y2], or an object with such a list as 'boxes'.")
    boxes = []
    for number, row in enumerate(rows):
        row = row[:4] if isinstance(row, list) and len(row) == 5 else row
        boxes.append(_checked(row, f"{path}: box {number}"))
    if names is not None and (
        not isinstance(names, list) or len(names) != len(boxes) or not all(isinstance(n, str) and n for n in names)
    ):
        raise ValueError(f"{path}: 'names' must hold one class name for each of the {len(boxes)} boxes.")
    if outlines is not None:
        if not isinstance(outlines, list) or len(outlines) != len(boxes):
            raise ValueError(f"{path}: 'segms' must hold the outlines of each of the {len(boxes)} boxes.")
        outlines = [read_polygons(rows, f"{path}: segms {number}") for number, rows in enumerate(outlines)]
    return GivenBoxes(_stack(boxes), names, outlines, str(path))


def _stack(boxes: list[list[float]]) -> np.ndarray:
    return np.array(boxes, dtype=np.float64).reshape(-1, 4)


def _checked(box: Any, where: str) -> list[float]:
    is_box = isinstance(box, list) and len(box) == 4
    is_box = is_box and all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in box)
    if not is_box or box[2] <= box[0] or box[3] <= box[1]:
        raise ValueError(
            f"{where} is no box; write the corners x1,y1,x2,y2 in pixels of the original image, x1 < x2 and y1 < y2."
        )
    return [float(value) for value in box]
