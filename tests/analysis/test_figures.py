"""Regions coloured by attention: values, overlaps, and images of any shape; maps among words."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from PIL import Image

from e2e_vl.analysis.captions import CaptionAnnotations
from e2e_vl.analysis.collect import RecordedText
from e2e_vl.analysis.options import AttentionOptions
from e2e_vl.analysis.results import AttentionResults, ChosenHead, draw_overlays, draw_word_map, parse_heads
from e2e_vl.analysis.run import write_page
from e2e_vl.drawing import draw_heat_map
from e2e_vl.structures import AttentionBlock, AttentionGraph

GRAPHS = {
    "language": AttentionGraph((0, 1), frozenset({AttentionBlock.WORDS_TO_WORDS})),
    "joint": AttentionGraph((2,)),
}


def test_the_most_attended_region_is_the_reddest_and_the_rest_is_grey():
    image = np.full((20, 30, 3), (0, 0, 255), dtype=np.uint8)
    boxes = np.array([[0.0, 0, 10, 20], [5, 0, 20, 20]])
    found = draw_heat_map(image, boxes, np.array([0.1, 0.4])).astype(int)
    assert (image == (0, 0, 255)).all(), "the image is not changed"
    rest, weak, overlap, strong = found[10, 25], found[10, 2], found[10, 7], found[10, 15]
    assert (overlap == strong).all(), "the highest value counts"
    assert rest[2] > weak[2] > strong[2] and strong[0] > rest[0]
    assert (draw_heat_map(image, boxes, np.zeros(2)) == found[10, 25]).all()
    assert (draw_heat_map(image, boxes[:0], np.zeros(0)) == found[10, 25]).all()


def seen(file: str, size: tuple[int, int], phrase: str) -> RecordedText:
    """A text with one phrase, [CLS] phrase | two regions."""
    height, width = size
    boxes = np.array([[0.0, 0, width / 2, height], [width / 4, height / 4, width, height]])
    caption = CaptionAnnotations(
        *("a caption", [phrase], np.array([[1, 2]]), [boxes[:1]], ["word"], np.array([[1, 2]]), [0], [True], []),
        np.array([False, True]),
    )
    maps = {name: np.full((len(graph.steps), 1, 4, 4), 0.25, np.float16) for name, graph in GRAPHS.items()}
    return RecordedText(7, caption, file, boxes, np.ones(2, bool), np.array([[True, False]]), 2, maps)


def results(options: AttentionOptions | None = None, **sums) -> AttentionResults:
    options = options or AttentionOptions(first_number=1)
    return AttentionResults(
        "r", "e", "d", "val", "gt", None, options, GRAPHS, sums, {}, {name: [] for name in GRAPHS}, 1
    )


@pytest.mark.parametrize("size", [(900, 90), (1500, 2000)])
def test_pictures_of_images_of_any_shape(tmp_path, size):
    file = tmp_path / "image.png"
    Image.fromarray(np.full((*size, 3), 120, np.uint8)).save(file)
    heads = [ChosenHead("joint", 0, 0), ChosenHead("language", 1, 0)]
    text = seen(str(file), size, "a phrase of many words")
    region, word = draw_overlays(tmp_path / "out", results(), [text], heads)
    assert region.file.name == "000007_joint_1-1_0.jpg" and word.file.name == "000007_language_2-1.png"
    assert "50 % of the attention is on regions; the most attended one is right" in region.note
    for overlay in (region, word):
        with Image.open(overlay.file) as picture:
            assert min(picture.size) >= 160 and 300 <= max(picture.size) <= 1600


def test_pictures_show_what_the_head_word_attends_to(tmp_path):
    """[CLS] of two words, the first of which is the head, | two regions; a second phrase has no words."""
    caption = CaptionAnnotations(
        *("a caption", ["the head", "none"], np.array([[0, 2], [0, 2]]), [np.array([[0.0, 0, 5, 9]])] * 2),
        *(["the", "head"], np.array([[0, 1], [1, 2]]), [0, 0], [True, False], [], np.array([True, True]), True),
    )
    text = seen(str(tmp_path / "no.png"), (9, 9), "x")
    text = dataclasses.replace(text, caption=caption, is_right=np.array([[True, False]] * 2))
    text.maps["joint"][:, :, 0] = (0.1, 0.1, 0.2, 0.6)
    options = AttentionOptions(entity_piece="head")
    [head] = draw_overlays(tmp_path / "out", results(options), [text], [ChosenHead("joint", 0, 0)])
    assert "80 % of the attention is on regions" in head.note and "the head" in head.title
    last = draw_overlays(tmp_path / "out", results(), [text], [ChosenHead("joint", 0, 0)])
    assert ["50 %" in one.note for one in last] == [True, True]


def test_pictures_are_of_the_chosen_layer_and_head(tmp_path):
    """Two layers of three heads, each with another share of attention on the regions."""
    graphs = {"joint": AttentionGraph((0, 1))}
    text = seen(str(tmp_path / "no.png"), (9, 9), "x")
    maps = np.zeros((2, 3, 4, 4), np.float16)
    maps[:, :, 1, 2] = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]
    text = dataclasses.replace(text, maps={"joint": maps})
    chosen = [ChosenHead("joint", layer, head) for layer in (0, 1) for head in (0, 1, 2)]
    found = draw_overlays(tmp_path / "out", dataclasses.replace(results(), graphs=graphs), [text], chosen)
    assert [one.note.partition(" %")[0] for one in found] == ["10", "20", "30", "40", "50", "60"]
    assert [one.title.rpartition(" ")[2] for one in found] == ["1-1", "1-2", "1-3", "2-1", "2-2", "2-3"]


def test_an_image_that_is_missing_is_said_on_the_page(tmp_path):
    overlays = draw_overlays(tmp_path / "out", results(), [seen(str(tmp_path / "no.png"), (9, 9), "x")], [])
    region = next(one for one in overlays if one.graph == "joint")
    assert region.file is None and "no.png" in region.problem
    page = write_page(tmp_path / "page.html", results(), {}, overlays).read_text()
    assert "No picture: " in page and "no.png" in page


def test_heads_are_chosen_by_graph_and_number():
    options = AttentionOptions(first_number=1)
    assert parse_heads(["1-3", "language:2-1"], GRAPHS, options, 3) == [
        *(ChosenHead("joint", 0, 2), ChosenHead("language", 1, 0)),
    ]
    for word in ("1-4", "language:3-1", "vision:1-1"):
        with pytest.raises(ValueError, match=f"--heads has '{word}'"):
            parse_heads([word], GRAPHS, options, 3)


def test_words_are_shown_as_they_are_written():
    """A dollar sign would begin a formula."""
    assert draw_word_map("layer 0, head 1: $x", ["$_$", "$5-$10", r"\frac"], np.eye(3)).startswith(b"\x89PNG")
