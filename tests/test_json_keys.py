"""Keys that are there twice, in texts of every form."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from e2e_vl import json_keys
from e2e_vl.json_keys import has_each_key_once, repeated_key

LAYOUTS = ({}, {"indent": 1}, {"separators": (",", ":")}, {"separators": (" , ", " : ")}, {"ensure_ascii": False})


def drawn(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(4 if depth < 3 else 2)
    if kind == 0:
        return rng.choice((None, True, 3, -1.5, 1e300, "", "a:b", '":"', "\\", "é: 日本"))
    if kind == 1:
        return rng.choice(([], {}, 7, float("nan")))
    if kind == 2:
        return [drawn(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice('abcdef:é"') + str(number): drawn(rng, depth + 1) for number in range(rng.randrange(4))}


def with_double(value: Any, rng: random.Random) -> str | None:
    """The value as JSON, with one key of one of its objects twice; None: it has no object with a key."""
    objects, below = [], [value]
    while below:
        one = below.pop()
        below += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        objects += [one] if isinstance(one, dict) and one else []
    if not objects:
        return None
    chosen = rng.choice(objects)
    key = rng.choice(list(chosen))
    chosen["DOUBLE"] = drawn(rng, 3)
    return json.dumps(value, **rng.choice(LAYOUTS)).replace('"DOUBLE"', json.dumps(key))


@pytest.mark.parametrize("large", [1, 1 << 20])
def test_every_double_key_is_found_and_nothing_else(monkeypatch, large):
    monkeypatch.setattr(json_keys, "_LARGE", large)
    monkeypatch.setattr(json_keys, "_MANY", 2)
    rng = random.Random(5)
    doubles = 0
    for _ in range(2000):
        value = drawn(rng)
        text = json.dumps(value, **rng.choice(LAYOUTS))
        for written in (text, text.encode()):
            assert has_each_key_once(written, json.loads(text))
            assert repeated_key(written) is None
        double = with_double(value, rng)
        if double is not None:
            doubles += 1
            assert not has_each_key_once(double, json.loads(double))
            assert "twice" in repeated_key(double)
    assert doubles > 500


def test_what_is_not_sure_is_looked_at():
    double = r'{"a\u003a": 1, "b": 2, "b": 3}'  # one colon more and one less
    assert not has_each_key_once(double, json.loads(double))
    assert repeated_key(double) == "the object has the key 'b' twice"
    assert has_each_key_once(r'{"a\u003c": 1}', {"a<": 1}) and not has_each_key_once(r'{"a\u003A": 1}', {"a:": 1})
    assert has_each_key_once("[1]", [10**400])
    assert not has_each_key_once(r'["\ud83d"]', ["\ud83d"]) and repeated_key(r'["\ud83d"]') is None
    assert has_each_key_once('{"a": {"b:": 1}}'[6:-1], {"b:": 1})


def test_the_object_is_named():
    assert repeated_key('[{"a": 1}, {"b": [{"c": {"x": 1, "y": 2, "x": 3}}]}]') == "[1].b[0].c has the key 'x' twice"
    assert repeated_key('{"7": {"x": 1, "x": {"y": 1, "y": 2}}}') == "7 has the key 'x' twice"
