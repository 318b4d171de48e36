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
from e2e_vl.data.storage.features.stores import open_features

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
        """The items all of whose images the file of boxes has; all of them without `leave_out_unseen`.

        Raises:
            ValueError: none is left.
        """
        items = list(items)
        if not self.leave_out_unseen or wants.boxes not in (BoxSource.PRECOMPUTED, BoxSource.DETECTIONS):
            return items
        path: Path = files.path(wants.boxes.needs[-1], **values)
        store = open_features(path)
        left = [item for item in items if all(image in store for image in images_of(item))]
        if not left:
            raise UserError(f"{path}: has features of no image of the split {values['split']}; give another file")
        if len(left) < len(items):
            number = len(items) - len(left)
            logger.warning("%s: %d records of %s have no features and are left out.", path, number, values["split"])
        return left
