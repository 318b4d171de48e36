"""Hostile files of region features."""

from __future__ import annotations

import functools
import io
import struct
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from e2e_vl.data.features import RegionFeatures, save_npz, write_features
from tests.campaign.hostile_parts import HUGE, Builder, rewritten, written


def record(image_id: str = "1", **changes) -> RegionFeatures:
    boxes = np.array([[0, 0, 10, 10], [5, 5, 30, 20]], dtype=np.float32)
    values = {"boxes": boxes, "features": np.ones((2, 8), np.float32), "scores": np.array([0.5, 1], np.float32)}
    values |= {"classes": np.array([1, 2])}
    return RegionFeatures(image_id, (30, 40), **{**values, **changes})


def npz_bytes(**changes) -> bytes:
    stream = io.BytesIO()
    save_npz(stream, record())
    arrays = {**dict(np.load(io.BytesIO(stream.getvalue()))), **changes}
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def _npy_header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def _npz_member(content: bytes, name: str = "features.npy") -> Builder:
    good = npz_bytes()
    return npz_file(rewritten(good, lambda one, data: content if one == name else data))


def npz_file(content: bytes) -> Builder:
    return written("1.npz", content)


def _npz_bomb(folder: Path, canary: Path) -> Path:
    shape = "{'descr': '<f4', 'fortran_order': False, 'shape': (16384, 2048)}"
    with (
        zipfile.ZipFile(folder / "1.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("features.npy", "w") as out,
    ):
        out.write(_npy_header(shape))
        for _ in range(32):
            out.write(bytes(1 << 22))
    return folder / "1.npz"


def _npz_lying_size(folder: Path, canary: Path) -> Path:
    """A member that unpacks to more than the directory says."""
    content = npz_bytes(features=np.zeros((2, 1 << 20), np.float32))
    packed = rewritten(content, lambda _, data: data, zipfile.ZIP_DEFLATED)
    at = packed.index(b"features.npy", packed.index(b"PK\1\2"))
    (folder / "1.npz").write_bytes(packed[: at - 22] + struct.pack("<L", 200) + packed[at - 18 :])
    return folder / "1.npz"


def _shape(shape: str, kind: str = "<f4", data: bytes = b"\0" * 64) -> bytes:
    return _npy_header(f"{{'descr': {kind!r}, 'fortran_order': False, 'shape': {shape}}}") + data


NPZ: dict[str, Builder] = {
    "empty": npz_file(b""),
    "cut_off": npz_file(npz_bytes()[:-200]),
    "end_of_zeros": npz_file(npz_bytes()[:-200] + bytes(200)),
    "bomb": _npz_bomb,
    "lying_size": _npz_lying_size,
    "shape_of_terabytes": _npz_member(_shape(f"({HUGE},)")),
    "shape_that_overflows": _npz_member(_shape(f"({1 << 33}, {1 << 33})")),
    "negative_shape": _npz_member(_shape("(-1, 16)")),
    "many_dimensions": _npz_member(_shape("(" + "1, " * 3000 + ")")),
    "type_without_bytes": _npz_member(_shape(f"({HUGE},)", "|V0", b"")),
    "objects": npz_file(npz_bytes(features=np.array([{}, 1], dtype=object))),
    "records": _npz_member(_shape("(2,)", "<f4,<i4")),
    "deep_header": _npz_member(_npy_header("(" * 9000)),
    "long_header": _npz_member(b"\x93NUMPY\x02\x00" + struct.pack("<I", (1 << 32) - 1) + b"{"),
    "another_image": npz_file(npz_bytes(image_id=np.array("2"))),
    "no_size": npz_file(npz_bytes(image_size=np.array([0, 40]))),
    "strange_size": npz_file(npz_bytes(image_size=np.zeros((2, 2, 2)))),
    "nan": npz_file(npz_bytes(features=np.full((2, 8), np.nan, np.float32))),
    "infinite_box": npz_file(npz_bytes(boxes=np.array([[0, 0, 1, 1], [0, 0, np.inf, 1]], np.float32))),
    "box_outside": npz_file(npz_bytes(boxes=np.array([[0, 0, 1, 1], [0, 0, 99, 1]], np.float32))),
    "box_inverted": npz_file(npz_bytes(boxes=np.array([[0, 0, 1, 1], [9, 0, 3, 1]], np.float32))),
    "scores_of_logits": npz_file(npz_bytes(scores=np.array([0.5, 17], np.float32))),
    "other_number_of_boxes": npz_file(npz_bytes(boxes=np.zeros((3, 4), np.float32))),
    "negative_class": npz_file(npz_bytes(classes=np.array([-1, 2]))),
}


@functools.cache
def store_bytes(layout: str, name: str, images: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        more = {"attributes": np.array([1, 2]), "attribute_scores": np.array([0.1, 0.2], np.float32)}
        records = (record(str(number), **more) for number in range(1, 1 + images))
        write_features(layout, path, records, {"a": 1}, num_bytes=images * 4096)
        return path.read_bytes()


def store(
    layout: str, name: str, change: Callable[[bytes], bytes] = lambda content: content, *, images: int = 59
) -> Builder:
    return lambda folder, canary: written(name, change(store_bytes(layout, name, images)))(folder, canary)


def _h5(change: Callable) -> Builder:
    def build(folder: Path, canary: Path) -> Path:
        import h5py

        path = store("hdf5", "f.h5")(folder, canary)
        with h5py.File(path, "a") as file:
            change(file, folder)
        return path

    return build


def _replace(name: str, **options) -> Callable:
    def change(file, folder: Path) -> None:
        del file[name]
        file.create_dataset(name, **options)

    return change


def _external(file, folder: Path) -> None:
    del file["features"]
    (folder / "secret").write_bytes(bytes(10_000))
    file.create_dataset("features", (118, 8), "f4", external=[(str(folder / "secret"), 0, 10_000)])


def _linked(file, folder: Path) -> None:
    import h5py

    del file["features"]
    with h5py.File(folder / "other.h5", "w") as other:
        other["features"] = np.zeros((118, 8), np.float32)
    file["features"] = h5py.ExternalLink("other.h5", "features")


def _swap(one: bytes, other: bytes) -> Callable[[bytes], bytes]:
    """Exchange the ids of two rows."""
    return lambda content: content.replace(one, b"@").replace(other, one).replace(b"@", other)


def _page(number: int, at: int, value: bytes) -> Callable[[bytes], bytes]:
    start = number * 4096 + at
    return lambda content: content[:start] + value + content[start + len(value) :]


def _lmdb_pages(flag: int, at: int, value: bytes) -> Callable[[bytes], bytes]:
    """Overwrite a place in each page of a kind."""

    def change(content: bytes) -> bytes:
        pages = [content[n : n + 4096] for n in range(0, len(content), 4096)]
        kinds = [struct.unpack_from("<H", page, 10)[0] for page in pages]
        parts = [p[:at] + value + p[at + len(value) :] if k & flag else p for p, k in zip(pages, kinds, strict=True)]
        return b"".join(parts)

    return change


def _circle(content: bytes) -> bytes:
    """The root's first node names the root as the page below."""
    root = struct.unpack_from("<Q", content, 4096 + 128)[0]
    at = root * 4096 + struct.unpack_from("<H", content, root * 4096 + 16)[0]
    assert struct.unpack_from("<H", content, root * 4096 + 10)[0] & 1
    return content[:at] + struct.pack("<HHH", root, 0, 0) + content[at + 6 :]


def _sidecar(text: str) -> Builder:
    def build(folder: Path, canary: Path) -> Path:
        path = store("tsv", "f.tsv")(folder, canary)
        (folder / "f.tsv.json").write_text(text)
        return path

    return build


def _emptied(folder: Path, canary: Path) -> Path:
    """A file of 0 bytes beside which an index says that these are all."""
    text = '{"stamp": {}, "index": {"bytes": 0, "offsets": {}, "checksums": []}}'
    _sidecar(text)(folder, canary).write_bytes(b"")
    return folder / "f.tsv"


STORES: dict[str, Builder] = {
    "tsv_empty": written("f.tsv", b""),
    "tsv_empty_with_an_index": _emptied,
    "tsv_without_lines": written("f.tsv", b"1" * 5_000_000),
    "tsv_with_many_boxes": store("tsv", "f.tsv", lambda c: c.replace(b"\t2\t", b"\t" + b"9" * 4000 + b"\t", 1)),
    "tsv_with_negative_boxes": store("tsv", "f.tsv", lambda c: c.replace(b"\t2\t", b"\t-2\t")),
    "tsv_with_damaged_base64": store("tsv", "f.tsv", lambda c: c.replace(b"A", b"!", 20)),
    "tsv_with_exchanged_rows": store("tsv", "f.tsv", _swap(b"\n2\t", b"1\t")),
    "tsv_with_a_damaged_index": _sidecar('{"stamp": {}, "index": {"bytes": "x", "offsets": []}}'),
    "tsv_with_an_index_outside": _sidecar('{"stamp": {}, "index": {"bytes": 99, "offsets": {"1": 1e300}}}'),
    "tsv_with_another_size": store("lxmert", "f.tsv", lambda c: c.replace(b"\t30\t40\t", b"\t3\t4\t")),
    "h5_cut_off": store("hdf5", "f.h5", lambda c: c[: len(c) // 2]),
    "h5_empty": written("f.h5", b""),
    "h5_of_terabytes": _h5(_replace("starts", shape=(HUGE,), dtype="i8", chunks=(1024,))),
    "h5_of_terabytes_of_features": _h5(_replace("features", shape=(HUGE, 8), dtype="f4", chunks=(64, 8))),
    "h5_of_large_pieces": _h5(
        _replace("features", shape=(118, 8), dtype="f4", maxshape=(None, 8), chunks=(1 << 25, 8))
    ),
    "h5_packed": _h5(_replace("features", shape=(1 << 26, 8), dtype="f4", chunks=(1 << 16, 8), compression="gzip")),
    "h5_with_objects": _h5(
        lambda file, _: _replace("ids", shape=(59,), dtype=__import__("h5py").string_dtype())(file, _)
    ),
    "h5_in_another_file": _h5(_external),
    "h5_with_a_link": _h5(_linked),
    "h5_with_starts_outside": _h5(lambda file, _: file["starts"].__setitem__(1, 10**9)),
    "h5_with_nan": _h5(lambda file, _: file["boxes"].__setitem__(0, np.nan)),
    "lmdb_empty": written("f.lmdb", b""),
    "lmdb_cut_off": store("lmdb", "f.lmdb", lambda c: c[: len(c) // 2]),
    "lmdb_cut_to_its_header": store("lmdb", "f.lmdb", lambda c: c[:8192]),
    "lmdb_with_a_root_outside": store("lmdb", "f.lmdb", _page(1, 128, struct.pack("<Q", 1 << 50))),
    "lmdb_with_itself_as_root": store("lmdb", "f.lmdb", _page(1, 128, struct.pack("<Q", 1))),
    "lmdb_with_strange_pages": store("lmdb", "f.lmdb", _page(1, 40, struct.pack("<I", 3))),
    "lmdb_with_leaves_without_bounds": store("lmdb", "f.lmdb", _lmdb_pages(2, 12, b"\xff\xff\xff\xff")),
    "lmdb_with_nodes_outside": store("lmdb", "f.lmdb", _lmdb_pages(2, 16, b"\xff\x0f" * 20)),
    "lmdb_with_a_circle": store("lmdb", "f.lmdb", _circle, images=200),
    "lmdb_with_damaged_values": store("lmdb", "f.lmdb", lambda c: c.replace(b"PK\3\4", b"XXXX")),
    "lmdb_with_exchanged_images": store("lmdb", "f.lmdb", lambda c: c.replace(b"1\0\0\0", b"2\0\0\0")),
}
