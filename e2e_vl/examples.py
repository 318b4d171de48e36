"""One image (or pair) with its texts, ready for a batch: resized pixels, transformed boxes, wordpieces, targets.

Shape legend: see `e2e_vl/structures.py`. Boxes are xyxy float32 in pixels of the resized image.
"""

from __future__ import annotations

import abc
import dataclasses
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped, UInt8
from torch import Tensor

from detector.errors import UserError
from detector.structures import Movable
from e2e_vl.io import Id
from e2e_vl.predictions import ONLY_PHRASES, Prediction
from e2e_vl.samples import DETECTED, Sample, SampleText
from e2e_vl.text import TextEncoding, TextTokenizer

# Targets: typed values of one text, and how to join them into a batch


@dataclasses.dataclass
class Ragged(Movable):
    """Concatenated lists of different lengths: `values` holds all entries, `counts` the length of each list."""

    values: Shaped[Tensor, "entries ..."]  # entries: sum of counts
    counts: Int64[Tensor, " lists"]

    def split(self) -> tuple[Tensor, ...]:
        return self.values.split(self.counts.tolist())

    @property
    def owner(self) -> Int64[Tensor, " entries"]:
        """The index of the list of each entry."""
        lists = torch.arange(len(self.counts), device=self.counts.device)
        return torch.repeat_interleave(lists, self.counts, output_size=len(self.values))


@dataclasses.dataclass
class Targets(Movable):
    """Base class of a task's targets; subclasses are dataclasses with fields made by the functions below."""

    # whether a text has a target of the task; in a batch, one value per text. None: all texts have one
    has_target: bool | Bool[Tensor, " M"] | None = dataclasses.field(default=None, kw_only=True)

    @classmethod
    def join(cls, texts: Sequence[Targets]) -> Targets:
        joined: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            values = [getattr(text, field.name) for text in texts]
            if field.name == "has_target":
                joined[field.name] = torch.tensor([value is not False for value in values]) if False in values else None
            elif all(value is None for value in values):
                joined[field.name] = None
            else:
                joined[field.name] = field.metadata["join"](values)
        return cls(**joined)

    def with_target(self, values: Shaped[Tensor, "M ..."]) -> Shaped[Tensor, "some ..."]:
        """Select the values of the texts that have a target."""
        return values if self.has_target is None else values[self.has_target]

    def truncate(self, index: Int64[Tensor, "M L"], attention_mask: Bool[Tensor, "M L"]) -> Targets:
        """A copy for truncated texts; `index` holds the old position of each kept wordpiece."""
        changes = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, dict):
                changes[field.name] = {name: one.truncate(index, attention_mask) for name, one in value.items()}
            elif value is not None and "fill" in field.metadata:
                changes[field.name] = value.gather(1, index).masked_fill(~attention_mask, field.metadata["fill"])
        return dataclasses.replace(self, **changes)

    def labelled_wordpieces(self, text: int) -> list[int]:
        """Positions of the labelled wordpieces of one text in a batch."""
        found: set[int] = set()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, dict):
                found |= {position for one in value.values() for position in one.labelled_wordpieces(text)}
            elif value is not None and "fill" in field.metadata:
                found |= set((value[text] != field.metadata["fill"]).nonzero()[:, 0].tolist())
        return sorted(found)


def _field(join: Callable[[list[Any]], Any], **more: Any) -> Any:
    return dataclasses.field(default=None, metadata={"join": join, **more})


def stacked() -> Any:
    """A field with the same shape [...] for every text; [M, ...] in a batch."""
    return _field(lambda values: torch.from_numpy(np.stack(values)))


def per_wordpiece(fill: int = -1) -> Any:
    """An int64 field [L] per text; [M, L] in a batch, padded with `fill`. It is truncated with the text."""

    def pad(values: list[Any]) -> Tensor:
        rows = [torch.from_numpy(np.asarray(value, dtype=np.int64)) for value in values]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)

    return _field(pad, fill=fill)


def ragged() -> Any:
    """A field [n, ...] per text, where n varies; in a batch, a `Ragged` with one list per text."""
    return _field(_ragged)


