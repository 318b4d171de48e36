"""The files in COCO's formats, RefCOCO+ and MAttNet's detections; each expression is true of its object alone."""

from __future__ import annotations

import json
import re
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask
from pycocotools.coco import COCO

from e2e_vl.synthetic.base import polygons
from e2e_vl.synthetic.config import ImitatedDetectorConfig, LanguageConfig
from e2e_vl.synthetic.generate import make_scenes
from tests.synthetic.meaning import LINKS, NUMBERS, SPLITS, described, words_of

DETECTIONS = "detections/refcoco+_unc/res101_coco_minus_refer_notime_dets.json"


@pytest.fixture(scope="module")
def said(refs) -> list[tuple[dict, dict]]:
    return [(ref, sentence) for ref in refs for sentence in ref["sentences"]]


def test_images_and_instances(synthetic_folder, coco):
    images, annotations = coco.dataset["images"], coco.dataset["annotations"]
    assert [image["id"] for image in images] == list(range(1, sum(SPLITS.values()) + 1))
    assert images[0]["file_name"] == "COCO_train2014_000000000001.jpg"
    for image in images[::10]:
        with Image.open(synthetic_folder / "images/train2014" / image["file_name"]) as picture:
            assert (picture.width, picture.height, picture.mode) == (image["width"], image["height"], "RGB")
    assert [entry["id"] for entry in annotations] == list(range(1, len(annotations) + 1))
    names = [entry["name"] for entry in coco.dataset["attributes"]]
    counts = Counter()
    for entry in annotations:
        assert entry["iscrowd"] == 0 and entry["area"] > 0
        colour, texture, size = (names[i] for i in entry["attribute_ids"])
        assert texture in ("plain", "striped") and size in ("small", "big")
        counts.update([colour, texture, size, entry["category_id"]])
    assert set(counts) >= {"red", "blue", 1, 2, 3, 4, 5, 6}
    assert 0.4 < counts["small"] / len(annotations) < 0.6
    assert 0.4 < counts["plain"] / len(annotations) < 0.6


def test_segmentations_give_box_and_area(coco):
    for entry in coco.dataset["annotations"]:
        pixels = coco.annToMask(entry)
        rows, columns = np.nonzero(pixels)
        x, y, w, h = entry["bbox"]
        assert (x, y, x + w, y + h) == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
        assert pixels.sum() == pytest.approx(entry["area"], rel=0.02)


def test_polygons_of_a_ragged_mask_are_exact():
    rng = np.random.default_rng(0)
    ragged = np.zeros((30, 40), bool)
    ragged[5:20, 8:30] = True
    ragged[4, 8:30] = rng.random(22) < 0.5
    ragged[5:20, 30] = rng.random(15) < 0.5
    ragged[0, 39] = True  # a second part, one pixel in the picture's corner
    parts = polygons(ragged)
    assert len(parts) == 2
    assert (mask.decode(mask.merge(mask.frPyObjects(parts, *ragged.shape))) == ragged).all()


def test_refs_have_the_official_fields(coco, refs):
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
    assert len({(ref["image_id"], sentence["sent"]) for ref in refs for sentence in ref["sentences"]}) == len(sent_ids)


def test_detections(synthetic_folder, coco):
    detections = json.loads((synthetic_folder / DETECTIONS).read_text())
    names = {entry["id"]: entry["name"] for entry in coco.dataset["categories"]}
    assert [entry["det_id"] for entry in detections] == list(range(len(detections)))
    assert {entry["image_id"] for entry in detections} == set(coco.imgs)
    assert [entry["image_id"] for entry in detections] != sorted(entry["image_id"] for entry in detections)
    best, covered = [], Counter()
    for entry in detections:
        assert set(entry) == {"det_id", "h5_id", "box", "image_id", "category_id", "category_name", "score"}
        assert entry["category_name"] == names[entry["category_id"]] and 0.65 <= entry["score"] <= 1
        x, y, w, h = entry["box"]
        assert min(x, y) >= 0 and max(x + w, y + h) <= 128.001 and min(w, h) > 0
        objects = coco.imgToAnns[entry["image_id"]]
        ious = mask.iou([entry["box"]], [one["bbox"] for one in objects], [0] * len(objects))[0]
        best.append(max(ious))
        if max(ious) >= 0.5:
            covered[entry["image_id"], int(np.argmax(ious))] += 1
    assert all(iou >= 0.599 or iou <= 0.401 for iou in best)
    assert 0.05 < np.mean([iou < 0.5 for iou in best]) < 0.3
    assert np.mean([iou > 0.999 for iou in best]) < 0.02
    assert 0.9 < len(covered) / len(coco.anns) < 0.99
    assert set(covered.values()) == {1}


