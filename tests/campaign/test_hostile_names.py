"""Hostile ids and names in files from outside: nothing is written, and nothing is read, outside of a folder.

Each reader gets each name in the place of the id or the file name of an image, and each writer all ids at once. Around
the folder lies bait under the names that an escape would find, and every file there is compared afterwards.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from detector.errors import UserError
from e2e_vl.analysis.run import AttentionRequest
from e2e_vl.cli import extract_features
from e2e_vl.config import BoxSource, DataSettings
from e2e_vl.data.base import open_options
from e2e_vl.data.captions import CocoCaptions, VLBertCaptions
from e2e_vl.data.coco import CocoDetectionDataset, ImageNames, read_instances
from e2e_vl.data.features import FORMATS, RegionFeatures, open_features, write_features
from e2e_vl.data.flickr30k import Flickr30KDataset
from e2e_vl.data.gqa import GQADataset
from e2e_vl.data.lxmert import ImageSentenceDataset
from e2e_vl.data.refcoco import NounPhrases, RefCOCODataset, ReferFiles
from e2e_vl.data.storage.archives import ArchivedFiles
from e2e_vl.data.user_inputs import ListedImage, list_images
from e2e_vl.data.visual_genome import VisualGenomeDataset
from e2e_vl.extraction.bulk import ExtractionJob
from e2e_vl.io import find_damage, write_checksums
from tests.data.roads import open_dataset
from tests.data.test_flickr30k import CAPTIONS, XML
from tests.data.tiny_gqa import write_gqa
from tests.data.tiny_refcoco import TinyRefCOCO
from tests.data.tiny_vcr import TinyVCR

ROOT = Path(__file__).parents[2]
BAIT = b"bait"
LEAVING = [  # names that lead out of a folder on some system
    *("../bait", "../../bait", "a/../../bait", "{outside}/bait", "..\\bait", "C:\\bait", "C:bait", "\\\\host\\bait"),
    *("/etc/hostname", "./../bait", "a//../../bait", "../bait\0", "..", "bait\n/../../bait"),
]
AWKWARD = ["con", "NUL.txt", "x.", "x ", "x" * 300, "a/" * 2500 + "x", "~/x", "a:b", "%2E%2E/x", "*", "\ud800", ".", ""]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The folder of the data; bait lies in the folders above it."""
    root = tmp_path / "outside" / "data"
    root.mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "outside"):
        for suffix in ("", ".jpg", ".png", ".json", ".txt", ".xml", ".npz"):
            (folder / f"bait{suffix}").write_bytes(BAIT)
    return root


def state(root: Path) -> dict[str, str]:
    """A digest of every file in the folders above the data, and of no file of the data."""
    top = root.parents[1]
    files = (path for path in top.rglob("*") if root not in path.parents)
    return {str(path): hashlib.md5(path.read_bytes()).hexdigest() if path.is_file() else "" for path in sorted(files)}


# Readers: each gives the paths or the bytes that it would read for a name.


def _tiny(root: Path, name: str) -> TinyRefCOCO:
    tiny = TinyRefCOCO(root).write()
    tiny.instances["images"][0]["file_name"] = name
    tiny.instances_file.write_text(json.dumps(tiny.instances))
    return tiny


def image_list(root: Path, name: str) -> list:
    (root / "list.json").write_text(json.dumps({"images": [{"id": 1, "file_name": name}]}))
    return [image.path for image in list_images(root / "list.json")]


def coco_detection(root: Path, name: str) -> list:
    tiny = _tiny(root, name)
    dataset = CocoDetectionDataset(tiny.images_root, read_instances(tiny.instances_file, drop_empty_boxes=True))
    return [dataset.sample((0,)).images[0].locate()]


def refcoco(root: Path, name: str) -> list:
    tiny = _tiny(root, name)
    dataset = RefCOCODataset(tiny.images_root, ReferFiles(tiny.refs_file, tiny.instances_file), "train")
    return [dataset.sample((0,)).images[0].locate()]


def coco_captions(root: Path, name: str) -> list:
    content = {"images": [{"id": 1, "file_name": name}], "annotations": [{"id": 1, "image_id": 1, "caption": "a"}]}
    (root / "captions.json").write_text(json.dumps(content))
    return [CocoCaptions(root / "captions.json", root).image(0)]


