"""Where the images and features of a split are whose annotations have no place for it, and which images are there."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from detector.errors import UserError
from e2e_vl.box_sources import BoxSource
from e2e_vl.data.base import DataFiles, Wants
from e2e_vl.data.formats.image_names import ImageNames
from e2e_vl.data.storage.features.stores import FeatureStore, open_features

logger = logging.getLogger(__name__)
Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class ImageSets(ImageNames):
    """Fields of `data.config`."""

    # split -> what {images} stands for in `data.files`, such as {mscoco_train: train2014}; a split that is not named
    # stands for itself
    image_sets: dict[str, str] = dataclasses.field(default_factory=dict)
    # leave out texts about images that the file of features (or of detections) lacks, as the official LXMERT code does,
    # and log their number. False: such an image is an error.
    leave_out_unseen: bool = False
    # split -> number of rows: only texts about images in the first so many rows of that file are kept, and the number
    # of the others is logged (minival of the official LXMERT code: 5000)
    first_rows: dict[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = next((split for split, number in self.first_rows.items() if number < 1), None)
        if wrong is not None:
            raise UserError(f"data.config.first_rows.{wrong} is {self.first_rows[wrong]}; it must be at least 1.")

    def values(self, split: str) -> dict[str, str]:
        """Placeholder values of a split."""
        return {"split": split, "images": self.image_sets.get(split, split)}

    def kept(
        self,
        items: Iterable[Item],
        images_of: Callable[[Item], Iterable[str]],
        files: DataFiles,
        values: Mapping[str, str],
        wants: Wants,
    ) -> list[Item]:
        """The items that `leave_out_unseen` and `first_rows` leave; without them these are all items.

        Raises:
            ValueError: none is left, or `first_rows` counts rows of boxes that do not come from one file.
        """
        items, split = list(items), values["split"]
        rows = self.first_rows.get(split)
        if wants.boxes not in (BoxSource.PRECOMPUTED, BoxSource.DETECTIONS):
            if rows is not None:
                raise UserError(
                    f"data.config.first_rows.{split} counts rows of a file of boxes, but boxes are '{wants.boxes}'; "
                    "take boxes of a file, or leave first_rows out."
                )
            return items
        if rows is None and not self.leave_out_unseen:
            return items
        path: Path = files.path(wants.boxes.needs[-1], **values)
        store = open_features(path)
        seen = items
        if self.leave_out_unseen:
            seen = [item for item in items if all(image in store for image in images_of(item))]
        left = seen if rows is None else _in_first_rows(seen, images_of, store, rows, split)
        if not left:
            raise UserError(f"{path}: has features of no image of the split {split}; give another file")
        if len(seen) < len(items):
            number = len(items) - len(seen)
            logger.warning("%s: %d records of %s have no features and are left out.", path, number, split)
        if len(left) < len(seen):
            number = len(seen) - len(left)
            logger.warning("%s: %d records of %s are behind row %d and are left out.", path, number, split, rows)
        return left


def _in_first_rows(
    items: list[Item], images_of: Callable[[Item], Iterable[str]], store: FeatureStore, rows: int, split: str
) -> list[Item]:
    """The items without an image behind the first rows. Images that the file lacks are left to the reader."""
    if store.path.is_dir():
        raise UserError(
            f"{store.path}: is a folder, which has no rows for data.config.first_rows.{split}; give a file of features"
        )
    behind = set(store.ids[rows:])
    return [item for item in items if behind.isdisjoint(images_of(item))]