def nested(*row: int) -> Any:
    """A field with a list of arrays [n, ...] per text; in a batch, a `Ragged` with one list per array, text by text.

    `row` is the shape [...] of one entry, for batches without any array (float32).
    """
    return _field(lambda values: _ragged([array for arrays in values for array in arrays], row))


def by_name() -> Any:
    """A field with a dict of `Targets` per text; in a batch, a dict of the joined targets."""
    return _field(lambda values: {key: type(values[0][key]).join([v[key] for v in values]) for key in values[0]})


def _ragged(values: list[Any], row: tuple[int, ...] = ()) -> Ragged:
    arrays = [np.asarray(value) for value in values]
    joined = np.concatenate(arrays) if arrays else np.zeros((0, *row), dtype=np.float32)
    return Ragged(torch.from_numpy(joined), torch.tensor([len(array) for array in arrays], dtype=torch.int64))


# Images.


@dataclasses.dataclass(frozen=True)
class ImageTransform:
    """The resize and flip of an image, applied to its boxes.

    The methods take boxes as float [R, 4] xyxy in pixels of the original image and return pixels of the resized image:

    transform_boxes            not clamped: phrases
    transform_referred_boxes   clamped: the boxes that an expression refers to (official VL-BERT code)
    transform_and_clamp_boxes  clamped, and never empty: candidate boxes (official VL-BERT code)
    transform_objects          clipped: targets of detection losses (Detectron2)
    """

    original_size: tuple[int, int]  # (height, width)
    size: tuple[int, int]  # (height, width) after the resize
    flipped: bool = False

    def transform_boxes(self, boxes: np.ndarray) -> np.ndarray:
        """float64 [R, 4]; a flip is x' = width - 1 - x, with the width of the resized image."""
        moved = self._scaled(boxes)
        if self.flipped:
            moved[:, [0, 2]] = self.size[1] - 1 - moved[:, [2, 0]]
        return moved

    def transform_referred_boxes(self, boxes: np.ndarray) -> np.ndarray:
        """float32 [R, 4], clamped to [0, width - 1] x [0, height - 1]."""
        return self._clamped(self.transform_boxes(boxes))

    def transform_objects(self, boxes: np.ndarray) -> np.ndarray:
        """float32 [G, 4], clipped to [0, width] x [0, height]; a flip is x' = width - x."""
        height, width = self.size
        moved = self._scaled(boxes)
        if self.flipped:
            moved[:, [0, 2]] = width - moved[:, [2, 0]]
        return moved.clip(0, [width, height, width, height]).astype(np.float32)

    def transform_and_clamp_boxes(self, boxes: np.ndarray, name: str) -> np.ndarray:
        """float32 [R, 4], clamped to [0, width - 1] x [0, height - 1].

        A box that only covers the last column or row of pixels, and would be empty after clamping, becomes one pixel
        wide or high: boxes never have zero area. `name` describes them in the error about a box outside the image.
        """
        boxes = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
        original_height, original_width = self.original_size
        outside = (boxes[:, 0] >= original_width) | (boxes[:, 1] >= original_height) | (boxes[:, 2:] <= 0).any(axis=1)
        if outside.any():
            row = int(outside.argmax())
            raise UserError(
                f"{name}: box {row} [x1, y1, x2, y2] = {boxes[row].tolist()} lies outside the "
                f"{original_width} x {original_height} image; correct or remove it"
            )
        moved = self._clamped(self.transform_boxes(boxes))
        for low, high in ((0, 2), (1, 3)):
            lost = moved[:, high] <= moved[:, low]
            moved[lost, low] = np.maximum(moved[lost, high] - 1, 0)
            moved[lost, high] = moved[lost, low] + 1
        return moved

    def _clamped(self, moved: np.ndarray) -> np.ndarray:
        height, width = self.size
        return np.clip(moved, 0, np.array([width - 1, height - 1, width - 1, height - 1])).astype(np.float32)

    def _scaled(self, boxes: np.ndarray) -> np.ndarray:
        x_scale, y_scale = self.size[1] / self.original_size[1], self.size[0] / self.original_size[0]
        return np.asarray(boxes, dtype=np.float64).reshape(-1, 4) * (x_scale, y_scale, x_scale, y_scale)