def image_names(root: Path, name: str) -> list:
    return [ImageNames().file(root, name)]


def noun_phrases(root: Path, name: str) -> list:
    (root / "Sentences").mkdir()
    phrases = NounPhrases(root / "Sentences", root / "Sentences")
    return [phrases.of(name, "a")]  # there is no file of this id, so this fails in any case


def flickr30k(root: Path, name: str) -> list:
    for folder in ("photos", "Sentences", "Annotations"):
        (root / folder).mkdir()
    for folder in (root.parent, root / "Sentences"):  # readable bait
        (folder / "bait.txt").write_text("\n".join(CAPTIONS))
        (folder / "bait.xml").write_text(XML.format(name="bait"))
    (root / "train.txt").write_text(f"{name}\n", errors="replace")
    files = {"ids": "{split}.txt", "images": "photos", "sentences": "Sentences", "annotations": "Annotations"}
    settings = DataSettings(name="flickr30k", root=str(root), files=files)
    return [open_dataset(Flickr30KDataset, settings, "train", "gt").sample((0,)).images[0].locate()]


def gqa(root: Path, name: str) -> list:
    settings = write_gqa(TinyRefCOCO(root).write())
    path = root / "questions" / "val_all_questions.json"
    content = json.loads(path.read_text())
    content["3"]["imageId"] = name
    path.write_text(json.dumps(content))
    dataset = open_dataset(GQADataset, settings, "val_all", "online")
    return [dataset.sample((0,)).images[0].locate()]


def image_sentences(root: Path, name: str) -> list:
    rows = [{"img_id": name, "sentf": {"mscoco": ["a cat"]}, "labelf": {}}]
    (root / "train.json").write_text(json.dumps(rows))
    files = {"sentences": "{split}.json", "images": "images"}
    dataset = open_dataset(ImageSentenceDataset, DataSettings(name="x", root=str(root), files=files), "train", "online")
    return [dataset.sample((0,)).images[0].locate()]


def vcr_image(root: Path, name: str) -> list:
    tiny = TinyVCR(root)
    tiny.lines[0]["img_fn"] = name
    return [tiny.dataset().sample((0,)).images[0].locate()]


def vcr_metadata(root: Path, name: str) -> list:
    tiny = TinyVCR(root)
    (root.parent / "bait.json").write_text(json.dumps(tiny.metadata))  # readable bait
    tiny.lines[0]["metadata_fn"] = f"{name}.json"
    return [tiny.dataset().sample((0,)).images[0].locate()]


def visual_genome_id(root: Path, name: str) -> list:
    return _visual_genome(root, name, "https://host/VG_100K/1.jpg")


def visual_genome_folder(root: Path, name: str) -> list:
    return _visual_genome(root, 1, f"https://host/{name}/1.jpg")


def _visual_genome(root: Path, number: int | str, url: str) -> list:
    images = [{"image_id": number, "width": 30, "height": 20, "url": url}]
    for file, content in (("i", images), ("r", [{"id": number, "regions": [{"region_id": 1, "phrase": "a"}]}])):
        (root / f"{file}.json").write_text(json.dumps(content))
    files = {"image_data": "i.json", "regions": "r.json", "images": "images"}
    dataset = open_dataset(VisualGenomeDataset, DataSettings(name="x", root=str(root), files=files), "all")
    return [dataset.sample((0,)).images[0].locate()]


def conceptual(root: Path, name: str) -> list:
    line = {"image": name, "caption": ["a"], "frcnn": name}
    (root / "train.json").write_text(json.dumps(line) + "\n")
    source = VLBertCaptions(root / "train.json", root, with_boxes=False)
    return [source.image(0)]


def archive_name(root: Path, name: str) -> list:
    return [ArchivedFiles(root, root / "cache").read(name)]


def archive(root: Path, name: str) -> list:
    with zipfile.ZipFile(root.parent / "bait.zip", "w") as file:
        file.writestr("x", BAIT)
    try:
        return [ArchivedFiles(root, root / "cache").read(f"{name}.zip@/x")]
    finally:
        (root.parent / "bait.zip").unlink()


