from __future__ import annotations

from collections import Counter

from e2e_vl.run.report import Sampled, list_predictions, phrase_line
from e2e_vl.tasks.base import PredictionWords


class FakeTask:
    """The record says everything."""

    def describe(self, record: dict) -> PredictionWords:
        return PredictionWords(
            record["id"],
            record.get("said", "x"),
            truth=record.get("truth", ""),
            group=record["group"],
            mistakes=record.get("mistakes"),
        )


def records(outcomes: dict[str, list[float | None]]) -> list[dict]:
    return [
        {"id": f"{group} {number}", "group": group, "correct": correct, "file_name": f"{group} {number}"}
        for group, values in outcomes.items()
        for number, correct in enumerate(values)
    ]


def ids(sample: Sampled) -> list[str]:
    return [one.words.asked for one in sample.shown]


def test_predictions_are_counted_by_group_and_outcome():
    lists = list_predictions(records({"b": [0.0, 1.0, 0.3], "a": [None, 1.0]}), FakeTask(), 9, 0)
    assert lists.groups == {
        "all": Counter({"right": 2, "wrong": 1, "partly right": 1, "without a label": 1}),
        "a": Counter({"right": 1, "without a label": 1}),
        "b": Counter({"right": 1, "wrong": 1, "partly right": 1}),
    }
    assert list(lists.groups) == ["all", "a", "b"]
    assert lists.outcomes == ["wrong", "partly right", "right", "without a label"]


def test_a_prediction_without_a_label_is_never_an_error():
    lists = list_predictions(records({"": [None] * 5}), FakeTask(), 9, 0)
    assert lists.wrong == [] and lists.mistakes == []
    assert [(sample.title, sample.total, len(sample.shown)) for sample in lists.others] == [("without a label", 5, 5)]
    assert lists.outcomes == ["wrong", "right", "without a label"]


def test_groups_take_turns_and_the_one_with_the_most_errors_comes_first():
    data = records({"few": [0.0] * 2, "none": [1.0], "many": [0.0] * 50, "some": [0.0] * 9})

    def shown(number: int) -> dict[str, tuple[int, int]]:
        lists = list_predictions(data, FakeTask(), number, 0)
        assert all(one.words.group == sample.title for sample in lists.wrong for one in sample.shown)
        return {sample.title: (len(sample.shown), sample.total) for sample in lists.wrong}

    assert shown(8) == {"many": (3, 50), "some": (3, 9), "few": (2, 2)}
    assert shown(1) == {"many": (1, 50), "some": (0, 9), "few": (0, 2)}
    assert shown(100) == {"many": (50, 50), "some": (9, 9), "few": (2, 2)}
    assert list(shown(8)) == ["many", "some", "few"]


def test_samples_are_drawn_by_the_seed_from_all_predictions():
    data = records({"": [1.0] * 40 + [0.0] * 40})
    [first], [again], [other] = (list_predictions(data, FakeTask(), 10, seed).others for seed in (0, 0, 1))
    assert ids(first) == ids(again) != ids(other)
    assert len(set(ids(first))) == 10 and first.total == 40
    seen = Counter(one for seed in range(200) for one in ids(list_predictions(data, FakeTask(), 10, seed).others[0]))
    assert len(seen) == 40  # every one has its chance, about 50 times in 200
    assert min(seen.values()) > 20 and max(seen.values()) < 85


def test_frequent_mistakes_are_those_of_several_images():
    data = [
        {"id": "", "group": "", "correct": 0.0, "truth": truth, "said": said, "file_name": file}
        for truth, said, file in (
            *(("red", "blue", str(number)) for number in range(3)),
            *(("one", "two", "the same") for _ in range(9)),
            ("yes", "no", "1"),
            ("yes", "no", "2"),
        )
    ]
    assert list_predictions(data, FakeTask(), 0, 0).mistakes == [("red", "blue", 3), ("yes", "no", 2)]


def test_a_prediction_of_several_items_has_several_mistakes():
    data = [
        {"id": "", "group": "", "correct": correct, "mistakes": pairs, "file_name": str(number), "truth": "all"}
        for number, (correct, pairs) in enumerate(
            [
                (0.5, (("red", "blue"), ("one", "two"))),
                (0.0, (("red", "blue"), ("red", "blue"))),
                (1.0, (("red", "blue"),)),  # a right one has no mistakes
                (0.0, ()),
                (0.0, ()),
            ]
        )
    ]
    assert list_predictions(data, FakeTask(), 0, 0).mistakes == [("red", "blue", 2)]


def phrases(*correct: bool | None) -> list[dict]:
    """Phrases of a prediction; None: the right box is unknown."""
    base = {"text": "a star", "box": [9.6, 20.2, 30.0, 40.4], "score": 0.25}
    return [base | ({} if one is None else {"correct": one}) for one in correct]


def test_wrong_relations_are_counted_by_whether_the_landmark_was_right():
    def wrong(*correct: bool | None, **changes) -> dict:
        return {"id": "", "group": "relation", "correct": 0.0, "grounded": phrases(*correct), **changes}

    right, missed, unknown = wrong(False, True), wrong(True, False), wrong(False, None)
    assert list_predictions([right, missed, unknown], FakeTask(), 9, 0).grounded == {
        "relation": Counter(right=1, wrong=1)
    }
    more = [
        *(wrong(True), wrong()),  # without a second phrase
        *(wrong(False, True, False), wrong(False, None, True)),  # all that are known must be right
        *(wrong(True, True, correct=1.0), wrong(True, True, correct=0.5), wrong(True, True, correct=None)),
        wrong(True, False, group="attribute"),
        {"id": "", "group": "none", "correct": 0.0},
    ]
    assert list_predictions([right, missed, unknown, *more], FakeTask(), 9, 0).grounded == {
        "relation": Counter(right=2, wrong=2),
        "attribute": Counter(wrong=1),
    }
    assert list_predictions([unknown], FakeTask(), 9, 0).grounded == {}


def test_phrases_are_said_with_their_boxes():
    assert phrase_line({}) == ""
    nowhere = {"text": "it", "box": None, "score": 0.0}
    place = "a star: x 10 to 30, y 20 to 40 (0.25"
    said = phrase_line({"grounded": [*phrases(True, False, None), nowhere]})
    assert said == f"{place}, right); {place}, wrong); {place}); it: no region (0.00)"
