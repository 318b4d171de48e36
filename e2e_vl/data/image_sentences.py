"""Sentences of several sources about images, for pre-training: the files of the official LXMERT code.

Files (`data.files`, relative to `data.root`; {split} is the split, such as mscoco_train, and {images} what
`data.config.image_sets` says of it, such as mscoco_imgfeat/train2014)
    sentences   lxmert/{split}.json
    images      folder of the images
    features    {images}_obj36.tsv: boxes and features with what the detector found
    detections  the same file for its boxes alone
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from detector.errors import UserError
from e2e_vl.box_sources import BoxSource
from e2e_vl.data.base import DataFiles, VLDataset, Wants, split_names
from e2e_vl.data.formats.image_sets import ImageSets
from e2e_vl.data.formats.lxmert_files import SourcedSentence, read_image_sentences
from e2e_vl.data.loading.grouping import ConsecutiveGroups
from e2e_vl.data.photo_ids import known_by_number
from e2e_vl.data.storage.record_table import RecordTable, text_column
from e2e_vl.samples import Sample, SampleImage, SampleText, ScoredAnswers


@dataclasses.dataclass(frozen=True)
class SentenceOptions(ImageSets):
    """Fields of `data.config`."""

    sources: list[str] | None = None  # only sentences of these sources; None: of all


class ImageSentenceDataset(VLDataset):
    """Sentences of one or several splits; the texts of an image stand one after the other.

    Args:
        sentences: of each image.
        folders: of each image, the folder that it is in; empty: no image is read.
        parts: placeholder values of each split, see `VLDataset.parts`.
    """

    known_files = ("images", "sentences", "detections", "features")
    options = SentenceOptions
    box_sources = (BoxSource.ONLINE, BoxSource.DETECTIONS, BoxSource.PRECOMPUTED)

    def __init__(
        self,
        sentences: Mapping[str, Sequence[SourcedSentence]],
        folders: Mapping[str, Path],
        options: SentenceOptions,
        parts: Sequence[Mapping[str, str]],
    ) -> None:
        self.images = text_column(sentences)
        self.sentences = RecordTable(SourcedSentence, (one for own in sentences.values() for one in own))
        self.groups = ConsecutiveGroups([len(own) for own in sentences.values()])
        self.folders = folders
        self.settings = options
        self.parts = parts

    @classmethod
    def open(cls, files: DataFiles, options: SentenceOptions, split: str, wants: Wants) -> ImageSentenceDataset:
        """`split` names one split or several joined by "+"; the top of this file says which files there are.

        Raises:
            ValueError: an image that is in two of the splits; and see `read_image_sentences`.
        """
        sentences: dict[str, Sequence[SourcedSentence]] = {}
        folders: dict[str, Path] = {}
        parts = []
        for name in split_names(split):
            values = options.values(name)
            own = read_image_sentences(files.path("sentences", **values), options.sources, files.errors)
            own = dict(options.kept(own.items(), lambda item: item[:1], files, values, wants))
            twice = next((image for image in own if image in sentences), None)
            if twice is not None:
                raise UserError(f"image {twice} is in two of the splits {split}; name each split once")
            sentences |= own
            if wants.boxes is not BoxSource.PRECOMPUTED:
                folders |= dict.fromkeys(own, files.path("images", **values))
            parts.append(values)
        return cls(sentences, folders, options, parts)

    @classmethod
    def texts_of(cls, files: DataFiles, options: SentenceOptions, split: str) -> Iterable[str]:
        """All sentences of a split."""
        for name in split_names(split):
            path = files.path("sentences", **options.values(name))
            found = read_image_sentences(path, options.sources, files.errors)
            yield from (sentence.words for own in found.values() for sentence in own)

    def __len__(self) -> int:
        """Number of sentences."""
        return len(self.sentences)

    def __getitem__(self, text: int) -> str:
        """One sentence; the data set is a pool of texts."""
        return self.sentences.column("words")[text]

    def image_ids(self) -> Iterable[str]:
        return self.images

    def truths(self) -> Iterable[ScoredAnswers | None]:
        return map(_truth, self.sentences)

    def sample(self, texts: Sequence[int]) -> Sample:
        """Some sentences about one image."""
        group = self.groups.of_text(texts[0])
        name = self.images[group]
        folder = self.folders.get(name, Path())
        image = SampleImage(name, self.settings.file(folder, name), known_as=known_by_number(name))
        return Sample((image,), tuple(self._text(index, name) for index in texts), pool=self, own=self.groups[group])

    def _text(self, index: int, image_id: str) -> SampleText:
        sentence = self.sentences[index]
        facts = {"image_id": image_id, "uid": sentence.uid(image_id), "source": sentence.source, "sent": sentence.words}
        return SampleText(index, sentence.words, facts, _truth(sentence))


def _truth(sentence: SourcedSentence) -> ScoredAnswers | None:
    return None if sentence.scores is None else ScoredAnswers(sentence.scores)
