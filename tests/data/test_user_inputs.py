"""Images and boxes in any form that users have them: in memory, at addresses, in lists, on a command line."""

from __future__ import annotations

import functools
import http.server
import io
import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from detector.errors import UserError
from detector.images import ResizeRule, load_image, load_resized
from e2e_vl.data import user_inputs
from e2e_vl.data.user_inputs import (
    ListedImage,
    convert_boxes,
    list_images,
    read_boxes,
    read_given_boxes,
    require_inside,
    to_image_file,
)
from tests.data.helpers import refused


def test_images_of_a_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.JPG", "sub/a.png", "x.1.jpeg", "notes.txt", "._b.jpg", "sub/._a.png"):
        (tmp_path / name).touch()
    found = [(image.id, image.path.name) for image in list_images(tmp_path)]
    assert found == [("b", "b.JPG"), ("sub/a", "a.png"), ("x.1", "x.1.jpeg")]
    (tmp_path / "sub" / "a.jpg").touch()
    with refused("a.png", "sub/a"):
        list_images(tmp_path)


def test_images_of_lists(tmp_path):
    (tmp_path / "list.txt").write_bytes(f"\ufeffone/b.jpg\r\n\n{tmp_path}/c.png\n../d.png\n".encode())
    found = list_images(tmp_path / "list.txt")
    assert [image.id for image in found] == ["one/b", "c", "d"]
    assert [image.path for image in found] == [tmp_path / "one/b.jpg", tmp_path / "c.png", tmp_path / "../d.png"]
    assert list_images(tmp_path / "list.txt", "/photos")[0].path == Path("/photos/one/b.jpg")
    path = tmp_path / "images.json"
    sized = {"id": 7, "file_name": "a/x.jpg", "width": 40.0, "height": 30}
    path.write_text(json.dumps({"images": [sized, {"id": 3, "file_name": "y.jpg", "width": 0, "height": 0}]}))
    found = list_images(path.rename(tmp_path / "images.JSON"), tmp_path / "r")
    assert found == [ListedImage("7", tmp_path / "r/a/x.jpg", (30, 40)), ListedImage("3", tmp_path / "r/y.jpg")]


def test_lists_that_cannot_be_used(tmp_path):
    with refused("no images"):
        list_images(tmp_path)
    (tmp_path / "a\tb.jpg").touch()
    with refused("a\\tb"):
        list_images(tmp_path)
    (tmp_path / "bad.json").write_text('{"images": [{"id": 1}]}')
    with refused("bad.json", "images[0]", "file_name"):
        list_images(tmp_path / "bad.json")


def test_given_boxes_of_detections(tmp_path):
    rows = [
        {"image_id": 2, "bbox": [1, 2, 3, 4], "category_id": 1, "score": 0.5},
        {"image_id": 1, "box": [0, 0, 2, 2], "det_id": 70},
        {"image_id": 2, "bbox": [5, 5, 1, 1]},
    ]
    (tmp_path / "d.json").write_text(json.dumps(rows))
    found = read_given_boxes(tmp_path / "d.json")
    assert set(found) == {"1", "2"}
    assert np.array_equal(found["2"].boxes, [[1, 2, 4, 6], [5, 5, 6, 6]])
    assert found["2"].ids.tolist() == [0, 2] and found["1"].ids.tolist() == [70]
    for row, part in (({}, "detection 0"), ({"bbox": [0.1, 0.2, 0.5, 0.6]}, "normalised")):
        (tmp_path / "d.json").write_text(json.dumps([{"image_id": 1, **row}]))
        with refused("d.json", part):
            read_given_boxes(tmp_path / "d.json")


def test_boxes_with_words_as_ids_are_numbered(tiny, tmp_path, caplog):
    rows = [
        {"image_id": "a", "bbox": [1, 2, 3, 4], "det_id": "x"},
        {"image_id": "a", "bbox": [5, 5, 4, 4], "det_id": 7},
    ]
    (tmp_path / "d.json").write_text(json.dumps(rows))
    assert read_given_boxes(tmp_path / "d.json")["a"].ids.tolist() == [0, 1]
    for row in tiny.instances["annotations"]:
        row["id"] += 2**70
    assert read_given_boxes(tiny.write().instances_file)["9"].ids.tolist() == [4, 5]
    assert [record.getMessage().partition(": ")[2][:18] for record in caplog.records] == ["boxes are numbered"] * 2


