"""A reader whose images are called by names, not by numbers: expressions that refer to shapes of scenes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from e2e_vl.data.base import DataFiles, NoOptions, VLDataset, Wants
from e2e_vl.data.formats.coco import CocoInstances, read_instances
from e2e_vl.samples import ReferredBox, Sample, SampleImage, SampleText


class NamedSceneDataset(VLDataset):
    """One expression for the first object of each scene; scene 7 is called "scene-7.b"."""

    known_files = ("images", "instances", "detections", "features")

    def __init__(self, images_root: Path, instances: CocoInstances):
        self.images_root = images_root
        self.instances = instances
        self.numbers = {f"scene-{number}.b": number for number in instances.images}
        self.names = list(self.numbers)
        self.groups = [[index] for index in range(len(self.names))]
        self.parts = [{}]
        self.class_names = instances.class_names

    @classmethod
    def open(cls, files: DataFiles, options: NoOptions, split: str, wants: Wants) -> Self:
        return cls(files.path("images"), read_instances(files.path("instances", split=split)))

    @classmethod
    def texts_of(cls, files: DataFiles, options: NoOptions, split: str) -> Iterable[str]:
        return [f"the first {name}" for name in read_instances(files.path("instances", split=split)).class_names]

    def __len__(self) -> int:
        return len(self.names)

    def image_ids(self) -> Iterable[str]:
        return self.names

    def sample(self, texts: Sequence[int]) -> Sample:
        [index] = texts
        name = self.names[index]
        image, objects = self.instances.images[self.numbers[name]], self.instances.objects(self.numbers[name])
        words, box = f"the first {objects.names[0]}", tuple(objects.boxes[0].tolist())
        facts = {"image_id": name, "expression_id": f"{name}/0", "sent": words, "gt_box": list(box)}
        stated = SampleImage(name, self.images_root / image.file_name, (image.height, image.width), objects=objects)
        return Sample((stated,), (SampleText(index, words, facts, ReferredBox(box)),))
