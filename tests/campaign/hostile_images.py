"""Hostile images."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

from PIL import Image

from tests.campaign.hostile_parts import Builder, written


def image_bytes(kind: str, size: tuple[int, int] = (40, 30), **options) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, (9, 99, 200)).save(stream, kind, **options)
    return stream.getvalue()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes, *more: bytes, bits: int = 8) -> bytes:
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, 2 if bits == 8 else 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _zeros(number: int) -> bytes:
    packer = zlib.compressobj(1)
    parts = [packer.compress(bytes(1 << 20)) for _ in range(number >> 20)]
    return b"".join(parts) + packer.flush()


def _eps(folder: Path, canary: Path) -> Path:
    text = (
        f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 30\n%%EndComments\n({canary}) (w) file closefile\nshowpage\n"
    )
    (folder / "photo.jpg").write_text(text)
    return folder / "photo.jpg"


def _svg(folder: Path, canary: Path) -> Path:
    (folder / "photo.png").write_text(f'<svg xmlns="http://www.w3.org/2000/svg"><image href="file://{canary}"/></svg>')
    return folder / "photo.png"


def _exif_bomb() -> bytes:
    """Entries that claim gigabytes, and a directory that names itself as the next one."""
    entries = b"".join(struct.pack("<HHII", 0x8769 + n, 7, 0x7FFFFFFF, 8) for n in range(400))
    block = b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", 400) + entries + struct.pack("<I", 8)
    return image_bytes("JPEG", exif=b"Exif\0\0" + block)


def _animation(kind: str, frames: int) -> bytes:
    stream = io.BytesIO()
    pictures = [Image.new("RGB", (40, 30), (n % 255, 0, 0)) for n in range(frames)]
    pictures[0].save(stream, kind, save_all=True, append_images=pictures[1:])
    return stream.getvalue()


def _jpeg_size(width: int, height: int) -> bytes:
    content = image_bytes("JPEG")
    at = content.index(b"\xff\xc0") + 5
    return content[:at] + struct.pack(">HH", height, width) + content[at + 4 :]


def _many_scans() -> bytes:
    """A progressive JPEG of 16 megapixels whose last scan comes 10,000 times more."""
    content = image_bytes("JPEG", (4000, 4000), progressive=True)
    last, end = content.rindex(b"\xff\xda"), content.rindex(b"\xff\xd9")
    return content[:end] + content[last:end] * 10_000 + content[end:]


def _tiff(*entries: tuple[int, int, int, int]) -> bytes:
    rows = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + rows + b"\0" * 4


def _with(kind: str, before: bytes, unit: bytes, number: int) -> Builder:
    """An image in which `unit` stands so many times before the last `before`."""

    def build(folder: Path, canary: Path) -> Path:
        content = image_bytes(kind)
        at = content.rindex(before)
        (folder / "photo.jpg").write_bytes(content[:at] + unit * number + content[at:])
        return folder / "photo.jpg"

    return build


def _tiff_of_strips(folder: Path, canary: Path) -> Path:
    """Two million strips, all at the same place."""
    number, start = 2_000_000, 8 + 2 + 12 * 7 + 4
    head = _tiff(
        *((256, 4, 1, 4), (257, 4, 1, number), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)),
        *((273, 4, number, start), (278, 4, 1, 1)),
    )
    (folder / "photo.tif").write_bytes(head + struct.pack("<I", start) * number)
    return folder / "photo.tif"


def _bmp_of_runs(width: int, height: int, runs: bytes) -> bytes:
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(runs), 0, 0, 256, 0) + bytes(1024)
    return b"BM" + struct.pack("<IHHI", 14 + len(head) + len(runs), 0, 0, 14 + len(head)) + head + runs


IMAGES: dict[str, Builder] = {
    "empty": written("photo.jpg", b""),
    "eps": _eps,
    "svg": _svg,
    "text": written("photo.jpg", b"<html>not found</html>"),
    "cut_off": written("photo.jpg", image_bytes("JPEG", (400, 300))[:900]),
    "png_cut_off": written("photo.png", image_bytes("PNG", (400, 300))[:-60]),
    "png_of_terabytes": written("photo.png", png(1 << 30, 1 << 30, zlib.compress(b"\0" * 99))),
    "png_of_no_pixels": written("photo.png", png(0, 0, zlib.compress(b""))),
    "png_bomb": written("photo.png", png(20_000, 20_000, _zeros(1 << 26))),
    "png_with_packed_text": written(
        "photo.png", png(1, 1, zlib.compress(bytes(4)), _chunk(b"zTXt", b"a\0\0" + _zeros(1 << 26)))
    ),
    "png_with_packed_profile": written(
        "photo.png", png(1, 1, zlib.compress(b"\0\1"), _chunk(b"iCCP", b"a\0\0" + _zeros(1 << 26)))
    ),
    "png_with_a_chunk_of_gigabytes": written("photo.png", b"\x89PNG\r\n\x1a\n\x7f\xff\xff\xffIHDR" + bytes(99)),
    "png_of_one_bit": written("photo.png", png(12_000, 12_000, _zeros(18 << 20), bits=1)),
    "jpeg_of_many_scans": written("photo.jpg", _many_scans()),
    "gif_beyond_the_limit_of_pil": written(
        "photo.gif", b"GIF89a\x30\x75\x30\x75\0\0\0,\0\0\0\0\x30\x75\x30\x75\0\x02\0;"
    ),
    "webp_beyond_the_limit_of_pil": written(
        "photo.webp", b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\x02\0\0\0\x2f\x3a\0\x2f\x3a\0" + bytes(60)
    ),
    "jpeg_of_gigapixels": written("photo.jpg", _jpeg_size(65_000, 65_000)),
    "jpeg_that_is_short_of_pixels": written("photo.jpg", _jpeg_size(20_000, 20_000)),
    "gif_of_gigapixels": written("photo.gif", b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\x02\0;"),
    "gif_cut_off": written("photo.gif", image_bytes("GIF", (400, 300))[:-200]),
    "bmp_of_gigapixels": written(
        "photo.bmp", image_bytes("BMP")[:18] + struct.pack("<ii", 1 << 30, 1 << 30) + bytes(999)
    ),
    "bmp_of_negative_size": written("photo.bmp", image_bytes("BMP")[:18] + struct.pack("<ii", -40, -30) + bytes(999)),
    "webp_cut_off": written("photo.webp", image_bytes("WEBP", (400, 300))[:60]),
    "webp_of_gigapixels": written(
        "photo.webp", b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\x02\0\0\0\xff\x3f\0\xff\x3f\0" + bytes(60)
    ),
    "tiff_of_gigapixels": written("photo.tif", _tiff((256, 4, 1, 1 << 30), (257, 4, 1, 1 << 30), (273, 4, 1, 8))),
    "tiff_with_long_entries": written("photo.tif", _tiff(*((256 + n, 4, 0x7FFFFFFF, 8) for n in range(300)))),
    "tiff_in_a_circle": written("photo.tif", _tiff((256, 4, 1, 4), (257, 4, 1, 4))[:-4] + struct.pack("<I", 8)),
    "jpeg_of_fill_bytes": _with("JPEG", b"\xff\xda", b"\xff", 30_000_000),
    "jpeg_of_fill_bytes_in_its_scan": _with("JPEG", b"\xff\xd9", b"\xff", 30_000_000),
    "jpeg_of_empty_comments": _with("JPEG", b"\xff\xda", b"\xff\xfe\0\2", 7_500_000),
    "jpeg_of_restarts": _with("JPEG", b"\xff\xda", b"\xff\xd0", 15_000_000),
    "jpeg_of_exif_segments": _with("JPEG", b"\xff\xdb", b"\xff\xe1\x04\x00Exif\0\0" + bytes(1016), 29_000),
    "png_of_empty_chunks": written("photo.png", png(40, 30, zlib.compress(bytes(3630)), _chunk(b"abCd", b"") * 2**21)),
    "png_of_packed_profiles": written(
        "photo.png", png(40, 30, zlib.compress(bytes(3630)), _chunk(b"iCCP", b"a\0\0" + _zeros(1 << 20)) * 9999)
    ),
    "gif_of_tiny_blocks": _with("GIF", b",\0\0\0\0", b"!\xfe" + b"\1a" * 9_000_000 + b"\0", 1),
    "gif_of_filling": _with("GIF", b",\0\0\0\0", b"\0", 30_000_000),
    "tiff_of_strips": _tiff_of_strips,
    "tiff_of_rationals": written(
        "photo.tif", _tiff((256, 4, 1, 4), (257, 4, 1, 4), (700, 5, 3_000_000, 60)) + bytes(24_000_000)
    ),
    "bmp_of_tiny_runs": written("photo.bmp", _bmp_of_runs(6000, 2500, b"\1\1" * 9_000_000)),
    "bmp_of_short_rows": written("photo.bmp", _bmp_of_runs(2**28, 1, b"\1\1\0\0" * 99)),
    "ppm": written("photo.ppm", b"P6 2 2 255\n" + bytes(12)),
    "jpeg2000": written("photo.jpg", b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(200)),
    "psd": written("photo.jpg", b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 30_000, 30_000, 8, 3) + bytes(99)),
}
HARMLESS_IMAGES: dict[str, Builder] = {  # whose picture is fine
    "exif_bomb": written("photo.jpg", _exif_bomb()),
    "gif_of_many_frames": written("photo.gif", _animation("GIF", 300)),
    "webp_of_many_frames": written("photo.webp", _animation("WEBP", 50)),
    "apng_of_many_frames": written("photo.png", _animation("PNG", 100)),
}
