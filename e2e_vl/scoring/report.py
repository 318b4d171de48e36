"""What a scoring is asked for, and what it reports: lines for a reader, the same facts as JSON."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from detector.errors import UserError
from e2e_vl.data.official_sizes import name_number
from e2e_vl.scoring.intervals import PERCENT, RESAMPLES, SEED
from e2e_vl.scoring.matching import Matches
from e2e_vl.scoring.measures import Measure
from e2e_vl.scoring.phrase_answers import PhraseMatches
from e2e_vl.scoring.truths import Truths


@dataclasses.dataclass(frozen=True)
class ScoreOptions:
    """How a file of predictions is read and scored."""

    predictions: Path
    data: str  # what the data set is called in sentences
    split: str
    questions: Path | None = None  # what the model was asked; None: the records name their expressions
    answer_key: str | None = None  # of the prediction in a record; None: the one that is there
    layout: str | None = None  # of boxes, one of `LAYOUTS`; None: the format's
    scale: str | None = None  # of boxes, "pixels" or a key of `SCALES`; None: the format's, or found
    iou: str = "continuous"  # one of `CONVENTIONS`
    min_score: float | None = None  # of predicted boxes, where an expression may have several
    missing: str | None = None  # texts without a record are "wrong" or left out ("skip"); None: an error
    skip_unknown: bool = False  # leave out records about other texts; False: an error
    resamples: int = RESAMPLES

    @property
    def counts_missing(self) -> bool:
        """Whether texts without a record count."""
        return self.missing != "skip"


@dataclasses.dataclass
class Report:
    """What the command prints and writes."""

    lines: list[str] = dataclasses.field(default_factory=list)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    measures: list[Measure] = dataclasses.field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        measures = {}
        for measure in self.measures:
            interval = None if math.isnan(measure.interval[0]) else list(measure.interval)
            measures[measure.name] = {"value": measure.value, "interval": interval, "count": measure.count}
        return {**self.facts, "counts": self.counts, "measures": measures}


def check_records(
    options: ScoreOptions, num_records: int, matches: Matches | PhraseMatches, truths: Truths, report: Report
) -> None:
    """Report how many records are missing, repeated or unknown.

    Raises:
        UserError: some are missing or unknown, and no option says what to do with them.
    """
    missing = matches.missing
    unknown = matches.unknown
    hint = name_number(num_records)
    if hint:
        hint = f" ({num_records:,} are {hint})"
    if unknown and not options.skip_unknown:
        raise UserError(
            f"{unknown[0].where} and {len(unknown) - 1:,} more of {num_records:,} records{hint} are about no text of "
            f"the split {options.split}; choose another --split or --protocol, or leave them out with --skip-unknown."
        )
    if missing and options.missing is None:
        raise UserError(
            f"{options.predictions}: {missing:,} of {len(truths):,} texts of the split {options.split} have no record "
            f"in its {num_records:,}{hint}; count them as wrong with --missing wrong, or leave them out with --missing "
            "skip."
        )
    if missing == len(truths):
        raise UserError(f"{options.predictions}: no record is about a text of the split {options.split}.")
    counts = {"records": num_records, "missing": missing, "repeated": matches.repeated, "unknown": len(unknown)}
    report.counts |= counts
    treatment = ""
    if not options.counts_missing:
        treatment = " (left out)"
    elif missing:
        treatment = " (wrong)"
    report.lines.append(
        f"{num_records:,} records: {missing:,} texts without one{treatment}, {matches.repeated:,} repeated, "
        f"{len(unknown):,} unknown"
    )


def add_measures(options: ScoreOptions, report: Report) -> None:
    """Print a line per measure, in per cent."""
    if options.resamples > 0:
        report.lines.append(f"[{PERCENT} % intervals: {options.resamples:,} resamples of whole images, seed {SEED}]")
    report.facts |= {"resamples": options.resamples, "resampled": "images"}
    width = max(len(measure.name) for measure in report.measures)
    for measure in report.measures:
        interval = ""
        if options.resamples > 0:
            low, high = measure.interval
            interval = f"  [{100 * low:.2f}, {100 * high:.2f}]"
        report.lines.append(f"  {measure.name:{width}s}  {100 * measure.value:6.2f}{interval}  of {measure.count:,}")