def archive_member(root: Path, name: str) -> list:
    (root / "a").mkdir()  # the archive is unpacked
    return [ArchivedFiles(root, root / "cache").read(f"a.zip@/{name}")]


def zipped_member(root: Path, name: str) -> list:
    with zipfile.ZipFile(root / "a.zip", "w") as file:
        file.writestr("x", "y")
    return [ArchivedFiles(root, root / "cache").read(f"a.zip@/{name}")]


def checksums(root: Path, name: str) -> list:
    """A wrong or a right digest of a file elsewhere must look the same."""
    (root / "x").write_text("x")
    write_checksums(root)
    path, told = root / "checksums.json", []
    for digest in (hashlib.sha256(BAIT).hexdigest(), "0"):
        path.write_text(json.dumps({name: digest}))
        told.append(find_damage(root))
    assert told[0] == told[1] is not None
    return []


READERS: list[Callable[[Path, str], list]] = [
    *(image_list, coco_detection, refcoco, coco_captions, image_names, noun_phrases, flickr30k, gqa, image_sentences),
    *(
        vcr_image,
        vcr_metadata,
        visual_genome_id,
        visual_genome_folder,
        conceptual,
        archive_name,
        archive,
        archive_member,
        zipped_member,
    ),
    checksums,
]


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_no_reader_leaves_its_folder(reader: Callable[[Path, str], list], place: Path):
    for number, name in enumerate([*LEAVING, *AWKWARD]):
        name = name.replace("{outside}", str(place.parent))
        root = place / str(number)
        root.mkdir()
        for suffix in ("", ".jpg", ".png", ".zip"):
            (place / f"bait{suffix}").write_bytes(BAIT)  # above the folder of the images, too
        try:
            found = reader(root, name)
        except (UserError, ValueError, FileNotFoundError) as error:
            message = str(error)
            assert message and "\n" not in message and "\0" not in message, (name, message)
            found = []
        for one in found:
            assert isinstance(one, Path) and one.resolve().is_relative_to(root.resolve()), (name, one)


@pytest.mark.parametrize(
    "reader", [one for one in READERS[:-1] if one is not visual_genome_id], ids=lambda reader: reader.__name__
)
def test_a_harmless_name_is_looked_for_in_the_folder(reader: Callable[[Path, str], list], place: Path):
    """So the files of these tests are right, and hostile names are not refused for another reason.

    Visual Genome's ids are numbers, so that every name in their place is refused.
    """
    name = "12" if reader in (gqa, flickr30k) else "fine"
    try:
        found = reader(place, name)
    except FileNotFoundError as error:
        assert str(place) in str(error) and name in str(error)
    else:
        assert found and all(
            name in str(one.relative_to(place)) and one.resolve().is_relative_to(place) for one in found
        )


# Writers

IDS = [
    *(name for name in LEAVING if name.isprintable() and not name.startswith("/etc")),
    "{outside}/new",
    "con",
    "NUL.txt",
    "x.",
    "x ",
    "~/x",
    "a:b",
    "%2E%2E/x",
    "*",
]
IDS += [".", "a", "a.npz/b", "stamp.json", "stamp", "a.npz.1.part/b", "/", "//", "a/", "-x", "$HOME", "`x`", "x" * 220]


def _expected(root: Path) -> list[str]:
    return [name.replace("{outside}", str(root.parent)) for name in IDS]


