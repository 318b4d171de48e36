from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from detector.config import InputConfig
from detector.errors import MissingFileError, UserError
from detector.image_files import read_size
from detector.images import (
    ResizeRule,
    load_image,
    load_resized,
    make_image_batch,
    mask_pixels,
    mask_rectangles,
    normalise_images,
    resize_image,
    resize_pixels,
)


def random_pixels(h: int = 24, w: int = 31, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (h, w, 3), dtype=np.uint8)


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


@pytest.mark.parametrize("mode", ["LA", "RGBA", "P", "I;16"])
def test_kinds_of_pixels(tmp_path: Path, mode: str):
    """Transparency does not change the stored colours, a palette is looked up, 16 bits keep their upper byte."""
    image, options = Image.fromarray(random_pixels()), {}
    if mode == "I;16":
        values = np.random.default_rng(0).integers(0, 65536, (16, 20), dtype=np.uint16)
        values[0, :2] = 0, 65535
        image, expected = Image.fromarray(values), (values >> 8).astype(np.uint8)[..., None].repeat(3, 2)
    elif mode == "P":
        image, options = image.convert("P"), {"transparency": bytes(range(256))}
        expected = np.array(image.getpalette(), dtype=np.uint8).reshape(-1, 3)[np.asarray(image)]
    else:
        image = image.convert("L" if mode == "LA" else "RGB")
        expected = np.array(image.convert("RGB"))
        image.putalpha(Image.fromarray(random_pixels(seed=1)[:, :, 0]))
    image.save(tmp_path / "a.png", **options)
    assert Image.open(tmp_path / "a.png").mode == mode
    assert np.array_equal(load_image(tmp_path / "a.png", "RGB"), expected)


@pytest.mark.parametrize("kind", ["jpg", "png"])
def test_exif_orientation(tmp_path: Path, kind: str):
    upright = np.full((32, 48, 3), 255, dtype=np.uint8)
    upright[:16, :16], upright[:16, 32:], upright[16:, :16] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    exif = Image.Exif()
    exif[0x0112] = 6  # row 0 of the file is the right side of the upright picture
    options = {"quality": 100, "subsampling": 0} if kind == "jpg" else {}
    Image.fromarray(np.rot90(upright, 1).copy()).save(tmp_path / f"a.{kind}", exif=exif, **options)
    loaded = load_image(tmp_path / f"a.{kind}", "RGB")
    assert loaded.shape == upright.shape
    assert np.abs(loaded.astype(int) - upright).max() < 8


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["png", "tiff"])
def test_images_annotated_without_their_exif_rotation_are_read_as_stored(tmp_path: Path, kind: str, orientation: int):
    """The size tells how it was annotated, if the orientation exchanges the sides."""
    stored, path = random_pixels(32, 48), tmp_path / f"a.{kind}"
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(stored).save(path, exif=exif)
    upright = load_image(path, "RGB")
    assert np.array_equal(load_image(path, "RGB", upright.shape[:2]), upright)
    as_annotated = load_image(path, "RGB", (32, 48))
    assert np.array_equal(as_annotated, stored if orientation > 4 else upright)
    assert np.array_equal(load_image(path, "RGB", (7, 7)), upright)
    resized, size = load_resized(path, ResizeRule(32, 48), "RGB", annotated_size=(32, 48))
    assert size == (32, 48) and np.array_equal(resized, as_annotated)
    sizes = None, upright.shape[:2], (32, 48), (7, 7)
    assert [read_size(path, size) for size in sizes] == [load_image(path, "RGB", size).shape[:2] for size in sizes]


def test_a_square_image_is_read_upright(tmp_path: Path):
    stored = random_pixels(32, 32)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(stored).save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(load_image(tmp_path / "a.png", "RGB", (32, 32)), np.rot90(stored, -1))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_unreadable_exif_is_upright(tmp_path: Path):
    pixels = random_pixels()
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=b"Exif\0\0MM\0*" + b"\xff" * 20)
    assert np.array_equal(load_image(tmp_path / "a.png", "RGB"), pixels)


