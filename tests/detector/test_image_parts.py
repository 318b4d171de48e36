"""Files of very many tiny parts are refused at once; photos with all that cameras and editors write are read."""

from __future__ import annotations

import io
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from detector.errors import UserError
from detector.image_parts import (
    MOST_FILL,
    MOST_NUMBERS,
    MOST_PARTS,
    MOST_REPEATS,
    MOST_RUN_BYTES,
    MOST_RUN_PIXELS,
)
from detector.images import ResizeRule, decode_resized, load_image


def picture(kind: str, size: tuple[int, int] = (40, 30), **options) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    if kind == "GIF":
        pixels = pixels[:, :, 0]  # grey: PIL takes many seconds to choose 256 colours of noise
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind, **options)
    return stream.getvalue()


JPEG, PNG, GIF = picture("JPEG"), picture("PNG"), picture("GIF")
SCAN, END = JPEG.index(b"\xff\xda"), JPEG.rindex(b"\xff\xd9")
COMMENT = b"\xff\xfe\0\2"


def put(content: bytes, at: int, more: bytes) -> bytes:
    return content[:at] + more + content[at:]


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def tiff(*entries: tuple[int, int, int, int], order: str = "<", after: bytes = b"") -> bytes:
    rows = b"".join(struct.pack(order + "HHII", *entry) for entry in entries)
    start = {"<": b"II*\0", ">": b"MM\0*"}[order]
    return start + struct.pack(order + "IH", 8, len(entries)) + rows + bytes(4) + after


def tiff_of_strips(number: int, order: str = "<") -> bytes:
    """Grey rows of 4 pixels; all strips, of one row each, share their bytes."""
    start = 8 + 2 + 12 * 10 + 4
    entries = [(256, 4, 1, 4), (257, 4, 1, number), (258, 4, 1, 8), (259, 4, 1, 1), (262, 4, 1, 1)]
    entries += [(273, 4, number, start), (277, 4, 1, 1), (278, 4, 1, 1), (279, 4, number, start + 4 * number)]
    rows = struct.pack(order + "I", start) * number + struct.pack(order + "I", 4) * number
    return tiff(*entries, (284, 4, 1, 1), order=order, after=rows)


def big_tiff(entries: int) -> bytes:
    return b"II+\0" + struct.pack("<HHQQ", 8, 0, 16, entries) + struct.pack("<HHQQ", 256, 4, 1, 4) * 10


def bmp(runs: bytes, width: int, height: int) -> bytes:
    """Run lengths of 8 bits per pixel, all grey."""
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(runs), 0, 0, 256, 0)
    palette = b"".join(bytes([n, n, n, 0]) for n in range(256))
    start = 14 + len(head) + len(palette)
    return b"BM" + struct.pack("<IHHI", start + len(runs), 0, 0, start) + head + palette + runs


def gif_block(more: bytes) -> bytes:
    return put(GIF, 13 + 3 * 2 ** ((GIF[10] & 7) + 1), more)


def exif_segment(data: bytes) -> bytes:
    return b"\xff\xe1" + struct.pack(">H", len(data) + 8) + b"Exif\0\0" + data


MANY = 3_000_000  # that many bytes take a decoder seconds, or memory
SLOW = {
    "fill bytes before the first segment": (put(JPEG, 2, b"\xff" * MANY), f"{MOST_FILL} bytes of filling"),
    "fill bytes before the scan": (put(JPEG, SCAN, b"\xff" * MANY), f"{MOST_FILL} bytes of filling"),
    "fill bytes in portions": (put(JPEG, 2, (b"\xff" * 60_000 + COMMENT) * 50), f"{MOST_FILL} bytes of filling"),
    "zeros between segments": (put(JPEG, SCAN, bytes(MANY)), f"{MOST_FILL} bytes of filling"),
    "stuffed bytes between segments": (put(JPEG, SCAN, b"\xff\0" * MANY), f"{MOST_FILL} bytes of filling"),
    "fill bytes in the scan": (put(JPEG, END, b"\xff" * MANY), f"{MOST_FILL} bytes of filling"),
    "fill bytes without an end": (JPEG[:END] + b"\xff" * MANY, f"{MOST_FILL} bytes of filling"),
    "comments": (put(JPEG, 2, COMMENT * (MOST_PARTS + 1)), f"{MOST_PARTS} segments"),
    "application segments": (put(JPEG, 2, b"\xff\xe9\0\2" * (MOST_PARTS + 1)), f"{MOST_PARTS} segments"),
    "segments of no length": (put(JPEG, 2, b"\xff\xe9\0\0" * (MOST_PARTS + 1)), f"{MOST_PARTS} segments"),
    "comments behind the scan": (put(JPEG, END, COMMENT * (MOST_PARTS + 1)), f"{MOST_PARTS} segments"),
    "restarts before the scan": (put(JPEG, SCAN, b"\xff\xd0" * (MOST_PARTS + 1)), f"{MOST_PARTS} segments"),
    "exif segments": (put(JPEG, 2, exif_segment(b"a") * 101), f"{MOST_REPEATS} segments of EXIF"),
    "chunks": (put(PNG, 33, chunk(b"abCd") * MOST_PARTS), f"{MOST_PARTS} chunks"),
    "chunks behind the picture": (put(PNG, len(PNG) - 12, chunk(b"abCd") * MOST_PARTS), f"{MOST_PARTS} chunks"),
    "empty data": (put(PNG, 33, chunk(b"IDAT") * MOST_PARTS), f"{MOST_PARTS} chunks"),
    "profiles": (put(PNG, 33, chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(10**6))) * 101), "100 colour profiles"),
    "gif comments": (gif_block(b"!\xfe\0" * (MOST_PARTS + 1)), f"{MOST_PARTS} blocks"),
    "a gif comment of tiny blocks": (gif_block(b"!\xfe" + b"\1a" * MOST_PARTS + b"\0"), f"{MOST_PARTS} blocks"),
    "filling between gif blocks": (gif_block(bytes(MANY)), f"{MOST_FILL} bytes of filling"),
    "filling between many gif blocks": (gif_block((bytes(60_000) + b"!\xfe\0") * 2), f"{MOST_FILL} bytes of filling"),
    "strips": (tiff_of_strips(150_001), f"the limit is {MOST_NUMBERS}"),
    "strips, the other byte order": (tiff_of_strips(150_001, ">"), f"the limit is {MOST_NUMBERS}"),
    "rationals": (tiff((256, 4, 1, 4), (700, 5, 350_000, 60), after=bytes(2_800_000)), f"the limit is {MOST_NUMBERS}"),
    "entries": (big_tiff(1 << 40), "65535 entries"),
    "run lengths": (bmp(b"\1\1" * 2_100_000, 2000, 2000), f"{MOST_RUN_BYTES} bytes"),
    "run lengths of many pixels": (bmp(b"\0\0" * 9, 3000, 3000), f"{MOST_RUN_PIXELS} pixels"),
    "run lengths from above": (bmp(b"\0\0" * 9, 3000, -3000), f"{MOST_RUN_PIXELS} pixels"),
}


