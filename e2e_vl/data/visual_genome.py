"""Visual Genome: descriptions of regions as captions, or questions with one answer each, for pre-training.

Files (`data.files`, relative to `data.root`; the release has no splits, so {split} is what you name)
    images      folder that holds VG_100K and VG_100K_2
    image_data  image_data.json
    regions     region_descriptions.json, for `data.config.texts: regions`
    region_graphs  optional, region_graphs.json: what the words of descriptions name, read for `phrases.weight`
    questions   question_answers.json, for `data.config.texts: questions`
    detections, features   boxes of images by their ids

For phrases beside the task, a description without region graphs is one phrase, which names the box of its region. A
description that has other words in the region graphs has no phrases; where only white space differs, it has them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from detector.errors import UserError
from e2e_vl.box_sources import BoxSource
from e2e_vl.converter import check_choice
from e2e_vl.data.base import DataFiles, VLDataset, Wants
from e2e_vl.data.formats.region_graphs import RegionPhrases, read_region_boxes, read_region_graphs
from e2e_vl.data.formats.visual_genome_files import (
    GenomeImage,
    GenomeText,
    read_genome_images,
    read_genome_questions,
    read_region_descriptions,
)
from e2e_vl.data.loading.grouping import ConsecutiveGroups
from e2e_vl.data.photo_ids import COCO, VISUAL_GENOME
from e2e_vl.file_names import inside, shown
from e2e_vl.samples import RightAnswer, Sample, SampleImage, SampleText

READ = {"regions": read_region_descriptions, "questions": read_genome_questions}
OF_COCO = ("all", "without", "only")


@dataclasses.dataclass(frozen=True)
class GenomeOptions:
    """Fields of `data.config`."""

    texts: Literal["regions", "questions"] = "regions"
    # "without": only images that COCO does not have (LXMERT's vgnococo); "only": only images that it has
    coco: Literal["all", "without", "only"] = "all"
    use_folders: bool = True  # images lie in VG_100K and VG_100K_2; False: all in one folder, as GQA releases them

    def __post_init__(self) -> None:
        check_choice("data.config.texts", self.texts, READ)
        check_choice("data.config.coco", self.coco, OF_COCO)


class VisualGenomeDataset(VLDataset):
    """Texts about images; the texts of an image stand one after the other.

    Args:
        texts: of each image.
        images: the facts about these images.
        parts: see `VLDataset.parts`.
        phrases: what the descriptions name; None: nobody asks for it, or the texts are questions.

    Raises:
        ValueError: a text about an image that is not listed, or no text about the images that are asked for.
    """

    known_files = ("images", "image_data", "regions", "region_graphs", "questions", "detections", "features")
    options = GenomeOptions
    box_sources = (BoxSource.ONLINE, BoxSource.DETECTIONS, BoxSource.PRECOMPUTED)
    id_space = VISUAL_GENOME

    def __init__(
        self,
        texts: Mapping[int, Sequence[GenomeText]],
        images: Mapping[int, GenomeImage],
        folder: Path,
        options: GenomeOptions,
        parts: Sequence[Mapping[str, str]] = (),
        phrases: RegionPhrases | None = None,
    ) -> None:
        wanted = {"all": (True, False), "without": (False,), "only": (True,)}[options.coco]
        self.images = [images[number] for number in texts if (images[number].coco_id is not None) in wanted]
        if not self.images:
            raise UserError(f"{folder}: no image with {options.texts} is left with data.config.coco={options.coco}")
        self.texts = [text for image in self.images for text in texts[image.image_id]]
        self.groups = ConsecutiveGroups([len(texts[image.image_id]) for image in self.images])
        self.folder = folder
        self.settings = options
        self.parts = parts
        self.phrases = phrases
        self.has_phrases = phrases is not None
        self.has_truths = options.texts == "questions"

    @classmethod
    def open(cls, files: DataFiles, options: GenomeOptions, split: str, wants: Wants) -> VisualGenomeDataset:
        """The top of this file says which files there are."""
        texts = _texts(files, options, split)
        images = files.read(read_genome_images, path := files.path("image_data", split=split))
        unknown = next((number for number in texts if number not in images), None)
        if unknown is not None:
            raise UserError(
                f"{path}: image {unknown} is not among the images of image_data; use files of the same release"
            )
        phrases = None
        if wants.phrases and options.texts == "regions":
            if "region_graphs" in files:
                phrases = files.read(read_region_graphs, files.path("region_graphs", split=split))
                phrases.compare(((one.number, one.words) for own in texts.values() for one in own), files.errors)
            else:
                phrases = files.read(read_region_boxes, files.path("regions", split=split))
        return cls(
            texts,
            images,
            Path() if wants.boxes is BoxSource.PRECOMPUTED else files.path("images", split=split),
            options,
            [{"split": split}],
            phrases,
        )

    @classmethod
    def reads(cls, options: GenomeOptions, split: str, wants: Wants) -> tuple[str, ...]:
        unread = {"regions": {"questions"}, "questions": {"regions", "region_graphs"}}[options.texts]
        if not wants.phrases:
            unread = unread | {"region_graphs"}
        return tuple(key for key in super().reads(options, split, wants) if key not in unread)

    @classmethod
    def texts_of(cls, files: DataFiles, options: GenomeOptions, split: str) -> Iterable[str]:
        """All descriptions, or all questions."""
        return (text.words for own in _texts(files, options, split).values() for text in own)

    @classmethod
    def answers_of(cls, files: DataFiles, options: GenomeOptions, split: str) -> dict[int, str]:
        """The answer to each question."""
        if options.texts != "questions":
            return super().answers_of(files, options, split)
        found = _texts(files, options, split)
        return {text.number: text.answer for own in found.values() for text in own}

    def __len__(self) -> int:
        """Number of texts."""
        return len(self.texts)

    def __getitem__(self, text: int) -> str:
        """One text; the data set is a pool of texts."""
        return self.texts[text].words

    def image_ids(self) -> Iterable[str]:
        return (str(image.image_id) for image in self.images)

    def truths(self) -> Iterable[RightAnswer | None]:
        return map(_truth, self.texts)

    def sample(self, texts: Sequence[int]) -> Sample:
        """Some texts about one image."""
        group = self.groups.of_text(texts[0])
        image = self.images[group]
        in_coco = () if image.coco_id is None else ((COCO, str(image.coco_id)),)
        name = str(image.image_id)
        place = f"{image.folder}/{name}.jpg" if image.folder and self.settings.use_folders else f"{name}.jpg"
        file = inside(self.folder, place, f"image {shown(name)}", follows_links=True)
        stated = SampleImage(name, file, image.size, known_as=((VISUAL_GENOME, name), *in_coco))
        return Sample((stated,), tuple(self._text(index) for index in texts), pool=self, own=self.groups[group])

    def _text(self, index: int) -> SampleText:
        text = self.texts[index]
        kind = "region_id" if text.answer is None else "qa_id"
        phrases = None if self.phrases is None else self.phrases.of(text.number, text.words)
        facts = {kind: text.number, "sent": text.words}
        return SampleText(index, text.words, facts, _truth(text), phrases=phrases)


def _texts(files: DataFiles, options: GenomeOptions, split: str) -> Mapping[int, Sequence[GenomeText]]:
    """All descriptions, or all questions, of each image; nobody may change it."""
    return files.read(READ[options.texts], files.path(options.texts, split=split))


def _truth(text: GenomeText) -> RightAnswer | None:
    return None if text.answer is None else RightAnswer(text.answer)
