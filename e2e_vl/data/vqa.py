"""VQA v2: answer a question about an image.

A text is `[CLS] question [SEP] [MASK] [SEP]`, segment 1 from [MASK] on; the position `mask` says where [MASK] is. What
people answered is in the record (`answers`, `answer_type`, `question_type`): the task, which owns the list of possible
answers, makes its targets of them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from e2e_vl.config import DataSettings
from e2e_vl.data.asked import Asked
from e2e_vl.data.coco import read_instances
from e2e_vl.data.examples import Example, ImageExample, Request, TextExample, random_generator
from e2e_vl.data.files import read_options
from e2e_vl.data.image_source import BoxSource, ImageSource
from e2e_vl.data.images import Placement
from e2e_vl.data.vqa_files import Question, read_questions
from e2e_vl.text import mirror_words

_FILES_OF = {  # box source -> files that it reads
    "gt": ("instances",),
    "detections": ("detections",),
    "detections+gt": ("instances", "detections"),
    "precomputed": ("features",),
}


@dataclasses.dataclass(frozen=True)
class VQAOptions:
    """Fields of `data.config`.

    Attributes:
        image_name: file name of an image; {id} is its id, {images} the COCO image set, such as train2014.
        mirror_precomputed: mirror the boxes and words of precomputed features although the features stay as they are
            (official VL-BERT code); False forbids `data.flip` with them.
        mean_image_feature: the whole image's feature is the mean of its regions' where the features file has none
            (official VL-BERT code).
    """

    image_name: str = "COCO_{images}_{id:012d}.jpg"
    mirror_precomputed: bool = False
    mean_image_feature: bool = True


@dataclasses.dataclass
class VQAPart:
    """Questions of one split, and where their images come from."""

    questions: list[Question]
    source: ImageSource
    folder: Path  # of the images
    image_name: str  # with {id}

    def image_path(self, image_id: int) -> Path:
        return self.folder / self.image_name.format(id=image_id)


class VQADataset(Dataset):
    """Questions of one or several splits, grouped by image.

    In a flipped image the words "left" and "right" are swapped in question and answers (official VL-BERT code).

    Args:
        parts: the splits that are joined, such as train2014 and val2014.
        split: their names, for error messages.
        tokenizer: wordpiece tokenizer.
        seed: all randomness depends on (seed, epoch, first text of the request) only.
        blank_text: drop all words of the question: the control that sees no text.
        max_text_length: longest sequence in wordpieces, the special ones included; longer questions lose their last
            pieces and the record tells how many in `cut_wordpieces`. None = no limit.

    Attributes:
        questions: the texts, part after part; their indices are text indices.
        groups: text indices of each image, images in order of first mention.

    Raises:
        ValueError: see `ImageSource.require_images`; or a question id in two splits.
    """

    # keys of `data.files`
    known_files = ("images", "questions", "annotations", "answers", "instances", "detections", "features")

    def __init__(
        self,
        parts: Sequence[VQAPart],
        split: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int = 0,
        blank_text: bool = False,
        max_text_length: int | None = None,
    ) -> None:
        if max_text_length is not None and max_text_length < 4:
            raise ValueError(f"max_text_length is {max_text_length}, but [CLS] [SEP] [MASK] [SEP] alone need 4")
        self.tokenizer = tokenizer
        self.seed = seed
        self.blank_text = blank_text
        self.max_text_length = max_text_length
        self.parts = list(parts)
        self.questions = [question for part in parts for question in part.questions]
        self._part_of = [number for number, part in enumerate(parts) for _ in part.questions]
        seen: set[int] = set()
        for question in self.questions:
            if question.question_id in seen:
                raise ValueError(
                    f"question {question.question_id} is in two of the splits {split}; name each split once"
                )
            seen.add(question.question_id)
        by_image: dict[tuple[int, int], list[int]] = {}
        for index, (part, question) in enumerate(zip(self._part_of, self.questions, strict=True)):
            by_image.setdefault((part, question.image_id), []).append(index)
        self.groups = list(by_image.values())
        for number, part in enumerate(parts):
            part.source.require_images([image for owner, image in by_image if owner == number], split)

    @classmethod
    def from_settings(
        cls,
        settings: DataSettings,
        tokenizer: PreTrainedTokenizerBase,
        split: str,
        *,
        boxes: BoxSource,
        training: bool,
        seed: int,
        channel_order: str,
        with_objects: bool,
    ) -> VQADataset:
        """Build from a run's settings.

        `split` names one split or several joined by "+" (train2014+val2014). `data.files` holds `questions`,
        `annotations`, `images` (a folder), and as the box source needs them `instances`, `detections` and `features`;
        in all of them {split} is the split and {images} its COCO image set. Splits with "test" in their name need no
        annotation file. See `VQAOptions` for `data.config`.

        Raises:
            FileNotFoundError, ValueError: see the readers; or a file that is not set, or an unknown option.
        """
        options = _options(settings)
        shared: dict[tuple[Path | None, ...], ImageSource] = {}  # parts with the same files share them
        parts = []
        wanted = _FILES_OF.get(boxes, ())
        if with_objects:
            wanted = (*wanted, "instances")
        for name in split_names(split):
            questions = _read_split(settings, name, annotated=training)
            images = _image_set(questions[0], name)
            paths = tuple(
                _path(settings, key, name, images) if key in wanted and key in settings.files else None
                for key in ("instances", "detections", "features")
            )
            if paths not in shared:
                instances, detections, features = paths
                shared[paths] = ImageSource(
                    box_source=boxes,
                    instances=instances and read_instances(instances, drop_empty_boxes=True),
                    detections_file=detections,
                    features_file=features,
                    channel_order=channel_order,
                    with_objects=with_objects,
                    mirror_precomputed=options.mirror_precomputed,
                    mean_image_feature=options.mean_image_feature,
                    name=cls.__name__,
                    **ImageSource.options_of(settings, training=training),
                )
            folder, image_name = _path(settings, "images", name, images), options.image_name.replace("{images}", images)
            parts.append(VQAPart(questions, shared[paths], folder, image_name))
        return cls(
            parts,
            split,
            tokenizer,
            seed=seed,
            blank_text=settings.blank_text,
            max_text_length=settings.max_text_length,
        )

    @classmethod
    def texts_of(cls, settings: DataSettings, split: str) -> list[str]:
        """All questions of a split and the most frequent answer to each, to build a vocabulary from."""
        questions = [q for name in split_names(split) for q in _read_split(settings, name, annotated=True)]
        return [text for question in questions for text in (question.text, question.most_frequent)]

    @classmethod
    def answers_of(cls, settings: DataSettings, split: str) -> dict[int, str]:
        """The most frequent answer to each question, by question id, to build a list of answers from."""
        questions = [q for name in split_names(split) for q in _read_split(settings, name, annotated=True)]
        return {question.question_id: question.most_frequent for question in questions}

    def check_classes(self, num_classes: int) -> None:
        """Raises ValueError if a detector with `num_classes` foreground classes cannot learn the annotated objects."""
        for part in self.parts:
            part.source.check_classes(num_classes)

    def __len__(self) -> int:
        """Number of texts (questions)."""
        return len(self.questions)

    def __getitem__(self, request: Request) -> Example:
        """Load the request's image once, with all its questions. Raises: see `ImageSource.load`."""
        first = request.texts[0]
        part, image_id = self.parts[self._part_of[first]], self.questions[first].image_id
        path = part.image_path(image_id)
        generator = random_generator(self.seed, request.epoch, first)
        image, placement = part.source.load(image_id, path, generator)
        if part.source.blank_image:
            image = _without_boxes(image)
        return Example([image], [self._text(index, path, placement) for index in request.texts])

    @staticmethod
    def example_of(
        asked: Asked, settings: DataSettings, tokenizer: PreTrainedTokenizerBase, channel_order: str
    ) -> Example:
        """A user's question about an image; without boxes the detector proposes them."""
        asked.refuse_choices("A question of VQA")
        image, _ = asked.load(settings, channel_order, asked.boxes)
        tokens, _ = _cut(tokenizer.tokenize(asked.text), settings.max_text_length)
        input_ids, segment_ids, mask = with_answer_slot(tokenizer, tokens)
        text = TextExample(
            input_ids=input_ids,
            segment_ids=segment_ids,
            looks_at=(0,),
            targets={},
            record=asked.record(),
            positions={"mask": mask},
        )
        return Example([image], [text])

    def _text(self, index: int, path: Path, placement: Placement) -> TextExample:
        question = self.questions[index]
        record = question.record()
        tokens = [] if self.blank_text else self.tokenizer.tokenize(question.text)
        if placement.flipped:
            tokens = mirror_words(tokens)
            if question.answers is not None:
                record["answers"] = [" ".join(mirror_words(answer.split(" "))) for answer in question.answers]
        tokens, num_cut = _cut(tokens, self.max_text_length)
        input_ids, segment_ids, mask = with_answer_slot(self.tokenizer, tokens)
        record |= {
            "file_name": str(path),
            "image_size": list(placement.original_size),
            "flipped": placement.flipped,
        }
        if num_cut:
            record["cut_wordpieces"] = num_cut
        return TextExample(
            input_ids=input_ids,
            segment_ids=segment_ids,
            looks_at=(0,),
            targets={},
            record={"text_index": index, **record},
            positions={"mask": mask},
        )


