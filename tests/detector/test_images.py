from __future__ import annotations

import io
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from detector.errors import UserError
from detector.images import (
    MAX_PIXELS,
    ResizeRule,
    decode_resized,
    load_image,
    load_resized,
    make_image_batch,
    resize_boxes,
    resize_image,
)


def random_pixels(h: int = 24, w: int = 31, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (h, w, 3), dtype=np.uint8)


def png(path: Path, *, size: tuple[int, int], bit_depth: int, colour_type: int, rows: np.ndarray) -> Path:
    """A PNG file written by hand: PIL cannot write every kind that it reads."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", size[1], size[0], bit_depth, colour_type, 0, 0, 0)
    lines = b"".join(b"\0" + row.tobytes() for row in rows)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    )
    return path


@pytest.mark.parametrize(("short", "long"), [(800, 1333), (320, 640)])
def test_sizes_of_torchvision(short, long):
    """Its own transform on sizes of photos, and on all kinds of sides."""
    transform = GeneralizedRCNNTransform(short, long, [0.0], [1.0]).eval()
    rule = ResizeRule(short, long, "torchvision")
    sizes = [(480, 640), (427, 640), (500, 333), (360, 640), (1080, 1920), (3000, 4000)]
    sizes += np.random.default_rng(0).integers(100, 1200, (60, 2)).tolist()
    for h, w in sizes:
        resized, _ = transform.resize(torch.empty(1, h, w, device="meta"))
        assert rule.target_size(h, w) == tuple(resized.shape[-2:]), (h, w)


def test_channel_orders(tmp_path: Path):
    pixels = random_pixels()
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert np.array_equal(load_image(tmp_path / "a.png", "RGB"), pixels)
    bgr = load_image(str(tmp_path / "a.png"))
    assert np.array_equal(bgr, pixels[:, :, ::-1]) and bgr.flags.c_contiguous and bgr.flags.writeable
    with pytest.raises(ValueError, match="HSV"):
        load_image(tmp_path / "a.png", "HSV")


def test_the_name_does_not_decide_about_the_format(tmp_path: Path):
    pixels = random_pixels()
    Image.fromarray(pixels).save(tmp_path / "a.png")
    (tmp_path / "a.jpg").write_bytes((tmp_path / "a.png").read_bytes())
    assert np.array_equal(load_image(tmp_path / "a.jpg", "RGB"), pixels)
    Image.fromarray(pixels).save(tmp_path / "a.bmp")
    assert np.array_equal(load_image(tmp_path / "a.bmp", "RGB"), pixels)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA"])
def test_kinds_of_png(tmp_path: Path, mode: str):
    image = Image.fromarray(random_pixels()).convert("L" if mode == "LA" else "RGB")
    if mode in ("LA", "RGBA"):  # transparency must not change the stored colours
        image.putalpha(Image.fromarray(random_pixels(seed=1)[:, :, 0]))
    else:
        image = image.convert(mode)
    image.save(tmp_path / "a.png")
    assert Image.open(tmp_path / "a.png").mode == mode
    expected = {
        "1": lambda: np.asarray(image.convert("L"))[..., None].repeat(3, 2),
        "L": lambda: np.asarray(image)[..., None].repeat(3, 2),
        "LA": lambda: np.asarray(image)[..., :1].repeat(3, 2),
        "P": lambda: np.array(image.getpalette(), dtype=np.uint8).reshape(-1, 3)[np.asarray(image)],
        "RGBA": lambda: np.asarray(image)[..., :3],
    }[mode]()
    assert np.array_equal(load_image(tmp_path / "a.png", "RGB"), expected)


def test_palette_with_transparency(tmp_path: Path):
    image = Image.fromarray(random_pixels()).convert("P")
    image.save(tmp_path / "a.png", transparency=bytes(range(256)))
    expected = np.array(image.getpalette(), dtype=np.uint8).reshape(-1, 3)[np.asarray(image)]
    assert np.array_equal(load_image(tmp_path / "a.png", "RGB"), expected)


@pytest.mark.parametrize(("colour_type", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_16_bit_png_keeps_the_upper_byte(tmp_path: Path, colour_type: int, channels: int):
    values = np.random.default_rng(0).integers(0, 65536, (16, 20, channels), dtype=np.uint16)
    values[0, 0], values[0, 1] = 0, 65535
    path = png(
        tmp_path / "a.png",
        size=(16, 20),
        bit_depth=16,
        colour_type=colour_type,
        rows=values.astype(">u2"),
    )
    loaded = load_image(path, "RGB")
    upper = (values >> 8).astype(np.uint8)
    expected = upper[..., :1].repeat(3, 2) if channels < 3 else upper[..., :3]
    assert loaded.dtype == np.uint8
    assert np.array_equal(loaded, expected)


def test_jpeg_grey_and_cmyk(tmp_path: Path):
    smooth = np.add.outer(np.arange(40), np.arange(60))[..., None].repeat(3, 2) + np.array([0, 60, 120])
    image = Image.fromarray(smooth.astype(np.uint8))
    for mode in ("RGB", "L", "CMYK"):
        image.convert(mode).save(tmp_path / f"{mode}.jpg", quality=95)
        loaded = load_image(tmp_path / f"{mode}.jpg", "RGB")
        expected = np.asarray(image.convert(mode).convert("RGB"), dtype=int)
        assert loaded.shape == (40, 60, 3)
        assert np.abs(loaded - expected).mean() < 3, mode


@pytest.mark.parametrize("kind", ["jpg", "png"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path: Path, orientation: int, kind: str):
    # What the photographer saw: red at the top left, green at the top right, blue at the bottom left.
    upright = np.full((32, 48, 3), 255, dtype=np.uint8)
    upright[:16, :16], upright[:16, 32:], upright[16:, :16] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    stored = {  # EXIF 2.3: which side row 0 and column 0 of the file are in the upright picture
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.swapaxes(0, 1),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].swapaxes(0, 1),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 100, "subsampling": 0} if kind == "jpg" else {}
    Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / f"a.{kind}", exif=exif, **options)
    loaded = load_image(tmp_path / f"a.{kind}", "RGB")
    assert loaded.shape == upright.shape
    assert np.abs(loaded.astype(int) - upright).max() < 8


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_unreadable_exif_is_upright(tmp_path: Path):
    pixels = random_pixels()
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=b"Exif\0\0MM\0*" + b"\xff" * 20)
    assert np.array_equal(load_image(tmp_path / "a.png", "RGB"), pixels)


def test_very_large(tmp_path: Path):
    """More pixels than PIL opens by itself (179 million), and no warning about them."""
    w, h = 19000, 9500
    image = Image.new("1", (w, h), 1)
    noise = np.random.default_rng(0).integers(0, 256, 300 * w // 8, dtype=np.uint8)  # a file of more than a few KB
    image.paste(Image.frombytes("1", (w, 300), noise.tobytes()))
    image.save(tmp_path / "a.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pixels, size = load_resized(tmp_path / "a.png", ResizeRule(100, 200, "truncate"))
    assert size == (h, w)
    assert pixels.shape == (100, 200, 3) and (pixels[8:] == 255).all() and (pixels[:3] < 255).all()


def test_one_limit_for_all_formats(tmp_path: Path):
    path = tmp_path / "a.gif"
    path.write_bytes(b"GIF89a" + struct.pack("<HH", 30000, 30000) + b"\0\0\0,\0\0\0\0\x30\x75\x30\x75\0\x02\0;")
    with pytest.raises(UserError, match=rf"a\.gif has 30000 x 30000 pixels; the limit is {MAX_PIXELS} pixels"):
        load_image(path)


def test_few_bytes_hold_few_pixels(tmp_path: Path):
    Image.new("1", (12000, 12000)).save(tmp_path / "a.png")
    with pytest.raises(UserError, match=r"a\.png claims 12000 x 12000 pixels in \d{5} bytes"):
        load_image(tmp_path / "a.png")


def test_scans_are_counted(tmp_path: Path):
    thumbnail, path = io.BytesIO(), tmp_path / "a.jpg"
    Image.new("L", (8, 8)).save(thumbnail, "JPEG")
    scan = b"\xff\xda\0\x02"  # in a segment and behind the picture it is none
    Image.fromarray(random_pixels()).save(path, progressive=True, exif=b"Exif\0\0" + thumbnail.getvalue() + scan * 200)
    content = path.read_bytes()
    path.write_bytes(content + scan * 200)
    assert load_image(path).shape == (24, 31, 3)
    last, end = content.rindex(b"\xff\xda"), content.rindex(b"\xff\xd9")
    path.write_bytes(content[:end] + content[last:end] * 100 + content[end:])
    with pytest.raises(UserError, match=r"a\.jpg has more than 100 scans"):
        load_image(path)


def test_beyond_the_limit(tmp_path: Path):
    side = int(MAX_PIXELS**0.5) + 1
    path = png(tmp_path / "a.png", size=(side, side), bit_depth=1, colour_type=0, rows=np.zeros((1, 4), np.uint8))
    with pytest.raises(ValueError, match=rf"a\.png has {side} x {side} pixels.*smaller"):
        load_image(path)


@pytest.mark.parametrize("kind", ["jpg", "png"])
@pytest.mark.parametrize("rest", [0.02, 0.6])
def test_cut_off_file(tmp_path: Path, kind: str, rest: float):
    path = tmp_path / f"a.{kind}"
    Image.fromarray(random_pixels(200, 200)).save(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * rest)])
    with pytest.raises(ValueError, match=rf"a\.{kind} is .*get") as caught:
        load_image(path)
    assert "\n" not in str(caught.value)


def test_damaged_file(tmp_path: Path):
    path = tmp_path / "a.png"
    Image.fromarray(random_pixels(200, 200)).save(path)
    content = bytearray(path.read_bytes())
    content[500:600] = bytes(100)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.png is damaged"):
        load_image(path)


def test_no_image(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jpg does not exist"):
        load_image(tmp_path / "nowhere.jpg")
    with pytest.raises(ValueError, match="is not a file"):
        load_image(tmp_path)
    (tmp_path / "empty.jpg").touch()
    with pytest.raises(ValueError, match=r"empty\.jpg is empty"):
        load_image(tmp_path / "empty.jpg")
    (tmp_path / "text.jpg").write_text("<html>404 not found</html>")
    with pytest.raises(ValueError, match=r"text\.jpg is not a readable JPEG or PNG"):
        load_image(tmp_path / "text.jpg")
    header = png(tmp_path / "nothing.png", size=(0, 5), bit_depth=8, colour_type=0, rows=np.zeros((0, 5), np.uint8))
    with pytest.raises(ValueError, match=r"nothing\.png"):
        load_image(header)
    Image.fromarray(np.ones((4, 4), dtype=np.float32)).save(tmp_path / "a.tiff")
    with pytest.raises(ValueError, match="floating-point"):
        load_image(tmp_path / "a.tiff")


def test_load_resized_is_load_then_resize(tmp_path: Path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(random_pixels(90, 140)).save(tmp_path / "a.png", exif=exif)
    rule = ResizeRule(40, 50, "truncate")
    pixels, size = load_resized(tmp_path / "a.png", rule)
    assert size == (140, 90)
    expected = resize_image(Image.fromarray(load_image(tmp_path / "a.png")), rule.target_size(*size))
    assert np.array_equal(pixels, expected)


def test_the_content_of_a_file_is_read_as_the_file_itself(tmp_path: Path):
    path = tmp_path / "a.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)).save(path)
    rule = ResizeRule(20, 50)
    pixels, size = decode_resized(path.read_bytes(), "shard.tar: a.jpg", rule)
    expected, expected_size = load_resized(path, rule)
    np.testing.assert_array_equal(pixels, expected)
    assert size == expected_size == (40, 60)
    content = path.read_bytes()
    for damaged, message in (
        (b"", "is empty"),
        (b"<html>", "is not a readable"),
        (content[: len(content) // 2], "is damaged or cut off"),
    ):
        with pytest.raises(ValueError, match=f"Image shard.tar: a.jpg {message}"):
            decode_resized(damaged, "shard.tar: a.jpg", rule)


@pytest.mark.parametrize(
    ("rule", "size", "expected"),
    [
        (ResizeRule(800, 1333), (480, 640), (800, 1067)),
        (ResizeRule(800, 1333), (427, 640), (800, 1199)),
        (ResizeRule(800, 1333), (300, 1000), (400, 1333)),  # 399.9 rounds up
        (ResizeRule(800, 1333), (1000, 300), (1333, 400)),
        (ResizeRule(800, 1333), (800, 800), (800, 800)),
        (ResizeRule(600, 1000, "truncate"), (91, 37), (998, 406)),
        (ResizeRule(600, 1000, "truncate"), (333, 500), (600, 900)),
        (ResizeRule(600, 1000, "truncate"), (300, 500), (600, 1000)),
        (ResizeRule(800, 1333), (2, 3000), (1, 1333)),
        (ResizeRule(800, 1333), (10000, 1), (1333, 1)),  # Detectron2's own rule gives 0 here
        (ResizeRule(600, 1000, "truncate"), (1, 10000), (1, 1000)),  # and the official VL-BERT code does too
    ],
)
def test_target_size(rule: ResizeRule, size: tuple[int, int], expected: tuple[int, int]):
    assert rule.target_size(*size) == expected


def test_resize_rule_errors():
    with pytest.raises(ValueError, match="short_edge 0"):
        ResizeRule(0, 100)
    with pytest.raises(ValueError, match="long_edge 50"):
        ResizeRule(100, 50)
    with pytest.raises(ValueError, match="'up'"):
        ResizeRule(100, 200, "up")
    with pytest.raises(ValueError, match="5 x 0"):
        ResizeRule().target_size(0, 5)


def test_thin_image_resizes_to_something():
    resized = resize_image(Image.fromarray(random_pixels(2, 3000)), ResizeRule(800, 1333).target_size(2, 3000))
    assert resized.size == (1333, 1)


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_resize_boxes_and_back(kind):
    boxes = kind([[10.0, 20.0, 30.0, 40.0], [0.0, 0.0, 331.0, 203.0]])
    resized = resize_boxes(boxes, (203, 331), (96, 157))
    assert type(resized) is type(boxes) and resized.dtype == boxes.dtype
    assert np.allclose(resized[1], [0, 0, 157, 96])
    assert np.allclose(resized[0], [10 * 157 / 331, 20 * 96 / 203, 30 * 157 / 331, 40 * 96 / 203])
    assert np.allclose(resize_boxes(resized, (96, 157), (203, 331)), boxes)


def test_batch_is_padded_after_normalisation():
    images = [random_pixels(5, 9), random_pixels(8, 4, seed=1)]
    mean, std = (100.0, 110.0, 120.0), (1.0, 2.0, 4.0)
    batch = make_image_batch(images, [(50, 90), (16, 8)], ["a", "b"], mean, std)
    assert batch.pixels.shape == (2, 3, 8, 9) and batch.pixels.dtype == torch.float32
    for pixels, image in zip(batch.pixels, images, strict=True):
        h, w = image.shape[:2]
        expected = (image.astype(np.float32) - np.float32(mean)) / np.float32(std)
        assert np.array_equal(pixels[:, :h, :w].permute(1, 2, 0).numpy(), expected)
        assert not pixels[:, h:].any() and not pixels[:, :, w:].any()
    assert batch.sizes.tolist() == [[5, 9], [8, 4]] and batch.sizes.dtype == torch.int64
    assert batch.original_sizes.tolist() == [[50, 90], [16, 8]]
    assert torch.allclose(batch.scales, torch.tensor([[0.1, 0.1], [0.5, 0.5]]))
    assert batch.names == ["a", "b"]


def test_batch_of_fixed_size():
    image = random_pixels(5, 9)
    batch = make_image_batch([image], [(5, 9)], ["a"], [0] * 3, [1] * 3, pad_to=(16, 12))
    assert batch.pixels.shape == (1, 3, 16, 12)
    assert batch.pixels.sum() == image.astype(int).sum()
    with pytest.raises(ValueError, match=r"photo\.jpg.*5 x 9.*4 x 12"):
        make_image_batch([image], [(5, 9)], ["photo.jpg"], [0] * 3, [1] * 3, pad_to=(4, 12))


def test_batch_errors():
    with pytest.raises(ValueError, match="at least one"):
        make_image_batch([], [], [], [0] * 3, [1] * 3)
    with pytest.raises(ValueError, match=r"photo\.jpg.*uint8"):
        make_image_batch([np.zeros((4, 4), np.uint8)], [(4, 4)], ["photo.jpg"], [0] * 3, [1] * 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_the_formats_that_are_named_are_read(tmp_path: Path, kind: str):
    Image.new("RGB", (6, 4), (255, 255, 255)).save(tmp_path / "a", kind)
    assert (load_image(tmp_path / "a") == 255).all()


@pytest.mark.parametrize("kind", ["EPS", "PPM", "ICO", "PCX", "TGA", "JPEG2000"])
def test_other_formats_are_refused_whatever_their_name(tmp_path: Path, kind: str):
    """PIL would start Ghostscript for the first one."""
    Image.new("RGB", (6, 4)).save(tmp_path / "photo.jpg", kind)
    with pytest.raises(UserError, match=r"photo\.jpg is not a readable JPEG or PNG file"):
        load_image(tmp_path / "photo.jpg")


def test_too_little_memory_is_a_sentence(tmp_path: Path, monkeypatch):
    Image.new("RGB", (6, 4)).save(tmp_path / "a.png")

    def fail(self):
        raise MemoryError

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", fail)
    with pytest.raises(UserError, match=r"a\.png has 6 x 4 pixels, which need more memory than there is"):
        load_image(tmp_path / "a.png")
