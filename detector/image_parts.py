"""What an image file is made of, looked at before it is decoded: files of very many tiny parts are refused.

PIL and libjpeg visit each segment, chunk, directory entry and byte of filling on its own, some of them in Python, so
that a file of some megabytes could keep a processor busy for a minute. No camera or program writes as many as the
limits below. The loops here end at a limit, and what lies between two parts is searched by one call.
"""

from __future__ import annotations

import io
import re
import struct

from detector.errors import UserError

MOST_PARTS = 100_000  # segments, chunks, blocks; a PNG of 2^29 pixels in chunks of 8 KiB has as many at most
MOST_SCANS = 100  # of a progressive JPEG, each of which visits all pixels; cameras and editors write about 10
MOST_FILL = 2**16  # bytes of a JPEG or GIF that belong to no part
MOST_REPEATS = 100  # parts of one kind that each cost more than their size: EXIF segments of a JPEG, profiles of a PNG
MOST_NUMBERS = (
    300_000  # in the directory of a TIFF: two for each strip, so one strip for each of 100,000 rows, and others
)
MOST_ENTRIES = 2**16 - 1  # of the directory of a TIFF; the classic form has no more
# PIL decodes the run lengths of a BMP in Python, run by run and partly pixel by pixel. 4K screens have fewer pixels.
MOST_RUN_BYTES, MOST_RUN_PIXELS = 2**22, 2**23

_MARKER = re.compile(rb"\xff([^\x00\xff])")  # of a JPEG
_MARKER_IN_SCAN = re.compile(rb"\xff([^\x00\x01\xd0-\xd7\xff])")  # restarts belong to the scan
_ALONE = frozenset(bytes([code]) for code in (0x01, *range(0xD0, 0xDA)))  # markers without a length behind them
_EXIF, _SCAN, _END = b"\xe1", b"\xda", b"\xd9"
_GIF_BLOCK = re.compile(rb"[!,;]")
_TEXT_TYPES = (1, 2, 6, 7)  # of TIFF values: bytes and characters, which PIL does not convert one by one
_RUN_LENGTHS = (1, 2)  # of BMP compressions


def check_parts(stream: io.BufferedIOBase, name: str, kind: str) -> None:
    """Refuse an image file that is slow to read for its size.

    Args:
        stream: the whole file; left at its beginning.
        name: names it in errors.
        kind: "JPEG", "PNG", "GIF", "TIFF" or "BMP", by the file's first bytes; other formats are read in a short time.

    Raises:
        UserError: the file has more parts or scans, or more bytes between them, than any real image. What is damaged in
            another way is left to the decoder.
    """
    check = {"JPEG": _check_jpeg, "PNG": _check_png, "GIF": _check_gif, "TIFF": _check_tiff, "BMP": _check_bmp}.get(
        kind
    )
    if check is not None:
        stream.seek(0)
        check(stream, name)
        stream.seek(0)


def _check_jpeg(stream: io.BufferedIOBase, name: str) -> None:
    """Up to the end of the picture; a thumbnail and what follows the picture do not count."""
    content = stream.read()
    parts = scans = fill = exifs = 0
    at = 2
    while found := (_MARKER_IN_SCAN if scans else _MARKER).search(content, at):
        # data of a scan have no two such bytes beside each other, so these are filling
        fill += 2 * content.count(b"\xff\xff", at, found.start() + 1) if scans else found.start() - at
        parts += 1
        scans += found[1] == _SCAN
        exifs += found[1] == _EXIF and content.startswith(b"Exif", found.end() + 2)
        if scans > MOST_SCANS:
            raise UserError(f"Image {name} has more than {MOST_SCANS} scans, which take very long; save it anew.")
        if parts > MOST_PARTS:
            raise _too_many(name, MOST_PARTS, "segments")
        if exifs > MOST_REPEATS:
            raise _too_many(name, MOST_REPEATS, "segments of EXIF data")
        if fill > MOST_FILL:
            break
        if scans and found[1] == _END:
            return
        at = found.end()
        if found[1] not in _ALONE:
            at += max(int.from_bytes(content[at : at + 2], "big"), 2)
    else:
        fill += 2 * content.count(b"\xff\xff", at) if scans else max(len(content) - at, 0)
    if fill > MOST_FILL:
        raise _too_many(name, MOST_FILL, "bytes of filling between its segments")


