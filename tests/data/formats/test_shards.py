from __future__ import annotations

import io
import json
import logging
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from detector.errors import UserError
from detector.images import ResizeRule
from e2e_vl.data import captions as shards
from e2e_vl.data.captions import ShardCaptions
from e2e_vl.data.image_loader import read_image


def jpeg(value: int, size=(20, 10)) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((size[1], size[0], 3), value, dtype=np.uint8)).save(stream, "JPEG")
    return stream.getvalue()


def write(path, members: list[tuple[str, bytes]]):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def record(key: str, caption: str | None, image: bytes | None = b"x", suffix: str = "jpg") -> list[tuple[str, bytes]]:
    members = [(f"{key}.json", b"{}")]
    if image is not None:
        members.append((f"{key}.{suffix}", image))
    if caption is not None:
        members.append((f"{key}.txt", caption.encode()))
    return members


@pytest.fixture
def folder(tmp_path):
    write(
        tmp_path / "cc" / "00000.tar",
        [
            *record("000000000", "A red box.", jpeg(10)),
            *record("000000002", "eine Hütte\n", jpeg(20, (30, 30))),
            *record("000000003", None, jpeg(30)),
            *record("000000004", " \n", jpeg(40)),
            *record("000000005", "lost", None),
            *record("000000006", "empty", b""),
        ],
    )
    write(tmp_path / "cc" / "00001.tar", record("000010000", "last", jpeg(50), "PNG"))
    return tmp_path / "cc"


def make(folder, tmp_path) -> ShardCaptions:
    return ShardCaptions(folder, tmp_path / "cache")


def test_records_of_all_shards_in_order(folder, tmp_path):
    source = make(folder, tmp_path)
    assert [source.caption(i) for i in range(3)] == ["A red box.", "eine Hütte", "last"]
    assert [source.name(i) for i in range(3)] == ["000000000", "000000002", "000010000"]
    assert [list(texts) for texts in source.groups] == [[0], [1], [2]]
    image = source.image(1)
    assert image.content == jpeg(20, (30, 30))
    assert image.name == f"{folder / '00000.tar'}: 000000002.jpg"
    pixels, image_transform = read_image(
        image, (30, 30), ResizeRule(15, 30), flip=False, channel_order="BGR", name="image 1"
    )
    assert pixels.shape == (15, 15, 3)
    assert (abs(pixels.astype(int) - 20) < 3).all()
    assert image_transform.original_size == (30, 30)
    assert source.image_size(0) is source.boxes(0) is None


