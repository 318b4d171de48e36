"""YAML files of models from outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e_vl.plain_yaml import check_plain


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("base: /etc/other.yaml\n", "base:"),
        ("_BASE_: /etc/other.yaml\nMODEL: {MASK_ON: false}\n", "_BASE_:"),
        ("output: ${oc.env:HOME}\n", "${oc.env:HOME}"),
        ('task: {config: {answers: ["\\u0024{oc.env:HOME}"]}}\n', "${oc.env:HOME}"),  # escaped
        ("data: {files: {'${seed}': a}}\n", "${seed}"),
    ],
)
def test_a_file_that_refers_to_something_else_is_refused(tmp_path: Path, content: str, named: str):
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(ValueError) as error:
        check_plain(path)
    assert str(error.value).startswith(f"{path}: has '{named}', but the settings of a saved model")


def test_plain_files_and_what_is_none(tmp_path: Path):
    path = tmp_path / "config.yaml"
    with pytest.raises(FileNotFoundError, match="no such settings file"):
        check_plain(path)
    path.write_text("data: {base: a, price: $5}\nagain: [&x [1], *x]\n")  # `base` is a key of the file's top only
    check_plain(path)
    path.write_text("a: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ValueError, match="is not valid YAML"):
        check_plain(path)