@dataclasses.dataclass
class DetectionObjects:
    """Annotated objects of one image, the targets of the detection losses."""

    boxes: Float[np.ndarray, "G 4"]
    classes: Int64[np.ndarray, " G"]  # 0 .. K-1
    attributes: Int64[np.ndarray, "G T"] | None = None  # -1 = none in this slot


@dataclasses.dataclass
class ImageExample:
    """One resized image."""

    pixels: UInt8[np.ndarray, "height width 3"]  # with precomputed features, only the shape is used
    image_transform: ImageTransform
    name: str  # for error messages, usually the path
    boxes: Float[np.ndarray, "R 4"] | None = None  # candidates; None: the detector proposes them
    box_ids: tuple[Id, ...] | None = None  # annotation ids, if all candidates are annotated objects
    box_classes: Int64[np.ndarray, " R"] | None = None  # annotated classes, if all candidates are annotated objects
    class_probs: Float[np.ndarray, "R C"] | None = None  # class distributions of the candidates, from a file
    detected_classes: Int64[np.ndarray, " R"] | None = None  # predicted classes of the candidates, see `DETECTED`
    detected_scores: Float[np.ndarray, " R"] | None = None
    detected_attributes: Int64[np.ndarray, " R"] | None = None
    detected_attribute_scores: Float[np.ndarray, " R"] | None = None
    objects: DetectionObjects | None = None
    roi_masks: Float[np.ndarray, "R S S"] | None = None  # instance masks in 0..1 on the RoI maps
    boxes_to_mask: Float[np.ndarray, "Q 4"] | None = None  # mask exactly these boxes; None: drawn at random
    features: Float[np.ndarray, "R D"] | None = None  # precomputed
    image_feature: Float[np.ndarray, " D"] | None = None  # precomputed feature of the whole image

    def without_boxes(self) -> ImageExample:
        """A copy without candidate boxes, for image-blind controls: boxes reveal something about the image."""
        if self.boxes is None:
            return self
        columns = ("boxes", "box_classes", "class_probs", "roi_masks", "features", *DETECTED)
        rows = {name: getattr(self, name) for name in columns}
        emptied = {name: None if values is None else values[:0] for name, values in rows.items()}
        return dataclasses.replace(self, **emptied, box_ids=None)


# Texts and their phrases, as wordpiece spans with boxes


@dataclasses.dataclass(frozen=True)
class TextPhrases:
    """The phrases of one text, see `PhraseBatch`."""

    words: str  # the text as written
    offsets: Int64[np.ndarray, "L 2"]  # first character of each wordpiece and the last plus one; 0, 0 at special tokens
    continues_word: Bool[np.ndarray, " L"]  # wordpieces of the same word as the one before
    spans: Int64[np.ndarray, "n 2"]  # first wordpiece of each phrase and the last plus one
    boxes: list[Float[np.ndarray, "_ 4"]]  # of each phrase; empty if it refers to no box or its boxes are unknown
    is_complete: bool  # all phrases of the text are listed


@dataclasses.dataclass
class TextExample:
    """One text with its targets."""

    encoding: TextEncoding
    image_index: tuple[int, ...]  # rows of `Example.images`; empty for a text without an image
    record: dict[str, Any]  # plain JSON-able values: ids, text, truth in pixels of the original image
    targets: Targets | None = None  # a class of the task's own
    seed: int | None = None  # of the model's random choices for the text
    region_of_token: Int64[np.ndarray, " L"] | None = None  # candidate box that each wordpiece names; -1 = none
    # None: not needed, or the phrases that the data annotate
    phrases: TextPhrases | None = None
    # the text, if it differs from the text in the data; the annotated phrases then do not apply
    other_words: str | None = None


@dataclasses.dataclass
class Example:
    """One image (or pair) with the texts about it."""

    images: list[ImageExample]
    texts: list[TextExample]