def _check_png(stream: io.BufferedIOBase, name: str) -> None:
    parts = profiles = 0
    at = 8
    kind = b""
    while kind != b"IEND":
        stream.seek(at)
        head = stream.read(8)
        if len(head) < 8:
            return
        kind = head[4:]
        at += int.from_bytes(head[:4], "big") + 12
        parts += 1
        profiles += kind == b"iCCP"  # each is unpacked
        if parts > MOST_PARTS:
            raise _too_many(name, MOST_PARTS, "chunks")
        if profiles > MOST_REPEATS:
            raise _too_many(name, MOST_REPEATS, "colour profiles")


def _check_gif(stream: io.BufferedIOBase, name: str) -> None:
    """Up to the first picture."""
    content = stream.read()
    if len(content) < 13:
        return
    at = 13 + (3 * 2 ** ((content[10] & 7) + 1) if content[10] & 128 else 0)
    parts = fill = 0
    while (found := _GIF_BLOCK.search(content, at)) and found[0] == b"!":
        fill += found.start() - at
        at = found.end() + 1
        size = -1
        while size and at < len(content):
            size = content[at]
            at += 1 + size
            parts += 1
            if parts > MOST_PARTS:
                raise _too_many(name, MOST_PARTS, "blocks before its picture")
    fill += (found.start() if found else len(content)) - at
    if fill > MOST_FILL:
        raise _too_many(name, MOST_FILL, "bytes of filling between its blocks")


def _check_tiff(stream: io.BufferedIOBase, name: str) -> None:
    """Its first directory."""
    head = stream.read(16)
    order = "<" if head[:2] == b"II" else ">"
    is_big = b"\x2b" in head[2:4]
    try:
        (at,) = struct.unpack_from(order + "Q" if is_big else order + "I", head, 8 if is_big else 4)
        stream.seek(at)
        (entries,) = struct.unpack(order + "Q" if is_big else order + "H", stream.read(8 if is_big else 2))
    except (struct.error, OSError, ValueError, OverflowError):  # the decoder says what is wrong
        return
    if entries > MOST_ENTRIES:
        raise _too_many(name, MOST_ENTRIES, "entries in its directory")
    form = struct.Struct(order + ("HHQ8x" if is_big else "HHI4x"))
    rows = stream.read(entries * form.size)
    rows = rows[: len(rows) // form.size * form.size]
    numbers = sum(count for _, kind, count in form.iter_unpack(rows) if kind not in _TEXT_TYPES)
    if numbers > MOST_NUMBERS:
        raise UserError(
            f"Image {name} has {numbers} numbers in its directory, such as the places of its strips; the limit is "
            f"{MOST_NUMBERS}, so save it anew with longer strips, or as PNG."
        )


def _check_bmp(stream: io.BufferedIOBase, name: str) -> None:
    head = stream.read(34)
    if len(head) < 34:
        return
    size, width, height, compression = struct.unpack("<14xIii4xI", head)
    if size < 40 or compression not in _RUN_LENGTHS:
        return
    length = stream.seek(0, io.SEEK_END)
    pixels = abs(width * height)
    if length > MOST_RUN_BYTES or pixels > MOST_RUN_PIXELS:
        raise UserError(
            f"Image {name} is a BMP of run lengths with {pixels} pixels in {length} bytes; the limits are "
            f"{MOST_RUN_PIXELS} pixels and {MOST_RUN_BYTES} bytes, since it is read slowly, so save it as PNG."
        )


def _too_many(name: str, limit: int, what: str) -> UserError:
    return UserError(f"Image {name} has more than {limit} {what}, which take very long to read; save it anew.")
