"""Where captions, their images and candidate boxes come from: one small interface, and COCO's captions.

Conceptual Captions are in `shards.py` (webdataset) and `conceptual.py` (the official VL-BERT layout).

Shape legend
    R   candidate boxes of one image
    C   classes of a detector, with the background
    D   width of a region feature
"""

from __future__ import annotations

import abc
import dataclasses
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from detector.selection import SelectionRule, select_regions
from e2e_vl.data.coco import CocoInstances
from e2e_vl.data.detections import DetectionsFile
from e2e_vl.data.features.stores import FeatureStore
from e2e_vl.data.files import read_json, require_keys
from e2e_vl.data.grouping import ConsecutiveGroups
from e2e_vl.data.images import EncodedImage

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CandidateBoxes:
    """Boxes of one image that come from a file, and what the file knows about them."""

    boxes: np.ndarray  # float [R, 4], xyxy, continuous, in pixels of the stored image
    origin: str  # file and record, for error messages
    targets: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # name -> [R, ...], see the readers
    image_size: tuple[int, int] | None = None  # (height, width) of the stored image, where the file says it
    features: np.ndarray | None = None  # float32 [R, D]
    image_feature: np.ndarray | None = None  # float32 [D], feature of the whole image


BoxReader = Callable[[str], CandidateBoxes]  # name of an image -> its boxes


class CaptionSource(abc.ABC):
    """Images with captions. Texts are numbered image by image.

    Attributes:
        path: the file or folder, for error messages.
        groups: the captions of each image.
    """

    path: Path
    groups: ConsecutiveGroups

    @abc.abstractmethod
    def caption(self, text: int) -> str:
        """One caption."""

    @abc.abstractmethod
    def name(self, group: int) -> str:
        """Id of an image, under which a file of boxes has it."""

    @abc.abstractmethod
    def image(self, group: int) -> Path | EncodedImage:
        """The image file, or its content.

        Raises:
            FileNotFoundError: it is missing.
        """

    def image_size(self, group: int) -> tuple[int, int] | None:
        """(height, width) that the annotations state, or None."""
        return None

    def boxes(self, group: int) -> CandidateBoxes | None:
        """Boxes that come with the captions themselves, or None."""
        return None


class CocoCaptions(CaptionSource):
    """COCO's `captions_*.json`: about five captions per image.

    Args:
        captions_file: the JSON file.
        images_root: folder of the image files that it names.

    Attributes:
        image_ids: ids of the images with captions, in file order. Images without a caption are left out and counted in
            the log.

    Raises:
        FileNotFoundError: no such file.
        ValueError: invalid JSON, a missing key, a duplicate image, a caption of an unknown image, an empty caption, or
            no caption at all; file and record are named.
    """

    def __init__(self, captions_file: str | Path, images_root: str | Path) -> None:
        self.path = Path(captions_file).expanduser()
        self.images_root = Path(images_root).expanduser()
        content = read_json(self.path, "captions")
        require_keys(content, ("images", "annotations"), str(self.path))
        rows: dict[int, dict[str, Any]] = {}
        for number, row in enumerate(content["images"]):
            require_keys(row, ("id", "file_name"), f"{self.path}: image number {number}")
            if row["id"] in rows:
                raise ValueError(f"{self.path}: image {row['id']} is listed twice; image ids must be unique")
            rows[row["id"]] = row
        captions: dict[int, list[str]] = {image_id: [] for image_id in rows}
        for number, row in enumerate(content["annotations"]):
            where = f"{self.path}: caption number {number}"
            require_keys(row, ("image_id", "caption"), where)
            if row["image_id"] not in rows:
                raise ValueError(f"{where} is about image {row['image_id']}, which is not among the file's images")
            if not isinstance(row["caption"], str) or not row["caption"].strip():
                raise ValueError(f"{where} (of image {row['image_id']}) is empty; remove it")
            captions[row["image_id"]].append(row["caption"])
        self.image_ids = [image_id for image_id in rows if captions[image_id]]
        if not self.image_ids:
            raise ValueError(f"{self.path}: there are no captions in the file")
        if len(self.image_ids) < len(rows):
            logger.warning("%s: %d images have no caption.", self.path, len(rows) - len(self.image_ids))
        self._rows = [rows[image_id] for image_id in self.image_ids]
        self._captions = [caption for image_id in self.image_ids for caption in captions[image_id]]
        self.groups = ConsecutiveGroups([len(captions[image_id]) for image_id in self.image_ids])

    def caption(self, text: int) -> str:
        return self._captions[text]

    def name(self, group: int) -> str:
        return str(self.image_ids[group])

    def image(self, group: int) -> Path:
        return self.images_root / self._rows[group]["file_name"]

    def image_size(self, group: int) -> tuple[int, int] | None:
        row = self._rows[group]
        return (row["height"], row["width"]) if "height" in row and "width" in row else None


