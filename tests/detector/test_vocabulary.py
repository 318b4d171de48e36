"""Files of names, as bottom-up attention publishes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from detector.zoo import read_vocabulary


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["", "end"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_first_words_of_the_lines(tmp_path: Path, end: str, last: str, mark: bytes):
    lines = ["hair,hairs", "tennis court", "caf\u00e9 , coffee house"]
    path = tmp_path / "objects_vocab.txt"
    path.write_bytes(mark + (end.join(lines) + (end if last else "")).encode())
    assert read_vocabulary(path, 3, "classes") == ("hair", "tennis court", "caf\u00e9")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\nb\n", "names 2 classes, but the detector has 3; give the file that belongs to its weights."),
        (b"a\nb\nc\nd", "names 4 classes, but the detector has 3"),
        (b"a\n,b\nc\n", ", line 2 has no name"),
        (b"\xff\xfea\n", "not a UTF-8 text file"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "names.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}.*{re.escape(message)}") as caught:
        read_vocabulary(path, 3, "classes")
    assert "\n" not in str(caught.value)


def test_no_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no such file of names; give a text file with a line for each of the"):
        read_vocabulary(tmp_path / "none.txt", 3, "attributes")
