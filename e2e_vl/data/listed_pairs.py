"""Sentences about pairs of images that are named one by one: the files of NLVR2 of the official LXMERT code.

Files (`data.files`, relative to `data.root`; {split} is the split, such as train, and {images} what
`data.config.image_sets` says of it)
    examples    nlvr2/{split}.json
    images      folder of all images of the split
    features    nlvr2_imgfeat/{split}_obj36.tsv
    detections  the same file for its boxes alone
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from detector.errors import UserError
from e2e_vl.box_sources import BoxSource
from e2e_vl.data.base import DataFiles, VLDataset, Wants, group_texts, split_names
from e2e_vl.data.formats.image_sets import ImageSets
from e2e_vl.data.formats.lxmert_files import ListedPair, read_listed_pairs
from e2e_vl.data.storage.record_table import RecordTable
from e2e_vl.samples import RightChoice, Sample, SampleImage, SampleText

LABELS = ("False", "True")  # as predictions and the official scores have them


@dataclasses.dataclass(frozen=True)
class ListedPairOptions(ImageSets):
    """Fields of `data.config`."""

    image_name: str = "{id}.png"


class ListedPairDataset(VLDataset):
    """Sentences of one or several splits, grouped by their pair of images.

    Args:
        pairs: the sentences; their indices are text indices.
        folders: of each sentence, the folder of its images.
        parts: placeholder values of each split, see `VLDataset.parts`.
    """

    known_files = ("images", "examples", "detections", "features")
    options = ListedPairOptions
    box_sources = (BoxSource.ONLINE, BoxSource.DETECTIONS, BoxSource.PRECOMPUTED)

    def __init__(
        self,
        pairs: Sequence[ListedPair],
        folders: Sequence[Path],
        options: ListedPairOptions,
        parts: Sequence[Mapping[str, str]],
    ) -> None:
        self.pairs = RecordTable(ListedPair, pairs)
        self.folders = folders
        self.settings = options
        self.parts = parts
        self.groups = group_texts(pair.images for pair in pairs)

    @classmethod
    def open(cls, files: DataFiles, options: ListedPairOptions, split: str, wants: Wants) -> ListedPairDataset:
        """`split` names one split or several joined by "+"; the top of this file says which files there are.

        Raises:
            ValueError: a sentence in two of the splits, or a split to train on that has no labels.
        """
        pairs: dict[str, ListedPair] = {}
        folders, parts = [], []
        for name in split_names(split):
            values = options.values(name)
            own = read_listed_pairs(path := files.path("examples", **values), files.errors)
            if wants.training and own[0].label is None:
                raise UserError(f"{path}: the split {name} has no labels to learn from; train on another split")
            own = options.kept(own, lambda pair: pair.images, files, values, wants)
            twice = next((pair.identifier for pair in own if pair.identifier in pairs), None)
            if twice is not None:
                raise UserError(f"example {twice} is in two of the splits {split}; name each split once")
            pairs |= {pair.identifier: pair for pair in own}
            reads_images = wants.boxes is not BoxSource.PRECOMPUTED
            folders += [files.path("images", **values) if reads_images else Path()] * len(own)
            parts.append(values)
        return cls(list(pairs.values()), folders, options, parts)

    @classmethod
    def texts_of(cls, files: DataFiles, options: ListedPairOptions, split: str) -> Iterable[str]:
        """All sentences of a split."""
        paths = [files.path("examples", **options.values(name)) for name in split_names(split)]
        return [pair.words for path in paths for pair in read_listed_pairs(path, files.errors)]

    def __len__(self) -> int:
        """Number of sentences about pairs."""
        return len(self.pairs)

    def image_ids(self) -> Iterable[str]:
        return (name for texts in self.groups for name in self.pairs[texts[0]].images)

    def truths(self) -> Iterable[RightChoice | None]:
        return map(_truth, self.pairs)

    def sample(self, texts: Sequence[int]) -> Sample:
        """Some sentences about one pair."""
        folder = self.folders[texts[0]]
        names = self.pairs[texts[0]].images
        images = tuple(SampleImage(name, self.settings.file(folder, name)) for name in names)
        return Sample(images, tuple(self._text(index) for index in texts))

    def _text(self, index: int) -> SampleText:
        pair = self.pairs[index]
        facts = {"identifier": pair.identifier, "sent": pair.words}
        facts |= {} if pair.label is None else {"label": LABELS[pair.label]}
        return SampleText(index, pair.words, facts, _truth(pair), looks_at=(0, 1))


def _truth(pair: ListedPair) -> RightChoice | None:
    return None if pair.label is None else RightChoice(pair.label)
