"""From a dict to a dataclass, checks that name the key, and the key that was probably meant."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from e2e_vl.config import setting_names
from e2e_vl.converter import check_choice, check_keys, check_numbers, from_dict, nearest


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    sizes: tuple[int, int] = (1, 2)

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"inner rate is {self.rate}")


@dataclass(frozen=True)
class Needed:
    number: int
    name: str = "a"


@dataclass(frozen=True)
class Outer:
    number: int = 1
    name: str = "a"
    switch: bool = False
    limit: int | None = 3
    words: list[str] = field(default_factory=list)
    names: tuple[str, ...] = ()
    mix: Mapping[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    kind: Literal["soft", "hard"] = "soft"
    answers: list[str] | str | None = None
    anything: Any = None
    inner: Inner = field(default_factory=Inner)
    maybe: Inner | None = None


def test_a_dict_becomes_a_dataclass():
    values = {
        "number": 3,
        "switch": True,
        "limit": None,
        "words": ["a", "b"],
        "names": ["c"],
        "mix": {"x": 1},
        "counts": {"y": 2},
        "kind": "hard",
        "answers": "file.txt",
        "anything": {1: object},
        "inner": {"rate": 2, "sizes": [3, 4]},
        "maybe": {"rate": 0.25},
    }
    made = from_dict(Outer, values, "task.config")
    expected = Outer(3, "a", True, None, ["a", "b"], ("c",), {"x": 1.0}, {"y": 2}, "hard", "file.txt", {1: object})
    assert made == dataclasses.replace(expected, inner=Inner(2.0, (3, 4)), maybe=Inner(0.25))
    assert type(made.mix["x"]) is type(made.inner.rate) is float
    assert from_dict(Outer, {}, "task.config") == Outer()
    assert from_dict(Outer, {"answers": ["x"]}, "task.config").answers == ["x"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"numbr": 3}, "x has the unknown key 'numbr'; it takes number, name, .*; did you mean 'x.number'?"),
        ({"qqqq": 3}, "x has the unknown key 'qqqq'; it takes number, .*, maybe."),
        ({"number": "3"}, "x.number is '3'; it must be a int."),
        ({"number": 3.0}, "x.number is 3.0; it must be a int."),
        ({"number": True}, "x.number is True; it must be a int."),
        ({"number": None}, "x.number is None; it must be a int."),
        ({"name": 3}, "x.name is 3; it must be a str."),
        ({"switch": 1}, "x.switch is 1; it must be a bool."),
        ({"limit": "3"}, "x.limit is '3'; it must be a int or None."),
        ({"words": "abc"}, "x.words is 'abc'; it must be a list of str."),
        ({"words": ["a", 3]}, "x.words[1] is 3; it must be a str."),
        ({"names": {"a": 1}}, "x.names is {'a': 1}; it must be a list of str."),
        ({"mix": {"x": "much"}}, "x.mix.x is 'much'; it must be a float."),
        ({"mix": {"x": True}}, "x.mix.x is True; it must be a float."),
        ({"mix": [1]}, "x.mix is [1]; it must be a dict of float."),
        ({"counts": {1: 1}}, "a key of x.counts is 1; it must be a str."),
        ({"kind": "firm"}, "x.kind is 'firm'; it must be one of soft, hard."),
        ({"answers": [1]}, "x.answers is [1]; it must be a list of str or str or None."),
        ({"inner": 3}, "x.inner is 3; it must hold settings as `key: value`."),
        (
            {"inner": {"rat": 3}},
            "x.inner has the unknown key 'rat'; it takes rate, sizes; did you mean 'x.inner.rate'?",
        ),
        ({"inner": {"sizes": [1, 2, 3]}}, "x.inner.sizes is [1, 2, 3]; it must be a list of 2 int."),
        ({"inner": {"rate": -1}}, "inner rate is -1.0"),
        ({"maybe": {"rate": "x"}}, "x.maybe.rate is 'x'; it must be a float."),
        ({"maybe": {"rate": -1}}, "inner rate is -1.0"),
    ],
)
def test_a_dict_that_does_not_fit_is_one_sentence(values, message):
    pattern = re.escape(message).replace(re.escape(".*"), ".*")
    with pytest.raises(ValueError, match=f"^{pattern}$"):
        from_dict(Outer, values, "x")


def test_a_field_without_a_default_must_be_given():
    assert from_dict(Needed, {"number": 2}, "x") == Needed(2)
    with pytest.raises(ValueError, match=r"^x.number has no value; set it\.$"):
        from_dict(Needed, {"name": "a"}, "x")


def test_what_is_no_dict():
    with pytest.raises(ValueError, match=r"^data.config is \[1\]; it must hold settings as `key: value`\.$"):
        from_dict(Inner, [1], "data.config")


def test_unknown_keys_are_named_with_the_nearest_and_all_known_ones():
    check_keys(["hidden_size", "layers"], ["layers"], "encoder.config")
    check_keys(iter(["layers"]), {"layers": 1}, "encoder.config")
    with pytest.raises(
        ValueError, match=r"^encoder.config has the unknown key 'hidden_sise'; it takes hidden_size, lay"
    ):
        check_keys(["hidden_size", "layers"], {"layers": 1, "hidden_sise": 2}, "encoder.config")
    with pytest.raises(ValueError, match=r"takes hidden_size, layers; did you mean 'encoder.config.hidden_size'\?$"):
        check_keys(["hidden_size", "layers"], ["hidden_sise"], "encoder.config")
    with pytest.raises(ValueError, match=r"^data.config has the unknown key 'x'; it takes nothing\.$"):
        check_keys([], ["x"], "data.config")
    with pytest.raises(ValueError, match=r"^data.files has the unknown key 'x'; refcoco takes images, refs\.$"):
        check_keys(["images", "refs"], ["x"], "data.files", who="refcoco")


def test_choices_and_numbers():
    check_choice("a.b", "x", ["x", "y"])
    with pytest.raises(ValueError, match=r"^a.b is 'z'; it must be one of x, y\.$"):
        check_choice("a.b", "z", iter(["x", "y"]))
    check_numbers(Inner(rate=0.0), "a.", not_negative=["rate"])
    for rate in (0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=rf"^a.rate is {rate}; it must be positive\.$"):
            check_numbers(Inner(rate=rate), "a.", positive=["rate"])


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("train.lrr", "train.lr"),
        ("trian.lr", "train.lr"),
        ("train.rl", "train.lr"),
        ("data.vocab", "data.vocabulary"),
        ("data.box", "data.boxes"),
        ("data.resize.shortedge", "data.resize.short_edge"),
        ("trian", "train"),
        ("sed", "seed"),
        ("lr", "train.lr"),  # of another section
        ("data.lr", "train.lr"),
        ("train.seed", "seed"),
        ("train.num_workers", "data.workers"),
        ("train.learning_rate", "train.lr"),  # by initials
        ("train.wd", "train.weight_decay"),
        ("train.batch_size", "train.images_per_batch"),  # by words
        ("eval.batch_size", "eval.images_per_batch"),
        ("train.grad_accumulation_steps", "train.accumulate"),
        ("train.max_epochs", "train.epochs"),
        ("eval.box_source", "eval.boxes"),
        ("encoder.hidden_size", "encoder.config"),  # by section
        ("task.dropout", "task.config"),
        ("qqqq", None),
        ("train.qqqq", None),
    ],
)
def test_the_nearest_setting(key, expected):
    assert nearest(key, setting_names()) == expected


def test_the_nearest_of_nothing():
    assert nearest("lr", []) is None
