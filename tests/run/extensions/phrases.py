"""A data set of texts whose phrases each name several boxes, and another number of phrases in each text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from e2e_vl.data.base import DataFiles, DataNeeds
from e2e_vl.data.config import NoOptions
from e2e_vl.samples import PhraseBoxes, Sample, SampleText
from tests.run.extensions.scenes import SceneDataset


class PhraseDataset(SceneDataset):
    """One text per image that lists its shapes; a phrase names all objects of its shape. The last one names nothing."""

    @classmethod
    def texts_of(cls, files: DataFiles, options: NoOptions, split: str) -> Iterable[str]:
        data = cls(files, options, split, DataNeeds())
        return [data.sample([number]).texts[0].words for number in range(len(data))]

    def sample(self, texts: Sequence[int]) -> Sample:
        [index] = texts
        image = self.image(self.ids[index])
        names = image.objects.names
        phrases = [f"the {shape}" for shape in dict.fromkeys(names)]
        boxes = [image.objects.boxes[[f"the {name}" == phrase for name in names]] for phrase in phrases]
        phrases, boxes = [*phrases, "the left or right scene"], [*boxes, np.zeros((0, 4))]
        words = " and ".join(phrases)
        truth = PhraseBoxes(tuple(spans_of(words)), tuple(boxes))
        facts = {"image_id": self.ids[index], "gt_boxes": [rows.tolist() for rows in boxes]}
        return Sample((image,), (SampleText(index, words, facts, truth),))


def spans_of(words: str) -> list[tuple[int, int]]:
    """First and last character plus one of the phrases that "and" stands between."""
    spans, first = [], 0
    for phrase in words.split(" and "):
        spans.append((first, first + len(phrase)))
        first += len(phrase) + len(" and ")
    return spans
