"""VCR: choose one of four answers to a question about a film scene (Q->A), or one of four reasons for it (QA->R).

A question is one text index and gives four consecutive texts, one per choice: `[CLS] question [SEP] choice [SEP]`. In
QA->R the question is followed, without a separator, by an answer. Words that name objects know their boxes.

Targets of a text: `is_right` float32 [], 1 for the right choice; left out where there are no labels. Targets of the
regions: `object_class` int64 [R], 1 .. number of classes (the whole image is 0, see the task).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from detector.boxes import check_boxes
from detector.images import ResizeRule
from e2e_vl.config import DataSettings
from e2e_vl.data import vcr_text
from e2e_vl.data.examples import Example, ImageExample, Objects, Request, TextExample, random_generator
from e2e_vl.data.files import read_options
from e2e_vl.data.image_source import MEAN_COLOUR
from e2e_vl.data.images import Placement, read_image
from e2e_vl.data.instance_masks import instance_mask
from e2e_vl.data.vcr_asked import asked_example
from e2e_vl.data.vcr_files import CHOICES, Sentence, VCRFile, VCRMetadata, VCRQuestion, read_metadata
from e2e_vl.data.vcr_options import VCROptions

logger = logging.getLogger(__name__)


class VCRDataset(Dataset):
    """Questions of one jsonl file, grouped by image.

    Args:
        images_root: the folder vcr1images, with the image and metadata files that questions name.
        questions_file: jsonl file of the split (path or content).
        tokenizer: wordpiece tokenizer.
        resize: size of the network input; of several rules one is drawn at random per request.
        options: see `VCROptions`.
        training: needs labels; random names (`turn_names`).
        flip_probability: chance to mirror the image, its boxes and masks. Words stay as they are (official code).
        seed: all randomness depends on (seed, epoch, text index) only.
        channel_order: "BGR" or "RGB".
        with_objects: add the objects as targets of the detection losses.
        blank_text: no words at all; blank_image: every pixel is the mean colour, and no instance masks. Controls.

    Attributes:
        questions: the questions, in file order. Text index i is question i; with `condition_on` "each" it is question
            i // 4, given answer i % 4.
        groups: text indices of each image, images in order of first mention. Where the boxes depend on the text
            (`objects` other than "all"), every text index is a group of its own.
        without_outline: (image file, object) of those met so far in this process whose instance mask is empty.

    Raises:
        FileNotFoundError, ValueError: see the readers; an object's class that `class_names` lacks; training without
            labels or with rationales given each answer.
    """

    example_of = staticmethod(asked_example)

    # keys of `data.files`
    known_files = ("images", "questions")

    def __init__(
        self,
        images_root: str | Path,
        questions_file: str | Path | VCRFile,
        tokenizer: PreTrainedTokenizerBase,
        resize: ResizeRule | Sequence[ResizeRule],
        *,
        options: VCROptions | None = None,
        training: bool = False,
        flip_probability: float = 0.0,
        seed: int = 0,
        channel_order: str = "BGR",
        with_objects: bool = False,
        blank_text: bool = False,
        blank_image: bool = False,
    ) -> None:
        if not 0 <= flip_probability <= 1:
            raise ValueError(f"flip_probability is {flip_probability}, expected a number from 0 to 1")
        self.images_root = Path(images_root).expanduser()
        self.questions = questions_file if isinstance(questions_file, VCRFile) else VCRFile(questions_file)
        self.tokenizer = tokenizer
        self.resize_rules = [resize] if isinstance(resize, ResizeRule) else list(resize)
        if not self.resize_rules:
            raise ValueError("VCRDataset needs at least one resize rule")
        self.options = options or VCROptions()
        self.training = training
        self.flip_probability = flip_probability
        self.seed = seed
        self.channel_order = channel_order
        self.with_objects = with_objects
        self.blank_text = blank_text
        self.blank_image = blank_image
        self.without_outline: set[tuple[str, int]] = set()
        self._check_questions()
        self._class_of = {name: number for number, name in enumerate(self.options.class_names, start=1)}
        self.per_question = CHOICES if self.options.condition_on == "each" else 1
        texts = range(len(self.questions) * self.per_question)
        if self.options.objects != "all":
            self.groups = [[index] for index in texts]
        else:
            by_image: dict[str, list[int]] = {}
            for index in texts:
                by_image.setdefault(self.questions.image_names[index // self.per_question], []).append(index)
            self.groups = list(by_image.values())

    def _check_questions(self) -> None:
        path = self.questions.path
        if self.training and self.options.condition_on == "each":
            raise ValueError("data.config.condition_on=each makes prediction files; train with condition_on=right.")
        if not self.questions.has_labels and (self.training or self._needs_right_answer):
            remedy = "train on another split" if self.training else "set data.config.condition_on=each"
            raise ValueError(f"{path}: the questions have no labels, as in the test split; {remedy}.")
        known = set(self.options.class_names)
        for name, annot_id in self.questions.class_names.items():
            if name not in known:
                raise ValueError(
                    f"{path} ({annot_id}): the object class '{name}' is none of the {len(known)} classes; correct it "
                    "or give your own list as data.config.class_names."
                )

    @property
    def _needs_right_answer(self) -> bool:
        return self.options.question == "rationale" and self.options.condition_on == "right"

    @classmethod
    def from_settings(
        cls,
        settings: DataSettings,
        tokenizer: PreTrainedTokenizerBase,
        split: str,
        *,
        boxes: str,
        training: bool,
        seed: int,
        channel_order: str,
        with_objects: bool,
    ) -> VCRDataset:
        """Build from a run's settings; `data.files` holds `images` and `questions`, in which {split} is the split.

        In evaluation the last of the short edges is used and nothing is mirrored.

        Raises:
            ValueError: boxes other than the given ones, a file that is not set, or a wrong option.
        """
        if boxes != "gt":
            raise ValueError(
                f"VCR gives the boxes that its sentences name, so they cannot come from '{boxes}'; set "
                "data.boxes.train=gt and eval.boxes=[gt]."
            )
        if settings.max_text_length is not None:
            raise ValueError("VCR cuts question and choice by a rule of its own; set data.config.max_pieces instead.")
        sizes = settings.resize.short_edge if training else settings.resize.short_edge[-1:]
        return cls(
            _file(settings, "images", split),
            _file(settings, "questions", split),
            tokenizer,
            [ResizeRule(size, settings.resize.long_edge, settings.resize.rounding) for size in sizes],
            options=read_options(VCROptions, settings.config, "data.config"),
            training=training,
            flip_probability=settings.flip if training else 0.0,
            seed=seed,
            channel_order=channel_order,
            with_objects=with_objects,
            blank_text=settings.blank_text,
            blank_image=settings.blank_image,
        )

    @classmethod
    def texts_of(cls, settings: DataSettings, split: str) -> list[str]:
        """All sentences of a split and the names of people, to build a vocabulary from."""
        options = read_options(VCROptions, settings.config, "data.config")
        texts = [" ".join(options.people_names)]
        questions = VCRFile(_file(settings, "questions", split))
        for index in range(len(questions)):
            one = questions[index]
            names = vcr_text.names_of(one.objects, options.people_names)
            sentences = [one.question, *one.answer_choices, *one.rationale_choices]
            texts.append(" ".join(vcr_text.plain_text(sentence, names, options.join_word) for sentence in sentences))
        return texts

    def check_classes(self, num_classes: int) -> None:
        """Raises ValueError if a detector with `num_classes` foreground classes cannot learn these objects."""
        if len(self.options.class_names) > num_classes:
            raise ValueError(
                f"{self.questions.path} is read with {len(self.options.class_names)} classes, but the detector has "
                f"{num_classes}; set MODEL.ROI_HEADS.NUM_CLASSES in its config, or data.config.class_names."
            )

    def __len__(self) -> int:
        """Number of text indices."""
        return len(self.questions) * self.per_question

    def __getitem__(self, request: Request) -> Example:
        """Load the request's image once, with four texts for each of its text indices.

        Raises:
            FileNotFoundError: the image or its metadata file is missing; names the question.
            ValueError: a file that cannot be read, sizes or objects that contradict each other, or a box outside the
                image.
        """
        generator = random_generator(self.seed, request.epoch, request.texts[0])
        flip = bool(generator.random() < self.flip_probability)
        resize = self.resize_rules[int(generator.integers(len(self.resize_rules)))]

        question = self.questions[request.texts[0] // self.per_question]
        path = self.images_root / question.img_fn
        metadata = read_metadata(self.images_root / question.metadata_fn, question)
        pixels, placement = read_image(
            path, metadata.size, resize, flip=flip, channel_order=self.channel_order, name=question.annot_id
        )
        if self.blank_image:
            pixels = np.broadcast_to(np.array(MEAN_COLOUR[self.channel_order], dtype=np.uint8), pixels.shape)
        kept = self._kept_objects(question, request.texts[0] % self.per_question)
        image = ImageExample(
            pixels=pixels,
            original_size=placement.original_size,
            name=str(path),
            boxes=placement.move_and_clamp_boxes(metadata.boxes[kept], f"{path} ({question.annot_id})"),
            objects=self._objects(question, metadata, placement) if self.with_objects else None,
            roi_masks=self._masks(question, metadata, kept, placement) if self.options.mask_size is not None else None,
            region_targets={
                "object_class": np.array([self._class_of[question.objects[row]] for row in kept], dtype=np.int64)
            },
        )
        texts = []
        for index in request.texts:
            own = self.questions[index // self.per_question]
            if own.objects != question.objects:
                raise ValueError(
                    f"{self.questions.path}: {own.annot_id} and {question.annot_id} are about the same image but list "
                    "different objects; correct the file"
                )
            texts += self._texts(own, index, request.epoch, kept, path, placement)
        return Example([image], texts)

    def _kept_objects(self, question: VCRQuestion, answer: int) -> list[int]:
        """Objects that are candidate boxes, in the order of the boxes."""
        if self.options.objects == "all":
            return list(range(len(question.objects)))
        is_answer = self.options.question == "answer"
        if self.options.objects == "mentioned":
            choices = [] if is_answer else question.rationale_choices
            return vcr_text.mentioned_objects([question.question, *question.answer_choices, *choices])
        choices = question.answer_choices if is_answer else question.rationale_choices
        sentences = [self._query(question, answer), *choices]
        return vcr_text.relevant_objects(question.objects, sentences)

    def _query(self, question: VCRQuestion, answer: int) -> Sentence:
        """The tokens in front of a choice."""
        if self.options.question == "answer":
            return question.question
        return question.question + question.answer_choices[self._given_answer(question, answer)]

    def _given_answer(self, question: VCRQuestion, answer: int) -> int:
        return question.answer_label if self._needs_right_answer else answer

    def _masks(self, question: VCRQuestion, metadata: VCRMetadata, kept: list[int], placement: Placement) -> np.ndarray:
        """float32 [R, S, S]."""
        side = self.options.mask_size
        if self.blank_image:  # outlines tell shapes
            return np.ones((len(kept), side, side), dtype=np.float32)
        masks = [instance_mask(metadata.polygons[row], metadata.boxes[row], side) for row in kept]
        self._count_empty(question, [row for row, mask in zip(kept, masks, strict=True) if not mask.any()])
        joined = np.array(masks, dtype=np.float32).reshape(-1, side, side)
        return np.ascontiguousarray(joined[:, :, ::-1]) if placement.flipped else joined

    def _count_empty(self, question: VCRQuestion, rows: list[int]) -> None:
        """Warn of objects that the model cannot see: of the first, and whenever their number has doubled."""
        for row in rows:
            before = len(self.without_outline)
            self.without_outline.add((question.img_fn, row))
            number = len(self.without_outline)
            if number > before and number & before == 0:  # 1, 2, 4, 8, ...
                logger.warning(
                    "%s: object %d (%s) has no outline that covers a point of its mask, so its feature is zero; %d "
                    "such objects so far in this process. data.config.mask_size=null leaves all masks out.",
                    *(self.images_root / question.metadata_fn, row, question.objects[row], number),
                )

    def _objects(self, question: VCRQuestion, metadata: VCRMetadata, placement: Placement) -> Objects:
        moved = placement.move_objects(metadata.boxes)
        check_boxes(moved, str(self.images_root / question.metadata_fn), "object")
        classes = np.array([self._class_of[name] - 1 for name in question.objects], dtype=np.int64)
        return Objects(moved, classes, metadata.attributes)

    def _texts(
        self, question: VCRQuestion, index: int, epoch: int, kept: list[int], path: Path, placement: Placement
    ) -> list[TextExample]:
        """The four texts of one text index."""
        answer = self._given_answer(question, index % self.per_question)
        is_answer = self.options.question == "answer"
        names, rows = self._names(question, kept, index, epoch)
        choices = question.answer_choices if is_answer else question.rationale_choices
        query, encoded = self._encoded(question, None if is_answer else answer, choices, names, rows)
        label = question.answer_label if is_answer else question.rationale_label
        if self.options.condition_on == "each" and answer != question.answer_label:
            label = None  # rationales are written for the right answer
        join_word = self.options.join_word
        record = {
            "text_index": index,
            "annot_id": question.annot_id,
            "kind": self.options.question,
            "conditioned_on": None if is_answer else answer,
            "label": label,
            "file_name": str(path),
            "image_size": list(placement.original_size),
            "sent": vcr_text.plain_text(self._query(question, index % self.per_question), names, join_word),
            "choices": [vcr_text.plain_text(choice, names, join_word) for choice in choices],
        }
        if question.family is not None:
            record["family"] = question.family
        has_target = self.questions.has_labels and self.options.condition_on == "right"
        texts = []
        for number, choice in enumerate(encoded):
            input_ids, segment_ids, region_of_token = vcr_text.join_choice(query, choice, self.tokenizer)
            texts.append(
                TextExample(
                    input_ids=input_ids,
                    segment_ids=segment_ids,
                    looks_at=(0,),
                    targets={"is_right": np.float32(number == label)} if has_target else {},
                    record=record,
                    region_of_token=region_of_token if self.options.ground_words else np.full_like(region_of_token, -1),
                )
            )
        return texts

    def _names(self, question: VCRQuestion, kept: list[int], index: int, epoch: int) -> tuple[list[str], list[int]]:
        """What each object of the question is called, and the row of its box (-1 = it has none)."""
        people, start = self.options.people_names, 0
        if self.training and self.options.turn_names:
            # the third draw: the first two decide about the image
            start = int(random_generator(self.seed, epoch, index).random(3)[2] * len(people))
        names, rows = list(question.objects), [-1] * len(question.objects)
        for row, (number, name) in enumerate(
            zip(kept, vcr_text.names_of([question.objects[n] for n in kept], people, start), strict=True)
        ):
            names[number], rows[number] = name, row
        return names, rows

    def _encoded(
        self,
        question: VCRQuestion,
        answer: int | None,
        choices: list[Sentence],
        names: list[str],
        rows: list[int],
    ) -> tuple[list[vcr_text.Piece], list[list[vcr_text.Piece]]]:
        """Wordpieces of what stands in front, and of the four choices, cut to their limit."""

        def encode(sentence: Sentence) -> list[vcr_text.Piece]:
            if self.blank_text:
                return []
            return vcr_text.encode_sentence(sentence, names, rows, self.tokenizer, self.options.join_word)

        first = [] if self.options.blank_question else encode(question.question)
        encoded = [encode(choice) for choice in choices]
        if answer is None:
            vcr_text.cut_answers(first, encoded, self.options.max_pieces)
            return first, encoded
        given = [] if self.options.blank_question else encode(question.answer_choices[answer])
        vcr_text.cut_rationales(first, given, encoded, self.options.max_pieces)
        return first + given, encoded


def _file(settings: DataSettings, key: str, split: str) -> Path:
    """The path of `data.files.<key>` for a split."""
    if key not in settings.files:
        raise ValueError(f"data.files.{key} is not set; it names the {key} of {settings.name}.")
    return Path(settings.root).expanduser() / settings.files[key].replace("{split}", split)