class AnnotatedBoxes:
    """All annotated boxes of an image, crowds too, in file order.

    Targets: `object_class` int64 [R], 0 .. K-1 by sorted category id.
    """

    def __init__(self, instances: CocoInstances) -> None:
        self.instances = instances

    def __call__(self, name: str) -> CandidateBoxes:
        image_id = int(name)
        if image_id not in self.instances.images:
            raise ValueError(f"{self.instances.path}: image {name} is not listed; use the instances of these images")
        image = self.instances.images[image_id]
        classes = [row.class_index for row in self.instances.by_image[image_id]]
        return CandidateBoxes(
            self.instances.boxes(image_id),
            f"{self.instances.path}: image {name}",
            {"object_class": np.array(classes, dtype=np.int64)},
            (image.height, image.width),
        )


class DetectedBoxes:
    """Boxes of a detections file in MAttNet's format, by falling score."""

    def __init__(self, detections: DetectionsFile, selection: SelectionRule) -> None:
        self.detections = detections
        self.selection = selection

    def __call__(self, name: str) -> CandidateBoxes:
        self.detections.require_images([int(name)])
        found = self.detections.by_image[int(name)]
        kept = select_regions(found.scores, self.selection).numpy()
        return CandidateBoxes(found.boxes[kept], f"{self.detections.path}: image {name}")


class StoredBoxes:
    """Boxes of a file of region features, by falling score where it has scores.

    Args:
        store: the file.
        selection: which boxes are kept; files without scores keep all of them in their order.
        with_features: give the features too, so that no detector has to run. Then every box is kept, in the same order.
    """

    def __init__(self, store: FeatureStore, selection: SelectionRule, *, with_features: bool) -> None:
        self.store = store
        self.selection = selection
        self.with_features = with_features

    def __call__(self, name: str) -> CandidateBoxes:
        found = self.store[name]
        origin = f"{self.store.path}: image {name}"
        if self.with_features:
            order = slice(None) if found.scores is None else np.argsort(-found.scores, kind="stable")
            features = found.features[order]
            return CandidateBoxes(found.boxes[order], origin, {}, found.image_size, features, found.image_feature)
        kept = slice(None) if found.scores is None else select_regions(found.scores, self.selection).numpy()
        return CandidateBoxes(found.boxes[kept], origin, {}, found.image_size)


def require_names(reader: BoxReader, names: Iterable[str]) -> None:
    """Check at the start of a run that a file has boxes of all images.

    Raises:
        ValueError: one is missing; it is named and all are counted.
    """
    if isinstance(reader, DetectedBoxes):
        reader.detections.require_images(int(name) for name in names)
    elif isinstance(reader, AnnotatedBoxes):
        missing = [name for name in names if int(name) not in reader.instances.images]
        if missing:
            raise ValueError(
                f"{reader.instances.path}: image {missing[0]} and {len(missing) - 1} more are not listed; "
                "use the instances of these images"
            )
    elif isinstance(reader, StoredBoxes):
        missing = [name for name in names if name not in reader.store]
        if missing:
            raise ValueError(
                f"{reader.store.path}: has no regions of image {missing[0]} and {len(missing) - 1} more with captions; "
                "extract them with the others"
            )