@dataclasses.dataclass
class PhraseBatch(Movable):
    """The phrases of M texts. Boxes are float32 xyxy in pixels of the resized image."""

    words: list[str]  # the texts as written
    offsets: Int64[Tensor, "M L 2"]  # first character of each wordpiece and the last plus one; 0, 0 at special tokens
    continues_word: Bool[Tensor, "M L"]  # wordpieces of the same word as the one before
    spans: Ragged  # [P, 2]: first wordpiece of each phrase and the last plus one; a list per text
    boxes: Ragged  # [boxes, 4]: a list per phrase; empty if it refers to no box or its boxes are unknown
    is_complete: Bool[Tensor, " M"]  # all phrases of the text are listed

    @classmethod
    def join(cls, texts: Sequence[TextPhrases]) -> PhraseBatch:
        offsets = [torch.from_numpy(text.offsets) for text in texts]
        continues = [torch.from_numpy(text.continues_word) for text in texts]
        return cls(
            words=[text.words for text in texts],
            offsets=torch.nn.utils.rnn.pad_sequence(offsets, batch_first=True),
            continues_word=torch.nn.utils.rnn.pad_sequence(continues, batch_first=True),
            spans=_ragged([text.spans for text in texts]),
            boxes=_ragged([rows for text in texts for rows in text.boxes], (4,)),
            is_complete=torch.tensor([text.is_complete for text in texts]),
        )

    def is_punctuation(self) -> Bool[Tensor, "M L"]:
        """Which wordpieces consist of punctuation only."""
        found = [
            end > first and all(unicodedata.category(one).startswith("P") for one in text[first:end])
            for text, offsets in zip(self.words, self.offsets.tolist(), strict=True)
            for first, end in offsets
        ]
        return torch.tensor(found, device=self.offsets.device).reshape(self.offsets.shape[:2])

    def truncate(self, index: Int64[Tensor, "M L"], attention_mask: Bool[Tensor, "M L"]) -> PhraseBatch:
        """A copy for truncated texts; `index` holds the old position of each kept wordpiece.

        A phrase that was truncated completely becomes the last wordpiece before it.
        """
        kept = index.masked_fill(~attention_mask, torch.iinfo(torch.int64).max)[self.spans.owner]  # [P, L]
        first, end = ((kept < bound[:, None]).sum(dim=1) for bound in self.spans.values.unbind(dim=1))
        end = end.clamp(min=1)
        return dataclasses.replace(
            self,
            offsets=self.offsets.take_along_dim(index[..., None], dim=1) * attention_mask[..., None],
            continues_word=self.continues_word.gather(1, index) & attention_mask,
            spans=Ragged(torch.stack([torch.minimum(first, end - 1), end], dim=1), self.spans.counts),
        )


def find_phrases(
    text: SampleText, example: TextExample, images: Sequence[ImageExample], text_tokenizer: TextTokenizer
) -> TextPhrases:
    """Find the wordpieces of the annotated phrases; `example` is the text, possibly followed by another one."""
    flipped = bool(text.image_index) and images[text.image_index[0]].image_transform.flipped
    pieces = text_tokenizer.encode(text.words, mirrored=flipped)
    source = example.encoding.source
    own = (source >= 0) & (source < len(pieces.ids))
    offsets, words = np.zeros((len(source), 2), dtype=np.int64), np.full(len(source), -1)
    offsets[own], words[own] = pieces.offsets[source[own]], pieces.word_ids[source[own]]
    continues = np.append(False, (words[1:] == words[:-1]) & own[1:])
    annotated = text.phrases
    if annotated is None or not text.image_index or not own.any():
        return TextPhrases(text.words, offsets, continues, np.zeros((0, 2), dtype=np.int64), [], False)
    move = images[text.image_index[0]].image_transform.transform_boxes
    unknown = [np.zeros((0, 4))] * len(annotated.spans)
    return TextPhrases(
        words=text.words,
        offsets=offsets,
        continues_word=continues,
        spans=np.array([find_wordpieces(offsets, own, span) for span in annotated.spans], dtype=np.int64).reshape(
            -1, 2
        ),
        boxes=[move(boxes).astype(np.float32) for boxes in annotated.boxes or unknown],
        is_complete=annotated.is_complete,
    )


