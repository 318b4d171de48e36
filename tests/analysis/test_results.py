"""The numbers of an analysis, from sums of two heads that can be checked by hand, and regions coloured by attention."""

from __future__ import annotations

import csv
import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from e2e_vl.analysis.captions import CaptionAnnotations
from e2e_vl.analysis.collect import ALL, DEPENDENCIES, ENTITIES, RELATIONS, MeasureKey, TextAttention
from e2e_vl.analysis.measures import HeadSums
from e2e_vl.analysis.options import AnalysisConfig
from e2e_vl.analysis.results import (
    AnalysisResults,
    AttentionHead,
    draw_head_figure,
    draw_overlays,
    find_best_heads,
    parse_heads,
    write_tables,
)
from e2e_vl.analysis.run import write_page
from e2e_vl.drawing import draw_heat_map
from e2e_vl.structures import AttentionBlock, AttentionGraph

WORDS = {"g": AttentionGraph((0,), frozenset({AttentionBlock.WORDS_TO_REGIONS, AttentionBlock.WORDS_TO_WORDS}))}
GRAPHS = {"language": AttentionGraph((0, 1), frozenset({AttentionBlock.WORDS_TO_WORDS})), "joint": AttentionGraph((2,))}


def results(graphs=GRAPHS, sums=None, relations=(), **options) -> AnalysisResults:
    shown = {name: [*relations] for name in graphs}
    return AnalysisResults(
        *("r", "e", "d", "val", "gt", None), AnalysisConfig(**options), graphs, sums or {}, {}, shown, 1
    )


def two_heads(*, has_entities: bool = True, **options) -> AnalysisResults:
    """Ten examples of each measure. Entities attend to regions in head 0, the words of the relation amod in head 1."""

    def sums(accuracy: list[float], attention: list[float]) -> HeadSums:
        shares = torch.tensor([accuracy]).double(), torch.tensor([attention]).double()
        return HeadSums(*(10 * share for share in shares), {"chance": 1.0}, 10, 10)

    own = {
        MeasureKey("g", ENTITIES): sums([0.2, 0.9], [0.3, 0.1]),
        MeasureKey("g", RELATIONS, ALL): sums([0.5, 0.8], [0.1, 0.4]),
        MeasureKey("g", RELATIONS, "amod"): sums([0.5, 0.8], [0.1, 0.4]),
        MeasureKey("g", DEPENDENCIES): sums([0.6, 0.7], [0.1, 0.4]),
    }
    if not has_entities:
        del own[MeasureKey("g", ENTITIES)]
    return results(WORDS, own, ["amod"], **options)


@pytest.mark.parametrize(
    ("over", "head", "accuracy", "active"),
    [("examples", "0-1", 0.8, ["no", "yes"]), ("entities", "0-0", 0.5, ["yes", "no"])],
)
def test_heads_are_active_over_the_examples_of_a_relation_or_over_entities(tmp_path, over, head, accuracy, active):
    found = two_heads(active_over=over)
    [row] = found.relation_rows("g")
    assert (row["best active head"], row["accuracy"]) == (head, pytest.approx(accuracy))
    assert row["attention on regions"] == pytest.approx(0.4 if over == "examples" else 0.1), "always of its own words"
    measures = found.as_json()["graphs"]["g"]["measures"]
    assert measures[RELATIONS]["best_active_head"]["head"] == head
    assert np.array(measures[ENTITIES]["accuracy"]) == pytest.approx(np.array([[0.2, 0.9]]))
    assert np.array(measures[ENTITIES]["attention"]) == pytest.approx(np.array([[0.3, 0.1]]))
    assert f"{accuracy:.4f} (head {head})" in found.summary_lines()[1]
    assert re.match(rf"g/{RELATIONS}/amod +{accuracy:.4f} \(head {head}\);", found.summary_lines()[2])
    assert found.best_active_head("g", ENTITIES) == (0, 0), "entities are measured on themselves"
    assert found.best_active_head("g", DEPENDENCIES) == (0, 1), "words among themselves read no regions"
    assert find_best_heads(found)[0] == AttentionHead("g", 0, 0)
    write_tables(tmp_path, found)
    with (tmp_path / "heads.csv").open() as file:
        assert [one["active"] for one in csv.DictReader(file) if one["relation"] == "amod"] == active
    picture, other = (draw_head_figure(one, "g", RELATIONS, ["amod"]) for one in (found, two_heads()))
    assert picture.startswith(b"\x89PNG") and (picture == other) == (over == "examples")


@pytest.mark.parametrize(("share", "active"), [(0.05, [True, True]), (0.2, [False, True]), (0.5, [False, False])])
def test_a_head_is_active_above_a_share_of_attention_on_regions(share, active):
    """The share of the words of relations is 0.1 in one head and 0.4 in the other."""
    assert two_heads(active_above=share).active_heads("g", RELATIONS).tolist() == [active]


def test_without_entities_no_head_is_active_over_them():
    found = two_heads(active_over="entities", has_entities=False)
    assert found.relation_rows("g")[0]["best active head"] == "" and not found.active_heads("g", RELATIONS).any()
    assert two_heads(has_entities=False).relation_rows("g")[0]["best active head"] == "0-1"


def test_heads_are_chosen_by_graph_and_number():
    options = AnalysisConfig(first_number=1)
    heads = [AttentionHead("joint", 0, 2), AttentionHead("language", 1, 0)]
    assert parse_heads(["1-3", "language:2-1"], GRAPHS, options, 3) == heads
    for word in ("1-4", "language:3-1", "vision:1-1", "10", "a-b", "1-2-3", "0-3"):
        with pytest.raises(ValueError, match=f"--heads has '{word}'"):
            parse_heads([word], GRAPHS, options, 3)


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


