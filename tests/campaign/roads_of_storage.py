"""The ways on which this project reads archives, indices and features of every format: what is read equals what was
written, or is refused."""

from __future__ import annotations

import functools
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from e2e_vl.data.captions import ShardCaptions, TextLines
from e2e_vl.data.features import OPTIONAL, FeatureStore, RegionFeatures, open_features, save_npz, write_features
from e2e_vl.data.storage.archives import ArchivedFiles
from tests.campaign.roads_of_files import Road, check_boxes, check_size, require

FILES = {"tsv": "tsv/f.tsv", "lxmert": "lxmert/f.tsv", "hdf5": "hdf5/f.h5", "lmdb": "lmdb/f.lmdb", "npz": "npz"}
MEMBERS = {f"folder/{number}.bin": bytes([number, 200]) * (50 + 9 * number) for number in range(4)}
LINES = [f"line {number} of a text" for number in range(150)]
STORAGE = "storage"  # below the drawn files
STAMP = {"detector": "drawn"}


def draw_storage(root: Path) -> None:
    folder = root / STORAGE
    for layout, name in FILES.items():
        place = folder / name
        (place if layout == "npz" else place.parent).mkdir(parents=True, exist_ok=True)
        if layout == "npz":
            for record in _records():
                save_npz(place / f"{record.image_id}.npz", record, STAMP)
            (place / "stamp.json").write_text('{"detector": "drawn"}')
        else:
            write_features(layout, place, iter(_records()), STAMP, num_bytes=10_000)
    for name, method in (("stored", zipfile.ZIP_STORED), ("packed", zipfile.ZIP_DEFLATED)):
        with zipfile.ZipFile(folder / f"{name}.zip", "w", method) as archive:
            for member, content in MEMBERS.items():
                archive.writestr(member, content)
    (folder / "lines.txt").write_text("\n".join(LINES))


def storage_roads() -> list[Road]:
    return list(_roads())


def _roads() -> Iterator[Road]:
    for layout, name in FILES.items():
        unheard = (f"{STORAGE}/{name}",) if layout == "hdf5" else ()
        reads = functools.partial(_features, layout, name)
        yield Road(f"features {layout}", None, reads, is_binary=True, unheard=unheard)
    for name in ("stored", "packed"):
        yield Road(f"archive {name}", None, functools.partial(_members, f"{name}.zip"), is_binary=True)
    yield Road("lines with an index", None, _lines, is_binary=True)
    yield Road("shards with an index", None, _shards, is_binary=True)


@functools.cache
def _records() -> tuple[RegionFeatures, ...]:
    rng = np.random.default_rng(0)
    made = []
    for image_id, rows in (("7", 3), ("42", 5), ("9", 1)):
        columns: dict[str, Any] = {name: rng.integers(0, 9, rows).astype(kind) for name, kind in OPTIONAL.items()}
        columns |= {name: columns[name] / 10 for name in ("scores", "attribute_scores")}
        boxes = rng.random((rows, 4), dtype=np.float32).cumsum(axis=1)
        features = rng.standard_normal((rows, 6)).astype(np.float32)
        whole = rng.random(6, dtype=np.float32)
        made.append(RegionFeatures(image_id, (30, 40), boxes, features, image_feature=whole, **columns))
    return tuple(made)


def _features(layout: str, name: str, root: Path) -> None:
    store: FeatureStore = open_features(root / STORAGE / name)
    known = {record.image_id: record for record in _records()}
    require(store.stamp is None or isinstance(store.stamp, dict), "no stamp")
    for image_id in store.ids:
        found = store[image_id]
        check_boxes(found.boxes, points=True)
        check_size(found.image_size)
        require(np.isfinite(found.features).all(), "a feature is not finite")
        expected = known[image_id].columns()
        for column, values in found.columns().items():
            require(np.array_equal(values, expected[column]), f"{column} of image {image_id} is not as written")
        kept = {"tsv": 2, "lxmert": 6}.get(layout, len(expected))
        require(len(found.columns()) == kept, f"image {image_id} has lost a column")


def _members(name: str, root: Path) -> None:
    folder = root / STORAGE
    files = ArchivedFiles(folder, folder / "index")
    for member, content in MEMBERS.items():
        require(files.read(f"{name}@/{member}") == content, f"{member} is not as written")


def _lines(root: Path) -> None:
    folder = root / STORAGE
    before = (folder / "lines.txt").stat().st_mtime_ns
    found = list(TextLines(folder / "lines.txt", folder / "index"))
    if before == _time_of(folder / "lines.txt"):  # the text is as drawn
        require(found == LINES, "the lines are others")
    require(all(isinstance(line, str) and line for line in found), "a line is not a text")


@functools.cache
def _time_of(path: Path) -> int:
    """When the file was drawn; asked first while all files are whole."""
    return path.stat().st_mtime_ns


def _shards(root: Path) -> None:
    captions = ShardCaptions(root / "shards" / "train", root / STORAGE / "index")
    for row in range(captions.groups.num_texts):
        caption = captions.caption(row)
        require(isinstance(caption, str), "a caption is not a text")
        captions.image(row)