def find_wordpieces(
    offsets: Int64[np.ndarray, "L 2"], is_own: Bool[np.ndarray, " L"], span: tuple[int, int]
) -> tuple[int, int]:
    """Convert a span of characters to a span of wordpieces: the first one and the last one plus one.

    If all of these characters were truncated, it is the last wordpiece before their end. `is_own` says which positions
    belong to the text, at least one.
    """
    kept = np.flatnonzero(is_own)
    starts = offsets[kept, 0]
    inside = kept[(starts >= span[0]) & (starts < span[1])]
    if not len(inside):
        inside = kept[starts < span[1]][-1:]
    if not len(inside):
        inside = kept[:1]
    return int(inside[0]), int(inside[-1]) + 1


def find_characters(offsets: Int64[Tensor, "L 2"], span: tuple[int, int]) -> tuple[int, int]:
    """Convert a span of wordpieces to a span of characters: the first one and the last one plus one."""
    own = offsets[span[0] : span[1]]
    real = own[own[:, 1] > 0]
    return (int(real[:, 0].min()), int(real[:, 1].max())) if len(real) else (0, 0)


# Preprocessing: from a sample to wordpieces and targets


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
        self, sample: Sample, images: Sequence[ImageExample], make_generator: GeneratorFactory
    ) -> Iterable[TextExample]:
        """Preprocess all texts of the sample, in order; `images` are its loaded images with their candidate boxes."""
        for text in sample.texts:
            for example in self.encode_text(text, sample, images, make_generator):
                if self.lacks_target(text):
                    example.targets = dataclasses.replace(self.placeholder_targets(), has_target=False)
                    example.record = example.record | {ONLY_PHRASES: True}
                if self.text_tokenizer.with_phrase_spans and example.phrases is None:
                    other = example.other_words
                    said = text if other is None else dataclasses.replace(text, words=other, phrases=None)
                    example.phrases = find_phrases(said, example, images, self.text_tokenizer)
                yield example

    def lacks_target(self, text: SampleText) -> bool:
        """Whether the text only serves phrase grounding, because it has no target of the task."""
        may_lack_target = self.text_tokenizer.with_phrase_spans and text.may_lack_target
        return may_lack_target and not isinstance(text.truth, self.learns_from)

    def placeholder_targets(self) -> Targets:
        """Meaningless targets with the class, shapes and dtypes of real ones."""
        raise NotImplementedError(f"{type(self).__name__} has targets for every text.")

    @abc.abstractmethod
    def encode_text(
        self, text: SampleText, sample: Sample, images: Sequence[ImageExample], make_generator: GeneratorFactory
    ) -> Iterable[TextExample]:
        """Encode one text of the sample: one example, or one per answer choice."""

    @abc.abstractmethod
    def truth_record(self, truth: Any, *, flipped: bool) -> dict[str, Any]:
        """Return the fields of the prediction that a truth, of a kind in `learns_from`, fills.

        Their values are plain and JSON-able, with boxes in pixels of the original image. In a `flipped` image, words of
        the truth are mirrored if those of the text are.
        """

    def record(
        self, text: SampleText, images: Sequence[ImageExample], encoding: TextEncoding | None = None
    ) -> dict[str, Any]:
        """Return what the prediction takes from the text: its number, words, image, metadata and truth.

        Sizes are (height, width) of the stored (first) image.

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
        kind = self.prediction_class
        refused = text.metadata.keys() & (set(kind.__struct_fields__) - kind.metadata_fields)
        if refused:
            raise UserError(
                f"The metadata of '{text.words}' state {', '.join(sorted(refused))}, which the task fills in a "
                f"{kind.__name__}; state a truth once, in the text's truth, from which the task makes such fields."
            )
        if text.truth is None or isinstance(text.truth, self.learns_from) or self.lacks_target(text):
            return
        known = " or ".join(truth_class.__name__ for truth_class in self.learns_from) or "no truth"
        raise UserError(
            f"The truth of '{text.words}' is of the class {type(text.truth).__name__}, but {type(self).__name__} knows "
            f"{known}; use a data set of this task, or set phrases.weight if it only adds phrases with boxes."
        )