def _images(root: Path, ids: list[str]) -> Path:
    (root / "images").mkdir(exist_ok=True)
    for number in range(len(ids)):
        Image.fromarray(np.full((24, 32, 3), number, np.uint8)).save(root / "images" / f"{number}.png")
    rows = [{"id": name, "file_name": f"images/{number}.png"} for number, name in enumerate(ids)]
    (root / "list.json").write_text(json.dumps({"images": rows}))
    return root / "list.json"


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("layout", "output"), [("npz", "out"), ("tsv", "out.tsv"), ("hdf5", "o.h5"), ("lmdb", "o.lmdb")]
)
def test_extraction_writes_into_its_folder(layout: str, output: str, place: Path):
    ids, before = _expected(place), state(place)
    listed = _images(place, ids)
    config = place / "small.yaml"
    config.write_text(
        f"_BASE_: {ROOT / 'configs/detector/tiny.yaml'}\nINPUT: {{MIN_SIZE_TEST: 32, MAX_SIZE_TEST: 64}}\n"
    )
    (place / "result").mkdir()
    words = ["--images", listed, "--config", config, "--format", layout, "--output", place / "result" / output]
    rule = "--rule maxnms --num-boxes 2 --max-proposals 5 --workers 0 --batch-size 64"
    assert extract_features.main([*map(str, words), *rule.split()]) == 0
    assert state(place) == before
    assert {path.name for path in (place / "result").iterdir()} <= {output, f"{output}.json"}
    store = open_features(place / "result" / output)
    assert sorted(store.ids) == sorted(ids)
    assert all(store[name].image_id == name for name in ids)
    assert extract_features.main([*map(str, words), *rule.split()]) == 0  # all are found again
    assert state(place) == before


@pytest.mark.parametrize("layout", FORMATS[1:])
def test_writers_of_one_file_write_one_file(layout: str, place: Path):
    one = np.ones(1, np.float32)
    columns = {"scores": one, "classes": one.astype(np.int64), "attributes": one.astype(np.int64)}
    columns["attribute_scores"] = one
    boxes, features = np.ones((1, 4), np.float32), np.ones((1, 2), np.float32)
    records = [RegionFeatures(name, (4, 4), boxes, features, **columns) for name in _expected(place)]
    before, path = state(place), place / f"out{({'hdf5': '.h5', 'lmdb': '.lmdb'}).get(layout, '.tsv')}"
    write_features(layout, path, iter(records), {}, num_bytes=10_000)
    assert state(place) == before and {file.name for file in place.iterdir()} <= {path.name, f"{path.name}.json"}
    assert sorted(open_features(path).ids) == sorted(_expected(place))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["a\0b"], "has characters that feature files cannot hold"),
        (["a\tb"], "has characters that feature files cannot hold"),
        (["\ud800"], "has half of a character"),
        ([""], "has characters that feature files cannot hold"),
        (["Img", "img"], "differ only in upper and lower case"),
        (["x" * 300], "give the image a shorter id"),
        (["a/" * 600 + "b"], "give the image a shorter id"),
    ],
)
def test_ids_that_are_refused_before_anything_is_written(ids: list[str], message: str, place: Path):
    listed, before = _images(place, ids), state(place)
    with pytest.raises(ValueError, match=message) as error:
        list_images(listed)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    assert state(place) == before


def test_a_folder_of_features_with_a_link_to_elsewhere_is_not_written_to(place: Path):
    (place / "out").mkdir()
    (place.parent / "victim").mkdir()
    (place / "out" / "train").symlink_to(place.parent / "victim")
    job = ExtractionJob([ListedImage("train/1", place / "1.png")], place / "out", "npz", None, None)
    with pytest.raises(UserError, match="leads out of it by a link"):
        job.file_of("train/1")


@pytest.mark.parametrize("split", ["../../x", "/etc/x", "a/b", "x" * 50, "val+test", "..\\x", "a\0b"])
def test_names_of_splits_stay_in_the_run(split: str, place: Path):
    request = AttentionRequest(run=place, split=split, boxes=BoxSource.GT)
    assert request.folder.parent == place / "attention" and "\0" not in request.folder.name
    assert not set(request.folder.name) & set("/\\")


def test_settings_do_not_name_images_outside_of_their_folder(place: Path):
    for pattern in ("../{id}.jpg", "{id}/../../bait.jpg"):
        with pytest.raises(UserError, match=r"holds '\.\.'"):
            ImageNames(pattern).file(place, "1")
    for pattern in ("{id.__class__}", "{id!r}", "{id:999999999}"):
        with pytest.raises(UserError, match=r"it takes \{id\} alone"):
            ImageNames(pattern)
        files = {"images": "images", "questions": "q.json"}
        settings = DataSettings(name="x", root=str(place), files=files, config={"image_name": pattern})
        with pytest.raises(ValueError, match=r"it takes \{id\} alone"):
            open_options(GQADataset, settings)