def test_detections_overlap_their_objects_as_much_as_is_asked_for(tmp_path):
    poor = ImitatedDetectorConfig(missed=0, wrong_category=0, false_alarms=0, iou=(0.5, 0.7))
    make_scenes(tmp_path / "poor", scenes={"val": 8}, detections=poor, formats=["refcoco+", "detections"])
    coco = COCO(tmp_path / "poor/refcoco+/instances.json")
    detections = json.loads((tmp_path / "poor" / DETECTIONS).read_text())
    best = []
    for entry in detections:
        objects = coco.imgToAnns[entry["image_id"]]
        ious = mask.iou([entry["box"]], [one["bbox"] for one in objects], [0] * len(objects))[0]
        best.append(max(ious))
    assert len(best) == len(coco.anns)
    assert 0.4999 <= min(best) < 0.53 and 0.67 < max(best) <= 0.7001
    assert 0.58 < np.mean(best) < 0.62
    with pytest.raises(ValueError, match="it must rise, from above 0"):
        ImitatedDetectorConfig(iou=(0.7, 0.5))


def test_captions_that_count_the_shapes_count_right(synthetic_folder, coco):
    content = json.loads((synthetic_folder / "annotations/captions_train2014.json").read_text())
    assert content["images"] == coco.dataset["images"]
    assert Counter(entry["image_id"] for entry in content["annotations"]) == dict.fromkeys(coco.imgs, 5)
    shapes = {entry["id"]: entry["name"] for entry in coco.dataset["categories"]}
    numbers, checked = {**NUMBERS, "a": 1}, 0
    for entry in content["annotations"]:
        caption = entry["caption"]
        assert re.fullmatch(r"[A-Z][a-z ,]*\.", caption)
        found = re.findall(r"(\w+) (circle|square|triangle|star|cross|diamond)(?:e?s)?\b", caption.lower())
        counts = Counter({name: numbers.get(number, 0) for number, name in found})
        objects = [shapes[item["category_id"]] for item in coco.imgToAnns[entry["image_id"]]]
        if len(found) == len(re.split(", | and ", caption)) and counts.total() == len(objects):  # all shapes
            assert counts == Counter(objects)
            checked += 1
    assert checked >= 100


# Expressions


class Judge:
    """Decides which objects of an image a sentence is true of, from the annotations alone and in plain words."""

    def __init__(self, coco: COCO, image_id: int) -> None:
        self.objects = coco.imgToAnns[image_id]
        self.words = words_of(coco, image_id)
        self.pixels = [np.argwhere(coco.annToMask(item)) for item in self.objects]

    def described(self, phrase: str) -> set[int]:
        meant = described(phrase, self.words)
        return {i for i, words in enumerate(self.words) if words in meant}

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

    def true_of(self, sentence: str, several: bool = True) -> set[int]:
        """`several`: a relation must have more than one candidate."""
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
            assert not several or len(candidates - {anchor}) >= 2
            return self.related(candidates - {anchor}, relation, anchor)
        return self.described(sentence)

    def extreme(self, candidates: set[int], bigger: bool) -> set[int]:
        assert len(candidates) >= 2
        return {i for i in candidates if all(self.bigger(i, j) is bigger for j in candidates - {i})}

    def related(self, candidates: set[int], relation: str, anchor: int) -> set[int]:
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
            "away": lambda i: self.gap(i, anchor) > 9,
            "touching": lambda i: self.gap(i, anchor) < 1.5,
            "in front": lambda i: self.gap(i, anchor) < 1.5 and i > anchor,
            "behind": lambda i: self.gap(i, anchor) < 1.5 and i < anchor,
        }
        return {i for i in candidates if tests[relation](i)}


