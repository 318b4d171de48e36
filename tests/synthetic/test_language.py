"""What an expression is true of; that drawn ones are true in words is judged in `test_coco.py`."""

from __future__ import annotations

import numpy as np
import pytest

from e2e_vl.synthetic.config import TEXTURES, SceneConfig
from e2e_vl.synthetic.language import Description, ReferringExpression, identify_each_value, referent
from e2e_vl.synthetic.scenes import Appearance, Scene, SceneGraph, SceneObject

VALUES = SceneConfig(textures=TEXTURES).values


def description(words: str) -> Description:
    return Description(**{slot: word for word in words.split() for slot, values in VALUES.items() if word in values})


def meant(scene: Scene, words: str, operator: str | None, anchor: str | None) -> int | None:
    anchored = None if anchor is None else description(anchor)
    return referent(ReferringExpression(description(words), operator, anchored), SceneGraph(scene))


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
    ("words", "operator", "anchor", "expected"),
    [
        ("star", None, None, 1),
        ("blue circle", None, None, None),  # two of them
        ("big blue circle", None, None, 3),
        ("striped big red circle", None, None, None),  # none
        ("thing", "biggest", None, 3),
        ("red thing", "biggest", None, 0),
        ("thing", "smallest", None, None),  # two of nearly the same size
        ("circle", "smallest", None, 2),
        ("star", "smallest", None, None),  # the only star: nothing to compare with
        ("circle", "smaller", None, 2),
        ("circle", "smaller", "big red circle", 2),
        ("blue thing", "bigger", "square", 3),
        ("circle", "bigger", "star", None),  # two of them, and one as big
        ("circle", "near", "star", None),  # both are
        ("blue circle", "near", "star", 2),
        ("thing", "near", "square", 5),
        ("circle", "nearest", "square", None),  # 0 and 3 are about as far
        ("blue circle", "nearest", "star", 2),
        ("circle", "farthest", "star", 3),
        ("thing", "behind", "star", 0),
        ("thing", "in front", "red circle", 1),
        ("red thing", "overlapping", "star", 0),
        ("blue thing", "overlapping", "star", None),
        ("circle", "near", "blue circle", None),  # the anchor is not one object
    ],
)
def test_referent(words, operator, anchor, expected):
    assert meant(SCENE, words, operator, anchor) == expected


@pytest.mark.parametrize(("gap", "expected"), [(4, None), (8, None), (15, 0)])
def test_an_unclear_object_spoils_an_expression(gap, expected):
    """A second circle at a doubtful distance makes "near" unclear, though the first one is certainly near."""
    near = ("small plain red circle", (26, 10, 46, 30))
    square = ("small plain blue square", (4, 10, 24, 30))
    below = ("small plain green circle", (4, 30 + gap, 24, 50 + gap))
    assert meant(make_scene(near, square, below), "circle", "near", "square") == expected


def test_distances_are_between_pixels_and_between_centres():
    graph = SceneGraph(SCENE)
    assert [graph.gap[0, 1], graph.gap[1, 2], graph.gap[1, 3]] == pytest.approx([1, 5, np.hypot(21, 45)], rel=0.02)
    assert graph.distance[2, 4] == pytest.approx(np.hypot(42, 72))


def test_a_rare_value_is_asked_for_as_often_as_a_frequent_one():
    graph = SceneGraph(SCENE)
    rng = np.random.default_rng(0)
    num_red = 0
    for _ in range(400):
        identified = identify_each_value(graph, "colour", rng)
        colours = [graph.appearances[index].colour for index, _ in identified]
        assert sorted(colours) == ["blue", "red"]
        for index, drawn in identified:
            assert drawn.colour is None
            assert drawn.mask(graph) == 1 << index
        num_red += colours[0] == "red"
    assert 170 < num_red < 230  # of six objects two are red
