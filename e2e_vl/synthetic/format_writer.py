"""The interface of the classes that write one file format each, and the settings that decide what they write."""

from __future__ import annotations

import os
import shutil
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import cv2
import numpy as np

from detector.errors import UserError
from e2e_vl.synthetic.imitated_detector import ImitatedDetectorConfig
from e2e_vl.synthetic.references import LanguageConfig
from e2e_vl.synthetic.relations import SceneFacts
from e2e_vl.synthetic.scene_records import Drawn, ScenePlace, SceneRecord
from e2e_vl.synthetic.scenes import SceneConfig

IMAGE_FORMATS = {"jpg": [cv2.IMWRITE_JPEG_QUALITY, 95], "png": [cv2.IMWRITE_PNG_COMPRESSION, 3]}


@dataclass(frozen=True)
class Recipe:
    """All settings that decide the content of the files (see ``make_scenes``), in their order in ``synthetic.json``.

    Raises:
        ValueError: a value is impossible; the message names it.
    """

    scenes: dict[str, int]
    seed: int
    image_format: str
    scene: SceneConfig
    language: LanguageConfig
    detections: ImitatedDetectorConfig

    def __post_init__(self) -> None:
        if sum(self.scenes.values()) < 1 or min(self.scenes.values()) < 0 or not all(self.scenes):
            raise UserError(
                f"scenes must name splits and their numbers of scenes, at least 1 in all; found {self.scenes}"
            )
        if self.seed < 0:
            raise UserError(f"seed must not be negative; found {self.seed}")
        if self.image_format not in IMAGE_FORMATS:
            raise UserError(f"image_format must be one of {', '.join(IMAGE_FORMATS)}; found {self.image_format!r}")

    def places(self, folder: Path) -> list[ScenePlace]:
        """The places of all scenes, in the order of their image ids; their images lie in ``folder``."""
        numbered = [(split, number) for split, count in self.scenes.items() for number in range(count)]
        return [
            ScenePlace(split, number, image_id, folder / f"COCO_train2014_{image_id:012d}.{self.image_format}")
            for image_id, (split, number) in enumerate(numbered, start=1)
        ]

    def generator(self, *names: str | int) -> np.random.Generator:
        """A random number generator that depends on the seed and these names and numbers only."""
        numbers = [name if isinstance(name, int) else zlib.crc32(name.encode()) for name in names]
        return np.random.default_rng([self.seed, *numbers])


class FormatWriter(ABC, Generic[Drawn]):
    """Writes one file format into a folder of its own.

    ``draw`` is called once per scene, perhaps in another process, and ``write`` once at the end. So a writer must be
    picklable and must not collect anything in ``draw``.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def draw(self, scene: SceneRecord[Any], facts: SceneFacts) -> Drawn:
        """What is drawn about a scene for this format alone; ``write`` finds it in ``scene.drawn``.

        Random numbers must come from ``self.recipe.generator(scene.split, scene.number, NAME)`` with a name that is not
        used by another format, so that no format changes the files of another. The ids of ``scene`` are not set yet.
        A format that draws nothing of its own keeps this method.
        """
        return None

    @abstractmethod
    def write(self, folder: Path, scenes: Sequence[SceneRecord[Drawn]]) -> dict[str, Any] | None:
        """Write all files of the format.

        Args:
            folder: an existing folder, named after the format.
            scenes: the scenes of all splits, in the order of their image ids (see ``by_split``).

        Returns:
            statistics for ``synthetic.json``, where they stand under the format's name; None for none.
        """


def link_image(source: Path, target: Path) -> None:
    """A hard link, or a copy where the disk has no hard links."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