@pytest.mark.parametrize("name", SLOW)
def test_slow_files_are_refused_at_once(tmp_path: Path, name: str):
    content, words = SLOW[name]
    (tmp_path / "a.img").write_bytes(content)
    start = time.process_time()
    with pytest.raises(UserError, match=words) as found:
        load_image(tmp_path / "a.img")
    assert time.process_time() - start < 1
    assert str(tmp_path / "a.img") in str(found.value) and "save it" in str(found.value)
    with pytest.raises(UserError, match="member 7.*" + words):
        decode_resized(content, "member 7", ResizeRule())


def icc() -> bytes:
    return bytes(range(256)) * 1200  # 300 KB: five segments, with pairs of 0xff in between


FINE = {
    "a progressive photo with EXIF, a profile and a comment": picture(
        "JPEG",
        (400, 300),
        progressive=True,
        exif=b"Exif\0\0" + tiff((0x0112, 3, 1, 1)),
        icc_profile=icc(),
        comment=b"\xff\xff" * 30_000,
    ),
    "restarts in the scan": picture("JPEG", (1000, 800), restart_marker_blocks=1),
    "several EXIF segments": put(JPEG, 2, exif_segment(b"\xff" * 60_000) * 9),
    "a few fill bytes": put(put(JPEG, SCAN, b"\xff" * 1000), 2, b"\xff" * 1000),
    "what follows the picture": JPEG + b"\xff" * MANY + COMMENT * (MOST_PARTS + 1),
    "as many segments as allowed": put(JPEG, 2, COMMENT * (MOST_PARTS - 20)),
    "a PNG with a profile and texts": put(
        picture("PNG", icc_profile=icc()), 33, chunk(b"tEXt", b"a\0b") * 2000 + chunk(b"pHYs", bytes(9))
    ),
    "a GIF with comments": gif_block((b"!\xfe" + b"\3abc" * 99 + b"\0") * 99),
    "a GIF with a picture of many blocks": picture("GIF", (3000, 2000)),
    "strips of a row": tiff_of_strips(50_000),
    "strips of a row, the other byte order": tiff_of_strips(10_000, ">"),
    "a TIFF that PIL wrote": picture("TIFF", (800, 3000), compression="tiff_lzw", icc_profile=icc()),
    "a big TIFF": picture("TIFF", (80, 300), big_tiff=True),
    "run lengths of a 4K screen": bmp(b"\xff\x07" * 15 + b"\x0f\x07\0\0", 3840, 2160),
    "a BMP without run lengths": picture("BMP", (3000, 3000)),
    "a WebP file": picture("WEBP", (400, 300), icc_profile=icc()),
}


@pytest.mark.parametrize("name", FINE)
def test_what_cameras_and_editors_write_is_read(tmp_path: Path, name: str):
    path = tmp_path / "a.img"
    path.write_bytes(FINE[name])
    start = time.process_time()
    if "run lengths of" in name:  # cut off behind its first row
        with pytest.raises(UserError, match="damaged or cut off"):
            load_image(path)
        assert time.process_time() - start < 2
        return
    with Image.open(path) as image:
        expected = np.asarray(image.convert("RGB"))
    assert np.array_equal(load_image(path, "RGB"), expected)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PIL, about a directory that is cut off
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "TIFF", "BMP"])
def test_a_cut_off_file_is_still_said_to_be_so(tmp_path: Path, kind: str):
    content = picture(kind)
    for length in (6, 9, 12, 17, 33, 40, 60):
        (tmp_path / "a.img").write_bytes(content[:length])
        with pytest.raises(UserError, match=r"get the file again|get or convert it again"):
            load_image(tmp_path / "a.img")
