"""A data set whose texts are about two images: does a statement hold for both?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from e2e_vl.data.base import DataFiles, DataNeeds
from e2e_vl.data.config import NoOptions
from e2e_vl.samples import CorrectChoice, Sample, SampleText
from tests.run.extensions.scenes import SceneDataset

SHAPES = ("circle", "star")  # two statements about each pair


class PairDataset(SceneDataset):
    """Each image of an instances file with the next one."""

    def __init__(self, files: DataFiles, options: NoOptions, split: str, needs: DataNeeds) -> None:
        super().__init__(files, options, split, needs)
        self.pairs = list(zip(self.ids, [*self.ids[1:], self.ids[0]], strict=True))
        self.groups = [[2 * number, 2 * number + 1] for number in range(len(self.pairs))]

    @classmethod
    def texts_of(cls, files: DataFiles, options: NoOptions, split: str) -> Iterable[str]:
        return [_statement(shape) for shape in SHAPES]

    def image_ids(self) -> Iterable[str]:
        return map(str, self.ids)

    def sample(self, texts: Sequence[int]) -> Sample:
        pair = self.pairs[texts[0] // len(SHAPES)]
        return Sample(tuple(map(self.image, pair)), tuple(self._text(index, pair) for index in texts))

    def _text(self, index: int, pair: tuple[int, int]) -> SampleText:
        shape = SHAPES[index % len(SHAPES)]
        holds = all(shape in self.instances.objects(image_id).names for image_id in pair)
        facts = {"image_ids": list(pair), "label": int(holds)}
        return SampleText(index, _statement(shape), facts, CorrectChoice(int(holds)), image_index=(0, 1))


def _statement(shape: str) -> str:
    return f"both images hold a {shape}"