def test_files_that_are_no_images(tmp_path: Path):
    with pytest.raises(MissingFileError, match=r"nowhere\.jpg"):
        load_image(tmp_path / "nowhere.jpg")
    for kind in ("jpg", "png"):
        Image.fromarray(random_pixels(200, 200)).save(tmp_path / f"cut_off.{kind}")
        content = (tmp_path / f"cut_off.{kind}").read_bytes()
        (tmp_path / f"cut_off.{kind}").write_bytes(content[: int(len(content) * 0.6)])
    (tmp_path / "text.jpg").write_text("<html>404 not found</html>")
    Image.fromarray(np.ones((4, 4), dtype=np.float32)).save(tmp_path / "32_bits.tiff")
    Image.new("RGB", (6, 4)).save(tmp_path / "eps.jpg", "EPS")  # PIL would start Ghostscript
    Image.new("RGB", (6, 4)).save(tmp_path / "ppm.jpg", "PPM")
    for name in ("text.jpg", "eps.jpg", "ppm.jpg"):
        with pytest.raises(UserError, match=name):
            read_size(tmp_path / name)
    for name in ("cut_off.jpg", "cut_off.png", "text.jpg", "32_bits.tiff", "eps.jpg", "ppm.jpg"):
        with pytest.raises(UserError, match=name):
            load_image(tmp_path / name)
        with pytest.raises(UserError, match=r"shard\.tar: x"):
            load_resized((tmp_path / name).read_bytes(), ResizeRule(20, 50), name="shard.tar: x")


@pytest.mark.parametrize(
    ("size", "new_size"),
    [
        ((427, 640), (600, 899)),
        ((1200, 1600), (600, 800)),
        ((1500, 2003), (224, 299)),
        ((600, 800), (600, 800)),
        ((600, 800), (600, 799)),
        ((1, 1), (600, 600)),
        ((1, 7), (600, 1000)),
        ((3000, 2), (1000, 1)),
        ((3, 20000), (1, 1000)),
    ],
)
@pytest.mark.parametrize("kind", ["noise", "black and white"])
def test_torch_resizes_like_pil(size: tuple[int, int], new_size: tuple[int, int], kind: str):
    """To one grey value, upwards and downwards, for photos, single pixels and strips."""
    pixels = random_pixels(*size)
    if kind == "black and white":
        pixels = np.where(pixels < 128, np.uint8(0), np.uint8(255))
    resized = resize_pixels(pixels, new_size)
    expected = np.asarray(resize_image(Image.fromarray(pixels), new_size))
    assert resized.dtype == np.uint8 and resized.shape == expected.shape
    difference = np.abs(resized.astype(int) - expected)
    assert difference.max() <= 1 and (min(new_size) == 1 or difference.mean() < 0.01)


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "P", "CMYK", "I;16"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_both_libraries_resize_every_kind_of_file(tmp_path: Path, mode: str, orientation: int):
    if mode == "I;16":
        image = Image.fromarray(np.random.default_rng(0).integers(0, 65536, (61, 83), dtype=np.uint16))
    else:
        image = Image.fromarray(random_pixels(61, 83)).convert(mode)
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / "a", "TIFF" if mode == "CMYK" else "PNG", exif=exif)
    for rule in (ResizeRule(40, 90), ResizeRule(200, 240)):
        by_pil, size = load_resized(tmp_path / "a", rule, "RGB")
        by_torch, same_size = load_resized(tmp_path / "a", dataclasses.replace(rule, library="torch"), "RGB")
        assert size == same_size == ((61, 83) if orientation == 1 else (83, 61))
        assert by_torch.flags.c_contiguous and by_torch.flags.writeable
        assert by_torch.shape == by_pil.shape == (*rule.target_size(*size), 3)
        assert np.abs(by_torch.astype(int) - by_pil).max() <= 1


def test_load_resized_is_load_then_resize(tmp_path: Path):
    path = tmp_path / "a.png"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(random_pixels(90, 140)).save(path, exif=exif)
    rule = ResizeRule(40, 50, "truncate")
    expected = resize_image(Image.fromarray(load_image(path)), rule.target_size(140, 90))
    for source in (path, path.read_bytes()):
        pixels, size = load_resized(source, rule)
        assert size == (140, 90) and np.array_equal(pixels, expected)


@pytest.mark.parametrize(
    ("rule", "size", "expected"),
    [
        (ResizeRule(800, 1333), (300, 1000), (400, 1333)),  # 399.9 rounds up
        (ResizeRule(600, 1000, "truncate"), (91, 37), (998, 406)),
        (ResizeRule(800, 1333), (2, 3000), (1, 1333)),
        (ResizeRule(800, 1333), (10000, 1), (1333, 1)),  # Detectron2's own rule gives 0 here
        (ResizeRule(600, 1000, "truncate"), (1, 10000), (1, 1000)),  # and the official VL-BERT code does too
    ],
)
def test_target_size(rule: ResizeRule, size: tuple[int, int], expected: tuple[int, int]):
    assert rule.target_size(*size) == expected


