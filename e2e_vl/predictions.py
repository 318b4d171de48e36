"""Predictions: the answer of a task to each text, and files of them.

Each task has a subclass of `Prediction` with its answer and the truth. A run writes a JSON list of them per split and
source of boxes; reports read it back. All boxes are xyxy in pixels of the original image.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec

from detector.errors import UserError
from detector.io import read_json, write_text
from e2e_vl.io import Count, FourNumbers, Score, Side, require_unique

Box = FourNumbers  # xyxy
Ranked = tuple[tuple[str, Score], ...]  # answers with their scores, best first

ONLY_PHRASES = "only_phrases"  # key of the record of a text that has phrases and no target of the task
CLEARLY_NAMED = 0.5  # least score of a phrase that names one region clearly


class Overlaps(msgspec.Struct, frozen=True):
    """IoUs with the true box; of several true boxes, the highest counts."""

    refined: float  # of the refined box
    proposal: float  # of the proposal that was chosen
    best_proposal: float  # of the best candidate


class GroundedPhrase(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one phrase of a text names, for a run with `phrases.weight`."""

    text: str
    characters: tuple[Count, Count]  # of the text: the first one and the last plus one
    box: Box | None  # in the first image; None: there is no region
    score: Score  # share of its attention on that box: low where several objects fit
    correct: bool | None = None  # None: its boxes are unknown
    proposal: Box | None = None  # the region of a refined box; None: boxes are not refined
    overlaps: Overlaps | None = None  # None: boxes are not refined, or its boxes are unknown

    @property
    def is_clear(self) -> bool:
        """It names one region clearly; otherwise pictures mark it as unsure."""
        return self.box is not None and self.score >= CLEARLY_NAMED

    @property
    def label(self) -> str:
        """Its words and score, for a picture."""
        return f"{self.text} {self.score:.2f}" + ("" if self.is_clear else ", unsure")

    @property
    def line(self) -> str:
        """Its words, box and score."""
        return f"{self.text}: " + ("no region" if self.box is None else f"{box_text(self.box)} ({self.score:.2f})")


class MaskedRegion(msgspec.Struct, frozen=True):
    """The classes that a pre-trained model predicts for a masked region."""

    box: Box
    classes: Ranked
    seen: tuple[str, Score] | None  # the best class by the detector, which sees it; None: no detector does


class TrueObject(msgspec.Struct, frozen=True):
    """An annotated object of an image."""

    box: Box
    category_id: int
    category: str
    is_crowd: bool
    area: float | None = None  # area of its mask, pixels; None: use the box


class Prediction(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="type", tag=True):
    """What every prediction has; the class of a task adds its answer and the truth."""

    # fields that the data set's metadata may fill: ids, and kinds by which texts are grouped. All others are the
    # task's: the answer, and the truth, which it makes from the text's typed truth
    metadata_fields: ClassVar[frozenset[str]] = frozenset({"family"})
    text_index: int = -1  # number of the text in its data set; -1: it is from none
    text: str = ""
    family: str | None = None  # kind of text, in the synthetic data sets
    file_name: str | None = None  # of the (first) image
    image_size: tuple[Side, Side] | None = None  # (height, width) of the original image
    flipped: bool = False
    truncated_wordpieces: Count = 0  # that did not fit into the text
    correct: Score | None = None  # how right the answer is, see `Task.correctness`; None: the truth is unknown
    is_unsure: bool = False  # it is less certain than the sure answers of the run's validation split
    grounded: tuple[GroundedPhrase, ...] = ()  # phrases of the text; empty for a run that does not ground phrases
    masked_regions: tuple[MaskedRegion, ...] = ()
    metadata: dict[str, Any] = {}  # whatever else the data set has about the text, such as ids

    @classmethod
    def from_record(cls, record: Mapping[str, Any], **answer: Any) -> Self:
        """Create the prediction for a text.

        Args:
            record: the record of the text, see `Batch.records`; keys that are not fields of the class go into
                `metadata`.
            answer: values of the other fields.

        Raises:
            UserError: a value is not of the declared type, such as a score that is NaN.
        """
        values = {**record, **answer}
        fields: dict[str, Any] = {"metadata": {}}
        for name, value in values.items():
            (fields if name in cls.__struct_fields__ else fields["metadata"])[name] = value
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise UserError(
                f"The {cls.__name__} of text {record.get('text_index')} does not hold what it should: {error}; look "
                "for NaN in a diverged model, or for a wrong value in the annotations."
            ) from error

    @property
    def chosen_text(self) -> int:
        """Index of the predicted text among the texts of its question in the batch."""
        return 0

    @property
    def box_names(self) -> Sequence[str]:
        """Names of the candidate boxes in a user's text; empty: they have no names."""
        return ()


class PhrasesOnly(Prediction, kw_only=True):
    """The prediction for a text of joined data sets that has phrases and no target of the task."""


def with_target(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Return the predictions for texts that have a target of the task; the others have phrases only."""
    return [prediction for prediction in predictions if not isinstance(prediction, PhrasesOnly)]


def box_text(box: Sequence[float]) -> str:
    """Return a box in words, in whole pixels."""
    x1, y1, x2, y2 = map(round, box)
    return f"x {x1} to {x2}, y {y1} to {y2}"


def write_list(path: str | Path, entries: Iterable[Any], id_names: Sequence[str] = ()) -> None:
    """Write one JSON list, an entry a line.

    Raises:
        UserError: two entries are equal in the keys `id_names`.
    """
    entries = list(entries)
    if id_names:
        require_distinct_texts(path, ("/".join(str(entry[name]) for name in id_names) for entry in entries))
    lines = b",\n".join(map(msgspec.json.encode, entries))
    write_text(Path(path), f"[\n{lines.decode()}\n]\n")


def require_distinct_texts(path: str | Path, ids: Iterable[str]) -> None:
    """Raise UserError if two predictions of a submission are of texts with one id, as joined data sets may have."""
    remedy = "give the texts of joined data sets different ids, or evaluate each data set alone"
    require_unique(ids, f"{path}: the text", remedy)


def read_predictions(path: Path, kind: type[Prediction]) -> list[Prediction]:
    """Read a file of predictions; raises UserError if it is damaged, or holds predictions of another kind."""
    return read_json(path, list[kind | PhrasesOnly])
