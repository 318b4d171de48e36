"""File names of images that are made from their ids, and annotated objects of images whose ids are texts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

from detector.errors import UserError
from e2e_vl.data.formats.coco import CocoInstances
from e2e_vl.file_names import inside, is_name_pattern, shown
from e2e_vl.samples import SampleImage

_NUMBER = re.compile(r"[0-9]{1,18}")


@dataclasses.dataclass(frozen=True)
class ImageNames:
    """How the files of images are called; fields of `data.config`.

    Raises:
        ValueError: a pattern that names all images alike, or holds something else than {id}.
    """

    # file name of an image; {id} is its id as a text, so {id:0>12} fills it up with zeros to twelve characters
    image_name: str = "{id}.jpg"

    def __post_init__(self) -> None:
        if not is_name_pattern(self.image_name, "id"):
            raise UserError(f"data.config.image_name is {shown(self.image_name)}; it takes {{id}} alone.")
        try:
            same = self.image_name.format(id="1") == self.image_name.format(id="2")
        except (KeyError, IndexError, ValueError) as error:
            raise UserError(f"data.config.image_name is '{self.image_name}'; it takes {{id}} alone.") from error
        if same:
            raise UserError(f"data.config.image_name is '{self.image_name}'; it must hold {{id}}, the image's id.")

    def file(self, folder: Path, image_id: str) -> Path:
        """The file of an image."""
        return inside(folder, self.image_name.format(id=image_id), f"image {shown(image_id)}", follows_links=True)


def instances_image(instances: CocoInstances, image_id: str, file: Path) -> SampleImage:
    """The facts about an image whose id in the instances is a number, such as 12 for "12"."""
    return instances.sample_image(int(image_id), file)


def require_instances(instances: CocoInstances, image_ids: Iterable[str]) -> None:
    """Raises ValueError unless the instances list all images."""
    known = set(instances.images)
    missing = [name for name in image_ids if not _NUMBER.fullmatch(name) or int(name) not in known]
    if missing:
        raise UserError(
            f"{instances.path}: has no image {missing[0]} and {len(set(missing)) - 1} more of the texts; use the "
            "instances file of the same images"
        )
