"""Names of metrics: values inside, strings such as `val/accuracy_predicted_boxes/relation` in files and trackers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from e2e_vl.config import BoxSource
from e2e_vl.metrics import baselines
from e2e_vl.registry import check_name

COUNTS = ("count", "unreadable_images")
LOSS = "loss"  # the weighted sum of task and phrase losses, without detection losses; lower is better
SURE_THRESHOLD = "sure_threshold"  # answers of a lower certainty are unsure; None: all are
CEILING = "ceiling"  # the highest possible accuracy with the candidate boxes
_NO_RESULTS = (*COUNTS, baselines.METRIC, SURE_THRESHOLD)  # metrics that do not say how good the answers are


@dataclasses.dataclass(frozen=True)
class MetricName:
    """What was measured: a metric of a split, with candidate boxes from a source."""

    split: str
    metric: str
    source: BoxSource
    detail: str = ""  # family, type of question or class; "" = all texts

    @classmethod
    def read(cls, name: str) -> MetricName | None:
        """Parse a name; None if it is not the name of a metric with a box source."""
        split, _, rest = name.partition("/")
        metric, _, detail = rest.partition("/")
        for source in BoxSource.for_evaluation():
            if metric.endswith(f"_{source.metric_suffix}"):
                return cls(split, metric.removesuffix(f"_{source.metric_suffix}"), source, detail)
        return None

    def __str__(self) -> str:
        return "/".join(filter(None, (self.split, f"{self.metric}_{self.source.metric_suffix}", self.detail)))

    @property
    def boxes(self) -> str:
        """The box source in words, such as "predicted boxes"."""
        return self.source.metric_suffix.replace("_", " ")

    @property
    def whole(self) -> MetricName:
        """The same metric over all texts."""
        return dataclasses.replace(self, detail="")

    @property
    def is_count(self) -> bool:
        return self.metric in COUNTS

    @property
    def is_loss(self) -> bool:
        return self.metric == LOSS

    @property
    def is_ceiling(self) -> bool:
        """Whether it is the best that candidate boxes allow, such as `ceiling_75` and `phrase_ceiling`."""
        return CEILING in self.metric.split("_")

    @property
    def measures_model(self) -> bool:
        """Whether it says how good the answers are: no count, shortcut or threshold, and no upper bound."""
        return self.metric not in _NO_RESULTS and not self.is_ceiling

    @property
    def is_constant(self) -> bool:
        """Whether the value does not improve with training.

        It is a count, a shortcut, the upper bound for given boxes, or the threshold of sure answers.
        """
        is_fixed_ceiling = self.is_ceiling and self.source is not BoxSource.ONLINE
        return is_fixed_ceiling or self.metric in _NO_RESULTS


Metrics: TypeAlias = dict[MetricName, Any]  # values are floats; None: it could not be measured


def name_metrics(scores: Mapping[str, Any], split: str, boxes: BoxSource) -> Metrics:
    """Return a task's scores, such as `accuracy` and `accuracy/relation`, as metrics of a split and a box source."""
    metrics = {}
    for key, value in scores.items():
        metric, _, detail = key.partition("/")
        metrics[MetricName(split, metric, boxes, detail)] = value
    return metrics


def metrics_to_json(metrics: Metrics) -> dict[str, Any]:
    """Return the metrics by their names in files."""
    return {str(name): value for name, value in metrics.items()}


def metrics_from_json(content: Mapping[str, Any]) -> Metrics:
    """Return the metrics in the content of a file such as `metrics.json`; other values are left out."""
    metrics = {}
    for key, value in content.items():
        name = MetricName.read(key)
        if name is not None:
            metrics[name] = value
    return metrics


def choose_metric(name: str, measured: Iterable[MetricName], setting: str) -> MetricName:
    """Return the metric that a setting names.

    A detail of a metric, such as a family of texts, may be missing in the evaluation of a few images.

    Args:
        measured: the metrics of an evaluation.
        setting: the setting's name, for messages.

    Raises:
        UserError: evaluations do not compute it, or training cannot change it.
    """
    choices = {str(metric): metric for metric in measured if not metric.is_constant}
    chosen = MetricName.read(name)
    if chosen is not None and not chosen.is_loss and str(chosen.whole) in choices:
        return chosen
    check_name(name, choices, setting)
    return choices[name]
