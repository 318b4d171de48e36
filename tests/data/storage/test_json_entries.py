"""JSON files of one object or one list, read entry by entry."""

from __future__ import annotations

import json

import pytest

from detector.errors import UserError
from e2e_vl.data.storage import json_entries as module
from e2e_vl.data.storage.index_files import OpenFiles
from e2e_vl.data.storage.json_entries import json_entries, json_items, json_members, read_entry

CONTENT = {
    "01": {"text": 'a "quoted" {brace} [bracket], é 日本', "more": [1, {"x": None}]},
    "2": {"text": "b" * 50, "number": -1.5e3},
    "é": {"nested": {"deep": {"deeper": [True, False]}}},
    "4": {},
}


@pytest.mark.parametrize("chunk", [1, 2, 7, 1 << 20])
@pytest.mark.parametrize("options", [{}, {"indent": 2}, {"ensure_ascii": False}, {"separators": (",", ":")}])
def test_entries_are_those_of_the_whole_file(tmp_path, monkeypatch, chunk, options):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    path = tmp_path / "some.json"
    path.write_text("\n " + json.dumps(CONTENT, **options) + "\n", encoding="utf-8")
    found = list(json_entries(path, "records"))
    assert {entry.key: entry.value for entry in found} == CONTENT
    files = OpenFiles()
    for entry in found:
        assert read_entry(files, path, entry.start, entry.size) == (entry.key, entry.value)
    path.write_text("{ }")
    assert list(json_entries(path, "records")) == []


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("options", [{}, {"indent": 2}, {"ensure_ascii": False}])
def test_items_are_those_of_the_whole_file(tmp_path, monkeypatch, chunk, options):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    path = tmp_path / "some.json"
    values = [*CONTENT.values(), "é", 12, 3.5, None, []]
    path.write_text("\n " + json.dumps(values, **options) + "\n", encoding="utf-8")
    assert list(json_items(path, "records")) == values
    path.write_text("[ ]")
    assert list(json_items(path, "records")) == []


@pytest.mark.parametrize("text", ['{"a": 1}', "[1, 2", "[1 2]", "[1] 2", "[1,]", "", '["\xff"]'])
def test_what_is_no_list_is_named(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"broken\.json: the records are not one JSON list \(near byte \d+: .*again"):
        list(json_items(path, "records"))


@pytest.mark.parametrize("options", [{}, {"indent": 2}, {"ensure_ascii": False}, {"separators": (" ,", " : ")}])
def test_a_key_that_is_there_twice_is_named(tmp_path, options):
    path, double = tmp_path / "some.json", json.dumps(CONTENT | {"é": {"a:": [{"x:": 1, "y": 2}]}}, **options)
    double = double.replace('"y"', '"x:"')
    path.write_text(double, encoding="utf-8")
    sentence = (
        r"some\.json: the records are not clear: near byte \d+, {}a:\[0\] has the key 'x:' twice; copy or download"
    )
    with pytest.raises(UserError, match=sentence.format(r"é\.")):
        list(json_entries(path, "records"))
    with pytest.raises(UserError, match=sentence.format("")):
        list(json_members(path, "records", []))
    path.write_text(f"[3, {double}]", encoding="utf-8")
    with pytest.raises(UserError, match=sentence.format(r"é\.")):
        list(json_items(path, "records"))
    path.write_text('{"a": [{"b": 1}], "c": 2, "a": []}')
    with pytest.raises(UserError, match="the object has the key 'a' twice"):
        list(json_members(path, "records", ["a"]))
    assert [entry.key for entry in json_entries(path, "records")] == ["a", "c", "a"]  # who reads them looks


def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 64)
    path = tmp_path / "long.json"
    path.write_text(json.dumps({str(number): {"x": number} for number in range(2000)}))
    longest = 0
    with path.open("rb") as file:
        scanner = module._Scanner(file, path, "records", "object")
        for number, entry in enumerate(scanner.inside("{", scanner.entry)):
            assert entry.value == {"x": number}
            longest = max(longest, len(scanner.text))
    assert longest < 256


@pytest.mark.parametrize(
    "text",
    [
        '{"a": {}',
        '{"a": {"b": }}',
        '[{"a": 1}]',
        '{"a": {}} more',
        '{"a" {}}',
        '{"a": {} "b": {}}',
        "",
        '{"a": {},}',
        "{1: {}}",
    ],
)
def test_what_is_no_object_is_named(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"broken\.json: the records are not one JSON object \(near byte \d+: .*again"):
        list(json_entries(path, "records"))


def test_files_that_are_not_there_or_have_changed(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.json: cannot read the records"):
        list(json_entries(tmp_path / "none.json", "records"))
    path = tmp_path / "some.json"
    path.write_text('{"a": {"b": 1}}')
    [entry] = json_entries(path, "records")
    path.write_text('{"abc": {"b": 1}}')
    with pytest.raises(ValueError, match=r"some\.json: has changed while it was in use"):
        read_entry(OpenFiles(), path, entry.start, entry.size)
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match="it is not UTF-8 text"):
        list(json_entries(path, "records"))


def test_long_lists_inside_an_object_come_value_by_value(tmp_path):
    path = tmp_path / "file.json"
    content = {"info": {"year": 2014}, "rows": [{"n": 1}, "größer", []], "none": [], "other": [1, 2]}
    for indent in (None, 1):
        path.write_text(json.dumps(content, ensure_ascii=False, indent=indent), encoding="utf-8")
        assert list(json_members(path, "rows", ["rows", "none"])) == [
            ("info", {"year": 2014}, False),
            ("rows", [], False),
            ("rows", {"n": 1}, True),
            ("rows", "größer", True),
            ("rows", [], True),
            ("none", [], False),
            ("other", [1, 2], False),
        ]
    for broken in (
        '{"rows": [1, 2}',
        '{"rows": [1 2]}',
        '{"rows": [1]} 3',
        "{3: [1]}",
        '{"rows": [1,]}',
        "[]",
        '{"',
    ):
        path.write_text(broken, encoding="utf-8")
        with pytest.raises(ValueError, match="the rows are not one JSON object"):
            list(json_members(path, "rows", ["rows"]))
