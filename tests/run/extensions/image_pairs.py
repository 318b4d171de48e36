"""A data set whose texts are about two images: does a statement hold for both?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from typing_extensions import override

from e2e_vl.config import BoxSource
from e2e_vl.data.base import DataFiles, DataNeeds, VLDataset
from e2e_vl.data.coco import CocoInstances
from e2e_vl.data.config import NoDatasetConfig
from e2e_vl.samples import CorrectChoice, Sample, SampleImage, SampleText

SHAPES = ("circle", "star")  # two statements about each pair


class PairDataset(VLDataset):
    """Each image of an instances file with the next one."""

    file_keys = ("images", "instances")
    box_sources = (BoxSource.GT, BoxSource.ONLINE)

    def __init__(self, files: DataFiles, options: NoDatasetConfig, split: str, needs: DataNeeds) -> None:
        self.images_root = files.path("images")
        self.instances = CocoInstances(files.path("instances", split=split))
        self.class_names = self.instances.class_names
        ids = [image.id for image in self.instances.images]
        self.pairs = list(zip(ids, [*ids[1:], ids[0]], strict=True))
        self.groups = [[2 * number, 2 * number + 1] for number in range(len(self.pairs))]

    @classmethod
    @override
    def texts_of(cls, files: DataFiles, options: NoDatasetConfig, split: str) -> Iterable[str]:
        return [_statement(shape) for shape in SHAPES]

    def __len__(self) -> int:
        return len(SHAPES) * len(self.pairs)

    @override
    def image_ids(self) -> Iterable[str]:
        return (str(first) for first, _ in self.pairs)

    @override
    def sample(self, texts: Sequence[int]) -> Sample:
        pair = self.pairs[texts[0] // len(SHAPES)]
        return Sample(tuple(map(self._image, pair)), tuple(self._text(index, pair) for index in texts))

    def _image(self, number: int) -> SampleImage:
        image = self.instances[number]
        path, size = self.images_root / image.file_name, (image.height, image.width)
        return SampleImage(str(number), path, size, objects=self.instances.objects(number))

    def _text(self, index: int, pair: tuple[int, int]) -> SampleText:
        shape = SHAPES[index % len(SHAPES)]
        holds = all(shape in self.instances.objects(image_id).names for image_id in pair)
        ids = {"image_ids": list(pair)}
        return SampleText(index, _statement(shape), ids, CorrectChoice(int(holds)), image_index=(0, 1))


def _statement(shape: str) -> str:
    return f"both images hold a {shape}"