def seen(file: Path, size: tuple[int, int] = (9, 9)) -> TextAttention:
    """A text with one phrase, [CLS] phrase | two regions. A dollar sign would begin a formula."""
    height, width = size
    boxes = np.array([[0.0, 0, width / 2, height], [width / 4, height / 4, width, height]])
    spans = np.array([[1, 2]])
    caption = CaptionAnnotations(
        *("a caption", ["a phrase of many words"], spans, [boxes[:1]], ["$_$"], spans, [0], [True], []),
        np.array([False, True]),
    )
    maps = {name: np.full((len(graph.steps), 1, 4, 4), 0.25, np.float16) for name, graph in GRAPHS.items()}
    return TextAttention(7, caption, str(file), boxes, np.ones(2, bool), np.array([[True, False]]), 2, maps)


@pytest.mark.parametrize("size", [(900, 90), (1500, 2000)])
def test_pictures_of_images_of_any_shape(tmp_path, size):
    file = tmp_path / "image.png"
    Image.fromarray(np.full((*size, 3), 120, np.uint8)).save(file)
    heads = [AttentionHead("joint", 0, 0), AttentionHead("language", 1, 0)]
    region, word = draw_overlays(tmp_path / "out", results(first_number=1), [seen(file, size)], heads)
    assert region.file.name == "000007_joint_1-1_0.jpg" and word.file.name == "000007_language_2-1.png"
    assert "0.50 of the attention is on regions; the most attended one is correct" in region.note
    for overlay in (region, word):
        with Image.open(overlay.file) as picture:
            assert min(picture.size) >= 160 and 300 <= max(picture.size) <= 1600


def test_pictures_show_what_the_head_word_attends_to(tmp_path):
    """[CLS] of two words, the first of which is the head, | two regions; a second phrase has no words."""
    caption = CaptionAnnotations(
        *("a caption", ["the head", "none"], np.array([[0, 2], [0, 2]]), [np.array([[0.0, 0, 5, 9]])] * 2),
        *(["the", "head"], np.array([[0, 1], [1, 2]]), [0, 0], [True, False], [], np.array([True, True]), True),
    )
    text = dataclasses.replace(seen(tmp_path / "no.png"), caption=caption, is_correct=np.array([[True, False]] * 2))
    text.maps["joint"][:, :, 0] = (0.1, 0.1, 0.2, 0.6)

    def notes(**options) -> list[str]:
        found = draw_overlays(tmp_path, results(**options), [text], [AttentionHead("joint", 0, 0)])
        return [one.note.partition(" of")[0] for one in found]

    assert notes(entity_piece="head") == ["0.80"] and notes() == ["0.50", "0.50"]


def test_pictures_are_of_the_chosen_layer_and_head(tmp_path):
    """Two layers of three heads, each with another share of attention on the regions."""
    graphs = {"joint": AttentionGraph((0, 1))}
    maps = np.zeros((2, 3, 4, 4), np.float16)
    maps[:, :, 1, 2] = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]
    text = dataclasses.replace(seen(tmp_path / "no.png"), maps={"joint": maps})
    chosen = [AttentionHead("joint", layer, head) for layer in (0, 1) for head in (0, 1, 2)]
    found = draw_overlays(tmp_path / "out", results(graphs, first_number=1), [text], chosen)
    assert [one.note.partition(" of")[0] for one in found] == [f"0.{number}0" for number in range(1, 7)]
    assert [one.title.rpartition(" ")[2] for one in found] == ["1-1", "1-2", "1-3", "2-1", "2-2", "2-3"]


def test_attention_is_summed_over_the_regions_of_an_object(tmp_path, monkeypatch):
    """One word, [CLS] word | four regions: two boxes of a phrase, and two others. The second of two layers is best."""
    drawn = {}
    monkeypatch.setattr("e2e_vl.analysis.results.draw_maps", lambda *given: drawn.update(map=given) or b"")
    boxes = np.array([[0.0, 0, 9, 9], [20, 0, 29, 9], [40, 0, 49, 9], [60, 0, 69, 9]])
    old = seen(tmp_path / "no.png")
    caption = dataclasses.replace(old.caption, boxes=[boxes[[0, 2]] + 1])
    maps = np.zeros((2, 2, 6, 6), np.float16)
    maps[1, 0, 1] = [0, 0.125, 0.25, 0.125, 0.375, 0.125]
    text = dataclasses.replace(
        *(old,),
        caption=caption,
        region_boxes=boxes,
        allowed=np.array([True, True, True, False]),
        is_correct=np.zeros((1, 4), bool),
        maps={"g": maps},
    )
    hits = torch.tensor([[0.0, 2.0], [5.0, 1.0]]).double()
    sums = {MeasureKey("g", ENTITIES): HeadSums(hits, hits, {}, 10, 10)}
    found = draw_overlays(tmp_path, results({"g": AttentionGraph((0, 1))}, sums), [text], [AttentionHead("g", 0, 0)])
    titles, rows, columns, values = drawn["map"]
    assert (titles, rows, columns) == (["head 0-1", "head 1-0"], ["$_$"], ["a phrase of many words", "*"])
    assert values.tolist() == [[[0, 0]], [[0.625, 0.125]]]
    assert found[-1].file.name == "000007_g_objects.png" and "summed over" in found[-1].note


def test_an_image_that_is_missing_is_said_on_the_page(tmp_path):
    overlays = draw_overlays(tmp_path / "out", results(), [seen(tmp_path / "no.png")], [])
    region = next(one for one in overlays if one.graph == "joint")
    assert region.file is None and "no.png" in region.problem
    page = write_page(tmp_path / "page.html", results(), {}, overlays).read_text()
    assert "No picture: " in page and "no.png" in page
