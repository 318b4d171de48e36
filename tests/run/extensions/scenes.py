"""What the readers here share: drawn scenes of an instances file, with one text each unless they say otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from e2e_vl.config import BoxSource
from e2e_vl.data.base import DataFiles, NoOptions, VLDataset, Wants
from e2e_vl.data.coco import CocoInstances, read_instances
from e2e_vl.samples import SampleImage


class SceneDataset(VLDataset):
    known_files = ("images", "instances")
    box_sources = (BoxSource.GT, BoxSource.ONLINE)

    def __init__(self, images_root: Path, instances: CocoInstances):
        self.images_root = images_root
        self.instances = instances
        self.ids = list(instances.images)
        self.groups = [[index] for index in range(len(self.ids))]
        self.parts = [{}]
        self.class_names = instances.class_names

    @classmethod
    def open(cls, files: DataFiles, options: NoOptions, split: str, wants: Wants) -> Self:
        return cls(files.path("images"), read_instances(files.path("instances", split=split)))

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    def image(self, number: int, name: str | None = None) -> SampleImage:
        """The image with this id in the file, and with another one for files of boxes if it has a name."""
        image = self.instances.images[number]
        path, size = self.images_root / image.file_name, (image.height, image.width)
        return SampleImage(name or str(number), path, size, objects=self.instances.objects(number))
