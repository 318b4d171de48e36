"""What the readers here share: drawn scenes of an instances file, with one text each unless they say otherwise."""

from __future__ import annotations

from e2e_vl.config import BoxSource
from e2e_vl.data.base import DataFiles, DataNeeds, VLDataset
from e2e_vl.data.coco import CocoInstances
from e2e_vl.data.config import NoOptions
from e2e_vl.samples import SampleImage


class SceneDataset(VLDataset):
    file_keys = ("images", "instances")
    box_sources = (BoxSource.GT, BoxSource.ONLINE)

    def __init__(self, files: DataFiles, options: NoOptions, split: str, needs: DataNeeds) -> None:
        self.images_root = files.path("images")
        self.instances = CocoInstances(files.path("instances", split=split))
        self.ids = [image.id for image in self.instances.images]
        self.groups = [[index] for index in range(len(self.ids))]
        self.parts = [{}]
        self.class_names = self.instances.class_names

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    def image(self, number: int, name: str | None = None) -> SampleImage:
        """The image with this id in the file, and with another one for files of boxes if it has a name."""
        image = self.instances[number]
        path, size = self.images_root / image.file_name, (image.height, image.width)
        return SampleImage(name or str(number), path, size, objects=self.instances.objects(number))
