"""What each choice does to phrases, regions and pairs of words, on captions that can be counted by hand."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from detector.structures import ImageBatch, Regions
from e2e_vl.analysis.captions import CAPTION_KEY, CaptionAnnotations, Relation
from e2e_vl.analysis.collect import (
    ALL,
    CONFIDENCE,
    DEPENDENCIES,
    ENTITIES,
    LARGEST,
    RELATIONS,
    AttentionStatistics,
    MeasureInputs,
    MeasureKey,
    add_batch,
    add_text,
    choose_queries,
    choose_texts,
    count_text,
    counted_phrases,
    find_correct_regions,
    list_grounded_pairs,
    list_word_pairs,
)
from e2e_vl.analysis.measures import Measurement
from e2e_vl.analysis.options import AnalysisConfig
from e2e_vl.structures import AttentionBlock, AttentionGraph, Batch, EncoderOutput, TextBatch, gather_regions

# [CLS] red star on it [SEP] | three regions. "red star" names region 0 or 1, "it" has no box; a third phrase ("on")
# has a box that no region overlaps.
CAPTION = CaptionAnnotations(
    words="red star on it",
    phrases=["red star", "it", "on"],
    phrase_spans=np.array([[1, 3], [4, 5], [3, 4]]),
    boxes=[np.array([[0.0, 0, 10, 10], [20, 0, 30, 10]]), np.zeros((0, 4)), np.array([[90.0, 90, 99, 99]])],
    forms=["red", "star", "on", "it"],
    word_spans=np.array([[1, 2], [2, 3], [3, 4], [4, 5]]),
    phrase_of=[0, 0, 2, 1],
    is_head=[False, True, True, True],
    relations=[Relation(1, 0, "amod"), Relation(1, 2, "prep"), Relation(2, 3, "pobj")],
    is_word=np.array([False, True, True, True, True, False]),
    is_parsed=True,
)
BOXES = np.array([[0.0, 0, 10, 10], [20, 0, 30, 10], [0, 0, 30, 10]])


def view(options: AnalysisConfig) -> MeasureInputs:
    right = np.array([find_correct_regions(BOXES, own, options) for own in CAPTION.boxes])
    areas = torch.tensor([100.0, 100, 300])
    return MeasureInputs(CAPTION, 6, BOXES, torch.ones(3, dtype=torch.bool), torch.from_numpy(right), {LARGEST: areas})


def numbers(found: AttentionStatistics, measure: str = ENTITIES, label: str = ALL) -> tuple[int, float, float]:
    """Examples, accuracy and mean attention of the one head of graph "g"."""
    sums = found.sums[MeasureKey("g", measure, label)]
    return sums.examples, sums.accuracy.item(), sums.mean_attention.item()


def test_several_gold_boxes_are_any_of_them_or_one_around_all():
    def right(**change):
        return find_correct_regions(BOXES, CAPTION.boxes[0], AnalysisConfig(**change)).tolist()

    assert right() == [True, True, False]
    assert right(gold_boxes="union") == [False, False, True]
    assert right(min_iou=1 / 3) == [True, True, True]  # 100 / 300, inclusive
    assert not find_correct_regions(BOXES, CAPTION.boxes[1], AnalysisConfig()).any()
    half = np.array([[0, 0, 10, 20.000001], [0, 0, 10, 20.01]])  # the first is half covered but for rounding
    assert find_correct_regions(half, np.array([[0.0, 0, 10, 10]]), AnalysisConfig()).tolist() == [True, False]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [True, False, True]),
        ({"without_box": "miss"}, [True, True, True]),
        ({"without_region": "skip"}, [True, False, False]),
        ({"without_box": "miss", "without_region": "skip"}, [True, True, False]),
    ],
)
def test_phrases_without_boxes_or_regions_are_missed_or_left_out(change, expected):
    options = AnalysisConfig(**change)
    assert counted_phrases(view(options), options).tolist() == expected


def test_relations_have_two_directions():
    caption = dataclasses.replace(CAPTION, relations=CAPTION.relations[:1])
    assert list_word_pairs(caption, AnalysisConfig()) == [(0, 1, "amod"), (1, 0, "amod")]
    labelled = [(0, 1, "amod, to its governor"), (1, 0, "amod, from its governor")]
    assert list_word_pairs(caption, AnalysisConfig(directions="separate")) == labelled


def test_w1_is_any_word_of_a_counted_phrase_or_its_head():
    counted = [True, False, False]
    found = set(list_grounded_pairs(CAPTION, counted, AnalysisConfig()))
    assert found == {(0, 0, "amod"), (1, 0, "amod"), (2, 0, "prep")}  # attending word, phrase
    head = set(list_grounded_pairs(CAPTION, counted, AnalysisConfig(phrase_word="head")))
    assert head == {(0, 0, "amod"), (2, 0, "prep")}  # "red" is not the head of its phrase


def test_the_measures_of_a_text():
    """One layer, one head: "star" looks at region 1, "red" at region 2, "on" at region 0, "it" at [CLS]."""
    maps = torch.zeros(1, 1, 9, 9)
    maps[0, 0, 1, 8] = maps[0, 0, 3, 6] = 1.0
    maps[0, 0, 2, 7], maps[0, 0, 2, 0] = 0.3, 0.7
    maps[0, 0, 4, 0] = 1.0
    graph = AttentionGraph((0,), frozenset({AttentionBlock.WORDS_TO_REGIONS, AttentionBlock.WORDS_TO_WORDS}))
    found, options = AttentionStatistics(), AnalysisConfig()
    add_text(found, "g", graph, maps, view(options), options)
    half_right = (2, 0.5, pytest.approx((0.3 + 1.0) / 2))
    assert numbers(found) == half_right  # "on" has no right region
    assert numbers(found, RELATIONS, "amod") == half_right  # "star" is right, "red" is not
    assert numbers(found, RELATIONS, "prep") == half_right  # "on" looks at the star; the star not at "on"
    entities = found.sums[MeasureKey("g", ENTITIES)]
    assert entities.baseline_accuracy("chance") == pytest.approx(1 / 3) and entities.baseline_accuracy(LARGEST) == 0
    assert numbers(found, RELATIONS)[0] == 5  # pobj: "it" to "on", whose phrase is counted
    assert numbers(found, DEPENDENCIES)[0] == 6
    assert found.most_common_relations("g", RELATIONS, options) == ["amod", "prep", "pobj"]
    assert found.most_common_relations("g", RELATIONS, AnalysisConfig(min_count=2, max_relations=1)) == ["amod"]
    count_text(found.counts, view(options), options)
    assert found.counts["phrases without a box"] == 1
    assert found.counts["phrases with a box but no correct region"] == 1


@pytest.mark.parametrize(("mean_over", "accuracy"), [("entities", 2 / 3), ("sentences", 3 / 4)])
def test_a_mean_is_over_entities_or_over_the_means_of_sentences(mean_over, accuracy):
    """Only the phrase of "star" is grounded. One of two sentences also has a phrase that is missed."""
    maps = torch.zeros(1, 1, 9, 9)
    maps[0, 0, 2, 7] = 1.0
    graph = AttentionGraph((0,), frozenset({AttentionBlock.WORDS_TO_REGIONS}))
    statistics = AttentionStatistics()
    for without_region in ("miss", "skip"):  # the phrase "on" has no right region
        options = AnalysisConfig(mean_over=mean_over, without_region=without_region)
        add_text(statistics, "g", graph, maps, view(options), options)
    assert numbers(statistics)[1] == pytest.approx(accuracy)


@pytest.mark.parametrize(
    ("scores", "sorted_boxes", "expected"),
    [
        ([1.0, 0.2, 0.1, 0.9], False, 0.0),  # the whole image, which is no candidate, then three regions
        ([1.0, 0.2, 0.9, 0.1], False, 0.5),
        (None, True, 0.5),  # boxes by falling confidence: the first one
        (None, False, None),
    ],
)
def test_confidences_come_from_the_detector_or_from_the_order_of_a_file(scores, sorted_boxes, expected):
    """The image was enlarged to twice its size."""
    whole = np.array([[0.0, 0, 100, 100]])
    rows = torch.from_numpy(2 * np.concatenate([whole, BOXES])).float()
    regions = Regions(
        *([rows], [torch.zeros(4, 2)], [torch.zeros(4, 3)]), scores=None if scores is None else [torch.tensor(scores)]
    )
    size = torch.tensor([[100, 100]])
    ones = torch.ones(1, 6, dtype=torch.int64)
    batch = Batch(
        images=ImageBatch(torch.zeros(1, 3, 200, 200), 2 * size, size, ["image"]),
        boxes=[rows[1:]],
        texts=TextBatch(ones, ones, ones.bool()),
        image_index=torch.zeros(1, 1, dtype=torch.int64),
        records=[{"text_index": 0, "file_name": "image", "image_size": (60, 80), CAPTION_KEY: CAPTION}],
    )
    of_text = gather_regions(regions, batch.images.sizes, batch.image_index, whole_image=True)
    maps = torch.zeros(1, 1, 10, 10)
    maps[0, 0, 2, 6], maps[0, 0, 2, 7] = 0.6, 0.4  # "star" looks at the whole image, then at region 0
    encoded = EncoderOutput(torch.zeros(1, 6, 2), torch.zeros(1, 4, 2), attentions=(maps,))
    model = SimpleNamespace(
        encoder=SimpleNamespace(
            uses_whole_image=True,
            attention_graphs={"g": AttentionGraph((0,), frozenset({AttentionBlock.WORDS_TO_REGIONS}))},
        ),
        encode=lambda batch, output_attentions: (regions, of_text, encoded),
    )
    found = {}
    for whole_image in ("excluded", "candidate"):
        one = AttentionStatistics()
        add_batch(one, model, batch, AnalysisConfig(whole_image=whole_image), sorted_boxes, [0])
        found[whole_image] = one.sums[MeasureKey("g", ENTITIES)]
        assert one.texts[0].region_boxes[1:].tolist() == BOXES.tolist(), "in pixels of the original image"
    sums = found["excluded"]
    assert sums.examples == 2 and sums.accuracy.item() == 0.5 and found["candidate"].accuracy.item() == 0
    if expected is None:
        assert CONFIDENCE not in sums.baselines
    else:
        assert sums.baseline_accuracy(CONFIDENCE) == expected


def test_a_measure_without_examples_has_no_sums():
    found, empty = AttentionStatistics(), Measurement(torch.zeros(1, 1, 0, dtype=torch.bool), torch.zeros(1, 1, 0), {})
    found.add(MeasureKey("g", ENTITIES), empty, per_sentence=True)
    assert not found.sums


def test_related_words_that_share_a_wordpiece_are_counted_and_left_out():
    caption = dataclasses.replace(CAPTION, word_spans=np.array([[1, 2], [1, 3], [3, 4], [4, 5]]))  # "red" is in "star"
    graph = AttentionGraph((0,), frozenset({AttentionBlock.WORDS_TO_WORDS}))
    found, shared = AttentionStatistics(), dataclasses.replace(view(AnalysisConfig()), caption=caption)
    add_text(found, "g", graph, torch.full((1, 1, 9, 9), 1 / 9), shared, AnalysisConfig())
    count_text(found.counts, shared, AnalysisConfig())
    assert numbers(found, DEPENDENCIES)[0] == 4
    assert found.counts["relations skipped in word dependency: the words share a wordpiece"] == 1


# [CLS] old st ##ar behind [SEP]; one phrase of all words, whose head is in its middle, and one that no word belongs to
LONG = dataclasses.replace(
    CAPTION,
    phrases=["old star behind", "old star behind"],
    phrase_spans=np.array([[1, 5], [1, 5]]),
    boxes=[np.array([[0.0, 0, 10, 10]]), np.array([[20.0, 0, 30, 10]])],
    forms=["old", "star", "behind"],
    word_spans=np.array([[1, 2], [2, 4], [4, 5]]),
    phrase_of=[0, 0, 0],
    is_head=[False, True, False],
    relations=[Relation(1, 0, "amod"), Relation(1, 2, "advmod")],
)


@pytest.mark.parametrize(
    ("change", "examples", "accuracy", "attention"),
    [
        ({}, 2, 0.5, 0.5),  # "behind": right for the second phrase
        ({"entity_piece": "first"}, 2, 0.0, 0.1),  # "old": the region of neither
        ({"entity_piece": "head"}, 1, 1.0, 0.3),  # ##ar: right
        ({"entity_piece": "head", "word_piece": "first"}, 1, 0.0, 0.8),  # st: wrong
        ({"entity_piece": "head", "word_piece": "mean"}, 1, 0.0, 0.55),  # 0.4 and 0.15
    ],
)
def test_the_head_word_of_a_phrase_attends(change, examples, accuracy, attention):
    maps = torch.zeros(1, 1, 9, 9)
    maps[0, 0, 1, 8], maps[0, 0, 2, 7], maps[0, 0, 3, 6], maps[0, 0, 4, 7] = 0.1, 0.8, 0.3, 0.5
    options = AnalysisConfig(**change)
    found, long = AttentionStatistics(), dataclasses.replace(view(options), caption=LONG)
    long.is_correct = torch.tensor([[True, False, False], [False, True, False]])
    add_text(found, "g", AttentionGraph((0,), frozenset({AttentionBlock.WORDS_TO_REGIONS})), maps, long, options)
    assert numbers(found) == (examples, accuracy, pytest.approx(attention))
    count_text(found.counts, long, options)
    left_out = found.counts.get("phrases skipped in entity grounding: no head word")
    assert left_out == (1 if "head" in change.values() else None), "only this choice leaves phrases out"


def test_a_phrase_has_no_head_word_without_a_parse_and_the_first_of_several():
    head = AnalysisConfig(entity_piece="head")
    assert choose_queries(dataclasses.replace(LONG, is_parsed=False), head).has_query.tolist() == [False, False]
    several = choose_queries(dataclasses.replace(LONG, is_head=[True, True, False]), head)
    assert several.spans.tolist() == [[1, 2], [1, 5]] and LONG.phrase_spans.tolist() == [[1, 5], [1, 5]]


def test_pictures_are_of_different_images():
    groups = [range(5), range(5, 5), range(5, 9), range(9, 10)]
    shown = choose_texts(groups, 3, seed=0)
    assert len(shown) == 3 and {sum(text >= own.start for own in groups if len(own)) for text in shown} == {1, 2, 3}
    assert choose_texts(groups, 3, seed=0) == shown and choose_texts(groups, 0, seed=0) == []
