"""A reader whose images are called by names, not by numbers: expressions that refer to shapes of scenes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from e2e_vl.config import BoxSource
from e2e_vl.data.base import DataFiles, DataNeeds
from e2e_vl.data.coco import CocoInstances
from e2e_vl.data.config import NoOptions
from e2e_vl.samples import ReferredBox, Sample, SampleText
from tests.run.extensions.scenes import SceneDataset


class NamedSceneDataset(SceneDataset):
    """One expression for the first object of each scene; scene 7 is called "scene-7.b"."""

    file_keys = ("images", "instances", "detections", "features")
    box_sources = tuple(BoxSource)

    def __init__(self, files: DataFiles, options: NoOptions, split: str, needs: DataNeeds) -> None:
        super().__init__(files, options, split, needs)
        self.names = [f"scene-{number}.b" for number in self.ids]

    @classmethod
    def texts_of(cls, files: DataFiles, options: NoOptions, split: str) -> Iterable[str]:
        return [f"the first {name}" for name in CocoInstances(files.path("instances", split=split)).class_names]

    def image_ids(self) -> Iterable[str]:
        return self.names

    def sample(self, texts: Sequence[int]) -> Sample:
        [index] = texts
        name, image = self.names[index], self.image(self.ids[index], self.names[index])
        words, box = f"the first {image.objects.names[0]}", tuple(image.objects.boxes[0].tolist())
        facts = {"image_id": name, "expression_id": f"{name}/0", "gt_box": list(box)}
        return Sample((image,), (SampleText(index, words, facts, ReferredBox(box)),))
