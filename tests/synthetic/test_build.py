"""The written files, read back with nothing of this project: formats, and the truth of every expression."""

from __future__ import annotations

import json
import pickle
import pickletools
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from e2e_vl.synthetic import DetectionConfig, LanguageConfig, SceneConfig, make_refcoco
from e2e_vl.synthetic.coco import polygons

SPLITS = {"train": 110, "val": 20, "testA": 10, "testB": 10}
DETECTIONS = "detections/refcoco+_unc/res101_coco_minus_refer_notime_dets.json"
LOCATION_WORDS = set(
    re.findall(
        r"\w+",
        """
    left right top bottom middle center centre central corner upper lower above below under underneath over high low
    side edge row column first second third last end background foreground up down north south east west
""",
    )
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("synthetic") / "data"
    make_refcoco(path, scenes=SPLITS, seed=11, progress=False)
    return path


@pytest.fixture(scope="module")
def coco(folder) -> COCO:
    return COCO(str(folder / "refcoco+" / "instances.json"))


@pytest.fixture(scope="module")
def refs(folder) -> list[dict]:
    return pickle.loads((folder / "refcoco+" / "refs(unc).p").read_bytes())


@pytest.fixture(scope="module")
def said(refs) -> list[tuple[dict, dict]]:
    return [(ref, sentence) for ref in refs for sentence in ref["sentences"]]


# ---- formats


def test_images_and_instances(folder, coco):
    images, annotations = coco.dataset["images"], coco.dataset["annotations"]
    assert [image["id"] for image in images] == list(range(1, 151))
    files = sorted(path.name for path in (folder / "images/train2014").iterdir())
    assert files == [image["file_name"] for image in images]
    assert files[0] == "COCO_train2014_000000000001.jpg"
    for image in images[::10]:
        with Image.open(folder / "images/train2014" / image["file_name"]) as picture:
            assert (picture.width, picture.height, picture.mode) == (image["width"], image["height"], "RGB")
    assert [entry["id"] for entry in annotations] == list(range(1, len(annotations) + 1))
    assert set(coco.dataset) == {"info", "images", "licenses", "annotations", "categories", "attributes"}
    names = [entry["name"] for entry in coco.dataset["attributes"]]
    assert [entry["id"] for entry in coco.dataset["attributes"]] == list(range(len(names)))
    counts = Counter()
    for entry in annotations:
        assert entry["iscrowd"] == 0
        assert entry["area"] > 0
        colour, texture, size = (names[i] for i in entry["attribute_ids"])
        assert texture in ("plain", "striped")
        assert size in ("small", "big")
        counts.update([colour, texture, size, entry["category_id"]])
    assert set(counts) >= {"red", "blue", 1, 2, 3, 4, 5, 6}
    assert 0.4 < counts["small"] / len(annotations) < 0.6
    assert 0.4 < counts["plain"] / len(annotations) < 0.6
    per_image = Counter(entry["image_id"] for entry in annotations)
    assert set(per_image.values()) == set(range(5, 11))
    assert folder.joinpath("refcoco+/instances.json").read_bytes() == (
        folder.joinpath("annotations/instances_train2014.json").read_bytes()
    )


def test_segmentations_give_box_and_area(coco):
    for entry in coco.dataset["annotations"][::5]:
        mask = coco.annToMask(entry)
        rows, columns = np.nonzero(mask)
        x, y, w, h = entry["bbox"]
        assert (x, y, x + w, y + h) == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
        assert mask.sum() == pytest.approx(entry["area"], rel=0.02)


def test_polygons_of_a_ragged_mask_are_exact():
    rng = np.random.default_rng(0)
    mask = np.zeros((30, 40), bool)
    mask[5:20, 8:30] = True
    mask[4, 8:30] = rng.random(22) < 0.5
    mask[5:20, 30] = rng.random(15) < 0.5
    mask[0, 39] = True  # a second part, one pixel in the picture's corner
    coco = COCO()
    coco.dataset = {
        "images": [{"id": 1, "height": 30, "width": 40}],
        "annotations": [{"id": 1, "image_id": 1, "segmentation": polygons(mask), "category_id": 1}],
        "categories": [],
    }
    coco.createIndex()
    assert len(polygons(mask)) == 2
    assert (coco.annToMask(coco.anns[1]) == mask).all()


def test_refs_have_the_official_fields(folder, coco, refs):
    data = (folder / "refcoco+" / "refs(unc).p").read_bytes()
    opcodes = list(pickletools.genops(data))
    assert opcodes[0][0].name == "PROTO"
    assert opcodes[0][1] == 2
    assert not {"GLOBAL", "REDUCE", "BUILD", "INST", "OBJ"} & {opcode.name for opcode, _, _ in opcodes}
    assert [ref["ref_id"] for ref in refs] == list(range(len(refs)))
    sent_ids = [sentence["sent_id"] for ref in refs for sentence in ref["sentences"]]
    assert sorted(sent_ids) == list(range(len(sent_ids)))
    keys = {"sent_ids", "file_name", "ann_id", "ref_id", "image_id", "split", "sentences", "category_id"}
    splits: dict[str, set[int]] = {split: set() for split in SPLITS}
    for ref in refs:
        assert set(ref) == keys
        annotation = coco.anns[ref["ann_id"]]
        assert (annotation["image_id"], annotation["category_id"]) == (ref["image_id"], ref["category_id"])
        stem = coco.imgs[ref["image_id"]]["file_name"].removesuffix(".jpg")
        assert re.fullmatch(rf"{stem}_\d+\.jpg", ref["file_name"])
        assert ref["sent_ids"] == [sentence["sent_id"] for sentence in ref["sentences"]]
        splits[ref["split"]].add(ref["image_id"])
        for sentence in ref["sentences"]:
            assert set(sentence) == {"tokens", "raw", "sent_id", "sent", "family"}
            assert " ".join(sentence["tokens"]) == sentence["sent"]
            assert " ".join(re.sub(r"[^a-z ]", "", sentence["raw"].lower()).split()) == sentence["sent"]
    assert {split: len(images) for split, images in splits.items()} == SPLITS
    assert sum(len(images) for images in splits.values()) == len(set().union(*splits.values()))


def test_detections(folder, coco):
    detections = json.loads((folder / DETECTIONS).read_text())
    names = {entry["id"]: entry["name"] for entry in coco.dataset["categories"]}
    assert [entry["det_id"] for entry in detections] == list(range(len(detections)))
    assert {entry["image_id"] for entry in detections} == set(coco.imgs)
    assert [entry["image_id"] for entry in detections] != sorted(entry["image_id"] for entry in detections)
    truth = {image_id: [entry["bbox"] for entry in entries] for image_id, entries in coco.imgToAnns.items()}
    best = []
    covered = Counter()
    for entry in detections:
        assert set(entry) == {"det_id", "h5_id", "box", "image_id", "category_id", "category_name", "score"}
        assert entry["h5_id"] == entry["det_id"]
        assert entry["category_name"] == names[entry["category_id"]]
        assert 0.65 <= entry["score"] <= 1
        x, y, w, h = entry["box"]
        assert min(x, y) >= 0
        assert max(x + w, y + h) <= 128.001
        assert min(w, h) > 0
        ious = [_iou((x, y, w, h), box) for box in truth[entry["image_id"]]]
        best.append(max(ious))
        if max(ious) >= 0.5:
            covered[entry["image_id"], int(np.argmax(ious))] += 1
    assert all(iou >= 0.599 or iou <= 0.401 for iou in best)
    assert 0.05 < np.mean([iou < 0.5 for iou in best]) < 0.3
    assert np.mean([iou > 0.999 for iou in best]) < 0.02
    assert 0.9 < len(covered) / len(coco.anns) < 0.99
    assert set(covered.values()) == {1}


def test_captions(folder, coco):
    content = json.loads((folder / "annotations/captions_train2014.json").read_text())
    assert content["images"] == coco.dataset["images"]
    per_image = Counter(entry["image_id"] for entry in content["annotations"])
    assert per_image == dict.fromkeys(coco.imgs, 5)
    shapes = {entry["id"]: entry["name"] for entry in coco.dataset["categories"]}
    numbers = {
        "a": 1,
        "two": 2,
        "three": 3,
        "four": 4,
        "five": 5,
        "six": 6,
        "seven": 7,
        "eight": 8,
        "nine": 9,
        "ten": 10,
    }
    checked = 0
    for entry in content["annotations"]:
        caption = entry["caption"]
        assert re.fullmatch(r"[A-Z][a-z ,]*\.", caption)
        counts = re.findall(r"(\w+) (circle|square|triangle|star|cross|diamond)(?:e?s)?\b", caption.lower())
        objects = [shapes[item["category_id"]] for item in coco.imgToAnns[entry["image_id"]]]
        if len(counts) == len(re.split(", | and ", caption)) and all(number in numbers for number, _ in counts):
            total = sum(numbers[number] for number, _ in counts)
            if total == len(objects):  # a caption that counts all shapes
                assert Counter({name: numbers[number] for number, name in counts}) == Counter(objects)
                checked += 1
    assert checked >= 100


# ---- language


def _iou(a, b) -> float:
    w = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    h = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    overlap = max(w, 0) * max(h, 0)
    return overlap / (a[2] * a[3] + b[2] * b[3] - overlap)


SYNONYMS = {"large": "big", "little": "small", "solid": "plain"}
ANY_SHAPE = {"thing", "object", "shape", "one"}
LINKS = {
    "next to|beside|near": "near",
    "closest to|nearest to": "nearest",
    "farthest from|furthest from": "farthest",
    "overlapping|touching": "touching",
    "in front of|covering": "in front",
    "behind|partly hidden by": "behind",
    "bigger than|larger than": "bigger",
    "smaller than": "smaller",
}


class Judge:
    """Decides which objects of an image a sentence is true of, from the annotations alone and in plain words."""

    def __init__(self, coco: COCO, image_id: int) -> None:
        self.objects = sorted(coco.imgToAnns[image_id], key=lambda entry: entry["id"])
        names = [entry["name"] for entry in coco.dataset["attributes"]]
        shapes = {entry["id"]: entry["name"] for entry in coco.dataset["categories"]}
        self.words = [
            {shapes[item["category_id"]], *(names[i] for i in item["attribute_ids"])} for item in self.objects
        ]
        self.pixels = [np.argwhere(coco.annToMask(item)) for item in self.objects]

    def described(self, phrase: str) -> set[int]:
        phrase = re.sub(r"^the ", "", phrase)
        phrase = re.sub(r"^(.*) with stripes$", r"striped \1", phrase)
        wanted = {SYNONYMS.get(word, word) for word in phrase.split()} - ANY_SHAPE
        return {i for i, words in enumerate(self.words) if wanted <= words}

    def size(self, i: int) -> tuple[float, float]:
        return max(self.objects[i]["bbox"][2:]), self.objects[i]["area"]

    def bigger(self, i: int, j: int) -> bool | None:
        """None when one is longer and the other has more area."""
        verdicts = {a > b for a, b in zip(self.size(i), self.size(j), strict=True)}
        return verdicts.pop() if len(verdicts) == 1 else None

    def gap(self, i: int, j: int) -> float:
        a, b = self.pixels[i].astype(float), self.pixels[j].astype(float)
        squares = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
        return float(np.sqrt(max(squares.min(), 0)))

    def distance(self, i: int, j: int) -> float:
        centres = [np.array(self.objects[k]["bbox"][:2]) + np.array(self.objects[k]["bbox"][2:]) / 2 for k in (i, j)]
        return float(np.linalg.norm(centres[0] - centres[1]))

    def true_of(self, sentence: str) -> set[int]:
        match = re.fullmatch(r"(?:the )?(biggest|largest|smallest) (.*)", sentence)
        if match:
            return self.extreme(self.described(match[2]), bigger=match[1] != "smallest")
        for words, relation in LINKS.items():
            match = re.fullmatch(rf"(.*?)(?: that is)? (?:{words}) (.*)", sentence)
            if not match:
                continue
            candidates = self.described(match[1])
            if match[2] in ("the others", "all the others"):
                return self.extreme(candidates, bigger=relation == "bigger")
            (anchor,) = self.described(match[2])
            return self.related(candidates - {anchor}, relation, anchor)
        return self.described(sentence)

    def extreme(self, candidates: set[int], bigger: bool) -> set[int]:
        assert len(candidates) >= 2
        return {i for i in candidates if all(self.bigger(i, j) is bigger for j in candidates - {i})}

    def related(self, candidates: set[int], relation: str, anchor: int) -> set[int]:
        assert len(candidates) >= 2
        if relation in ("nearest", "farthest"):
            choose = min if relation == "nearest" else max
            by_centre = choose(candidates, key=lambda i: self.distance(i, anchor))
            assert by_centre == choose(candidates, key=lambda i: self.gap(i, anchor))
            return {by_centre}
        if relation in ("bigger", "smaller"):
            assert all(self.bigger(i, anchor) is not None for i in candidates)
        tests = {
            "bigger": lambda i: self.bigger(i, anchor),
            "smaller": lambda i: self.bigger(i, anchor) is False,
            "near": lambda i: self.gap(i, anchor) < 9,
            "touching": lambda i: self.gap(i, anchor) < 1.5,
            "in front": lambda i: self.gap(i, anchor) < 1.5 and i > anchor,
            "behind": lambda i: self.gap(i, anchor) < 1.5 and i < anchor,
        }
        return {i for i in candidates if tests[relation](i)}


def test_every_expression_is_true_of_its_object_and_no_other(coco, said):
    judges: dict[int, Judge] = {}
    families = Counter()
    for ref, sentence in said:
        judge = judges.setdefault(ref["image_id"], Judge(coco, ref["image_id"]))
        true_of = {judge.objects[i]["id"] for i in judge.true_of(sentence["sent"])}
        assert true_of == {ref["ann_id"]}, f'image {ref["image_id"]}: "{sentence["sent"]}"'
        families[sentence["family"]] += 1
    assert len(families) == 4


def test_no_word_for_a_place_in_the_picture(said):
    words = Counter(word for _, sentence in said for word in sentence["tokens"])
    assert not set(words) & LOCATION_WORDS
    assert words["front"] == sum(" in front of " in sentence["sent"] for _, sentence in said)
    assert len(words) > 45


def test_mix_of_families_and_number_of_texts(folder, said):
    shares = {name: count / len(said) for name, count in Counter(item["family"] for _, item in said).items()}
    for name, share in LanguageConfig().family_mix.items():
        assert shares[name] == pytest.approx(share, abs=0.05)
    statistics = json.loads((folder / "synthetic.json").read_text())["statistics"]
    assert statistics["families"] == pytest.approx(shares, abs=1e-4)
    assert statistics["expressions_per_image"] == pytest.approx(len(said) / 150, abs=1e-3)
    assert 6 <= statistics["expressions_per_image"] <= 9
    assert 2 <= statistics["expressions_per_image"] / statistics["refs_per_image"] <= 3


def test_choices_that_ignore_the_sentence_are_poor(folder, coco, said):
    right = Counter()
    for ref, _ in said:
        objects = coco.imgToAnns[ref["image_id"]]
        central = [np.linalg.norm(np.add(item["bbox"][:2], np.divide(item["bbox"][2:], 2)) - 64) for item in objects]
        choices = {
            "biggest": objects[int(np.argmax([item["area"] for item in objects]))],
            "most_central": objects[int(np.argmin(central))],
            "first": objects[0],
            "last": objects[-1],
        }
        right.update(name for name, item in choices.items() if item["id"] == ref["ann_id"])
    accuracy = {name: count / len(said) for name, count in right.items()}
    assert max(accuracy.values()) <= 0.25
    statistics = json.loads((folder / "synthetic.json").read_text())["statistics"]["blind_accuracy"]
    for name in ("biggest", "most_central"):
        assert statistics[name] == pytest.approx(accuracy[name], abs=0.01)


def test_one_attribute_is_rarely_enough(coco, said):
    """How often a guess among the objects of the named shape, or of the named colour, would be right."""
    names = [entry["name"] for entry in coco.dataset["attributes"]]
    shapes = {entry["id"]: entry["name"] for entry in coco.dataset["categories"]}
    chances = {"shape": [], "colour": []}
    for ref, sentence in said:
        if sentence["family"] != "attribute":
            continue
        looks = [
            {"shape": shapes[item["category_id"]], "colour": names[item["attribute_ids"][0]]}
            for item in coco.imgToAnns[ref["image_id"]]
        ]
        for slot, values in chances.items():
            fitting = [look for look in looks if look[slot] in sentence["tokens"]]
            values.append(1 / len(fitting or looks))
    assert np.mean(chances["shape"]) < 0.65
    assert np.mean(chances["colour"]) < 0.65


# ---- the folder


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


SMALL = {"scenes": {"train": 4, "val": 2}, "seed": 5, "progress": False}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("synthetic") / "small"
    make_refcoco(path, **SMALL)
    return path


def test_number_of_processes_changes_nothing(small, tmp_path):
    make_refcoco(tmp_path / "data", **SMALL, workers=2)  # in chunks of one scene
    assert _contents(tmp_path / "data") == _contents(small)


def test_other_seed_gives_other_scenes_and_more_training_scenes_keep_the_others(small, tmp_path):
    make_refcoco(tmp_path / "seed", **{**SMALL, "seed": 6})
    make_refcoco(tmp_path / "more", **{**SMALL, "scenes": {"train": 5, "val": 2}})
    images = {
        name: [path.read_bytes() for path in sorted((folder / "images/train2014").iterdir())]
        for name, folder in (("small", small), ("seed", tmp_path / "seed"), ("more", tmp_path / "more"))
    }
    assert not set(images["small"]) & set(images["seed"])
    assert images["more"][:4] == images["small"][:4]
    assert images["more"][5:] == images["small"][4:]


def test_second_call_does_nothing(small):
    before = {path: path.stat().st_mtime_ns for path in small.rglob("*")}
    stamp = make_refcoco(small, **SMALL)
    assert {path: path.stat().st_mtime_ns for path in small.rglob("*")} == before
    assert stamp == json.loads((small / "synthetic.json").read_text())


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seed": 6}, "seed"),
        ({"scenes": {"train": 4}}, "scenes"),
        ({"config": SceneConfig(max_objects=8)}, "scene"),
        ({"language": LanguageConfig(redundant=0)}, "language"),
        ({"detections": DetectionConfig(missed=0)}, "detections"),
        ({"image_format": "png"}, "image_format"),
    ],
)
def test_other_settings_in_the_same_folder_are_an_error(small, change, name):
    with pytest.raises(ValueError, match=rf"other settings \({name}\): remove the folder"):
        make_refcoco(small, **{**SMALL, **change})


