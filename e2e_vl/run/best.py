"""The best model of a run so far, and when to stop because no better one comes.

best/
  config.yaml, detector/, encoder/, task/, tokenizer/    as `save_model` writes them
  best.json                                              metric, value and step

A checkpoint remembers which model was the best. If a better one comes after the checkpoint, the older one moves into
the checkpoint's folder, so that a run that is resumed there has it again.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from detector.errors import UserError
from detector.io import atomic_folder, read_json, write_json
from e2e_vl.config import BoxSource
from e2e_vl.data.batching import ExampleDataset
from e2e_vl.metrics.names import MetricName
from e2e_vl.records import Count, Record
from e2e_vl.run.optim import LOSS

logger = logging.getLogger(__name__)

FILE = "best.json"
POSITION = ("metric", "step", "value", "judged_step", "waited")  # attributes that a checkpoint keeps


def check_metric_name(metric: str, splits: Sequence[str], sources: Sequence[BoxSource]) -> None:
    """Check all of `train.keep_best` that is known without an evaluation.

    Raises:
        ValueError: the name does not fit the form SPLIT/METRIC_BOXES, its split or boxes are not evaluated, or the
            metric is a constant such as the number of texts.
    """
    found = MetricName.read(metric)
    if found is None or found.split not in splits or found.source not in sources or found.is_constant:
        forms = [str(MetricName(split, "METRIC", source)) for split in splits for source in sources]
        raise UserError(
            f"train.keep_best is '{metric}'; it must be the name of a metric that training can change, of what is "
            f"evaluated: {', '.join(forms) or 'nothing, see data.eval_splits and eval.boxes'}."
        )


class _Best(Record):
    """What `BestModel.write` leaves beside a model; only the step is read again."""

    step: Count


@dataclasses.dataclass
class BestModel:
    """Judges the evaluations of a run; every process has the same one, and one of them writes.

    Attributes:
        folder: of the best model.
        metric: name of the metric, of which more is better, or of the loss, of which less is; None judges nothing.
        patience: number of evaluations in a row without a better value after which training ends; None = never.
        step, value: of the best evaluation; None before there is one.
        judged_step: of the last evaluation that was judged.
        waited: evaluations since the best one.
        checkpoint: folder of the newest checkpoint that remembers the model in `folder`.
        is_remembered: the run goes on from a checkpoint that judged by the same metric.
    """

    folder: Path
    metric: str | None = None
    patience: int | None = None
    step: int | None = None
    value: float | None = None
    judged_step: int | None = None
    waited: int = 0
    checkpoint: Path | None = None
    is_remembered: bool = False

    @property
    def is_over(self) -> bool:
        """No better model came for too long."""
        return self.patience is not None and self.waited >= self.patience

    @property
    def found(self) -> dict[str, Any] | None:
        """Metric, value and step of the best model, if there is one."""
        return None if self.step is None else {"metric": self.metric, "value": self.value, "step": self.step}

    def check_name(self, metrics: Mapping[str, Any]) -> None:
        """Raises ValueError unless evaluations give the metric, or the metric that it is a detail of.

        A metric that training cannot change is refused, too.
        """
        if self.metric is None:
            return
        # a family of texts may be missing in a part of the images
        found = MetricName.read(self.metric)
        has_details = found is not None and found.metric != LOSS
        is_measured = self.metric in metrics or (has_details and str(found.whole) in metrics)
        if not is_measured or (found is not None and found.is_constant):
            names = [name for name in metrics if (other := MetricName.read(name)) is None or not other.is_constant]
            raise UserError(f"train.keep_best is '{self.metric}'; it must be one of {', '.join(names)}.")

    def judge(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Whether the model of this step is the best so far; a step is judged once."""
        if self.metric is None or step == self.judged_step:
            return False
        self.check_name(metrics)
        value = metrics.get(self.metric)
        is_best = value is not None and math.isfinite(value) and (self.value is None or self._is_better(value))
        self.judged_step, self.waited = step, 0 if is_best else self.waited + 1
        if is_best:
            self.step, self.value = step, float(value)
        return is_best

    @property
    def prefers_less(self) -> bool:
        """The model is judged by a loss."""
        found = MetricName.read(self.metric or "")
        return found is not None and found.metric == LOSS

    def _is_better(self, value: float) -> bool:
        return value < self.value if self.prefers_less else value > self.value

    def write(self, save: Callable[[Path], None]) -> None:
        """Put the model that was just judged into the folder; `save` writes it into a folder of any name."""
        with atomic_folder(self.folder) as part:
            save(part)
            write_json(part / FILE, self.found)
            if self.folder.exists() and self.checkpoint is not None and self.checkpoint.is_dir():
                kept = self.checkpoint / self.folder.name
                shutil.rmtree(kept, ignore_errors=True)  # of another metric
                self.folder.replace(kept)
        self.checkpoint = None

    def judged_images(self, data: Mapping[tuple[str, BoxSource], ExampleDataset], limit: int | None) -> int:
        """Number of images behind the value that the best model was chosen by.

        Args:
            data: by split and boxes.
            limit: most images of an evaluation; None = all.
        """
        name = MetricName.read(self.metric)
        number = len(data[name.split, name.source].groups)
        return number if limit is None else min(number, limit)

    def position(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {name: getattr(self, name) for name in POSITION}

    def prepare(self, position: Mapping[str, Any], checkpoint: Path) -> None:
        """Know what was known when the checkpoint was saved; what was measured by another metric is forgotten.

        Args:
            position: what the checkpoint kept; empty if it knows of no best model.
        """
        self.checkpoint = checkpoint
        self.is_remembered = self.metric is not None and position.get("metric") == self.metric
        if self.is_remembered:
            vars(self).update({name: position[name] for name in POSITION})

    def go_on(self, *, is_writer: bool) -> None:
        """Put the model that `prepare` knows of into the folder, from the checkpoints if a later one took its place.

        Args:
            is_writer: True on the process that moves the files.
        """
        if not self.is_remembered or not is_writer:
            return
        # the newest of the checkpoints that remember a model has it, also if the run goes on from an earlier one
        places = [self.folder, *sorted(self.checkpoint.parent.glob(f"step_*/{self.folder.name}"))]
        found = next((place for place in places if _step_in(place) == self.step), None)
        if found not in (None, self.folder) and self.step is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            found.replace(self.folder)
        if self.step != _step_in(self.folder):
            shutil.rmtree(self.folder, ignore_errors=True)
            if self.step is not None:
                logger.warning(
                    "The best model, of step %d, is lost with the checkpoint that kept it; only a model with %s than "
                    "%g for %s will be kept.",
                    *(self.step, "less" if self.prefers_less else "more", self.value, self.metric),
                )


def _step_in(folder: Path) -> int | None:
    """The step of the best model in a folder; None: there is none."""
    try:
        return read_json(folder / FILE, _Best).step
    except (OSError, ValueError):
        return None