def test_given_boxes_of_instances(tiny):
    tiny.instances["images"].append({"id": 11, "file_name": "x.png", "width": 9, "height": 9})
    found = read_given_boxes(tiny.write().instances_file)
    assert found["7"].ids.tolist() == [100, 101, 102] and found["11"].boxes.shape == (0, 4)
    assert found["3"].boxes.tolist() == [[5.5, 10, 25.75, 70]]


def test_boxes_in_words():
    given = read_boxes(["1,2,3,4", "0.5,0,9,8.25"])
    np.testing.assert_array_equal(given.boxes, [[1, 2, 3, 4], [0.5, 0, 9, 8.25]])
    assert given.names is None and given.outlines is None
    assert read_boxes(["person:1,2,3,4", "hot:dog:1,2,3,4"]).names == ("person", "hot:dog")


def test_boxes_of_a_file(tmp_path):
    outline = [[[1, 2], [3, 2], [3, 4]]]
    content = {"boxes": [[1, 2, 3, 4, 0.75]], "names": ["cat"], "segms": [outline], "width": 9, "height": 9}
    (tmp_path / "one.json").write_text(json.dumps(content))
    given = read_boxes([str(tmp_path / "one.json")])
    np.testing.assert_array_equal(given.boxes, [[1, 2, 3, 4]])
    assert given.names == ("cat",) and given.origin.endswith("one.json")
    np.testing.assert_array_equal(given.outlines[0], outline)
    np.savez(tmp_path / "some.npz", boxes=np.array([[1, 2, 3, 4]]))
    np.testing.assert_array_equal(read_boxes([str(tmp_path / "some.npz")]).boxes, [[1, 2, 3, 4]])
    np.savez(tmp_path / "bad.npz", rows=np.eye(4))
    with refused("bad.npz"):
        read_boxes([str(tmp_path / "bad.npz")])


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["none.json"], "none.json"),
        (["1,2,3,4", "1,2,x,4"], "'x'"),
        (["5,2,3,4"], "not a box"),
        (["1,2,3"], "not a box"),
        (["0.1,0.2,0.5,0.6", "0.3,0.4,1.01,0.9"], "normalised"),
        (["0,0,1,1"], "normalised"),
        ("[[0.1, 0.2, 0.5, 0.6]]", "pixels"),
        ("[[1, 2, 3]]", "[0]"),
        ("[[1, 2, 3, 4], [5, 6, 5, 9]]", "[5.0, 6.0, 5.0, 9.0]"),
        ("[]", "no box"),
        ("[", "JSON"),
        ('{"boxes": [[1, 2, 3, 4]], "names": ["a", "b"]}', "names"),
        ('{"boxes": [[1, 2, 3, 4]], "segms": [[[1, 2]]]}', "segms[0]"),
    ],
)
def test_bad_boxes_are_named(tmp_path, words, part):
    """On the command line, or (a text) in a file."""
    path, in_file = tmp_path / "bad.json", isinstance(words, str)
    path.write_text(words if in_file else "")
    with refused(part, "bad.json" if in_file else ""):
        read_boxes([str(path)] if in_file else words)


def test_boxes_must_lie_in_their_image():
    require_inside(np.array([[-1.0, 0, 101, 61]]), (60, 100), "--boxes", "a.jpg")
    for box in ([0, 0, 102, 5], [0, 0, 5, 62], [-2, 0, 5, 5]):
        with refused("--boxes", "box 0", "a.jpg", "100 x 60"):
            require_inside(np.array([box], dtype=float), (60, 100), "--boxes", "a.jpg")


# In Python


