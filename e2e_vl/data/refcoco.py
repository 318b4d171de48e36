"""RefCOCO, RefCOCO+ and RefCOCOg: expressions that refer to one annotated object of an image.

Files (`data.files`, relative to `data.root`)
    images        folder of the image files that the instances name
    instances     COCO instances with all annotations of the images
    refs          REFER file of the expressions
    phrases       optional: folder of the noun phrases of the expressions, <image id>.txt as in Flickr30K Entities
    phrase_boxes  with it: folder of their boxes, <image id>.xml, pixels counted from 1
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from detector.errors import MissingFileError, UserError
from detector.user_paths import user_path
from e2e_vl.data.base import DataFiles, NoOptions, VLDataset, Wants, group_texts
from e2e_vl.data.formats.flickr_entities import (
    AnnotatedImage,
    EntitySentence,
    read_annotation,
    read_sentences,
)
from e2e_vl.data.formats.refer import ReferFiles
from e2e_vl.file_names import inside
from e2e_vl.samples import PhraseBoxes, ReferredBox, Sample, SampleText


class RefCOCODataset(VLDataset):
    """Expressions of one split, grouped by image.

    Args:
        images_root: folder of the image files named in the instances file.
        refer: all expressions, with all annotations of the images.
        split: name of a split, by the rules of `refer.split_contains`.
        phrases: of all expressions; None: each expression is one phrase.

    Attributes:
        expressions: the texts, in file order; their indices are text indices.

    Raises:
        ValueError: a split without expressions.
    """

    known_files = ("images", "instances", "refs", "phrases", "phrase_boxes", "detections", "features")
    has_phrases = True

    def __init__(
        self,
        images_root: str | Path,
        refer: ReferFiles,
        split: str,
        phrases: NounPhrases | None = None,
    ) -> None:
        self.images_root = user_path(images_root)
        self.refer = refer
        self.instances = refer.instances
        self.expressions = self.refer.in_split(split)
        self.groups = group_texts(expression.image_id for expression in self.expressions)
        self.phrases = phrases
        self.parts = [{"split": split}]
        self.class_names = self.instances.class_names

    @classmethod
    def open(cls, files: DataFiles, options: NoOptions, split: str, wants: Wants) -> RefCOCODataset:
        """The top of this file says which files there are."""
        phrases = None
        if "phrases" in files and wants.phrases:
            phrases = NounPhrases(files.path("phrases"), files.path("phrase_boxes"))
        return cls(files.path("images"), _refer(files), split, phrases)

    @classmethod
    def reads(cls, options: NoOptions, split: str, wants: Wants) -> tuple[str, ...]:
        keys = ("instances", *super().reads(options, split, wants))
        return keys if wants.phrases else tuple(key for key in keys if not key.startswith("phrase"))

    @classmethod
    def texts_of(cls, files: DataFiles, options: NoOptions, split: str) -> Iterable[str]:
        """All expressions of a split."""
        return [expression.sentence for expression in _refer(files).in_split(split)]

    def __len__(self) -> int:
        """Number of expressions."""
        return len(self.expressions)

    def image_ids(self) -> Iterable[str]:
        return (str(self.expressions[texts[0]].image_id) for texts in self.groups)

    def sample(self, texts: Sequence[int]) -> Sample:
        """Some expressions about one image."""
        image_id = self.expressions[texts[0]].image_id
        # the `file_name` of a ref is not a file
        name, where = self.instances.images[image_id].file_name, f"{self.instances.path}: image {image_id}"
        image = self.instances.sample_image(image_id, inside(self.images_root, name, where, follows_links=True))
        return Sample((image,), tuple(self._text(index) for index in texts))

    def _text(self, index: int) -> SampleText:
        expression = self.expressions[index]
        annotation = self.instances.annotations[expression.ann_id]
        facts = {
            "ref_id": expression.ref_id,
            "sent_id": expression.sent_id,
            "image_id": expression.image_id,
            "ann_id": expression.ann_id,
            "sent": expression.sentence,
            "category": self.instances.class_names[annotation.class_index],
            "gt_box": list(annotation.box),
        }
        if expression.family is not None:
            facts["family"] = expression.family
        if self.phrases is None:
            phrases = PhraseBoxes(((0, len(expression.sentence)),), (np.array([annotation.box]),))
        else:
            phrases = self.phrases.of(expression.image_id, expression.sentence)
        return SampleText(index, expression.sentence, facts, ReferredBox(annotation.box), phrases=phrases)


def _refer(files: DataFiles) -> ReferFiles:
    """All splits are in the same two files."""
    return files.read(ReferFiles, files.path("refs"), files.path("instances"))


class NounPhrases:
    """The noun phrases of expressions, from files as in Flickr30K Entities, read image by image when needed.

    The image that was asked for last is kept, because the expressions of an image are asked for one after the other.
    """

    def __init__(self, sentences: Path, annotations: Path) -> None:
        self.sentences, self.annotations = sentences, annotations
        for folder in (sentences, annotations):
            if not folder.is_dir():
                raise MissingFileError(f"{folder}: no such folder; data.files.phrases and phrase_boxes name two.")
        self._last: tuple[int | None, dict[str, EntitySentence], AnnotatedImage | None] = None, {}, None

    def of(self, image_id: int, words: str) -> PhraseBoxes:
        """All phrases of an expression about an image.

        Raises:
            FileNotFoundError, ValueError: a file of the image is missing or malformed, or lacks the expression.
        """
        file = inside(self.sentences, f"{image_id}.txt", follows_links=True)
        if self._last[0] != image_id:
            known = {one.words: one for one in reversed(read_sentences(file))}
            self._last = image_id, known, read_annotation(self.annotations / f"{file.stem}.xml")
        _, known, annotated = self._last
        if words not in known:
            raise UserError(f"{file}: no line has the expression '{words}'; give the phrases of the same expressions.")
        phrases = known[words].phrases
        # pixels are counted from 1 and the last one is included
        boxes = [annotated.boxes_of(phrase.chain) - (1, 1, 0, 0) for phrase in phrases]
        return PhraseBoxes(tuple(phrase.span for phrase in phrases), tuple(boxes), is_complete=True)
