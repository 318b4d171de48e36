"""Metrics by name, such as `val/accuracy_own_boxes/relation`, as tables of box sources and families."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from e2e_vl.metric_names import MetricName


@dataclasses.dataclass(frozen=True)
class MetricTable:
    """Rows of values, one for each box source."""

    title: str
    columns: list[str]  # box sources, in words
    rows: dict[str, list[float | None]]  # name of the row -> a value for each column; None: not measured


def metric_tables(metrics: Mapping[str, Any]) -> list[MetricTable]:
    """All metrics that were measured with some boxes.

    For each split a table of its metrics over all texts, the numbers of texts last, then a table of every metric that
    has families: its rows are all texts and the families.
    """
    names = {name: found for name in metrics if (found := MetricName.read(name)) is not None}
    tables = []
    for split in dict.fromkeys(found.split for found in names.values()):
        values = {found: metrics[name] for name, found in names.items() if found.split == split}
        by_family = dict.fromkeys(found.metric for found in values if found.detail)
        overall = {found: value for found, value in values.items() if not found.detail}
        overall = dict(sorted(overall.items(), key=lambda item: item[0].is_count))
        if overall:
            tables.append(_table(split, {(found.metric, found.boxes): value for found, value in overall.items()}))
        for metric in by_family:
            own = {(f.detail or "all", f.boxes): value for f, value in values.items() if f.metric == metric}
            tables.append(_table(f"{split}: {metric.replace('_', ' ')}", own))
    return tables


def _table(title: str, values: Mapping[tuple[str, str], float | None]) -> MetricTable:
    """A table of values by (row, column), in the order in which rows and columns come."""
    columns = list(dict.fromkeys(column for _, column in values))
    rows = dict.fromkeys(row for row, _ in values)
    table = {row.replace("_", " "): [values.get((row, column)) for column in columns] for row in rows}
    return MetricTable(title, columns, table)
