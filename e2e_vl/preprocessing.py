"""Preprocessing: from a sample, as its data set states it, to an encoded sample with wordpieces and targets.

Shape legend: see `e2e_vl/structures.py`. Boxes are xyxy float32 in pixels of the resized image.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int64

from detector.errors import UserError
from e2e_vl.phrases import TextPhrases, match_phrase
from e2e_vl.predictions import ONLY_PHRASES, Prediction
from e2e_vl.samples import Sample, SampleText
from e2e_vl.targets import Targets
from e2e_vl.text import TextEncoding, TextTokenizer
from e2e_vl.transforms import LoadedImage


@dataclasses.dataclass
class EncodedText:
    """One text with its targets."""

    encoding: TextEncoding
    image_index: tuple[int, ...]  # rows of `EncodedSample.images`; empty for a text without an image
    record: dict[str, Any]  # plain JSON-able values: ids, text, truth in pixels of the original image
    targets: Targets | None = None  # a class of the task's own
    seed: int | None = None  # of the model's random choices for the text
    region_of_token: Int64[np.ndarray, " L"] | None = None  # candidate box that each wordpiece names; -1 = none
    # None: not needed, or the phrases that the data annotate
    phrases: TextPhrases | None = None
    # of each image float32 [R, 2], how well the phrase of each candidate box matches the text; None: unknown
    phrase_matches: list[Float[np.ndarray, "_R 2"]] | None = None
    # the text, if it differs from the text in the data; the annotated phrases then do not apply
    other_words: str | None = None


@dataclasses.dataclass
class EncodedSample:
    """One image (or pair) with the texts about it."""

    images: list[LoadedImage]
    texts: list[EncodedText]


GeneratorFactory = Callable[[int], np.random.Generator]  # text index -> its random generator in this epoch


@dataclasses.dataclass(frozen=True)
class Preprocessor(abc.ABC):
    """Turns the texts of a sample into wordpieces, targets and records; runs in data workers."""

    text_tokenizer: TextTokenizer
    prediction_class: ClassVar[type[Prediction]]  # of the task, see `Task.prediction_class`
    # kinds of truth that the task knows; another kind is refused. In joined data sets, texts with phrases and another
    # kind of truth only serve phrase grounding, see `lacks_target`. (object,): all kinds.
    learns_from: ClassVar[tuple[type, ...]]

    def __call__(
        self, sample: Sample, images: Sequence[LoadedImage], make_generator: GeneratorFactory
    ) -> Iterable[EncodedText]:
        """Preprocess all texts of the sample, in order; `images` are its loaded images with their candidate boxes."""
        for text in sample.texts:
            for example in self.encode_text(text, sample, images, make_generator):
                if self.lacks_target(text):
                    example.targets = dataclasses.replace(self.placeholder_targets(), has_target=False)
                    example.record = example.record | {ONLY_PHRASES: True}
                if self.text_tokenizer.with_phrase_spans and example.phrases is None:
                    encoded_text = text
                    if example.other_words is not None:
                        encoded_text = dataclasses.replace(text, words=example.other_words, phrases=None)
                    example.phrases = find_phrases(encoded_text, example, images, self.text_tokenizer)
                if self.text_tokenizer.with_phrase_matches:
                    words = text.words if example.other_words is None else example.other_words
                    if self.text_tokenizer.is_blank:
                        words = ""
                    example.phrase_matches = match_phrases([images[row] for row in example.image_index], words)
                yield example

    def lacks_target(self, text: SampleText) -> bool:
        """Return whether the text only serves phrase grounding, because it has no target of the task."""
        may_lack_target = self.text_tokenizer.with_phrase_spans and text.may_lack_target
        return may_lack_target and not isinstance(text.truth, self.learns_from)

    def placeholder_targets(self) -> Targets:
        """Return meaningless targets with the class, shapes and dtypes of real ones."""
        raise NotImplementedError(f"{type(self).__name__} has targets for every text.")

    @abc.abstractmethod
    def encode_text(
        self, text: SampleText, sample: Sample, images: Sequence[LoadedImage], make_generator: GeneratorFactory
    ) -> Iterable[EncodedText]:
        """Encode one text of the sample: one example, or one per answer choice."""

    @abc.abstractmethod
    def truth_record(self, truth: Any, *, flipped: bool) -> dict[str, Any]:
        """Return the fields of the prediction that a truth, of a kind in `learns_from`, fills.

        Their values are plain and JSON-able, with boxes in pixels of the original image. In a `flipped` image, words of
        the truth are mirrored if those of the text are.
        """

    def record(
        self, text: SampleText, images: Sequence[LoadedImage], encoding: TextEncoding | None = None
    ) -> dict[str, Any]:
        """Return what the prediction takes from the text: its number, words, image, metadata and truth.

        `image_size` is (height, width) of the first image as it is stored.

        Raises:
            UserError: the metadata fill a field that is not theirs, or the truth is of a kind that the task does not
                know.
        """
        self._check_statements(text)
        flipped = False
        record = {"text_index": text.index, "text": text.words, **text.metadata}
        if text.image_index:
            image = images[text.image_index[0]]
            flipped = image.image_transform.flipped
            size = list(image.image_transform.original_size)
            record |= {"file_name": image.name, "image_size": size, "flipped": flipped}
        if text.truth is not None and not self.lacks_target(text):
            record |= self.truth_record(text.truth, flipped=flipped)
        if encoding is not None and encoding.num_truncated:
            record["truncated_wordpieces"] = encoding.num_truncated
        return record

    def _check_statements(self, text: SampleText) -> None:
        """Raise a UserError for metadata that the task fills in itself, and for a truth that it does not know."""
        prediction_class = self.prediction_class
        task_fields = set(prediction_class.__struct_fields__) - prediction_class.metadata_fields
        refused_keys = text.metadata.keys() & task_fields
        if refused_keys:
            raise UserError(
                f"The metadata of '{text.words}' state {', '.join(sorted(refused_keys))}, which the task fills in a "
                f"{prediction_class.__name__}; state a truth once, in the text's truth, from which the task makes such "
                "fields."
            )
        if text.truth is None or isinstance(text.truth, self.learns_from) or self.lacks_target(text):
            return
        known = " or ".join(truth_class.__name__ for truth_class in self.learns_from) or "no truth"
        raise UserError(
            f"The truth of '{text.words}' is of the class {type(text.truth).__name__}, but {type(self).__name__} knows "
            f"{known}; use a data set of this task, or set phrases.weight if it only adds phrases with boxes."
        )


def match_phrases(images: Sequence[LoadedImage], words: str) -> list[Float[np.ndarray, "_R 2"]] | None:
    """Return how well the phrase of each candidate box of each image matches a text; None: there are no phrases."""
    if all(image.phrases is None for image in images):
        return None
    matches = []
    for image in images:
        phrases = image.phrases or ()
        shares = {phrase: match_phrase(phrase, words) for phrase in set(phrases)}
        rows = [shares[phrase] for phrase in phrases]
        matches.append(np.array(rows, dtype=np.float32).reshape(-1, 2))
    return matches


def find_phrases(
    text: SampleText, example: EncodedText, images: Sequence[LoadedImage], text_tokenizer: TextTokenizer
) -> TextPhrases:
    """Find the wordpieces of the annotated phrases; `example` is the text, possibly followed by another one."""
    flipped = bool(text.image_index) and images[text.image_index[0]].image_transform.flipped
    pieces = text_tokenizer.encode(text.words, mirrored=flipped)
    source = example.encoding.source
    is_of_text = (source >= 0) & (source < len(pieces.ids))
    offsets = np.zeros((len(source), 2), dtype=np.int64)
    offsets[is_of_text] = pieces.offsets[source[is_of_text]]
    word_ids = np.full(len(source), -1)
    word_ids[is_of_text] = pieces.word_ids[source[is_of_text]]
    continues = np.append(False, (word_ids[1:] == word_ids[:-1]) & is_of_text[1:])
    annotated = text.phrases
    if annotated is None or not text.image_index or not is_of_text.any():
        no_spans = np.zeros((0, 2), dtype=np.int64)
        return TextPhrases(text.words, offsets, continues, no_spans, boxes=[], is_complete=False)
    spans = [find_wordpieces(offsets, is_of_text, span) for span in annotated.spans]
    image_transform = images[text.image_index[0]].image_transform
    original_boxes = annotated.boxes or [np.zeros((0, 4))] * len(annotated.spans)  # unknown boxes: none
    return TextPhrases(
        words=text.words,
        offsets=offsets,
        continues_word=continues,
        spans=np.array(spans, dtype=np.int64).reshape(-1, 2),
        boxes=[image_transform.transform_boxes(boxes).astype(np.float32) for boxes in original_boxes],
        is_complete=annotated.is_complete,
    )


def find_wordpieces(
    offsets: Int64[np.ndarray, "L 2"], is_of_text: Bool[np.ndarray, " L"], span: tuple[int, int]
) -> tuple[int, int]:
    """Convert a span of characters to a span of wordpieces: the first one and the last one plus one.

    If all of these characters were truncated, it is the last wordpiece before their end. `is_of_text` says which
    positions belong to the text, at least one.
    """
    positions = np.flatnonzero(is_of_text)
    first_characters = offsets[positions, 0]
    inside = positions[(first_characters >= span[0]) & (first_characters < span[1])]
    if not len(inside):
        inside = positions[first_characters < span[1]][-1:]
    if not len(inside):
        inside = positions[:1]
    return int(inside[0]), int(inside[-1]) + 1
