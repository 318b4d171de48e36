"""The masks of the objects in a COCO instances file: polygons, or run lengths of crowds and of other tools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from detector.errors import UserError, user_path
from detector.io import read_json
from e2e_vl.data.table_files import tabulate
from e2e_vl.data.tables import RowIndex, SerializedList
from e2e_vl.io import Id, Record, Side
from e2e_vl.masks import ObjectMask, check_mask


class _Image(Record):
    id: Id
    width: Side
    height: Side


class _Annotation(Record):
    id: Id
    image_id: Id
    segmentation: ObjectMask | None = None


class _MaskFile(Record):
    images: list[_Image]
    annotations: list[_Annotation]


class CocoMasks:
    """The mask of each annotation that has one, in pixels of the original image.

    Args:
        folder: of a table, from which later starts read a large file; None: there is none.
    """

    def __init__(self, path: str | Path, folder: Path | None = None) -> None:
        self.path = user_path(path)
        ids, rows, ends, data = tabulate([self.path], folder, ["masks"], self._read)
        self._rows = RowIndex.from_arrays(ids, rows)
        self._masks = SerializedList.from_arrays(ends, data, ObjectMask)

    def _read(self) -> list[np.ndarray]:
        content = read_json(self.path, _MaskFile)
        sizes = {str(image.id): (image.height, image.width) for image in content.images}
        masks: dict[str, ObjectMask] = {}
        for annotation in content.annotations:
            if not annotation.segmentation:
                continue
            size = sizes.get(str(annotation.image_id))
            if size is None:
                raise UserError(
                    f"{self.path}: annotation {annotation.id} has the image_id {annotation.image_id!r}, which the file "
                    "does not list; correct or remove it."
                )
            check_mask(annotation.segmentation, size, f"{self.path}: annotation {annotation.id}")
            masks[str(annotation.id)] = annotation.segmentation
        return [*RowIndex(masks).arrays, *SerializedList(masks.values(), ObjectMask).arrays]

    def of(self, ids: Iterable[Id]) -> Sequence[ObjectMask]:
        """Return the masks of annotations."""
        return [self._masks[self._row(annotation_id)] for annotation_id in ids]

    def encoded(self, annotation_id: Id) -> np.ndarray:
        """Return the mask of an annotation, uint8 [bytes], for `tables.fingerprint`."""
        return self._masks.encoded_item(self._row(annotation_id))

    def require(self, ids: Iterable[Id]) -> None:
        """Raise a UserError if an annotation has no mask."""
        for annotation_id in ids:
            self._row(annotation_id)

    def _row(self, annotation_id: Id) -> int:
        row = self._rows.row(annotation_id)
        if row is None:
            raise UserError(
                f"{self.path}: annotation {annotation_id} has no mask (segmentation), which segmentation.weight "
                "needs; use a file with masks, or set segmentation.weight to 0."
            )
        return row
