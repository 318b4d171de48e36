"""Images and annotations of an instances file in flat arrays, which forked data workers read without copying them.

See `e2e_vl/data/storage/record_table.py` for why. An image or an annotation is made as an object when it is asked for.

Shape legend: see `detector/structures.py`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from e2e_vl.data.storage.record_table import RecordTable, RowsById, text_column

_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,18}")  # as Python writes it


@dataclasses.dataclass(frozen=True, slots=True)
class CocoImage:
    """One row of `images`."""

    id: int
    file_name: str
    width: int  # pixels of the stored image
    height: int


@dataclasses.dataclass(frozen=True, slots=True)
class CocoAnnotation:
    """One row of `annotations`."""

    id: int
    image_id: int
    category_id: int  # as in the file
    class_index: int  # 0 .. K-1, by sorted category id
    box: tuple[float, float, float, float]  # xyxy, continuous, pixels of the stored image
    is_crowd: bool
    attributes: tuple[int, ...] = ()  # 0 .. number of attributes - 1, by sorted attribute id
    area: float | None = None  # of its mask, pixels of the stored image; None where the file does not say


class CocoImages(Mapping[int, CocoImage]):
    """Images by their ids, in file order.

    Args:
        images: with an id of its own each.

    Attributes:
        rows: the images, from 0 on.
        ids: of the images, a number or a text each.
    """

    def __init__(self, images: Iterable[CocoImage]) -> None:
        self.rows: RecordTable[CocoImage] = RecordTable(CocoImage, images)
        self.ids: Sequence[int] = self.rows.column("id")
        self._row_of = RowsById(self.ids)

    def row(self, image_id: int | str) -> int | None:
        """The row of an image; None where there is no image with this id."""
        return self._row_of.row(image_id)

    def id_written(self, name: str) -> int | str | None:
        """The id that is `name` as a text; None where there is none."""
        if self.row(name) is not None:
            return name
        number = int(name) if _NUMBER.fullmatch(name) else None
        return None if number is None or self.row(number) is None else number

    def __getitem__(self, image_id: int) -> CocoImage:
        row = self.row(image_id)
        if row is None:
            raise KeyError(image_id)
        return self.rows[row]

    def __contains__(self, image_id: object) -> bool:
        return isinstance(image_id, int | str) and self.row(image_id) is not None

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.rows)


class AnnotationRow(NamedTuple):
    """What is kept of an annotation."""

    id: int
    image: int  # row of its image
    class_index: int
    box: tuple[float, float, float, float]
    is_crowd: bool
    attributes: Sequence[int]
    area: float | None


class CocoAnnotations(Mapping[int, CocoAnnotation]):
    """Annotations by their ids, in file order.

    Args:
        rows: with an id of its own each.
        images: that they belong to.
        category_ids: of the classes.
    """

    def __init__(self, rows: Iterable[AnnotationRow], images: CocoImages, category_ids: Sequence[int]) -> None:
        self._images, self._category_ids = images, category_ids
        self._image_rows, self._classes, self._crowds = array("q"), array("i"), array("b")
        self._boxes, self._areas = array("d"), array("d")  # an area that is unknown is NaN
        self._attributes, self._attribute_ends = array("i"), array("q", [0])
        self._ids = text_column(self._add(row) for row in rows)
        self._row_of = RowsById(self._ids)
        of_image = np.asarray(self._image_rows, dtype=np.int64)
        self._order = np.argsort(of_image, kind="stable")  # rows, image after image
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(of_image, minlength=len(images)))])

    def _add(self, row: AnnotationRow) -> int:
        """Append all but the id, which is returned."""
        self._image_rows.append(row.image)
        self._classes.append(row.class_index)
        self._crowds.append(row.is_crowd)
        self._boxes.extend(row.box)
        self._areas.append(math.nan if row.area is None else row.area)
        self._attributes.extend(row.attributes)
        self._attribute_ends.append(len(self._attributes))
        return row.id

    def __getitem__(self, annotation_id: int) -> CocoAnnotation:
        row = self._row_of.row(annotation_id)
        if row is None:
            raise KeyError(annotation_id)
        return self._at(row)

    def _at(self, row: int) -> CocoAnnotation:
        index, area = self._classes[row], self._areas[row]
        return CocoAnnotation(
            id=self._ids[row],
            image_id=self._images.ids[self._image_rows[row]],
            category_id=self._category_ids[index],
            class_index=index,
            box=tuple(self._boxes[4 * row : 4 * row + 4]),
            is_crowd=bool(self._crowds[row]),
            attributes=tuple(self._attributes[self._attribute_ends[row] : self._attribute_ends[row + 1]]),
            area=None if math.isnan(area) else area,
        )

    def __contains__(self, annotation_id: object) -> bool:
        return isinstance(annotation_id, int | str) and self._row_of.row(annotation_id) is not None

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def of_image(self, row: int) -> list[CocoAnnotation]:
        """All annotations of the image in a row, in file order."""
        return [self._at(one) for one in self._of_image(row).tolist()]

    def boxes_of(self, row: int) -> np.ndarray:
        """float64 [R, 4]: the boxes of the image in a row, xyxy in pixels of the stored image."""
        return np.asarray(self._boxes).reshape(-1, 4)[self._of_image(row)]

    def _of_image(self, row: int) -> np.ndarray:
        return self._order[self._starts[row] : self._starts[row + 1]]

    def has_objects(self) -> np.ndarray:
        """bool [images]: which images have an annotation that is not a crowd."""
        rows = np.asarray(self._image_rows, dtype=np.int64)[np.asarray(self._crowds, dtype=bool).nonzero()[0]]
        crowds = np.bincount(rows, minlength=len(self._images))
        return np.diff(self._starts) > crowds


class AnnotationsByImage(Mapping[int, list[CocoAnnotation]]):
    """Every image id has a (maybe empty) list of its annotations, in file order, made when it is asked for."""

    def __init__(self, images: CocoImages, annotations: CocoAnnotations) -> None:
        self._images, self._annotations = images, annotations

    def __getitem__(self, image_id: int) -> list[CocoAnnotation]:
        row = self._images.row(image_id)
        if row is None:
            raise KeyError(image_id)
        return self._annotations.of_image(row)

    def __iter__(self) -> Iterator[int]:
        return iter(self._images)

    def __len__(self) -> int:
        return len(self._images)
