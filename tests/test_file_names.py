"""Ids as names of files, and names in files as paths."""

from __future__ import annotations

import itertools
import os
from pathlib import Path, PureWindowsPath

import pytest

from detector.errors import UserError
from e2e_vl.io import LONGEST_PART, id_of, inside, is_name_pattern, name_of, require_distinct, shown

PLAIN = [
    "12",
    "COCO_train2014_000000000009",
    "train2014/x.y",
    "a b",
    "größe",
    "日本/1",
    "-x",
    "~root",
    ".hidden",
    "a..b",
]
HOSTILE = [
    *("../../x", "/etc/passwd", "..", ".", "", "a/../b", "a//b", "a/", "a\0b", "..\\..\\x", "C:\\x", "C:x", "x.", "x "),
    *(
        "con",
        "CON.txt",
        "lpt1",
        "nul",
        "aux/x",
        "com¹",
        "a\nb",
        "a%2Fb",
        "%",
        "%2E",
        "a.npz/b",
        "A.NPZ/b",
        "*?|",
        "\ud800",
    ),
    *("\u202egnp.exe", "a:b", "..%2F", "./x", "...", ". .", "x/con ", "con .x"),
]


@pytest.mark.parametrize("text", PLAIN)
def test_an_id_without_anything_special_is_its_name(text: str):
    assert name_of(text) == text == id_of(text)


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("flat", [False, True])
def test_every_other_id_is_a_harmless_name_and_comes_back(text: str, flat: bool, tmp_path: Path):
    name = name_of(text, flat=flat)
    assert id_of(name) == text
    parts = name.split("/")
    assert all(part and not part.endswith((".", " ")) and set(part) != {"."} for part in parts), name
    assert not set(name) & set('<>:"|?*\\\0') and name.isprintable()
    assert not PureWindowsPath(f"{name}.npz").is_reserved() and not PureWindowsPath(name).drive
    assert not flat or len(parts) == 1
    path = inside(tmp_path, f"{name}.npz")
    assert path.resolve().is_relative_to(tmp_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")


def test_two_ids_never_share_a_name():
    pieces = ["", ".", "..", "/", "%", "%2E", "%2F", "a", "A", ".npz", "con", "\\", " "]
    texts = {"".join(parts) for number in range(4) for parts in itertools.product(pieces, repeat=number)}
    names = {text: name_of(text) for text in texts}
    assert len(set(names.values())) == len(texts) > 1500
    assert all(id_of(name) == text for text, name in names.items())
    files = {f"{name}.npz" for name in names.values()}
    folders = {str(parent) for name in files for parent in Path(name).parents}
    assert not files & folders  # else one could not be written beside the other


def test_a_name_that_is_not_ours_is_the_id():
    for name in ("a:b", "100%", "%zz", "%41", "con", "a%2"):
        assert id_of(name) == name


@pytest.mark.parametrize("text", ["x" * 221, "x/" * 400 + "x" * 201, "ä" * 111, "a/" + "?" * 74])
def test_a_name_that_no_disk_takes(text: str):
    with pytest.raises(UserError, match=r"give the image a shorter id\.$") as error:
        name_of(text)
    assert len(str(error.value)) < 300 and "\n" not in str(error.value)


def test_the_longest_name_can_be_written_with_the_longest_ending(tmp_path: Path):
    inside(tmp_path, f"{name_of('x' * LONGEST_PART)}.npz.4194304.part").write_text("x")


@pytest.mark.parametrize(("one", "other"), [("Img", "img"), ("a/B", "a/b"), ("STRASSE", "straße"), ("é", "e\u0301")])
def test_ids_that_some_disks_take_for_one(one: str, other: str):
    require_distinct([one, "x", one], "list.json")
    with pytest.raises(UserError, match=r"^list\.json: the ids .* rename one of them\.$"):
        require_distinct([one, "x", other], "list.json")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../x", "holds '..'"),
        ("a/../../x", "holds '..'"),
        ("/etc/passwd", "does not begin in it"),
        ("C:/x", "does not begin in it"),
        ("c:x", "does not begin in it"),
        ("..\\x", "holds a backslash"),
        ("\\\\server\\x", "holds a backslash"),
        ("a\0b", "holds a control character"),
        ("a\nb", "holds a control character"),
        ("x" * 256, "has more than 255 bytes"),
        ("ä" * 128, "has more than 255 bytes"),
        ("x/" * 2100, "is too long"),
        ("\ud800", "holds half of a character"),
        ("", "is empty"),
        (None, "is not a text"),
        (["x"], "is not a text"),
        (7, "is not a text"),
    ],
)
@pytest.mark.parametrize("follows_links", [False, True])
def test_a_name_that_is_not_of_a_file_in_the_folder(name, reason: str, follows_links: bool, tmp_path: Path):
    with pytest.raises(UserError) as error:
        inside(tmp_path, name, "list.json: image 3", follows_links=follows_links)
    message = str(error.value)
    assert message.startswith("list.json: image 3: the name ") and f": it {reason}" in message
    assert "\n" not in message and "\0" not in message and len(message) < 400
    message.encode()  # it can be printed


def test_links(tmp_path: Path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "link").symlink_to(outside)
    (root / "own").mkdir()
    (root / "near").symlink_to(root / "own")
    with pytest.raises(UserError, match="leads out of it by a link"):
        inside(root, "link/x.npz")
    assert inside(root, "near/x.npz") == root / "near/x.npz"
    assert inside(root, "link/x.npz", follows_links=True) == root / "link/x.npz"
    (root / "loop").symlink_to(root / "loop")
    with pytest.raises(UserError, match="leads out of it by a link"):
        inside(root, "loop/x.npz")
    (tmp_path / "alias").symlink_to(root)  # the root itself may be one
    assert inside(tmp_path / "alias", "x.npz") == tmp_path / "alias/x.npz"
    assert inside(os.path.relpath(root), "x.npz") == Path(os.path.relpath(root)) / "x.npz"


def test_patterns_of_names():
    assert all(is_name_pattern(one, "id") for one in ("{id}.jpg", "{id:0>12}.jpg", "a{{b{id}", "{id:012d}", "x"))
    for one in (
        "{id.__class__}",
        "{id[0]}",
        "{id!r}",
        "{id:999999999}",
        "{id:{id}}",
        "{other}",
        "{}",
        "{0}",
        "{",
        "{id",
    ):
        assert not is_name_pattern(one, "id"), one


def test_what_is_shown_is_short_and_one_line():
    assert shown("a\nb") == "'a\\nb'" and len(shown("x" * 10_000)) < 100
