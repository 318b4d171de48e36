"""The numbers of an analysis, from sums of two heads that can be checked by hand."""

from __future__ import annotations

import csv

import pytest
import torch

from e2e_vl.analysis.collect import ALL, DEPENDENCIES, ENTITIES, RELATIONS, MeasureKey
from e2e_vl.analysis.measures import HeadSums
from e2e_vl.analysis.options import AttentionOptions
from e2e_vl.analysis.results import AttentionResults, ChosenHead, draw_head_figure, find_best_heads, write_tables
from e2e_vl.structures import AttentionBlock, AttentionGraph


def sums(accuracy: list[float], attention: list[float]) -> HeadSums:
    """Ten examples of one layer with two heads."""
    found = HeadSums(torch.tensor([accuracy]).double() * 10, torch.tensor([attention]).double() * 10, {"chance": 1.0})
    found.count, found.examples = 10, 10
    return found


def results(*, has_entities: bool = True, **change) -> AttentionResults:
    """Entities attend to regions in head 0, the words of the relation amod in head 1."""
    own = {
        MeasureKey("g", ENTITIES): sums([0.2, 0.9], [0.3, 0.1]),
        MeasureKey("g", RELATIONS, ALL): sums([0.5, 0.8], [0.1, 0.4]),
        MeasureKey("g", RELATIONS, "amod"): sums([0.5, 0.8], [0.1, 0.4]),
        MeasureKey("g", DEPENDENCIES): sums([0.6, 0.7], [0.1, 0.4]),
    }
    if not has_entities:
        own[MeasureKey("g", ENTITIES)] = HeadSums.zero(1, 2, ["chance"])
    graphs = {"g": AttentionGraph((0,), frozenset({AttentionBlock.WORDS_TO_REGIONS, AttentionBlock.WORDS_TO_WORDS}))}
    options = AttentionOptions(**change)
    return AttentionResults("r", "e", "d", "val", "gt", "p", options, graphs, own, {}, {"g": ["amod"]}, 1)


@pytest.mark.parametrize(
    ("over", "head", "accuracy", "active"),
    [("examples", "0-1", 0.8, ["no", "yes"]), ("entities", "0-0", 0.5, ["yes", "no"])],
)
def test_heads_are_active_over_the_examples_of_a_relation_or_over_entities(tmp_path, over, head, accuracy, active):
    found = results(active_over=over)
    [row] = found.relation_rows("g")
    assert (row["best active head"], row["accuracy"]) == (head, pytest.approx(accuracy))
    assert row["attention on regions"] == pytest.approx(0.4 if over == "examples" else 0.1), "always of its own words"
    best = found.as_json()["graphs"]["g"]["measures"][RELATIONS]["best_active_head"]
    assert best["head"] == head and f"{accuracy:.4f} (head {head})" in found.lines()[1]
    assert found.best_active("g", ENTITIES) == (0, 0), "entities are measured on themselves"
    assert found.best_active("g", DEPENDENCIES) == (0, 1), "words among themselves read no regions"
    assert find_best_heads(found)[0] == ChosenHead("g", 0, 0)
    write_tables(tmp_path, found)
    with (tmp_path / "relations.csv").open() as file:
        assert [one["active"] for one in csv.DictReader(file)] == active
    picture, other = (draw_head_figure(one, "g", RELATIONS, ["amod"]) for one in (found, results()))
    assert picture.startswith(b"\x89PNG") and (picture == other) == (over == "examples")


def test_without_entities_no_head_is_active_over_them():
    found = results(active_over="entities", has_entities=False)
    assert found.relation_rows("g")[0]["best active head"] == "" and not found.active("g", RELATIONS).any()
    assert results(has_entities=False).relation_rows("g")[0]["best active head"] == "0-1"