def test_interrupted_run_is_finished_and_foreign_folders_are_left_alone(small, tmp_path, monkeypatch):
    folder = tmp_path / "data"
    with monkeypatch.context() as patch:
        patch.setattr("e2e_vl.synthetic.build._statistics", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make_refcoco(folder, **SMALL)
    assert not (folder / "synthetic.json").exists()
    with pytest.raises(ValueError, match="other settings"):
        make_refcoco(folder, **{**SMALL, "seed": 6})
    make_refcoco(folder, **SMALL)
    assert _contents(folder) == _contents(small)

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "photo.jpg").write_bytes(b"")
    with pytest.raises(ValueError, match="not empty and was not written by this tool"):
        make_refcoco(foreign, **SMALL)
    with pytest.raises(ValueError, match="is a file, not a folder"):
        make_refcoco(foreign / "photo.jpg", **SMALL)
    (folder / "synthetic.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        make_refcoco(folder, **SMALL)


def test_png_and_unequal_sides(tmp_path):
    make_refcoco(
        tmp_path / "data",
        scenes={"train": 3},
        seed=0,
        config=SceneConfig(min_side=112, max_side=144, textures=["plain", "striped", "dotted"]),
        image_format="png",
        progress=False,
    )
    images = json.loads((tmp_path / "data/refcoco+/instances.json").read_text())["images"]
    assert len({(image["height"], image["width"]) for image in images}) == 3
    for image in images:
        assert image["file_name"].endswith(".png")
        with Image.open(tmp_path / "data/images/train2014" / image["file_name"]) as picture:
            assert (picture.format, picture.size) == ("PNG", (image["width"], image["height"]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scenes": {}}, "scenes must name splits"),
        ({"scenes": {"train": -1, "val": 2}}, "scenes must name splits"),
        ({"seed": -1}, "seed must not be negative"),
        ({"image_format": "gif"}, "image_format must be one of jpg, png"),
        ({"workers": -1}, "workers must not be negative"),
    ],
)
def test_impossible_settings_are_named(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        make_refcoco(tmp_path / "data", **{**SMALL, **change})
    assert not (tmp_path / "data").exists()
    with pytest.raises(ValueError, match=r"detections\.missed"):
        DetectionConfig(missed=2)
