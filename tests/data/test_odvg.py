"""ODVG's JSON lines: captions, expressions and class names with their boxes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e_vl.config import DataConfig
from e2e_vl.data.odvg import ODVGDataset
from e2e_vl.samples import EntityPhrases, ReferredBoxes
from tests.data.helpers import open_dataset, refused, with_files, with_options, write_json, write_json_lines

IMAGE = {"filename": "00001/7.jpg", "height": 60, "width": 100}
FIRST = [10, 20, 40, 60]
SECOND = [1, 2, 4, 6]
CAPTION = "A red hat on a man in red"


@pytest.fixture
def settings(tmp_path: Path) -> DataConfig:
    return DataConfig(name="odvg", root=str(tmp_path), files={"annotations": "{split}.jsonl", "images": "images"})


def captioned(*regions: dict[str, Any], caption: str = CAPTION) -> dict[str, Any]:
    return IMAGE | {"grounding": {"caption": caption, "regions": list(regions)}}


def opened(settings: DataConfig, lines: list[dict[str, Any]], **options) -> ODVGDataset:
    write_json_lines(Path(settings.root) / "train.jsonl", lines)
    return open_dataset(ODVGDataset, with_options(settings, **options), "train", phrases=True)


def phrases_of(dataset: ODVGDataset, text: int = 0) -> dict[str, list[list[float]]]:
    """The boxes of each phrase of a text, by its words."""
    [sample_text] = dataset.sample([text]).texts
    phrases = sample_text.phrases
    words = [sample_text.words[slice(*span)] for span in phrases.spans]
    return {name: boxes.tolist() for name, boxes in zip(words, phrases.boxes, strict=True)}


@pytest.mark.parametrize(
    "regions",
    [
        [  # MMDetection
            {"bbox": [FIRST, SECOND], "phrase": "a red hat", "tokens_positive": [[0, 9]]},
            {"bbox": SECOND, "phrase": ["man", "red"], "tokens_positive": [[15, 18], [22, 25]]},
        ],
        [  # words of one phrase
            {"bbox": [FIRST, SECOND], "phrase": "a red hat", "tokens_positive": [[0, 1], [2, 5], [6, 9]]},
            {"bbox": [SECOND], "phrase": "man", "tokens_positive": [[15, 18]]},
            {"bbox": [SECOND], "phrase": "red", "tokens_positive": [[22, 25]]},
        ],
    ],
)
def test_regions_with_the_spans_of_their_phrases(settings, regions):
    dataset = opened(settings, [captioned(*regions)])
    assert phrases_of(dataset) == {"A red hat": [FIRST, SECOND], "man": [SECOND], "red": [SECOND]}
    sample = dataset.sample([0])
    assert sample.images[0].locate() == Path(settings.root) / "images/00001/7.jpg"
    assert (sample.images[0].id, sample.images[0].size) == ("00001/7", (60, 100))
    assert isinstance(sample.texts[0].truth, EntityPhrases)


def test_phrases_without_spans_are_found_in_the_caption(settings, caplog):
    """Open-GroundingDino's files have a region for each box; "an" is in "man", but no word."""
    regions = [{"bbox": box, "phrase": "a red hat"} for box in (FIRST, SECOND)]
    regions += [{"bbox": SECOND, "phrase": phrase} for phrase in ("red", "an", "blue")]
    dataset = opened(settings, [captioned(*regions)])
    assert phrases_of(dataset) == {"A red hat": [FIRST, SECOND], "red": [SECOND]}
    assert "skipped 2 phrases that their caption lacks, by line: 1; 1" in caplog.text


def test_expressions(settings, caplog):
    """A caption refers to all its boxes; of the lines of expressions, each expression to the boxes of its object."""
    lines = [
        captioned({"bbox": FIRST, "phrase": "hat"}, {"bbox": SECOND, "phrase": "man"}),
        IMAGE | {"referring": [{"bbox": FIRST, "phrase": ["the hat", " "]}, {"bbox": [], "phrase": "no hat"}]},
        IMAGE | {"detection": {"instances": []}},
        captioned(),
    ]
    dataset = opened(settings, lines, texts="expressions")
    assert [dataset[text] for text in range(len(dataset))] == [CAPTION, "the hat", "no hat"]
    first = tuple(map(float, FIRST))
    both = (first, tuple(map(float, SECOND)))
    assert list(dataset.truths()) == [ReferredBoxes(both), ReferredBoxes((first,)), ReferredBoxes(())]
    assert phrases_of(dataset, 2) == {"no hat": []}
    assert dataset.sample([1]).texts[0].metadata == {"sent_id": "train.jsonl:2.0", "image_id": "00001/7"}
    assert list(dataset.groups) == [[0, 1, 2]]
    for message in (
        "1 blank expressions, by line: 2",
        "1 lines of detection, which have no expressions: 3",
        "1 expressions without a box, by line: 4",
    ):
        assert f"skipped {message}" in caplog.text


def test_class_names_are_the_text_of_a_line_of_detection(settings, tmp_path, caplog):
    dog = {"bbox": FIRST, "label": 0, "category": "dog"}
    cat = {"bbox": SECOND, "label": 1}
    lines = [IMAGE | {"detection": {"instances": [dog, cat, dog | {"bbox": SECOND}]}}]
    lines += [IMAGE | {"detection": {"instances": []}}]
    with refused("train.jsonl, record 1", "label 1", "data.files.label_map"):
        opened(settings, lines)
    write_json(tmp_path / "label_map.json", {"0": "hound", "1": "traffic light"})
    dataset = opened(with_files(settings, label_map="label_map.json"), lines)
    assert [dataset[text] for text in range(len(dataset))] == ["dog . traffic light ."]
    assert phrases_of(dataset) == {"dog": [FIRST, SECOND], "traffic light": [SECOND]}
    assert "skipped 1 lines of detection without an object: 2" in caplog.text


@pytest.mark.parametrize(
    ("bbox", "message"),
    [([10, 20, 10, 60], "1 boxes without an area"), ([-9, 20, -1, 60], "1 boxes outside their image")],
)
def test_odd_boxes_are_skipped_and_counted(settings, caplog, bbox, message):
    region = {"bbox": bbox, "phrase": "hat"}
    dataset = opened(settings, [captioned(region, {"bbox": SECOND, "phrase": "man"})])
    assert phrases_of(dataset) == {"man": [SECOND]}
    assert f"skipped {message}, by text: 1" in caplog.text


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (IMAGE, ["train.jsonl, record 1", "no grounding, referring or detection"]),
        (captioned({"bbox": [1, 2, 3], "phrase": "hat"}), ["record 1", "four numbers"]),
        (captioned({"bbox": [FIRST, 3], "phrase": "hat"}), ["record 1", "four numbers"]),
        (captioned({"bbox": [[FIRST]], "phrase": "hat"}), ["train.jsonl, line 1", "bbox"]),
        (
            captioned({"bbox": [60, 30, 9, 9], "phrase": "hat"}),
            ["1 of 1 boxes end", "record 1", "x, y, width, height"],
        ),
        (captioned({"bbox": [0.1, 0.2, 0.3, 0.4], "phrase": "hat"}), ["train.jsonl", "normalised"]),
        (captioned(caption=" "), ["train.jsonl", "none found"]),
    ],
)
def test_what_cannot_be_read_is_named(settings, line, parts):
    with refused(*parts):
        opened(settings, [line])
