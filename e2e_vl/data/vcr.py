"""VCR: questions about a film scene with four answers (Q->A), or with four reasons for an answer (QA->R)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from detector.errors import UserError
from detector.user_paths import user_path
from e2e_vl.box_sources import BoxSource
from e2e_vl.data.base import DataFiles, VLDataset, Wants, group_texts
from e2e_vl.data.formats.vcr_files import CHOICES, CLASS_NAMES, VCRFile, VCRQuestion, read_metadata
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.file_names import inside
from e2e_vl.samples import ChoiceText, RightChoice, Sample, SampleImage, Sentence

PERSON = "person"
EVERYONE = ("everyone", "everyones")  # name all people under R2C's rule


@dataclasses.dataclass(frozen=True)
class VCROptions:
    """Fields of `data.config`. The official VL-BERT code has the same defaults.

    Attributes:
        question: "answer" (Q->A) or "rationale" (QA->R). For pre-training: "both" states each question twice, for its
            answer and for its rationale; "in_turn" (VisualBERT's code, by mistake) once, four questions for their
            answers, the next four for their rationales, and so on.
        condition_on: "right": rationales are given the right answer. "each": given each of the four answers, as the
            leaderboard file wants it; a question is then four text indices, and there is nothing to learn.
        objects: which boxes there are. "all" of the image, in file order: its questions can share a detector pass.
            "mentioned": what question and choices name (for rationales what the answers name too), in the order of
            first mention. "r2c": what R2C chooses of them, see `relevant_objects`, in file order. "r2c_all_texts": the
            same for the question with all its answers and rationales together (official VisualBERT code).
        class_names: the classes of objects, in the order of the detector's classes.
        names_are_phrases: the names of objects in question and choices are phrases for the objects' boxes, which a run
            with `phrases.weight` learns.
    """

    question: Literal["answer", "rationale", "both", "in_turn"] = "answer"
    condition_on: Literal["right", "each"] = "right"
    objects: Literal["all", "mentioned", "r2c", "r2c_all_texts"] = "all"
    class_names: tuple[str, ...] = CLASS_NAMES
    names_are_phrases: bool = False

    def __post_init__(self) -> None:
        if self.condition_on == "each" and self.question != "rationale":
            raise UserError(
                "data.config.condition_on=each is about rationales; set data.config.question=rationale, or give a run "
                "that was trained with it."
            )
        if len(set(self.class_names)) != len(self.class_names):
            raise UserError("data.config.class_names must all be different.")


class VCRDataset(VLDataset):
    """Questions of one jsonl file, grouped by image.

    Args:
        images_root: the folder vcr1images, with the image and metadata files that questions name.
        questions: of the split.
        options: see `VCROptions`.
        training: needs labels.
        errors: what becomes of an error about one record.

    Attributes:
        questions: the questions, in file order. Text index i is question i; with `condition_on` "each" it is question
            i // 4, given answer i % 4; with `question` "both" it is question i // 2, for its answer where i is even.
        groups: text indices of each image, images in order of first mention. Where the boxes depend on the text
            (`objects` other than "all"), every text index is a group of its own.

    Raises:
        FileNotFoundError, ValueError: see the readers; an object's class that `class_names` lacks; training without
            labels or with rationales given each answer.
    """

    known_files = ("images", "questions")
    options = VCROptions
    id_space = "vcr"
    box_sources = (BoxSource.GT,)  # the sentences name the boxes that are given

    def __init__(
        self,
        images_root: str | Path,
        questions: VCRFile,
        options: VCROptions | None = None,
        *,
        training: bool = False,
        errors: RecordErrors = RAISE,
    ) -> None:
        self.images_root = user_path(images_root)
        self.questions = questions
        self.settings = options or VCROptions()
        self.class_names = self.settings.class_names
        self.has_phrases = self.settings.names_are_phrases
        self.parts = [{}]
        self._check_questions(training, errors)
        self._class_of = {name: number for number, name in enumerate(self.class_names)}
        self.per_question = CHOICES if self.settings.condition_on == "each" else 1 + (self.settings.question == "both")
        texts = range(len(self))
        if self.settings.objects != "all":
            self.groups = [[index] for index in texts]
        else:
            self.groups = group_texts(self.questions.image_names[index // self.per_question] for index in texts)

    def _check_questions(self, training: bool, errors: RecordErrors) -> None:
        path = self.questions.path
        if training and self.settings.condition_on == "each":
            raise UserError("data.config.condition_on=each makes prediction files; train with condition_on=right.")
        if not self.questions.has_labels and (training or self._needs_right_answer):
            remedy = "train on another split" if training else "set data.config.condition_on=each"
            raise UserError(f"{path}: the questions have no labels, as in the test split; {remedy}.")
        known = set(self.class_names)
        for name, annot_id in self.questions.class_names.items():
            if name not in known:
                with errors:
                    raise UserError(
                        f"{path} ({annot_id}): the object class '{name}' is none of the {len(known)} classes; correct "
                        "it or give your own list as data.config.class_names."
                    )

    @property
    def _needs_right_answer(self) -> bool:
        return self.settings.question != "answer" and self.settings.condition_on == "right"

    def _is_answer(self, index: int) -> bool:
        """Whether a text index asks for an answer, not for a rationale."""
        if self.settings.question == "both":
            return index % 2 == 0
        if self.settings.question == "in_turn":
            return index % (2 * CHOICES) < CHOICES
        return self.settings.question == "answer"

    @classmethod
    def open(cls, files: DataFiles, options: VCROptions, split: str, wants: Wants) -> VCRDataset:
        """`data.files` holds `images` and `questions`, in which {split} is the split."""
        images, questions = files.path("images", split=split), files.read(VCRFile, files.path("questions", split=split))
        return cls(images, questions, options, training=wants.training, errors=files.errors)

    @classmethod
    def texts_of(cls, files: DataFiles, options: VCROptions, split: str) -> Iterable[str]:
        """All sentences of a split, objects as their class names."""
        questions = files.read(VCRFile, files.path("questions", split=split))
        for index in range(len(questions)):
            one = questions[index]
            for sentence in (one.question, *one.answer_choices, *one.rationale_choices):
                yield " ".join(t if isinstance(t, str) else " ".join(one.objects[o] for o in t) for t in sentence)

    @classmethod
    def class_names_of(cls, options: VCROptions) -> Sequence[str]:
        return options.class_names

    @classmethod
    def wants_given_answer(cls, options: VCROptions) -> bool:
        return options.question == "rationale"

    @classmethod
    def narrowed(cls, sample: Sample, options: VCROptions) -> Sample:
        image, text = sample.images[0], sample.texts[0]
        kept = _kept_objects(options.objects, image.objects.names, [*text.query, *text.choices])
        return dataclasses.replace(sample, images=(dataclasses.replace(image, candidates=kept),))

    def __len__(self) -> int:
        """Number of text indices."""
        return len(self.questions) * self.per_question

    def truths(self) -> Iterable[RightChoice | None]:
        for index in range(len(self)):
            yield self._truth(self.questions[index // self.per_question], index)

    def sample(self, texts: Sequence[int]) -> Sample:
        """Some questions about one image.

        Raises:
            FileNotFoundError: the metadata file is missing; names the question.
            ValueError: a file that cannot be read, or objects that contradict each other.
        """
        question = self.questions[texts[0] // self.per_question]
        where = f"{self.questions.path} ({question.annot_id})"
        metadata = inside(self.images_root, question.metadata_fn, where, follows_links=True)
        size, objects = read_metadata(metadata, question)
        classes = np.array([self._class_of[name] for name in question.objects], dtype=np.int64)
        image = SampleImage(
            question.img_fn,
            inside(self.images_root, question.img_fn, where, follows_links=True),
            size,
            objects=dataclasses.replace(objects, classes=classes),
            candidates=self._candidates(question, texts[0]),
        )
        return Sample((image,), tuple(self._text(index, question) for index in texts))

    def _candidates(self, question: VCRQuestion, index: int) -> tuple[int, ...] | None:
        """Objects that are candidate boxes, in the order of the boxes; None: all of them."""
        is_answer = self._is_answer(index)
        choices = question.answer_choices if is_answer else question.rationale_choices
        sentences = [*self._query(question, index), *choices]
        if self.settings.objects == "mentioned":
            sentences = [question.question, *question.answer_choices, *([] if is_answer else choices)]
        if self.settings.objects == "r2c_all_texts":
            sentences = [question.question, *question.answer_choices, *question.rationale_choices]
        return _kept_objects(self.settings.objects, question.objects, sentences)

    def _query(self, question: VCRQuestion, index: int) -> tuple[Sentence, ...]:
        """The sentences in front of a choice."""
        if self._is_answer(index):
            return (question.question,)
        return (question.question, question.answer_choices[self._given_answer(question, index)])

    def _given_answer(self, question: VCRQuestion, index: int) -> int:
        return question.answer_label if self._needs_right_answer else index % self.per_question

    def _truth(self, question: VCRQuestion, index: int) -> RightChoice | None:
        if not self.questions.has_labels or self.settings.condition_on != "right":
            return None
        return RightChoice(question.answer_label if self._is_answer(index) else question.rationale_label)

    def _text(self, index: int, first: VCRQuestion) -> ChoiceText:
        """One text index; `first` is the question that the image was read for."""
        question = self.questions[index // self.per_question]
        if question.objects != first.objects:
            raise UserError(
                f"{self.questions.path}: {question.annot_id} and {first.annot_id} are about the same image but list "
                "different objects; correct the file"
            )
        is_answer = self._is_answer(index)
        answer = self._given_answer(question, index)
        label = question.answer_label if is_answer else question.rationale_label
        if self.settings.condition_on == "each" and answer != question.answer_label:
            label = None  # rationales are written for the right answer
        facts: dict[str, Any] = {
            "annot_id": question.annot_id,
            "kind": "answer" if is_answer else "rationale",
            "conditioned_on": None if is_answer else answer,
            "label": label,
        }
        if question.family is not None:
            facts["family"] = question.family
        query = self._query(question, index)
        return ChoiceText(
            index,
            " ".join(t if isinstance(t, str) else str(t) for sentence in query for t in sentence),
            facts,
            self._truth(question, index),
            query=query,
            choices=tuple(question.answer_choices if is_answer else question.rationale_choices),
            names_are_phrases=self.settings.names_are_phrases,
        )


def _kept_objects(which: str, objects: Sequence[str], sentences: Sequence[Sentence]) -> tuple[int, ...] | None:
    """Objects that the option `objects` leaves as candidates; None: all of them."""
    if which == "all":
        return None
    return mentioned_objects(sentences) if which == "mentioned" else relevant_objects(objects, sentences)


def mentioned_objects(sentences: Iterable[Sentence]) -> tuple[int, ...]:
    """Objects that the sentences name, in the order of first mention (VL-BERT's rule)."""
    named = (o for sentence in sentences for token in sentence if isinstance(token, list) for o in token)
    return tuple(dict.fromkeys(named))


def relevant_objects(objects: Sequence[str], sentences: Sequence[Sentence]) -> tuple[int, ...]:
    """Objects that R2C keeps, ascending: the named ones; all people if a sentence says "everyone" or names nothing."""
    people = {index for index, name in enumerate(objects) if name == PERSON}
    kept = set(mentioned_objects(sentences))
    says_everyone = any(isinstance(t, str) and t.lower() in EVERYONE for sentence in sentences for t in sentence)
    return tuple(sorted(kept | people if says_everyone or not kept else kept))
