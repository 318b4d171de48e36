"""VCR: choose one of four answers, or of four rationales.

A batch has four texts per question, one per choice. Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
import torch.nn.functional as F
from jaxtyping import Float, Int64
from msgspec import Meta
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from detector.errors import UserError
from detector.io import atomic_file
from detector.structures import Detector, Loss
from e2e_vl.drawing import draw_boxes
from e2e_vl.io import Score
from e2e_vl.phrases import TextPhrases
from e2e_vl.predictions import ONLY_PHRASES, Box, Prediction, Ranked
from e2e_vl.preprocessing import EncodedText, GeneratorFactory, Preprocessor
from e2e_vl.samples import (
    AnnotatedObjects,
    ChoiceText,
    CorrectChoice,
    DatasetInfo,
    Question,
    Sample,
    SampleText,
    Sentence,
)
from e2e_vl.structures import Ability, Batch, EncoderOutput, ModelOutput, TaskOutput, TextRegions, at_least_float32
from e2e_vl.targets import Targets, stacked
from e2e_vl.tasks.base import (
    Head,
    HeadInit,
    InstanceMasks,
    PredictionSummary,
    Sizes,
    Task,
    Transform,
    load_predicted_image,
)
from e2e_vl.tasks.config import NEUTRAL_NAMES, VCRConfig
from e2e_vl.tasks.submission import SecondRun, Submission
from e2e_vl.text import TextEncoding, TextTokenizer, truncate_fronts
from e2e_vl.transforms import LoadedImage

# Metrics and the leaderboard file. Q->A and QA->R are accuracies of the arg-max, and Q->AR is the share of questions
# with both right (`eval_q2ar.py` of the official R2C code). QA->R is conditioned on the right answer.

CHOICES = 4
Number = Annotated[int, Meta(ge=0, lt=CHOICES)]  # index of a choice
ANSWER_COLUMNS = tuple(f"answer_{i}" for i in range(CHOICES))
RATIONALE_COLUMNS = tuple(
    f"rationale_conditioned_on_a{answer}_{rationale}"
    for answer, rationale in itertools.product(range(CHOICES), repeat=2)
)
COLUMNS = ("annot_id", *ANSWER_COLUMNS, *RATIONALE_COLUMNS)


class VCRPrediction(Prediction, kw_only=True):
    """The predicted choice among four answers, or four rationales."""

    metadata_fields = Prediction.metadata_fields | {"annot_id", "kind", "conditioned_on"}  # together, a text's id
    probabilities: tuple[Score, Score, Score, Score]
    choice: Number  # the predicted choice
    choices: tuple[str, ...] = ()  # as text
    label: Number | None = None  # the right choice; None: unknown
    named_boxes: tuple[tuple[str, Box], ...] = ()  # the candidate objects
    kind: Literal["answer", "rationale"] = "answer"
    annot_id: str = ""
    conditioned_on: Number | None = None  # the given answer, for rationales

    @property
    @override
    def chosen_text(self) -> int:
        return self.choice

    @property
    @override
    def box_names(self) -> list[str]:
        return [name for name, _ in self.named_boxes]


class LeaderboardScores(NamedTuple):
    """The contents of the leaderboard file."""

    annot_ids: list[str]  # U, unique
    answers: np.ndarray  # float64 [U, 4], one score per answer
    rationales: np.ndarray  # float64 [U, 4, 4]: scores of rationales (last axis) for each given answer


def write_submission(path: Path, answers_run: Sequence[VCRPrediction], rationales_run: Sequence[VCRPrediction]) -> None:
    """Write the leaderboard file of a Q->A run and a QA->R run, see `join_predictions`."""
    write_leaderboard(path, join_predictions(answers_run, rationales_run))


def write_leaderboard(path: Path, scores: LeaderboardScores) -> None:
    """Write the leaderboard file: a header, and a row of 21 columns per question with scores in full precision."""
    with atomic_file(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for annot_id, answers, rationales in zip(*scores, strict=True):
            row = np.concatenate([answers, rationales.reshape(-1)])
            writer.writerow([annot_id, *(repr(float(score)) for score in row)])


def join_predictions(
    answers_run: Sequence[VCRPrediction], rationales_run: Sequence[VCRPrediction]
) -> LeaderboardScores:
    """Join the predictions of a Q->A run and of a QA->R run; the latter with condition_on=each.

    Returns the scores, in the order of `answers_run`.
    """
    answers = _by_question(answers_run, "answer")
    rationales = _by_question(rationales_run, "rationale")
    annot_ids = [annot_id for annot_id, _ in answers]
    rationale_keys = list(itertools.product(annot_ids, range(CHOICES)))
    missing_keys = [key for key in rationale_keys if key not in rationales]
    if missing_keys:
        annot_id, answer = missing_keys[0]
        raise UserError(
            f"There is no rationale prediction for the question {annot_id} with answer {answer}, and for "
            f"{len(missing_keys) - 1} more; predict rationales of the same split with data.config.condition_on=each."
        )
    answer_scores = [prediction.probabilities for prediction in answers.values()]
    rationale_scores = [rationales[key].probabilities for key in rationale_keys]
    return LeaderboardScores(
        annot_ids,
        np.array(answer_scores, dtype=np.float64).reshape(-1, CHOICES),
        np.array(rationale_scores, dtype=np.float64).reshape(-1, CHOICES, CHOICES),
    )


def joint_metrics(answers_run: Sequence[VCRPrediction], rationales_run: Sequence[VCRPrediction]) -> dict[str, float]:
    """Return the accuracies "Q->A", "QA->R" and "Q->AR" of a Q->A run and a QA->R run on the same split, as fractions.

    Rationales for a wrong answer are not counted. Empty if the split has no labels.
    """
    if any(prediction.label is None for prediction in answers_run):
        return {}
    answers = _by_question(answers_run, "answer")
    rationales = _by_question(rationales_run, "rationale")
    right_answers = []
    right_rationales = []
    both_right = []
    for answer in answers.values():
        rationale = rationales[answer.annot_id, answer.label]
        right_answers.append(answer.choice == answer.label)
        right_rationales.append(rationale.choice == rationale.label)
        both_right.append(right_answers[-1] and right_rationales[-1])
    number = len(answers)
    return {
        "Q->A": sum(right_answers) / number,
        "QA->R": sum(right_rationales) / number,
        "Q->AR": sum(both_right) / number,
    }


def _by_question(predictions: Sequence[VCRPrediction], kind: str) -> dict[tuple[str, int | None], VCRPrediction]:
    """Return the predictions by `annot_id` and `conditioned_on`."""
    by_question = {}
    for prediction in predictions:
        if prediction.kind != kind:
            raise UserError(
                f"The prediction for {prediction.annot_id} is for the {prediction.kind}, expected the {kind}: give the "
                "predictions of the Q->A run first, then the predictions of the QA->R run."
            )
        by_question[prediction.annot_id, prediction.conditioned_on] = prediction
    return by_question


# Sentences with object names, as in the official code of VL-BERT and VisualBERT

PERSON = "person"
_TAG = re.compile(r"\[\s*(\d+(?:\s*,\s*\d+)*)\s*\]")


class Piece(NamedTuple):
    """One wordpiece."""

    id: int
    row: int  # row of the candidate box it refers to; -1 = none
    word: int  # index of its word in the sentence; "and" between two objects is a separate word


def name_objects(objects: Sequence[str], names: Sequence[str] = NEUTRAL_NAMES, start: int = 0) -> list[str]:
    """Name each object in the text: people get the names in turn, from `start` on; other objects get their class."""
    result = []
    person = start
    for class_name in objects:
        if class_name == PERSON:
            result.append(names[person % len(names)])
            person += 1
        else:
            result.append(class_name)
    return result


def name_objects_by_mention(
    sentence: Sentence,
    objects: Sequence[str],
    names: Sequence[str],
    named: Mapping[int, str],
    *,
    restarts: bool = False,
) -> dict[int, str]:
    """Return `named` and the objects that the sentence mentions: people get the next names, others their class.

    The next name is the one after those of the people in `named`. With `restarts` it is the first name again, so two
    people may share a name (R2C's code, which VisualBERT uses). `named`: names of objects that earlier sentences
    mention, by index.
    """
    result = dict(named)
    person = 0 if restarts else sum(objects[number] == PERSON for number in named)
    for token in sentence:
        if isinstance(token, str):
            continue
        for number in token:
            if number in result:
                continue
            if objects[number] == PERSON:
                result[number] = names[person % len(names)]
                person += 1
            else:
                result[number] = objects[number]
    return result


def sentence_words(sentence: Sentence, names: Sequence[str], join_word: str | None = "and") -> list[tuple[str, int]]:
    """Return the words of the sentence, with names for objects, each with the index of its object (-1 = none)."""
    words: list[tuple[str, int]] = []
    for token in sentence:
        if isinstance(token, str):
            words.append((token, -1))
            continue
        for position, index in enumerate(token):
            if position and join_word:
                words.append((join_word, -1))
            words.append((names[index], index))
    return words


def encode_sentence(
    sentence: Sentence,
    names: Sequence[str],
    rows: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    join_word: str | None = "and",
    first_word: int = 0,
) -> list[Piece]:
    """Split every word into wordpieces; the pieces of an object's name have the row of its box.

    `join_word`: word between several objects; None leaves it out (R2C).
    """
    pieces = []
    for number, (word, object_index) in enumerate(sentence_words(sentence, names, join_word), start=first_word):
        row = rows[object_index] if object_index >= 0 else -1
        ids = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(word))
        pieces += [Piece(piece_id, row, number) for piece_id in ids]
    return pieces


def rows_by_word_number(encoding: TextEncoding, *texts: Sequence[Piece]) -> Int64[np.ndarray, " L"]:
    """Return the row of each named object at the position equal to its word number; -1 elsewhere.

    This is a bug in the official VisualBERT code, which confuses words and wordpieces. Words are numbered from the
    start of each text, so positions are too small after a word with several wordpieces, and too large if the front of
    the text was truncated. Positions beyond the end are dropped.
    """
    rows = np.full(len(encoding.input_ids), -1, dtype=np.int64)
    first = 0
    for pieces in texts:
        for piece in pieces:
            position = int(np.flatnonzero(encoding.source == first)[0]) + piece.word
            if piece.row >= 0 and position < len(rows):
                rows[position] = piece.row
        first += len(pieces)
    return rows


def truncate_choices(front: Sequence[Piece], choices: list[list[Piece]], limit: int) -> None:
    """Truncate front + choice to `limit` wordpieces, in place, by removing the first pieces of the choice.

    (A bug in the official VisualBERT code: it is meant to truncate the front too, as `e2e_vl.text.truncate_fronts`
    does, but uses the length of the pair as the length of the front.)
    """
    for choice in choices:
        del choice[: max(len(front) + len(choice) - limit, 0)]


def truncate_answers(question: list[Piece], answers: list[list[Piece]], limit: int) -> None:
    """Truncate question + answer to `limit` wordpieces, in place, by removing the last pieces of the longer one.

    If both are equally long, the question is truncated. The four choices share the question, so truncating it for one
    of them truncates it for all (official code).
    """
    for answer in answers:
        while len(question) + len(answer) > limit:
            longer = answer if len(answer) > len(question) else question
            longer.pop()


def truncate_rationales(question: list[Piece], answer: list[Piece], rationales: list[list[Piece]], limit: int) -> None:
    """Truncate question + answer + rationale to `limit` wordpieces, in place.

    The rationale is truncated while it is longer than question and answer together; otherwise the question, down to one
    piece, and then the answer (official code).
    """
    for rationale in rationales:
        while len(question) + len(answer) + len(rationale) > limit:
            if len(rationale) > len(question) + len(answer):
                rationale.pop()
            elif len(question) > 1:
                question.pop()
            else:
                answer.pop()


def parse_sentence(text: str, num_objects: int) -> Sentence:
    """Split a text such as "Why is [0] smiling at [1,2]?" into words and lists of objects."""
    sentence: Sentence = []
    for position, part in enumerate(_TAG.split(text)):  # text, tag, text, tag, ...
        if position % 2 == 0:
            sentence += part.split()
            continue
        objects = [int(number) for number in part.split(",")]
        if max(objects) >= num_objects:
            raise UserError(
                f"'{text}' refers to the object [{max(objects)}], but has only {num_objects} boxes; give its box too."
            )
        sentence.append(objects)
    return sentence


def choice_phrases(
    encoding: TextEncoding,
    texts: Sequence[Sequence[Piece]],
    words: Sequence[Sequence[str]],
    boxes: Float[np.ndarray, "R 4"] | None,
) -> TextPhrases:
    """Find the phrases of a front and its choice: the names of objects, with the objects' boxes.

    Args:
        words: the words of front and choice, indexed by `Piece.word`; they are joined by spaces.
        boxes: xyxy in pixels of the resized image, indexed by `Piece.row`; None: names are not phrases.

    All wordpieces of a word have the offsets of the whole word, because texts are tokenized word by word. Names that
    were truncated completely are dropped.
    """
    characters = np.zeros((sum(map(len, texts)) + 1, 2), dtype=np.int64)  # the last row is for special wordpieces
    runs: list[tuple[int, int, int]] = []  # row of the box, first piece, last piece + 1
    first_character = 0
    first_piece = 0
    for text_words, pieces in zip(words, texts, strict=True):
        widths = [len(word) + 1 for word in text_words]  # each with the space after it
        word_starts = list(itertools.accumulate(widths, initial=first_character))
        for number, piece in enumerate(pieces, start=first_piece):
            word_start = word_starts[piece.word]
            characters[number] = word_start, word_start + len(text_words[piece.word])
        start = first_piece
        for (_, row), run in itertools.groupby(pieces, lambda piece: (piece.word, piece.row)):
            end = start + len(list(run))
            if row >= 0:
                runs.append((row, start, end))
            start = end
        first_character = word_starts[-1]
        first_piece += len(pieces)
    named_runs = [] if boxes is None else runs
    position_of = {int(number): position for position, number in enumerate(encoding.source) if number >= 0}
    spans = [(position_of[start], position_of[end - 1] + 1) for _, start, end in named_runs]
    offsets = characters[encoding.source]
    continues = (offsets[1:] == offsets[:-1]).all(axis=1) & (offsets[1:, 1] > 0)
    return TextPhrases(
        words=" ".join(itertools.chain.from_iterable(words)),
        offsets=offsets,
        continues_word=np.append(False, continues),
        spans=np.array(spans, dtype=np.int64).reshape(-1, 2),
        boxes=[np.asarray(boxes[row : row + 1], dtype=np.float32) for row, _, _ in named_runs],
        is_complete=False,
    )


@dataclasses.dataclass
class VCRTargets(Targets):
    """Which choices are right."""

    is_correct: float | np.float32 | Float[Tensor, " M"] | None = stacked()  # 1 for the right choice of each four


@dataclasses.dataclass(frozen=True)
class VCRPreprocessor(Preprocessor):
    """Encodes four texts per question, one per choice; wordpieces of object names have the row of the object's box."""

    prediction_class = VCRPrediction
    learns_from = (CorrectChoice,)
    config: VCRConfig = dataclasses.field(default_factory=VCRConfig)

    @override
    def truth_record(self, truth: CorrectChoice, *, flipped: bool) -> dict[str, Any]:
        return {"label": truth.number}

    @override
    def placeholder_targets(self) -> VCRTargets:
        return VCRTargets(np.float32(0))

    @override
    def encode_text(
        self, text: SampleText, sample: Sample, images: Sequence[LoadedImage], make_generator: GeneratorFactory
    ) -> Iterable[EncodedText]:
        if not isinstance(text, ChoiceText):
            yield self._encode_without_choices(text, images)
            return
        [image] = sample.images
        config = self.config
        names, rows = self._object_names(text, image.objects, image.candidates, make_generator)
        in_choices = self._names_in_choices(text, image.objects, names)
        fronts, choices = self._pieces(text, names, in_choices, rows)
        query_words: list[str] = []
        for sentence in text.query:
            query_words += [word for word, _ in sentence_words(sentence, names, config.join_word)]
        choice_words: list[list[str]] = []
        for choice, choice_names in zip(text.choices, in_choices, strict=True):
            choice_words.append([word for word, _ in sentence_words(choice, choice_names, config.join_word)])
        named_boxes = []
        for name, row, box in zip(names, rows, image.objects.boxes, strict=True):
            if row >= 0:
                named_boxes.append((name, tuple(box.tolist())))
        record = self.record(text, images) | {
            "text": " ".join(query_words),
            "choices": [" ".join(words) for words in choice_words],
            "named_boxes": named_boxes,
        }
        boxes = None
        if text.names_are_phrases and self.text_tokenizer.with_phrase_spans:
            if config.ground_words:
                raise UserError(
                    "data.config.names_are_phrases trains the model to predict the region of a name, but "
                    "task.config.ground_words gives it that region; set one of them to false."
                )
            boxes = images[text.image_index[0]].boxes
        for number, (front, choice) in enumerate(zip(fronts, choices, strict=True)):
            encoding = self.text_tokenizer.pair([piece.id for piece in front], [piece.id for piece in choice])
            region_of_token = None
            if config.ground_words and config.grounding_position == "word_number":
                region_of_token = rows_by_word_number(encoding, front, choice)
            elif config.ground_words:
                region_of_token = encoding.place([piece.row for piece in (*front, *choice)])
            phrases = None
            if self.text_tokenizer.with_phrase_spans:
                phrases = choice_phrases(encoding, (front, choice), (query_words, choice_words[number]), boxes)
            is_correct = None
            if text.truth is not None and text.is_learned:
                is_correct = np.float32(number == text.truth.number)
            yield EncodedText(
                encoding,
                text.image_index,
                record,
                VCRTargets(is_correct),
                region_of_token=region_of_token,
                phrases=phrases,
            )

    def _encode_without_choices(self, text: SampleText, images: Sequence[LoadedImage]) -> EncodedText:
        """Encode a text of another data set, with phrases but without choices, truncated to `max_pieces`."""
        if not self.lacks_target(text):
            raise UserError(
                f"'{text.words}' has no choices, so VCR cannot train on it; leave out its data set, or set "
                "phrases.weight if it has phrases with boxes."
            )
        mirrored = bool(text.image_index) and images[text.image_index[0]].image_transform.flipped
        pieces = self.text_tokenizer.pieces(text.words, mirrored=mirrored)
        encoding = self.text_tokenizer.single(pieces[: self.config.max_pieces])
        return EncodedText(encoding, text.image_index, self.record(text, images, encoding), self.placeholder_targets())

    def _object_names(
        self,
        text: ChoiceText,
        objects: AnnotatedObjects,
        candidates: Sequence[int] | None,
        make_generator: GeneratorFactory,
    ) -> tuple[list[str], list[int]]:
        """Return the name of each object in the front, and the row of its box (-1 = none)."""
        people = self.config.people_names
        start = 0
        if self.text_tokenizer.training and self.config.rotate_names:
            # the third random number: the first two are for the image
            start = int(make_generator(text.index).random(3)[2] * len(people))
        if candidates is None:
            candidates = range(len(objects))
        names = list(objects.names)
        rows = [-1] * len(objects)
        candidate_names = name_objects([objects.names[number] for number in candidates], people, start)
        for row, (number, name) in enumerate(zip(candidates, candidate_names, strict=True)):
            names[number] = name
            rows[number] = row
        if self.config.name_order == "mention":
            query_tokens = list(itertools.chain.from_iterable(text.query))
            by_mention = name_objects_by_mention(query_tokens, objects.names, people, {})
            names = [by_mention.get(number, name) for number, name in enumerate(objects.names)]
        return names, rows

    def _names_in_choices(self, text: ChoiceText, objects: AnnotatedObjects, names: list[str]) -> list[list[str]]:
        """Return the names of all objects in each choice; `names` are those in the front."""
        if self.config.name_order == "box":
            return [names] * len(text.choices)
        in_query: dict[int, str] = {}
        for token in itertools.chain.from_iterable(text.query):
            if isinstance(token, list):
                in_query |= {number: names[number] for number in token}
        people = self.config.people_names
        restarts = self.config.names_restart_in_choices
        in_choices = []
        for choice in text.choices:
            by_mention = name_objects_by_mention(choice, objects.names, people, in_query, restarts=restarts)
            in_choices.append([by_mention.get(number, name) for number, name in enumerate(names)])
        return in_choices

    def _pieces(
        self, text: ChoiceText, names: list[str], in_choices: list[list[str]], rows: list[int]
    ) -> tuple[list[list[Piece]], list[list[Piece]]]:
        """Return the wordpieces of the four fronts and of the four choices, truncated."""
        config = self.config
        limit = config.max_pieces

        def encode(sentence: Sentence, names: list[str], first_word: int = 0) -> list[Piece]:
            if self.text_tokenizer.is_blank:
                return []
            tokenizer = self.text_tokenizer.tokenizer
            return encode_sentence(sentence, names, rows, tokenizer, config.join_word, first_word)

        query: list[list[Piece]] = []  # the question, and the answer for rationales
        num_words = 0
        for sentence in text.query:
            query.append([] if config.blank_question else encode(sentence, names, num_words))
            num_words += len(sentence_words(sentence, names, config.join_word))
        choices = [encode(choice, choice_names) for choice, choice_names in zip(text.choices, in_choices, strict=True)]
        if config.truncation == "longer" and not _is_unlabelled_rationale(text):
            if len(query) == 1:
                truncate_answers(*query, choices, limit)
            else:
                truncate_rationales(*query, choices, limit)
        front = list(itertools.chain.from_iterable(query))
        if config.truncate_choices_only:
            truncate_choices(front, choices, limit)
        if config.truncation == "longer" or config.truncate_choices_only:
            return [front] * len(choices), choices
        fronts = []
        shortened_choices = []
        for choice in choices:
            lost_of_front, lost_of_choice = truncate_fronts(len(front), len(choice), limit)
            fronts.append(front[lost_of_front:])
            shortened_choices.append(choice[lost_of_choice:])
        return fronts, shortened_choices


def _is_unlabelled_rationale(text: ChoiceText) -> bool:
    """Return whether rationales for a given answer are predicted without a label.

    The official VL-BERT code truncates their texts in training and validation, but not in its test mode.
    """
    return text.metadata.get("conditioned_on") is not None and text.truth is None


class VCRTask(Task):
    """Scores each choice from the summary, and classifies every region from its state."""

    example_call = """
    "photo.jpg",
    "Why is [0] smiling at [1] ?",
    boxes=["person:10,20,80,200", "person:90,30,160,210"],
    choices=["[1] told a joke", "[0] is tired", "it is raining", "[1] has left"]"""
    prediction_class = VCRPrediction
    submission = Submission(
        write_submission,
        # rationales, given each of the four answers
        SecondRun(("data.config.condition_on=each",), "--rationale-run", joint_metrics),
    )
    copies_first_segment = True
    init_from = HeadInit(
        copies={"masked_regions.transform.": "region_classifier.transform."},
        difference=("relationship.head.", "head.output."),
        random=("region_classifier.output.", "head.output."),
    )

    def __init__(self, hidden_size: int, config: VCRConfig | None = None, summary_size: int | None = None):
        super().__init__()
        config = config or VCRConfig()
        self.config = config
        self.instance_masks = InstanceMasks.from_settings(config.mask_size, config.mask_at)
        self.head = Head(summary_size or hidden_size, None, config.dropout, config.head_init)
        self.region_classifier = None
        if config.region_loss_weight > 0:
            self.region_classifier = Head(
                hidden_size,
                config.num_classes,
                config.region_dropout,
                config.initializer_range,
                transform=Transform(hidden_size),
            )

    @classmethod
    @override
    def build(cls, sizes: Sizes, config: VCRConfig) -> Self:
        return cls(sizes.hidden_size, config, sizes.summary_size)

    @property
    @override
    def needs(self) -> tuple[Ability, ...]:
        if self.config.ground_words:
            return (Ability.SUMMARY_OF_PAIR, Ability.NAMED_REGIONS)
        return (Ability.SUMMARY_OF_PAIR,)

    @classmethod
    @override
    def extra_words(cls, config: VCRConfig) -> Iterable[str]:
        return (*config.people_names, config.join_word or "")

    @override
    def preprocessor(self, text_tokenizer: TextTokenizer) -> VCRPreprocessor:
        return VCRPreprocessor(text_tokenizer, self.config)

    @override
    def question(self, question: Question) -> Sample:
        """Return the sample of a question with four choices; texts refer to the user's boxes as [0] or [1,2].

        Boxes without a class name are people; without outlines, the mask is the whole box.
        """
        user_boxes = question.boxes
        has_answer = question.answer is not None
        if user_boxes is None or len(question.choices) != CHOICES or has_answer != question.accepts_answer:
            other = "the answer, for which it chooses a rationale" if question.accepts_answer else "no answer"
            raise UserError(f"This run takes boxes, such as person:10,20,80,200, four choices, and {other}.")
        names = user_boxes.names or (PERSON,) * len(user_boxes)
        classes = question.class_names or names
        unknown_names = [name for name in names if name not in classes]
        if unknown_names:
            raise UserError(
                f"{user_boxes.origin}: the class '{unknown_names[0]}' is not one of the run's {len(classes)} classes "
                f"({', '.join(classes[:4])}, ...)."
            )
        outlines = user_boxes.outlines
        if not outlines:
            outlines = []
            for x1, y1, x2, y2 in user_boxes.boxes:
                rectangle = np.array([[x1, y1], [x2 + 1, y1], [x2 + 1, y2 + 1], [x1, y2 + 1]])
                outlines.append([rectangle])
        objects = dataclasses.replace(
            user_boxes,
            classes=np.array([classes.index(name) for name in names], dtype=np.int64),
            names=names,
            outlines=outlines,
        )
        query = [question.text]
        if question.answer is not None:
            query.append(question.answer)
        text = ChoiceText(
            0,
            question.text,
            {"annot_id": "asked", "kind": "rationale" if question.answer else "answer"},
            query=tuple(parse_sentence(sentence, len(objects)) for sentence in query),
            choices=tuple(parse_sentence(choice, len(objects)) for choice in question.choices),
        )
        return question.sample(text, objects=objects, takes_choices=True)

    @override
    def check_data(self, info: DatasetInfo, detector: Detector) -> None:
        names = info.class_names
        if self.region_classifier is not None and names is not None and len(names) >= self.config.num_classes:
            raise UserError(
                f"task.config.num_classes is {self.config.num_classes}, but the data set has {len(names)} classes "
                f"plus the whole image; set it to {len(names) + 1}."
            )

    @override
    def forward(self, batch: Batch, text_regions: TextRegions, encoded: EncoderOutput) -> TaskOutput:
        """Score the four choices of U questions; texts that only have phrases are ignored.

        Returns `logits` float32 [U, 4]; if the batch has labels, the loss `choice` (count: choices with "sigmoid",
        questions with "softmax") and the weighted loss `region_class` (count: regions of all choices).
        """
        targets = batch.targets or VCRTargets()
        logits = at_least_float32(self.head(targets.with_target(encoded.summary))).view(-1, CHOICES)
        losses = {}
        if targets.is_correct is not None:
            is_correct = targets.with_target(targets.is_correct).view_as(logits)
            if self.config.loss == "sigmoid":
                total = F.binary_cross_entropy_with_logits(logits, is_correct.to(logits.dtype), reduction="sum")
                count = logits.numel()
            else:
                total = F.cross_entropy(logits, is_correct.argmax(dim=1), reduction="sum")
                count = len(logits)
            losses["choice"] = Loss(total=total, count=logits.new_tensor(float(count)))
            if self.region_classifier is not None:
                losses["region_class"] = self._region_loss(batch, text_regions, encoded.regions)
        return TaskOutput(losses=losses, logits=logits)

    def _region_loss(self, batch: Batch, text_regions: TextRegions, states: Float[Tensor, "M R E"]) -> Loss:
        """Classify every region of every choice, with the whole image as class 0."""
        is_classified = text_regions.attention_mask
        if batch.targets.has_target is not None:
            is_classified = is_classified & batch.targets.has_target[:, None]
        index = is_classified.nonzero(as_tuple=True)
        classes = text_regions.gather(batch.region_labels.classes, fill=-1)[index] + 1
        scores = at_least_float32(self.region_classifier(states[index]))
        total = F.cross_entropy(scores, classes, reduction="sum") * self.config.region_loss_weight
        return Loss(total=total, count=total.new_full((), len(scores)))

    @override
    def predict(self, output: ModelOutput) -> list[VCRPrediction]:
        """Return one prediction per question, with the phrases of the chosen text.

        Probabilities are a softmax over the choices for both losses (official code).
        """
        probabilities = output.task.logits.softmax(dim=1).tolist()
        best = output.task.logits.argmax(dim=1).tolist()
        records = output.batch.records
        choice_records = [record for record in records if not record.get(ONLY_PHRASES)]
        predictions = [self.prediction(record) for record in records if record.get(ONLY_PHRASES)]
        for number, (shares, choice) in enumerate(zip(probabilities, best, strict=True)):
            record = choice_records[CHOICES * number + choice]
            predictions.append(self.prediction(record, probabilities=shares, choice=choice))
        return predictions

    @override
    def correctness(self, prediction: VCRPrediction) -> float | None:
        return None if prediction.label is None else float(prediction.choice == prediction.label)

    @override
    def score_of(self, prediction: VCRPrediction) -> float:
        return prediction.probabilities[prediction.choice]

    @override
    def metrics(self, predictions: list[VCRPrediction]) -> dict[str, float]:
        """Return `accuracy` over the questions with a label, and `accuracy/<family>` if they have a family.

        They are Q->A or QA->R accuracies, depending on `data.config.question`.
        """
        scores: dict[str, list[float]] = defaultdict(list)
        for prediction in predictions:
            if prediction.label is not None:
                score = self.correctness(prediction)
                scores["accuracy"].append(score)
                if prediction.family is not None:
                    scores[f"accuracy/{prediction.family}"].append(score)
        return {name: sum(values) / len(values) for name, values in sorted(scores.items())}

    @override
    def draw(self, prediction: VCRPrediction) -> np.ndarray:
        boxes = [box for _, box in prediction.named_boxes]
        return draw_boxes(load_predicted_image(prediction), boxes, prediction.box_names)

    @override
    def describe(self, prediction: VCRPrediction) -> PredictionSummary:
        choices = prediction.choices
        probabilities = prediction.probabilities
        label = prediction.label
        truth = ""
        note = ""
        if label is not None:
            truth = choices[label]
            if label != prediction.choice:
                note = f"the right choice has {probabilities[label]:.2f}"
        return PredictionSummary(
            question=prediction.text,
            answer=choices[prediction.choice],
            score=probabilities[prediction.choice],
            truth=truth,
            note=note,
            group=prediction.family or "",
        )

    @override
    def ranked(self, prediction: VCRPrediction) -> Ranked:
        pairs = zip(prediction.choices, prediction.probabilities, strict=True)
        return tuple(sorted(pairs, key=lambda pair: -pair[1]))
