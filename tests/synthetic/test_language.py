from __future__ import annotations

import numpy as np
import pytest

from e2e_vl.synthetic.config import LanguageConfig, SceneConfig
from e2e_vl.synthetic.language import (
    RELATIONS,
    Description,
    ReferringExpression,
    draw_references,
    referent,
    to_words,
)
from e2e_vl.synthetic.scenes import Appearance, Scene, SceneGraph, SceneObject, draw_scene, members
from tests.synthetic.meaning import parse


def make_scene(*boxes: tuple[str, tuple[int, int, int, int]]) -> Scene:
    """Rectangles named "size texture colour shape", painted in this order."""
    objects, covered = [], np.zeros((100, 100), bool)
    for name, (x1, y1, x2, y2) in reversed(boxes):
        size, texture, colour, shape = name.split()
        full = np.zeros_like(covered)
        full[y1:y2, x1:x2] = True
        visible = full & ~covered
        covered |= full
        rows, columns = np.nonzero(visible)
        box = (int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1)
        extent = float(max(x2 - x1, y2 - y1))
        objects.append(SceneObject(Appearance(shape, colour, texture, size), extent, full, visible, box))
    return Scene(np.zeros((100, 100, 3), np.uint8), objects[::-1])


SCENE = make_scene(
    ("big plain red circle", (0, 0, 30, 30)),  # 0: hidden in part by 1
    ("small striped red star", (24, 0, 40, 16)),  # 1
    ("small plain blue circle", (44, 0, 60, 16)),  # 2: 5 pixels from 1
    ("big striped blue circle", (60, 60, 95, 95)),  # 3
    ("small plain blue square", (0, 70, 20, 90)),  # 4
    ("small plain blue cross", (0, 50, 19, 69)),  # 5: a pixel from 4
)


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("the star", 1),
        ("blue circle", None),  # two of them
        ("big blue circle", 3),
        ("large circle with stripes", 3),
        ("the striped big red circle", None),  # none
        ("the biggest thing", 3),
        ("biggest red thing", 0),
        ("smallest thing", None),  # two of nearly the same size
        ("smallest circle", 2),
        ("the smallest star", None),  # the only star: nothing to compare with
        ("circle smaller than the others", 2),
        ("circle smaller than the big red circle", 2),
        ("blue thing bigger than the square", 3),
        ("circle bigger than the star", None),  # two of them, and one as big
        ("circle next to the star", None),  # both are
        ("blue circle next to the star", 2),
        ("thing next to the square", 5),
        ("circle closest to the square", None),  # 0 and 3 are about as far
        ("blue circle nearest to the star", 2),
        ("circle farthest from the star", 3),
        ("thing behind the star", 0),
        ("thing in front of the red circle", 1),
        ("the red thing touching the star", 0),
        ("blue thing touching the star", None),
        ("circle next to the blue circle", None),  # the anchor is not one object
    ],
)
def test_referent(sentence, expected):
    assert referent(parse(sentence), SceneGraph(SCENE)) == expected


def test_an_unclear_object_spoils_an_expression():
    """A second circle at a doubtful distance makes "next to" unclear, though the first one is certainly near."""
    near = ("small plain red circle", (26, 10, 46, 30))
    square = ("small plain blue square", (4, 10, 24, 30))
    for gap, expected in ((4, None), (8, None), (15, 0)):
        below = ("small plain green circle", (4, 30 + gap, 24, 50 + gap))
        graph = SceneGraph(make_scene(near, square, below))
        assert referent(parse("the circle next to the square"), graph) == expected


def test_overlaps_and_distances():
    graph = SceneGraph(SCENE)
    assert members(graph.related["in front"][0]) == [1]
    assert members(graph.related["behind"][1]) == [0]
    assert members(graph.related["overlapping"][0]) == [1]
    assert members(graph.unrelated["overlapping"][0]) == [2, 3, 4, 5]
    assert members(graph.related["near"][1]) == [0, 2]
    assert graph.gap[1, 2] == pytest.approx(5, rel=0.03)
    assert graph.gap[0, 1] == pytest.approx(1, rel=0.03)
    assert graph.distance[2, 4] == pytest.approx(np.hypot(42, 72))


def _random_expression(rng: np.random.Generator) -> ReferringExpression:
    def describe() -> Description:
        values = {
            "size": rng.choice(["small", "big"]),
            "texture": rng.choice(["plain", "striped", "dotted"]),
            "colour": rng.choice(["red", "white"]),
            "shape": rng.choice(["star", "cross"]),
        }
        return Description(**{slot: str(value) for slot, value in values.items() if rng.random() < 0.5})

    operators = [None, "biggest", "smallest", "bigger", "smaller", *RELATIONS]
    operator = operators[rng.integers(len(operators))]
    if operator in (None, "biggest", "smallest"):
        return ReferringExpression(describe(), operator)
    alone = operator in ("bigger", "smaller") and rng.random() < 0.5
    return ReferringExpression(describe(), operator, None if alone else describe())


def test_parse_inverts_to_words():
    rng = np.random.default_rng(0)
    expressions = [_random_expression(rng) for _ in range(1500)]
    assert {expression.family for expression in expressions} == {"attribute", "superlative", "comparison", "relation"}
    for expression in expressions:
        sentence = to_words(expression, rng)
        assert parse(sentence) == expression, sentence
        assert sentence == " ".join(sentence.lower().split())
        assert sentence.replace(" ", "").isalpha()


def test_references_of_a_scene():
    config = LanguageConfig(family_mix={"relation": 1.0}, refs_per_image=(3, 3))
    operators = set()
    for i in range(10):
        rng = np.random.default_rng(i)
        graph = SceneGraph(draw_scene(SceneConfig(), rng))
        references = draw_references(graph, config, rng)
        assert len({item.expression for item in references}) == len(references) <= 9
        for item in references:
            operators.add(item.expression.operator)
            assert referent(item.expression, graph) == item.target
            # The words before the relation alone would not do.
            anchor = item.expression.anchor.mask(graph)
            assert (item.expression.description.mask(graph) & ~anchor).bit_count() >= 2
    assert operators == set(RELATIONS)
