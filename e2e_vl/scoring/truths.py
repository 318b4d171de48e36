"""What the annotations of a split say, read by the data set's own reader: images, expressions and their boxes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from detector.errors import UserError
from e2e_vl.config import DataConfig
from e2e_vl.data.base import DataNeeds, VLDataset, open_options
from e2e_vl.data.overlap import GlobalImageId, ImageIdLookup
from e2e_vl.registry import DATASETS
from e2e_vl.samples import SampleImage, SampleText


@dataclasses.dataclass(frozen=True)
class TrueText:
    """An annotated text about one image."""

    words: str
    truth: Any  # `ReferredBoxes` or `EntityPhrases`
    ids: dict[str, Any]  # the metadata of the data set, such as sent_id and ref_id
    image: int  # number of the image in the split
    image_id: str
    file_name: str  # of the image, without its folder
    size: tuple[int, int]  # (height, width) of the image, pixels


@dataclasses.dataclass(frozen=True)
class Truths:
    """All annotated texts of a split, image by image."""

    texts: list[TrueText]
    image_ids: list[tuple[GlobalImageId, ...]]  # of each image, by which data sets share it
    left_out: int  # texts that the reader skips, because nothing can be predicted for them

    def __len__(self) -> int:
        return len(self.texts)


def read_truths(data: DataConfig, split: str, id_lookup: ImageIdLookup) -> Truths:
    """Read a split of any data set whose texts refer to boxes of one image each."""
    dataset_class = DATASETS[data.name].cls
    dataset: VLDataset = dataset_class(*open_options(dataset_class, data), split, DataNeeds())
    texts: list[TrueText] = []
    image_ids: list[tuple[GlobalImageId, ...]] = []
    for number, (image, text) in enumerate_texts(dataset):
        if image.size is None:
            raise UserError(f"image {image.id} of the split {split}: the annotations do not state its size.")
        file = image.file if isinstance(image.file, Path) else None
        if number == len(image_ids):
            ids = id_lookup.of_image(image.id, file, dataset.id_namespace, image.image_aliases)
            image_ids.append(ids)
        file_name = "" if file is None else file.name
        texts.append(TrueText(text.words, text.truth, text.metadata, number, image.id, file_name, image.size))
    return Truths(texts, image_ids, dataset.left_out)


def enumerate_texts(dataset: VLDataset) -> Iterator[tuple[int, tuple[SampleImage, SampleText]]]:
    """Yield (number of the image, (image, text)) for all texts about one image."""
    for number, group in enumerate(dataset.groups):
        sample = dataset.sample(group)
        for text in sample.texts:
            yield number, (sample.images[0], text)
