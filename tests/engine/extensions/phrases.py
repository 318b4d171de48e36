"""A data set of texts whose phrases each name several boxes, and another number of phrases in each text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from e2e_vl.box_sources import BoxSource
from e2e_vl.data.base import DataFiles, NoOptions, VLDataset, Wants
from e2e_vl.data.formats.coco import CocoInstances, read_instances
from e2e_vl.samples import PhraseBoxes, Sample, SampleImage, SampleText


class PhraseDataset(VLDataset):
    """One text per image that lists its shapes; a phrase names all objects of its shape. The last one names nothing."""

    known_files = ("images", "instances")
    box_sources = (BoxSource.GT, BoxSource.ONLINE)

    def __init__(self, images_root: Path, instances: CocoInstances):
        self.images_root = images_root
        self.instances = instances
        self.ids = list(instances.images)
        self.groups = [[number] for number in range(len(self.ids))]
        self.parts = [{}]
        self.class_names = instances.class_names

    @classmethod
    def open(cls, files: DataFiles, options: NoOptions, split: str, wants: Wants) -> Self:
        return cls(files.path("images"), read_instances(files.path("instances", split=split)))

    @classmethod
    def texts_of(cls, files: DataFiles, options: NoOptions, split: str) -> Iterable[str]:
        data = cls.open(files, options, split, Wants())
        return [data.sample([number]).texts[0].words for number in range(len(data))]

    def __len__(self) -> int:
        return len(self.ids)

    def sample(self, texts: Sequence[int]) -> Sample:
        [index] = texts
        image, objects = self.instances.images[self.ids[index]], self.instances.objects(self.ids[index])
        size = (image.height, image.width)
        stated = SampleImage(str(image.id), self.images_root / image.file_name, size, objects=objects)
        phrases = [f"the {shape}" for shape in dict.fromkeys(objects.names)]
        boxes = [objects.boxes[[f"the {name}" == phrase for name in objects.names]] for phrase in phrases]
        phrases, boxes = [*phrases, "the left or right scene"], [*boxes, np.zeros((0, 4))]
        words = " and ".join(phrases)
        truth = PhraseBoxes(tuple(spans_of(words)), tuple(boxes))
        facts = {"image_id": image.id, "sent": words, "gt_boxes": [rows.tolist() for rows in boxes]}
        return Sample((stated,), (SampleText(index, words, facts, truth),))


def spans_of(words: str) -> list[tuple[int, int]]:
    """First and last character plus one of the phrases that "and" stands between."""
    spans, first = [], 0
    for phrase in words.split(" and "):
        spans.append((first, first + len(phrase)))
        first += len(phrase) + len(" and ")
    return spans