def _cut(tokens: list[str], max_length: int | None) -> tuple[list[str], int]:
    """The first wordpieces that leave room for four special ones, and how many were cut off."""
    num_cut = 0 if max_length is None else max(len(tokens) + 4 - max_length, 0)
    return tokens[: len(tokens) - num_cut], num_cut


def with_answer_slot(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> tuple[np.ndarray, np.ndarray, int]:
    """`[CLS] question [SEP] [MASK] [SEP]`: wordpiece ids and segments, int64 [L], and the position of [MASK].

    Args:
        tokens: wordpieces of the question.
    """
    answer = [tokenizer.mask_token, tokenizer.sep_token]
    question = [tokenizer.cls_token, *tokens, tokenizer.sep_token]
    ids = np.array(tokenizer.convert_tokens_to_ids([*question, *answer]), dtype=np.int64)
    segments = np.array([0] * len(question) + [1] * len(answer), dtype=np.int64)
    return ids, segments, len(question)


def split_names(split: str) -> list[str]:
    """Names in a joined split such as train2014+val2014.

    Raises:
        ValueError: an empty name.
    """
    names = [name.strip() for name in split.split("+")]
    if not all(names):
        raise ValueError(f"the split {split!r} has an empty name; join splits as in train2014+val2014")
    return names


def _options(settings: DataSettings) -> VQAOptions:
    options = read_options(VQAOptions, settings.config, "data.config")
    try:
        same = options.image_name.format(id=1, images="") == options.image_name.format(id=2, images="")
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"data.config.image_name is '{options.image_name}'; it takes {{id}} and {{images}}."
        ) from error
    if same:
        raise ValueError(f"data.config.image_name is '{options.image_name}'; it must hold {{id}}, the image's id.")
    return options