def test_what_is_left_out_is_counted_and_said(folder, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        source = make(folder, tmp_path)
    assert source.left_out == {"no image": 2, "no caption": 2, "failed": -1}
    assert "3 images with captions in 2 shards; left out: 2 captions without image, 2 images without" in caplog.text
    assert "failed downloads: not known" in caplog.text
    assert [entry.levelname for entry in caplog.records] == ["WARNING"]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        make(folder / "00001.tar", tmp_path)
    assert [entry.levelname for entry in caplog.records] == ["INFO"], "nothing is left out of this one"
    for number, counts in ((0, (9, 6)), (1, (4, 1))):
        stats = {"count": counts[0], "successes": counts[1], "failed_to_download": 2, "failed_to_resize": 1}
        (folder / f"0000{number}_stats.json").write_text(json.dumps(stats))
    assert make(folder, tmp_path).left_out["failed"] == 6, "counted again from the kept index"


def test_the_index_is_kept_and_only_changed_shards_are_read_again(folder, tmp_path, monkeypatch):
    make(folder, tmp_path)
    write(folder / "00001.tar", [*record("a", "new"), *record("b", "newer")])
    opened = []
    original = shards.members_of
    monkeypatch.setattr(shards, "members_of", lambda file: opened.append(Path(file.name).name) or original(file))
    source = make(folder, tmp_path)
    assert opened == ["00001.tar"]
    assert [source.caption(i) for i in range(4)] == ["A red box.", "eine Hütte", "new", "newer"]


def test_many_shards_with_few_open_files_and_in_another_process(tmp_path):
    for number in range(5):
        write(tmp_path / "cc" / f"{number:05d}.tar", record(f"{number}", f"caption {number}", bytes([number])))
    source = make(tmp_path / "cc", tmp_path)
    source._files.limit = 2
    copy = pickle.loads(pickle.dumps(source))
    for each in (source, copy):
        for number in (4, 0, 3, 1, 2, 4):
            assert each.caption(number) == f"caption {number}"
            assert each.image(number).content == bytes([number])
        assert len(each._files._files) <= 2


def test_a_pattern_names_some_shards_and_folders_in_a_tar_are_fine(tmp_path):
    for number in range(12):
        write(tmp_path / "cc" / f"{number:05d}.tar", record(f"part.d/{number}", f"caption {number}"))
    source = make(tmp_path / "cc" / "0000*.tar", tmp_path)
    assert len(source.groups) == 10
    assert source.name(9) == "part.d/9"


def test_webdataset_reads_the_same_records(folder, tmp_path):
    webdataset = pytest.importorskip("webdataset")
    source = make(folder, tmp_path)
    urls = sorted(str(path) for path in folder.glob("*.tar"))
    samples = [
        sample
        for sample in webdataset.WebDataset(urls, shardshuffle=False)
        if sample.get("txt", b"").strip() and (sample.get("jpg") or sample.get("png"))
    ]
    assert [sample["__key__"] for sample in samples] == [source.name(i) for i in range(3)]
    assert [sample["txt"].decode().strip() for sample in samples] == [source.caption(i) for i in range(3)]


def test_bad_shards(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere: no shards"):
        make(tmp_path / "nowhere", tmp_path)
    write(tmp_path / "none" / "00000.tar", record("a", None))
    with pytest.raises(ValueError, match=r"the 1 shards hold no image with a caption"):
        make(tmp_path / "none", tmp_path)
    path = write(tmp_path / "odd" / "00000.tar", record("a", "b"))
    path.write_bytes(b"not a tar file" * 100)
    with pytest.raises(ValueError, match=r"00000.tar: no readable tar file .* run img2dataset again"):
        make(path.parent, tmp_path)
    write(path, record("a", "b")).write_bytes(b"")
    with pytest.raises(ValueError, match=r"00000.tar: "):
        make(path.parent, tmp_path)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([*record("a", "one"), ("a.png", b"i")], r"a\.jpg and a\.png are two images of one record"),
        ([("a.jpg", b"i"), *record("a", "one")], r"a\.jpg and a\.jpg are two images of one record"),
        ([*record("a", "one"), ("a.txt", b"two")], r"a\.txt and a\.txt are two captions of one record"),
        ([*record("a", "one"), *record("b", "two"), *record("a", "one")], r"the record of a\.json is there twice"),
    ],
)
def test_two_records_with_one_key(tmp_path, members, message):
    path = write(tmp_path / "cc" / "00000.tar", members)
    with pytest.raises(ValueError, match=message):
        make(path.parent, tmp_path)


@pytest.mark.parametrize("kept", [700, 1024, 1300, 3072])
def test_a_shard_that_is_cut_off(tmp_path, kept):
    path = write(tmp_path / "cc" / "00000.tar", record("a", "caption", b"i" * 600))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"00000.tar: .*run img2dataset again"):
        make(path.parent, tmp_path)


def test_a_damaged_header_in_the_middle_does_not_end_the_shard(tmp_path):
    path = write(tmp_path / "cc" / "00000.tar", [*record("a", "first"), *record("b", "second")])
    content = bytearray(path.read_bytes())
    start = content.index(b"b.json")
    content[start : start + 512] = b"?" * 512
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"00000.tar: .*it has a damaged header at byte {start}\); run img2d"):
        make(path.parent, tmp_path)


def test_tar_files_one_after_the_other_in_one_file(tmp_path):
    path = write(tmp_path / "cc" / "0.tar", record("a", "first"))
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(ValueError, match=r"0.tar: .*it goes on after its end"):
        make(path.parent, tmp_path)


