"""The best model of a run so far, and early stopping.

best/
  config.yaml, detector/, encoder/, task/, tokenizer/    as `save_model` writes them
  best.json                                              metric, value and step
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from detector.errors import UserError
from detector.io import atomic_folder, write_json
from e2e_vl.metrics.names import MetricName
from e2e_vl.run.evaluate import LOSS


@dataclasses.dataclass
class BestModel:
    """Tracks the best evaluation of a run. All processes have the same copy; the main process writes.

    Attributes:
        folder: folder of the best model.
        metric: a metric (higher is better) or a loss (lower is better); None: nothing is tracked.
        patience: training ends after this many evaluations in a row without a better value; None = never.
        step, value: step and value of the best evaluation; None before the first one.
        judged_step: step of the last evaluation.
        waited: evaluations since the best one.
    """

    folder: Path
    metric: str | None = None
    patience: int | None = None
    step: int | None = None
    value: float | None = None
    judged_step: int | None = None
    waited: int = 0

    @property
    def is_over(self) -> bool:
        """Whether `patience` is used up."""
        return self.patience is not None and self.waited >= self.patience

    @property
    def found(self) -> dict[str, Any] | None:
        """Metric, value and step of the best model; None before the first evaluation."""
        return None if self.step is None else {"metric": self.metric, "value": self.value, "step": self.step}

    def check_name(self, metrics: Mapping[str, Any]) -> None:
        """Raise UserError for a metric that evaluations do not compute, or that training cannot change.

        A detail of a metric, such as a family of texts, may be missing in a subset of the images.
        """
        if self.metric is None:
            return
        found = MetricName.read(self.metric)
        has_details = found is not None and found.metric != LOSS
        is_measured = self.metric in metrics or (has_details and str(found.whole) in metrics)
        if not is_measured or (found is not None and found.is_constant):
            names = [name for name in metrics if (other := MetricName.read(name)) is None or not other.is_constant]
            raise UserError(
                f"train.keep_best is '{self.metric}'; it must be one of {', '.join(names) or 'nothing'}, see "
                "data.eval_splits and eval.boxes."
            )

    def judge(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Whether the model of this step is the best so far; False if the step was evaluated before."""
        if self.metric is None or step == self.judged_step:
            return False
        self.check_name(metrics)
        value = metrics.get(self.metric)
        is_best = value is not None and math.isfinite(value)
        if is_best and self.value is not None:
            name = MetricName.read(self.metric)
            is_loss = name is not None and name.metric == LOSS
            is_best = value < self.value if is_loss else value > self.value
        self.judged_step, self.waited = step, 0 if is_best else self.waited + 1
        if is_best:
            self.step, self.value = step, float(value)
        return is_best

    def write(self, save: Callable[[Path], None]) -> None:
        """Write the current model into the folder.

        Args:
            save: writes the model into the folder that it is given.
        """
        with atomic_folder(self.folder) as part:
            save(part)
            write_json(part / "best.json", self.found)

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint saves."""
        return {name: getattr(self, name) for name in ("metric", "step", "value", "judged_step", "waited")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint, unless it belongs to another metric."""
        if self.metric is not None and state["metric"] == self.metric:
            vars(self).update(state)