def test_every_expression_is_true_of_its_object_and_no_other(coco, said):
    """A word that the judge does not know, such as one for a place, is true of nothing."""
    judges = {image_id: Judge(coco, image_id) for image_id in coco.imgs}
    for ref, sentence in said:
        judge = judges[ref["image_id"]]
        true_of = {judge.objects[i]["id"] for i in judge.true_of(sentence["sent"])}
        assert true_of == {ref["ann_id"]}, f'image {ref["image_id"]}: "{sentence["sent"]}"'


def test_constructions_families_and_number_of_texts(synthetic_folder, said):
    for words in [*LINKS, "biggest|largest", "smallest", "the others|all the others"]:
        assert sum(re.search(rf"\b(?:{words})\b", sentence["sent"]) is not None for _, sentence in said) >= 8, words
    shares = {
        name: count / len(said) for name, count in Counter(item["family"].split("/")[0] for _, item in said).items()
    }
    assert shares == pytest.approx(LanguageConfig().family_mix, abs=0.05)
    statistics = json.loads((synthetic_folder / "synthetic.json").read_text())["statistics"]
    assert statistics["families"] == pytest.approx(shares, abs=1e-4)
    assert 6 <= statistics["expressions_per_image"] <= 9
    assert statistics["expressions_per_image"] == pytest.approx(len(said) / sum(SPLITS.values()), abs=1e-3)
    assert 2 <= len(said) / len({ref["ref_id"] for ref, _ in said}) <= 3


def test_choices_that_ignore_the_sentence_are_poor(coco, said):
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
    assert max(right.values()) / len(said) <= 0.25


def test_the_nearest_object_is_wrong_for_half_of_the_relations(coco, said):
    """A listener that takes the nearest fitting object need not know which relation is said."""
    right = []
    for ref, sentence in said:
        judge = Judge(coco, ref["image_id"])
        match = re.fullmatch(rf"(.*?)(?: that is)? (?:{'|'.join(LINKS)}) (.*)", sentence["sent"])
        if sentence["family"].startswith("relation/"):
            (anchor,) = judge.described(match[2])
            candidates = judge.described(match[1]) - {anchor}
            nearest = min(candidates, key=lambda i: (max(judge.gap(i, anchor), 2), judge.distance(i, anchor)))
            right.append(judge.objects[nearest]["id"] == ref["ann_id"])
    assert len(right) > 100
    assert np.mean(right) == pytest.approx(0.5, abs=0.06)


def test_grefs_have_expressions_that_are_true_of_nothing(tmp_path):
    language = LanguageConfig(no_target=0.2)
    formats = ["refcoco+", "refcoco+_phrases"]
    make_scenes(tmp_path / "data", scenes={"train": 60}, seed=3, language=language, formats=formats)
    folder = tmp_path / "data" / "refcoco+"
    refs = json.loads((folder / "grefs(unc).json").read_text())
    assert [ref["ref_id"] for ref in refs] == list(range(len(refs)))
    ids = [sentence["sent_id"] for ref in refs for sentence in ref["sentences"]]
    assert sorted(ids) == list(range(len(ids)))
    coco, reasons = COCO(str(folder / "instances.json")), Counter()
    for ref in refs:
        if ref["ann_id"] != [-1]:
            assert [coco.anns[ref["ann_id"][0]]["category_id"]] == ref["category_id"]
            continue
        [sentence], judge = ref["sentences"], Judge(coco, ref["image_id"])
        parts = re.split(rf"(?: that is)? (?:{'|'.join(LINKS)}) ", sentence["sent"])
        head, anchor = re.sub("^(the )?(biggest|largest|smallest) ", "", parts[0]), (*parts, None)[1]
        if not judge.described(head):
            reasons["object"] += 1
        elif anchor is not None and not judge.described(anchor):
            reasons["anchor"] += 1
        else:
            assert anchor is not None
            reasons["relation"] += 1
            assert not judge.true_of(sentence["sent"], several=False)
        phrases = (folder.parent / "refcoco+_phrases" / "Sentences" / f"{ref['image_id']}.txt").read_text()
        assert sentence["sent"] in re.sub(r"\[/EN#\S+ |\]", "", phrases).split("\n")
    assert min(reasons[one] for one in ("object", "anchor", "relation")) >= 3
    assert 0.15 < sum(reasons.values()) / len(ids) < 0.25
