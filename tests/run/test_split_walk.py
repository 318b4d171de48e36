"""The facts about a split are the same in one process and in several, whichever groups share images or are broken."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from e2e_vl.data.overlap import PhotoId
from e2e_vl.data.storage.record_errors import NotedErrors
from e2e_vl.run import forked_work, split_walk
from e2e_vl.run.split_walk import FolderLists, GroupFacts, SplitFacts, SplitWalk, TextLengths, WalkRules
from e2e_vl.samples import AnnotatedObjects, ChoiceText, CorrectAnswer, Sample, SampleImage, SampleText
from e2e_vl.text import build_vocabulary, load_tokenizer


def image(name: str, *boxes: Sequence[float], size: object = (10, 20), classes: Sequence[int] = ()) -> SampleImage:
    rows = np.array(boxes, dtype=np.float64).reshape(-1, 4)
    objects = AnnotatedObjects(rows, f"boxes of {name}", classes=np.array(classes, dtype=np.int64))
    return SampleImage(name, Path(f"images/{name}.jpg"), size, objects)


def text(words: object, answer: str | None = None) -> SampleText:
    return SampleText(7, words, {"question_id": 3}, None if answer is None else CorrectAnswer(answer))


IN, OUT, EMPTY = (1, 1, 4, 4), (1, 1, 40, 4), (5, 5, 5, 9)
GROUPS: list[tuple[list[SampleImage], list[SampleText]]] = [
    ([image("a", IN, OUT, classes=(1, 2))], [text("one two", "yes"), text("one", "no")]),
    ([image("b", IN, size=("x", 3))], [text("these five words are lost")]),  # the size ends the work on the group
    ([image("b", IN, size=("x", 3))], [text("the image is known now")]),
    ([image("a", EMPTY, EMPTY, classes=(9,))], [text("a second time", "no")]),  # boxes of a known image do not count
    ([image("c", IN, size=("x", 3)), image("d", IN, EMPTY, classes=(3, 3))], [text("four words on both")]),
    ([image("gone"), image("e", OUT)], [text("counted"), text(None), text("after an error")]),
    ([image("b", size=("x", 3)), image("f", IN, classes=(4,))], [text("  ")]),
    ([image("d", OUT, OUT)], []),
    ([image("f", OUT)], [text("f is known")]),
    ([image("away")], [ChoiceText(8, "who", {}, query=(["who"],), choices=(["he"], ["not", [0]]))]),
]


class ListedGroups:
    """What a walk asks of a data set."""

    def __init__(self, errors: NotedErrors) -> None:
        self.errors = errors
        self.groups = [range(number, number + 1) for number in range(len(GROUPS) + 1)]

    def __len__(self) -> int:
        return 20

    def sample(self, texts: range) -> Sample:
        if texts[0] == len(GROUPS):
            self.errors.note("a reader notes this")
            raise KeyError("lost")
        images, own = GROUPS[texts[0]]
        return Sample(tuple(images), tuple(own))


def ids(dataset: ListedGroups, one: SampleImage) -> tuple[PhotoId, ...]:
    if one.id == "away":
        raise ValueError("away is nowhere")
    return (PhotoId("file", one.id),)


def walk(folder: Path, processes: int) -> tuple[SplitFacts, dict, list[str]]:
    errors, facts, photos = NotedErrors(), SplitFacts("val", False), {}
    rules = WalkRules(
        lengths=TextLengths(None, 3, "val"),
        extras=(2, 3),
        files=FolderLists(),
        ids=ids,
        answers=1,
        is_known="yes".__eq__,
        skips_missing=False,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        SplitWalk(ListedGroups(errors), rules, facts, photos, errors).run(None, processes)
    return facts, photos, list(errors.sentences)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "images").mkdir()
    for name in "abcdef":
        (tmp_path / "images" / f"{name}.jpg").touch()
    return tmp_path


def test_facts_of_the_first_group_with_an_image_count(folder):
    facts, photos, sentences = walk(folder, 1)
    lengths = [2, 1, 5, 3, 1, 0, 3]  # of the texts that are counted, in words
    lengths = [length + 2 for length in lengths]
    assert list(photos) == ["a", "b", "c", "gone", "e", "f", "d"]  # d is behind the size of c, and comes later
    assert (facts.images, facts.photos, facts.texts, facts.looked_at) == (7, 7, 20, 1.0)
    assert (facts.missing_images, facts.missing_examples) == (1, [str(Path("images/gone.jpg"))])
    assert (facts.boxes, facts.empty_boxes, facts.boxes_outside, facts.classes) == (2 + 1 + 1 + 0 + 1 + 1 + 2, 0, 4, 3)
    assert facts.images_without_boxes == 1
    assert facts.boxes_outside_example == "boxes of a: [1.0, 1.0, 40.0, 4.0] of 20 x 10 pixels"
    assert facts.mean_length == sum(lengths) / len(lengths) and facts.longest == 7
    assert (facts.too_long, facts.too_long_example) == (4, "one two")
    assert (facts.answers, facts.texts_without_known_answer) == (1, 2)
    wrong_size = "a field has another type than expected (UFuncTypeError"
    assert [sentence.partition(": ")[0] for sentence in sentences] == [
        *("the split val, text 1", "the split val, text 4", "text 7 of the split val is None; it must be a text"),
        *("the split val", "away is nowhere", "a reader notes this", "the split val, text 10"),
        str(Path("images/gone.jpg")),
    ]
    assert wrong_size in sentences[0] and wrong_size in sentences[1]


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_and_chunks_change_nothing(folder, monkeypatch, chunk, processes):
    expected = walk(folder, 1)
    monkeypatch.setattr(split_walk, "CHUNK", chunk)
    monkeypatch.setattr(forked_work, "PATIENCE", 0.0)
    found = walk(folder, processes)
    assert found == expected
    assert list(found[1]) == list(expected[1]), "photos in the same order"


def test_lengths_are_those_of_whole_texts(tmp_path):
    texts = [
        "what is it?",
        "it's  the caf\u00e9 ,(red)",
        "",
        " \u4e2d\u6587 is what\tis",
        "red-it. Red",
        "[MASK] is[SEP]",
    ]
    build_vocabulary(texts[:2], tmp_path / "vocab.txt")
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    lengths, group = TextLengths(tokenizer, None, "val"), GroupFacts()
    for number, words in enumerate(texts):
        lengths.add(group, words, 2, number)
    lengths.flush()
    whole = [len(tokenizer(words, add_special_tokens=False)["input_ids"]) + 2 for words in texts]
    assert (group.texts, group.pieces, group.longest) == (len(texts), sum(whole), max(whole))
    assert group == dataclasses.replace(GroupFacts(), texts=len(texts), pieces=sum(whole), longest=max(whole))


def test_half_a_character_is_a_problem_and_the_text_counts(tmp_path):
    build_vocabulary(["what is it"], tmp_path / "vocab.txt")
    lengths = TextLengths(load_tokenizer(tmp_path / "vocab.txt"), None, "val")
    whole, half = GroupFacts(), GroupFacts()
    lengths.add(whole, "what is", 0, 4)
    lengths.add(half, "what \ud83d it", 0, 5)
    lengths.flush()
    assert (whole.pieces, whole.problems_behind, half.pieces) == (2, [], 3)
    [sentence] = half.problems_behind
    assert sentence == r"the split val: text 5 holds half a character (a lone surrogate): 'what \ud83d it'"
