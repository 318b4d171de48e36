"""The same image under the names of several data sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e_vl.data.overlap import GlobalImageId, ImageIdLookup, aliases_of_id, count_distinct_images, read_visual_genome
from tests.data.helpers import refused


def test_names_of_coco_tell_whose_image_it_is():
    ids = ImageIdLookup()
    train = Path("a/COCO_train2014_000000581857.jpg")
    release_2017 = Path("a/000000581857.jpg")
    assert ids.of_image("581857", train, None) == ids.of_image("x", release_2017, "vg")
    assert ids.of_image("581857", train, None) == (GlobalImageId("coco", "581857"),)
    assert ids.of_image("1", Path("a/1.jpg"), None) != ids.of_image("1", Path("b/1.jpg"), None)
    assert ids.of_image("1", Path("a/1.jpg"), "vcr") == ids.of_image("1", Path("b/1.jpg"), "vcr")


def test_visual_genome_knows_the_images_of_coco_and_flickr(tmp_path):
    path = tmp_path / "image_data.json"
    rows = [
        {"image_id": 7, "coco_id": 33, "flickr_id": 99, "url": "VG_100K/7.jpg"},
        {"image_id": 8, "coco_id": None, "flickr_id": None, "url": "VG_100K_2/8.jpg"},
    ]
    path.write_text(json.dumps(rows))
    ids = ImageIdLookup(read_visual_genome(path))
    both = {GlobalImageId("vg", "7"), GlobalImageId("coco", "33"), GlobalImageId("flickr", "99")}
    assert set(ids.of_image("7", Path("images/7.jpg"), "vg")) == both
    assert ids.of_image("8", None, "vg") == (GlobalImageId("vg", "8"),)
    assert set(next(ImageIdLookup().of_list(path))) == both
    path.write_text(json.dumps([{"coco_id": 7}]))
    with refused("image_data.json", "image_id"):
        read_visual_genome(path)


@pytest.mark.parametrize(
    ("name", "content", "namespace", "expected"),
    [
        ("train.txt", "VG_100K_2/12.jpg xml/12.xml\n\nCOCO_val2014_000000000005.jpg\n", None, ["vg 12", "coco 5"]),
        ("ids.txt", "12\n13\n", "vg", ["vg 12", "vg 13"]),
        ("ids.json", "[12, 13]", "coco", ["coco 12", "coco 13"]),
        ("instances.json", '{"images": [{"id": 4, "file_name": "000000000004.jpg"}]}', None, ["coco 4"]),
        ("instances.json", '{"images": [{"id": 4, "file_name": "x.jpg"}, {"id": 6}]}', "coco", ["coco 4", "coco 6"]),
    ],
)
def test_lists_of_images(name, content, namespace, expected, tmp_path):
    (tmp_path / name).write_text(content)
    ids_of_images = list(ImageIdLookup().of_list(tmp_path / name, namespace))
    assert [" ".join(image_id) for (image_id,) in ids_of_images] == expected


def test_a_bare_number_does_not_tell_whose_it_is(tmp_path):
    (tmp_path / "ids.txt").write_text("12\n")
    with refused("ids.txt", "'12'", "--detector-ids"):
        list(ImageIdLookup().of_list(tmp_path / "ids.txt"))


def test_images_with_an_id_in_common_are_one_image():
    coco = GlobalImageId("coco", "1")
    genome = GlobalImageId("vg", "5")
    other = GlobalImageId("vg", "6")
    assert count_distinct_images([(coco,), (genome,), (other,)]) == 3
    assert count_distinct_images([(coco,), (genome,), (other,), (genome, coco)]) == 2
    assert count_distinct_images([(coco, genome), (other, genome)]) == 1
    assert count_distinct_images([]) == 0


def test_aliases_go_before_the_ids_of_the_data_set():
    ids = ImageIdLookup({"5": (GlobalImageId("flickr", "9"),)})
    aliases = ids.of_image("of genome/5", Path("VG_100K/5.jpg"), None, (("vg", "5"), ("coco", "33")))
    assert set(aliases) == {GlobalImageId("vg", "5"), GlobalImageId("flickr", "9"), GlobalImageId("coco", "33")}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("2375429", GlobalImageId("vg", "2375429")),
        ("n161313", GlobalImageId("vg", "n161313")),
        ("COCO_val2014_000000000042", GlobalImageId("coco", "42")),
        ("dev-0-0-img0", GlobalImageId("file", str(Path("dev-0-0-img0.jpg").absolute()))),
    ],
)
def test_file_names_of_coco_and_of_visual_genome(name, expected):
    assert ImageIdLookup().of_image(name, Path(f"{name}.jpg"), None, aliases_of_id(name)) == (expected,)
