"""Files of candidate boxes: detections in MAttNet's format, and region features.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from detector.errors import UserError
from detector.selection import select_regions
from detector.selection_rule import SelectionRule
from e2e_vl.box_sources import BoxSource
from e2e_vl.data.base import VLDataset, open_options
from e2e_vl.data.formats.detections import DetectionsFile
from e2e_vl.data.storage.features.record import RegionFeatures
from e2e_vl.data.storage.features.stores import FeatureStore, open_features
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.data.storage.shared_reads import SharedReads
from e2e_vl.data_settings import DataSettings
from e2e_vl.samples import FOUND, CandidateBoxes

_OTHER_BOXES = "use the detections of this data set, or another box source (gt or online)"


class BoxReader(abc.ABC):
    """Candidate boxes of images by their id, from one file or from several that each know other images."""

    @abc.abstractmethod
    def read(self, image_id: str) -> CandidateBoxes:
        """The boxes of one image.

        Raises:
            ValueError: no file has the image, or the file is damaged there.
        """

    @abc.abstractmethod
    def require_images(self, image_ids: Iterable[str], split: str) -> None:
        """Raises ValueError, naming the first image and counting all, unless the files have all images."""


class DetectedBoxes(BoxReader):
    """Boxes of MAttNet's detection files that the rule keeps, by falling score."""

    def __init__(self, files: Sequence[DetectionsFile], selection: SelectionRule) -> None:
        self.files = files
        self.selection = selection
        self._found = {str(image_id): (file, image_id) for file in reversed(files) for image_id in file.by_image}

    def read(self, image_id: str) -> CandidateBoxes:
        if image_id not in self._found:
            raise UserError(f"{_names(self.files)}: no detections for image {image_id}; {_OTHER_BOXES}")
        file, key = self._found[image_id]
        found = file.by_image[key]
        kept = select_regions(found.scores, self.selection).numpy()
        return CandidateBoxes(found.boxes[kept], f"{file.path}: image {image_id}")

    def require_images(self, image_ids: Iterable[str], split: str) -> None:
        missing = [image_id for image_id in image_ids if image_id not in self._found]
        if missing:
            more = f" (and {len(missing) - 1} more images)" if len(missing) > 1 else ""
            raise UserError(
                f"{_names(self.files)}: no detections for image {missing[0]}{more} of the split {split}; {_OTHER_BOXES}"
            )


class StoredBoxes(BoxReader):
    """Boxes of files of region features: detected ones by falling score where there are scores, given ones as stored.

    Args:
        stores: the files.
        selection: which boxes are kept where there are scores.
        with_features: give the features too, so that no detector has to run; then the first `limit` boxes are kept.
        limit: see `with_features`; None keeps them all.
    """

    def __init__(
        self,
        stores: Sequence[FeatureStore],
        selection: SelectionRule,
        *,
        with_features: bool,
        limit: int | None = None,
    ) -> None:
        self.stores = stores
        self.selection = selection
        self.with_features = with_features
        self.limit = limit

    def read(self, image_id: str) -> CandidateBoxes:
        store = next((store for store in self.stores if image_id in store), self.stores[0])
        found = store[image_id]
        origin = f"{store.path}: image {image_id}"
        is_scored = found.scores is not None and found.box_ids is None
        if self.with_features:
            order = np.argsort(-found.scores, kind="stable")[: self.limit] if is_scored else slice(self.limit)
            return CandidateBoxes(
                found.boxes[order],
                origin,
                image_size=found.image_size,
                features=found.features[order],
                image_feature=found.image_feature,
                **_found(found, order),
            )
        kept = select_regions(found.scores, self.selection).numpy() if is_scored else slice(None)
        return CandidateBoxes(found.boxes[kept], origin, image_size=found.image_size, **_found(found, kept))

    def require_images(self, image_ids: Iterable[str], split: str) -> None:
        missing = [image_id for image_id in image_ids if not any(image_id in store for store in self.stores)]
        if missing:
            raise UserError(
                f"{_names(self.stores)}: has no features of image {missing[0]} and {len(missing) - 1} more of the "
                f"split {split}; extract them, with the annotation file as the list of images"
            )


def open_boxes(
    paths: Sequence[Path],
    selection: SelectionRule,
    *,
    with_features: bool,
    limit: int | None = None,
    errors: RecordErrors = RAISE,
    shared: SharedReads | None = None,
) -> BoxReader:
    """Open files of one kind: `.json` is MAttNet's format, everything else region features; see `StoredBoxes`.

    Args:
        errors: what becomes of an error about one detection.
        shared: what other splits have read already; None: nothing.

    Raises:
        FileNotFoundError, ValueError: see the readers; or features are wanted from a file that has none.
    """
    if paths[0].suffix != ".json":
        stores = [open_features(path) for path in paths]  # each process opens its own files, which are not kept
        return StoredBoxes(stores, selection, with_features=with_features, limit=limit)
    if with_features:
        raise UserError(f"{paths[0]}: boxes in MAttNet's format have no features; give a file of region features")
    shared = SharedReads() if shared is None else shared
    return DetectedBoxes([shared.read(DetectionsFile, path, errors=errors) for path in paths], selection)


def open_boxes_of(
    dataset: VLDataset,
    settings: DataSettings,
    boxes: BoxSource,
    errors: RecordErrors = RAISE,
    shared: SharedReads | None = None,
) -> BoxReader | None:
    """The files of boxes or features of an opened split; None where the source reads none or boxes come along.

    Args:
        errors: what becomes of an error about one detection.
        shared: what other splits have read already; None: nothing.

    Raises:
        FileNotFoundError, ValueError: see `open_boxes`.
    """
    key = next((key for key in boxes.needs if key != "instances"), None)
    if key is None or not dataset.parts:
        return None
    files, _ = open_options(type(dataset), settings)
    paths = list(dict.fromkeys(files.path(key, **values) for values in dataset.parts))
    with_features = boxes is BoxSource.PRECOMPUTED
    limit = settings.boxes.max_precomputed if with_features else None
    return open_boxes(
        paths, settings.boxes.selection, with_features=with_features, limit=limit, errors=errors, shared=shared
    )


def _found(regions: RegionFeatures, rows: np.ndarray | slice) -> dict[str, np.ndarray]:
    """What the detector found in these boxes, as far as the file has it; `FOUND` has its names."""
    columns = (regions.classes, regions.scores, regions.attributes, regions.attribute_scores)
    return {name: values[rows] for name, values in zip(FOUND, columns, strict=True) if values is not None}


def _names(files: Sequence[DetectionsFile | FeatureStore]) -> str:
    return ", ".join(str(file.path) for file in files)
