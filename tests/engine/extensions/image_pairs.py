"""A data set whose texts are about two images: does a statement hold for both?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from e2e_vl.box_sources import BoxSource
from e2e_vl.data.base import DataFiles, NoOptions, VLDataset, Wants
from e2e_vl.data.formats.coco import CocoInstances, read_instances
from e2e_vl.samples import RightChoice, Sample, SampleImage, SampleText

SHAPES = ("circle", "star")  # two statements about each pair


class PairDataset(VLDataset):
    """Each image of an instances file with the next one."""

    known_files = ("images", "instances")
    box_sources = (BoxSource.GT, BoxSource.ONLINE)

    def __init__(self, images_root: Path, instances: CocoInstances):
        self.images_root = images_root
        self.instances = instances
        ids = list(instances.images)
        self.pairs = list(zip(ids, [*ids[1:], ids[0]], strict=True))
        self.groups = [[2 * number, 2 * number + 1] for number in range(len(self.pairs))]
        self.parts = [{}]
        self.class_names = instances.class_names

    @classmethod
    def open(cls, files: DataFiles, options: NoOptions, split: str, wants: Wants) -> Self:
        return cls(files.path("images"), read_instances(files.path("instances", split=split)))

    @classmethod
    def texts_of(cls, files: DataFiles, options: NoOptions, split: str) -> Iterable[str]:
        return [_statement(shape) for shape in SHAPES]

    def __len__(self) -> int:
        return len(self.pairs) * len(SHAPES)

    def image_ids(self) -> Iterable[str]:
        return map(str, self.instances.images)

    def sample(self, texts: Sequence[int]) -> Sample:
        pair = self.pairs[texts[0] // len(SHAPES)]
        return Sample(tuple(map(self._image, pair)), tuple(self._text(index, pair) for index in texts))

    def _image(self, image_id: int) -> SampleImage:
        image = self.instances.images[image_id]
        path, size = self.images_root / image.file_name, (image.height, image.width)
        return SampleImage(str(image_id), path, size, objects=self.instances.objects(image_id))

    def _text(self, index: int, pair: tuple[int, int]) -> SampleText:
        shape = SHAPES[index % len(SHAPES)]
        holds = all(shape in self.instances.objects(image_id).names for image_id in pair)
        facts = {"image_ids": list(pair), "sent": _statement(shape), "label": int(holds)}
        return SampleText(index, _statement(shape), facts, RightChoice(int(holds)), looks_at=(0, 1))


def _statement(shape: str) -> str:
    return f"both images hold a {shape}"