def _read_split(settings: DataSettings, name: str, *, annotated: bool) -> list[Question]:
    """Questions of one split, with answers if there are any or they are needed."""
    annotations = None
    if annotated or "annotations" in settings.files:
        annotations = _path(settings, "annotations", name)
        if not annotated and "test" in name and not annotations.is_file():
            annotations = None
    return read_questions(_path(settings, "questions", name), annotations)


def _path(settings: DataSettings, key: str, split: str, images: str = "") -> Path:
    if key not in settings.files:
        raise ValueError(f"data.files.{key} is not set; it names the {key} of {settings.name}.")
    return Path(settings.root).expanduser() / settings.files[key].replace("{split}", split).replace("{images}", images)


def _image_set(question: Question, split: str) -> str:
    """COCO's image set of a split: test2015 for test-dev2015, val2014 for valminusminival2014."""
    for name in (question.data_subtype, split):
        found = re.match(r"(train|val|test|minival|nominival).*?(20\d\d)$", name or "")
        if found:
            return found[1].removeprefix("mini").removeprefix("nomini") + found[2]
    return split


def _without_boxes(image: ImageExample) -> ImageExample:
    """An image without candidate boxes: their number and places would tell about it."""
    if image.boxes is None:
        return image
    features = None if image.features is None else image.features[:0]
    return dataclasses.replace(image, boxes=image.boxes[:0], features=features)