@pytest.mark.parametrize("what", ["image", "caption"])
def test_a_bit_that_flips_after_the_index_was_made(tmp_path, what):
    path = write(tmp_path / "cc" / "0.tar", [*record("a", "one", b"pixels"), *record("b", "two", b"others")])
    source, status = make(path.parent, tmp_path), path.stat()
    content = bytearray(path.read_bytes())
    content[content.index({"image": b"others", "caption": b"two"}[what])] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as where the disk is to blame
    for one in (source, make(path.parent, tmp_path)):
        assert (one.caption(0), one.image(0).content) == ("one", b"pixels")
        with pytest.raises(UserError, match=rf"0\.tar: the {what} of record b is not as it was .* get the file again"):
            getattr(one, what)(1)


def test_a_file_that_is_cut_off_while_it_is_in_use(tmp_path):
    path = write(tmp_path / "cc" / "0.tar", [*record("a", "one"), *record("b", "two", b"i" * 30_000)])
    source = make(path.parent, tmp_path)
    os.truncate(path, 20_000)
    assert source.caption(0) == "one"
    with pytest.raises(UserError, match=r"0\.tar: has changed while it was in use .* start again"):
        source.image(1)


def test_a_large_member_is_read_in_parts(tmp_path):
    content = os.urandom(3 << 20)
    write(tmp_path / "cc" / "0.tar", record("a", "one", content))
    assert make(tmp_path / "cc", tmp_path).image(0).content == content


def test_a_caption_in_another_encoding(tmp_path):
    path = write(tmp_path / "cc" / "0.tar", [("a.jpg", b"i"), ("a.txt", "Hütte".encode("latin-1"))])
    with pytest.raises(ValueError, match=r"0.tar: the caption of record a is not UTF-8"):
        make(path.parent, tmp_path).caption(0)


def test_records_with_long_names_have_names_of_their_own(tmp_path):
    """The header of a member holds only the beginning of its name, and only ASCII letters."""
    for number, keys in enumerate((["k" * 120 + "1", "k" * 120 + "2"], ["é", "è"])):
        write(
            tmp_path / "cc" / f"{number}.tar", [*record(keys[0], "one", b"first"), *record(keys[1], "two", b"second")]
        )
    source = make(tmp_path / "cc", tmp_path)
    assert [source.name(number) for number in range(4)] == ["k" * 120 + "1", "k" * 120 + "2", "é", "è"]
    assert [source.image(number).content for number in range(4)] == [b"first", b"second"] * 2


@pytest.mark.parametrize(("suffix", "limit"), [("jpg", 1 << 28), ("txt", 1 << 20)])
def test_an_image_or_a_caption_that_is_far_too_large(tmp_path, suffix, limit):
    (tmp_path / "cc").mkdir()
    with (tmp_path / "cc" / "0.tar").open("wb") as file:
        member = tarfile.TarInfo(f"a.{suffix}")
        member.size = limit + 1
        file.write(member.tobuf())
        file.truncate(limit + 4096)
    with pytest.raises(UserError, match=rf"0\.tar: the .* a\.{suffix} has {limit + 1} bytes; the limit is {limit}"):
        make(tmp_path / "cc", tmp_path)


def test_a_shard_that_is_removed_while_it_is_in_use(tmp_path):
    source = make(write(tmp_path / "cc" / "0.tar", record("a", "one")), tmp_path)
    (tmp_path / "cc" / "0.tar").unlink()
    for look in (source.caption, source.image, source.name):
        with pytest.raises(UserError, match=r"0\.tar: it was removed while in use"):
            look(0)


@pytest.mark.parametrize("make_one", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_a_shard_that_is_not_a_file(tmp_path, make_one):
    make_one(tmp_path / "00000.tar")
    with pytest.raises(UserError, match=r"00000\.tar: cannot read the shard"):
        make(tmp_path, tmp_path / "cache")