@pytest.mark.parametrize(
    ("rule", "size", "expected"),
    [
        (ResizeRule(600, 1000), (480, 642), (600, 803)),  # 802.5
        (ResizeRule(600, 1000, "truncate"), (480, 642), (600, 802)),
        (ResizeRule(600, 1000, "torchvision"), (480, 642), (600, 802)),
        (ResizeRule(600, 1000, "opencv"), (480, 642), (600, 802)),
        (ResizeRule(600, 1000, "opencv"), (646, 480), (808, 600)),  # 807.5
        (ResizeRule(384, 768, "r2c"), (430, 1024), (322, 768)),  # 322.5
        (ResizeRule(384, 768, "r2c"), (434, 1024), (326, 768)),  # 325.5
        (ResizeRule(384, 768, "r2c"), (640, 480), (384, 288)),  # its window is wide
    ],
)
def test_halves(rule: ResizeRule, size: tuple[int, int], expected: tuple[int, int]):
    assert rule.target_size(*size) == expected


@pytest.mark.parametrize(("rounding", "expected"), [("outward", [1, 2, 4, 6]), ("truncate", [1, 2, 5, 6])])
def test_pixels_of_a_box(rounding: str, expected: list[int]):
    assert mask_rectangles(torch.tensor([[1.5, 2.5, 4.0, 5.5]]), (8, 8), rounding).tolist() == [expected]


def test_batch_is_padded_after_normalisation():
    images = [random_pixels(5, 9), random_pixels(8, 4, seed=1)]
    colours = InputConfig(pixel_mean=(100.3, 110.0, 120.0), pixel_std=(1.7, 2.0, 4.0))
    given = make_image_batch(images, [(50, 90), (16, 8)], ["a", "b"])
    batch = normalise_images(given, colours)
    assert (given.pixels.dtype, batch.pixels.dtype) == (torch.uint8, torch.float32)
    expected = (images[0].astype(np.float32) - np.float32(colours.pixel_mean)) / np.float32(colours.pixel_std)
    assert np.array_equal(batch.pixels[0, :, :5, :9].permute(1, 2, 0).numpy(), expected)
    assert not batch.pixels[0, :, 5:].any() and not batch.pixels[1, :, :, 4:].any()
    assert torch.allclose(batch.scales, torch.tensor([[0.1, 0.1], [0.5, 0.5]]))
    masks = [torch.tensor([[1.0, 2.0, 4.0, 5.0]]), torch.zeros(0, 4)]
    masked = normalise_images(batch, colours, masks).pixels  # normalised pixels are not normalised again
    assert torch.equal(masked, mask_pixels(batch.pixels, batch.sizes, masks)) and not torch.equal(masked, batch.pixels)
    larger = make_image_batch(images, [(50, 90), (16, 8)], ["a", "b"], pad_to=(16, 12)).pixels
    assert torch.equal(larger[:, :, :8, :9], given.pixels) and larger.shape == (2, 3, 16, 12)
    assert not larger[:, :, 8:].any() and not larger[:, :, :, 9:].any()
    with pytest.raises(ValueError, match=r"photo\.jpg.*5 x 9.*4 x 12"):
        make_image_batch(images[:1], [(5, 9)], ["photo.jpg"], pad_to=(4, 12))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_supported_formats(tmp_path: Path, kind: str):
    Image.new("RGB", (6, 4), (255, 255, 255)).save(tmp_path / "a", kind)
    assert (load_image(tmp_path / "a") == 255).all()


def test_only_the_boxes_of_each_image_are_filled():
    pixels = torch.rand(3, 3, 10, 12) + 1
    before = pixels.clone()
    sizes = torch.tensor([[10, 12], [6, 5], [10, 12]])
    masks = [torch.tensor([[1.0, 2.0, 4.0, 5.0], [8.0, 8.0, 9.5, 9.0]]), torch.tensor([[3.0, 3.0, 50.0, 50.0]])]
    masked = mask_pixels(pixels, sizes, [*masks, torch.zeros(0, 4)])
    expected = before.clone()
    expected[0, :, 2:5, 1:4] = 0
    expected[0, :, 8:9, 8:10] = 0
    expected[1, :, 3:6, 3:5] = 0  # clipped to the image: padding is not filled
    assert torch.equal(masked, expected)
    assert torch.equal(pixels, before)
