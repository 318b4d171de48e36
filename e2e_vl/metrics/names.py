"""Build and parse metric names, such as `val/accuracy_predicted_boxes/relation`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from e2e_vl.config import BoxSource

COUNTS = ("count", "unreadable_images")


@dataclasses.dataclass(frozen=True)
class MetricName:
    """The parts of a metric's name."""

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
        """Whether it is the number of evaluated texts, or of unreadable images."""
        return self.metric in COUNTS

    @property
    def measures_model(self) -> bool:
        """Whether it is neither a count nor the upper bound for the candidate boxes."""
        return self.metric not in (*COUNTS, "ceiling")

    @property
    def is_constant(self) -> bool:
        """Whether training cannot change the value: a count, or the upper bound for given boxes."""
        return self.is_count or (self.metric == "ceiling" and self.source is not BoxSource.ONLINE)


def named_metrics(scores: Mapping[str, Any], split: str, boxes: BoxSource) -> dict[str, Any]:
    """`accuracy` -> `val/accuracy_predicted_boxes`; `accuracy/relation` -> `val/accuracy_predicted_boxes/relation`."""
    named = {}
    for key, value in scores.items():
        metric, _, detail = key.partition("/")
        named[str(MetricName(split, metric, boxes, detail))] = value
    return named