def picture(mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def pixels_of(image: object) -> np.ndarray:
    file = to_image_file(image)
    return load_resized(file.content, ResizeRule(40, 60), "RGB", file.name)[0]


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> io.BytesIO:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream


ROTATED = Image.Exif()
ROTATED[0x0112] = 6


@pytest.mark.parametrize(
    "file",
    [
        *(saved(picture(mode)) for mode in ("1", "L", "LA", "RGBA")),
        *(saved(picture(mode), "TIFF") for mode in ("CMYK", "YCbCr")),
        saved(picture("P"), transparency=3),
        saved(picture(), exif=ROTATED),
        saved(picture(), "JPEG", exif=b"Exif\0\0no tags"),
    ],
)
def test_a_pil_image_has_the_pixels_of_its_file(file, tmp_path):
    (tmp_path / "image").write_bytes(file.getvalue())
    image = Image.open(file)
    image.load()
    before = (image.mode, dict(image.info))
    np.testing.assert_array_equal(pixels_of(image), load_image(tmp_path / "image", "RGB"))
    assert (image.mode, image.info) == before


def test_arrays_and_modes_that_only_memory_has():
    values = np.linspace(0, 65535, 2400).reshape(40, 60).astype(np.uint16)
    expected = np.repeat((values >> 8).astype(np.uint8)[..., None], 3, axis=2)
    np.testing.assert_array_equal(pixels_of(Image.fromarray(values)), expected)
    np.testing.assert_array_equal(pixels_of(picture("HSV")), np.asarray(picture("HSV").convert("RGB")))
    colours = np.asarray(picture())
    alpha = np.dstack([colours, np.full((40, 60), 7, dtype=np.uint8)])
    first, floats = torch.tensor(colours).permute(2, 0, 1), colours.astype(np.float32) / 255
    for form in (colours, alpha, first, first.numpy(), first / 255, first[:, :, :3], floats, torch.tensor(floats)):
        pixels = np.asarray(Image.open(io.BytesIO(to_image_file(form).content)).convert("RGB"))
        np.testing.assert_array_equal(pixels, colours[:, : pixels.shape[1]])
    for form in (colours[:, :, 0], colours[:, :, :1], first[:1], floats[:, :, 0]):
        np.testing.assert_array_equal(pixels_of(form), np.repeat(colours[:, :, :1], 3, axis=2))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (picture("L").convert("F"), "not Image"),
        (np.full((4, 4, 3), 7, dtype=np.float32), "from 7 to 7; undo"),
        (torch.full((3, 4, 4), torch.nan), "from nan to nan; undo"),
        (np.zeros((2, 40, 60), dtype=np.uint8), r"not uint8 \[2, 40, 60\]"),
        (torch.zeros(1, 3, 40, 60), r"not torch.float32 \[1, 3, 40, 60\]"),
        (7, "not int"),
        (b"no image", "the bytes given"),
        (".", "is a folder; give one image"),
        ("https://127.0.0.1:1/a.png", "could not be fetched .*refused"),
    ],
)
def test_what_is_no_image(image, message):
    with pytest.raises(UserError, match=message):
        pixels_of(image)


def test_an_image_at_an_address(tmp_path, monkeypatch):
    picture().save(tmp_path / "a.png")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        np.testing.assert_array_equal(pixels_of(f"{address}/a.png"), np.asarray(picture()))
        with pytest.raises(UserError, match=r"b\.png could not be fetched .*404"):
            to_image_file(f"{address}/b.png")
        monkeypatch.setattr(user_inputs, "MAX_DOWNLOAD", 1000)
        with pytest.raises(UserError, match=r"a\.png has more than"):
            to_image_file(f"{address}/a.png")
        server.shutdown()


def test_forms_of_boxes():
    for boxes in ([1, 2, 30, 40], ((1, 2, 30, 40),), torch.tensor([[1, 2, 30, 40]]), "1,2,30,40"):
        assert convert_boxes(boxes).boxes.tolist() == [[1, 2, 30, 40]]
    for boxes in ([], [[1, 2, 3, 4, 0.5, 6]], [[1, 2, 1, 4]], [[1, 2, np.nan, 4]]):
        with pytest.raises(UserError, match="boxes"):
            convert_boxes(boxes)
