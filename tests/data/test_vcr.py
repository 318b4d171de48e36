"""VCR's readers on a small hand-made data set in the official formats."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from detector.images import ResizeRule
from e2e_vl.config import DataSettings
from e2e_vl.data.examples import Request
from e2e_vl.data.vcr import VCRDataset
from e2e_vl.data.vcr_files import VCRFile, read_metadata
from e2e_vl.data.vcr_options import VCROptions
from e2e_vl.data.vcr_text import (
    CLASS_NAMES,
    NEUTRAL_NAMES,
    Piece,
    cut_answers,
    cut_rationales,
    mentioned_objects,
    names_of,
    plain_text,
    relevant_objects,
)
from e2e_vl.text import build_vocabulary, load_tokenizer

SAME = ResizeRule(short_edge=60, long_edge=1000)  # the image is 100 x 60 pixels and keeps its size
OBJECTS = ["person", "person", "chair", "person"]
BOXES = [[0, 0, 20, 59, 0.9], [30, 0, 50, 59, 0.8], [60, 30, 95, 59, 0.7], [52.5, 10, 58, 20, 0.5]]


class TinyVCR:
    """Lines and metadata (change them, then `write`)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lines = [
            {
                "annot_id": f"val-{number}",
                "img_fn": f"film/{image}.png",
                "metadata_fn": f"film/{image}.json",
                "objects": list(OBJECTS),
                "question": ["Why", "is", [1, 2], "there", "?"],
                "answer_choices": [["No", [0], "."], ["Yes", "."], [[1], "'", "s", "chair", "."], ["No", "."]],
                "answer_label": 2,
                "rationale_choices": [["So", "."], [[3], "is", "."], ["Not", "so", "."], ["Everyone", "is", "."]],
                "rationale_label": 1,
                "movie": "film",
            }
            for number, image in enumerate(["a", "b", "a"])
        ]
        self.metadata = {
            "boxes": BOXES,
            "segms": [[[[x1, y1], [x2, y1], [x2, y2], [x1, y2]]] for x1, y1, x2, y2, _ in BOXES],
            "names": list(OBJECTS),
            "width": 100,
            "height": 60,
        }

    def write(self) -> TinyVCR:
        folder = self.root / "vcr1images" / "film"
        folder.mkdir(parents=True, exist_ok=True)
        for name in "ab":
            pixels = np.arange(60 * 100 * 3, dtype=np.uint8).reshape(60, 100, 3)
            Image.fromarray(pixels).save(folder / f"{name}.png")
            (folder / f"{name}.json").write_text(json.dumps(self.metadata))
        self.file.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        return self

    @property
    def file(self) -> Path:
        return self.root / "val.jsonl"

    def dataset(self, **options) -> VCRDataset:
        given = {key: options.pop(key) for key in list(options) if key in VCROptions.__dataclass_fields__}
        self.write()
        words = ["why is there no yes so not everyone and chair ' s . ?", *CLASS_NAMES, *NEUTRAL_NAMES]
        build_vocabulary(words, self.root / "vocab.txt")
        tokenizer = load_tokenizer(self.root / "vocab.txt")
        return VCRDataset(self.root / "vcr1images", self.file, tokenizer, SAME, options=VCROptions(**given), **options)


@pytest.fixture
def tiny(tmp_path) -> TinyVCR:
    return TinyVCR(tmp_path)


def words(dataset: VCRDataset, text) -> list[str]:
    return dataset.tokenizer.convert_ids_to_tokens(text.input_ids.tolist())


def spoken(dataset: VCRDataset, text) -> str:
    return " ".join(words(dataset, text))


def test_four_texts_of_a_question(tiny):
    dataset = tiny.dataset()
    example = dataset[Request(0, (0,))]
    assert len(example.images) == 1
    assert len(example.texts) == 4
    first = example.texts[0]
    assert spoken(dataset, first) == "[CLS] why is riley and chair there ? [SEP] no casey . [SEP]"
    assert first.segment_ids.tolist() == [0] * 9 + [1] * 4
    assert first.region_of_token.tolist() == [-1, -1, -1, 1, -1, 2, -1, -1, -1, -1, 0, -1, -1]
    assert words(dataset, example.texts[2])[9:] == ["riley", "'", "s", "chair", ".", "[SEP]"]
    assert example.texts[2].region_of_token[9:].tolist() == [1, -1, -1, -1, -1, -1]
    assert [float(text.targets["is_right"]) for text in example.texts] == [0, 0, 1, 0]
    assert {text.looks_at for text in example.texts} == {(0,)}
    for text in tiny.dataset(ground_words=False)[Request(0, (0,))].texts:
        assert set(text.region_of_token.tolist()) == {-1}


def test_question_and_right_answer_stand_before_a_rationale(tiny):
    dataset = tiny.dataset(question="rationale")
    example = dataset[Request(0, (0,))]
    said = spoken(dataset, example.texts[1])
    assert said == "[CLS] why is riley and chair there ? riley ' s chair . [SEP] jessie is . [SEP]"
    assert example.texts[1].segment_ids.tolist() == [0] * 14 + [1] * 4
    assert [float(text.targets["is_right"]) for text in example.texts] == [0, 1, 0, 0]
    assert (example.texts[0].record["label"], example.texts[0].record["conditioned_on"]) == (1, 2)


def test_rationales_given_each_answer(tiny):
    for line in tiny.lines:  # as in the test split
        del line["answer_label"], line["rationale_label"]
    dataset = tiny.dataset(question="rationale", condition_on="each")
    assert len(dataset) == 12
    assert dataset.groups == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7]]
    example = dataset[Request(0, (1, 8))]
    assert len(example.texts) == 8
    records = [text.record for text in example.texts]
    assert [record["text_index"] for record in records] == [1] * 4 + [8] * 4
    assert {(record["annot_id"], record["conditioned_on"]) for record in records} == {("val-0", 1), ("val-2", 0)}
    assert spoken(dataset, example.texts[0]).startswith("[CLS] why is riley and chair there ? yes . [SEP]")
    assert all(text.targets == {} for text in example.texts)
    with pytest.raises(ValueError, match=r"val.jsonl: the questions have no labels.*condition_on=each"):
        tiny.dataset(question="rationale")


def test_only_rationales_given_the_right_answer_have_a_label(tiny):
    dataset = tiny.dataset(question="rationale", condition_on="each")
    example = dataset[Request(0, (0, 1, 2, 3))]
    assert [text.record["label"] for text in example.texts[::4]] == [None, None, 1, None]


def test_image_boxes_classes_and_masks(tiny):
    [image] = tiny.dataset()[Request(1, (1,))].images
    assert image.pixels.shape == (60, 100, 3)
    assert image.name.endswith("b.png")
    np.testing.assert_array_equal(image.boxes, np.array(BOXES, dtype=np.float32)[:, :4])
    assert image.region_targets["object_class"].tolist() == [1, 1, CLASS_NAMES.index("chair") + 1, 1]
    assert image.roi_masks.shape == (4, 14, 14)
    assert image.objects is None
    assert tiny.dataset(mask_size=None)[Request(1, (1,))].images[0].roi_masks is None


def test_a_flip_mirrors_boxes_and_masks_but_no_words(tiny):
    tiny.metadata["segms"][0] = [[[0, 0], [10, 0], [10, 59], [0, 59]]]  # the left half
    plain = tiny.dataset()[Request(0, (0,))]
    mirrored = tiny.dataset(flip_probability=1.0)[Request(0, (0,))]
    x1, _, x2, _ = plain.images[0].boxes[0]
    assert mirrored.images[0].boxes[0].tolist() == [99 - x2, 0, 99 - x1, 59]
    np.testing.assert_array_equal(mirrored.images[0].roi_masks, plain.images[0].roi_masks[:, :, ::-1])
    assert plain.images[0].roi_masks[0, :, :3].all() and not plain.images[0].roi_masks[0, :, 10:].any()
    for one, other in zip(plain.texts, mirrored.texts, strict=True):
        np.testing.assert_array_equal(one.input_ids, other.input_ids)


def test_objects_in_the_order_of_first_mention(tiny):
    dataset = tiny.dataset(objects="mentioned")
    assert dataset.groups == [[0], [1], [2]]  # the boxes depend on the question
    example = dataset[Request(0, (0,))]
    np.testing.assert_array_equal(example.images[0].boxes[:, 0], [30, 60, 0])  # objects 1, 2, 0
    assert example.images[0].roi_masks.shape == (3, 14, 14)
    assert spoken(dataset, example.texts[0]) == "[CLS] why is casey and chair there ? [SEP] no riley . [SEP]"
    assert example.texts[0].region_of_token[[3, 5, 10]].tolist() == [0, 1, 2]
    rationale = tiny.dataset(objects="mentioned", question="rationale")
    assert len(rationale[Request(0, (0,))].images[0].boxes) == 4  # [3] in a rationale; answers count too


def test_objects_of_r2c(tiny):
    dataset = tiny.dataset(objects="r2c", join_word=None)
    example = dataset[Request(0, (0,))]
    np.testing.assert_array_equal(example.images[0].boxes[:, 0], [0, 30, 60])
    assert spoken(dataset, example.texts[0]).startswith("[CLS] why is riley chair there ? [SEP]")
    everyone = tiny.dataset(objects="r2c", question="rationale")[Request(0, (0,))]
    assert len(everyone.images[0].boxes) == 4


def test_people_are_named_in_turn_and_in_training_from_anywhere(tiny):
    assert names_of(["person", "cup", "person"], ["A", "B"], 1) == ["B", "cup", "A"]
    assert len(NEUTRAL_NAMES) == 13
    assert names_of(["person"] * 14)[-1] == names_of(["person"])[0]
    dataset = tiny.dataset(training=True)
    seen = {tuple(words(dataset, dataset[Request(0, (0,), epoch)].texts[0])) for epoch in range(20)}
    assert len(seen) > 5
    assert len({tuple(words(tiny.dataset(), tiny.dataset()[Request(0, (0,), e)].texts[0])) for e in range(5)}) == 1
    fixed = tiny.dataset(training=True, turn_names=False)
    assert words(fixed, fixed[Request(0, (0,), 3)].texts[0])[3] == "riley"


def test_a_name_does_not_depend_on_the_other_questions(tiny):
    dataset = tiny.dataset(training=True)
    alone, together = dataset[Request(0, (2,), 1)], dataset[Request(0, (0, 2), 1)]
    for one, other in zip(alone.texts, together.texts[4:], strict=True):
        np.testing.assert_array_equal(one.input_ids, other.input_ids)


def pieces(number: int) -> list[Piece]:
    return [Piece(index, -1, index) for index in range(number)]


def test_the_longer_of_question_and_answer_is_cut():
    question, answers = pieces(6), [pieces(3), pieces(9), pieces(5)]
    cut_answers(question, answers, limit=8)
    # 6 + 3: the question -> 5; 5 + 9: the answer -> 5, a tie, the question -> 4, ... and the third sees what is left
    assert ([len(answer) for answer in answers], len(question)) == ([3, 4, 4], 4)
    assert question == pieces(4)


def test_cutting_rationales():
    question, answer, rationales = pieces(4), pieces(3), [pieces(9), pieces(5)]
    cut_rationales(question, answer, rationales, limit=10)
    assert (len(question), len(answer), [len(rationale) for rationale in rationales]) == (2, 3, [5, 5])
    question, answer, rationales = pieces(2), pieces(6), [pieces(4)]
    cut_rationales(question, answer, rationales, limit=8)
    assert (len(question), len(answer), len(rationales[0])) == (1, 3, 4)


def test_texts_are_cut_without_special_tokens(tiny):
    dataset = tiny.dataset(max_pieces=6)
    lengths = [len(text.input_ids) for text in dataset[Request(0, (0,))].texts]
    assert max(lengths) == 6 + 3


def test_rules_about_mentions():
    sentences = [["Is", [2, 0], "?"], [[0], "and", [1]]]
    assert mentioned_objects(sentences) == [2, 0, 1]
    objects = ["cup", "person", "person", "car"]
    assert relevant_objects(objects, [["No", "."]]) == [1, 2]
    assert relevant_objects(objects, [[[3], "."]]) == [3]
    assert relevant_objects(objects, [[[3], "and", "EVERYONE"]]) == [1, 2, 3]
    assert plain_text(["Is", [2, 0], "?"], ["a", "b", "c"]) == "Is c and a ?"


def test_controls(tiny):
    blank = tiny.dataset(blank_text=True)
    assert [words(blank, text) for text in blank[Request(0, (0,))].texts] == [["[CLS]", "[SEP]", "[SEP]"]] * 4
    answers = tiny.dataset(blank_question=True)
    assert words(answers, answers[Request(0, (0,))].texts[1]) == ["[CLS]", "[SEP]", "yes", ".", "[SEP]"]
    [image] = tiny.dataset(blank_image=True)[Request(0, (0,))].images
    assert len(np.unique(image.pixels.reshape(-1, 3), axis=0)) == 1
    assert image.roi_masks.all()


def test_objects_for_the_detection_losses(tiny):
    [image] = tiny.dataset(with_objects=True)[Request(0, (0,))].images
    assert image.objects.classes.tolist() == [0, 0, CLASS_NAMES.index("chair"), 0]
    assert image.objects.attributes is None
    tiny.metadata["attribute_ids"] = [[1, 4], [2, 4], [3, 4], [1, 5]]
    [image] = tiny.dataset(with_objects=True)[Request(0, (0,))].images
    assert image.objects.attributes.tolist() == tiny.metadata["attribute_ids"]
    tiny.dataset().check_classes(80)
    with pytest.raises(ValueError, match=r"80 classes, but the detector has 6"):
        tiny.dataset().check_classes(6)


def test_records_are_plain(tiny):
    tiny.lines[0]["family"] = "colour"
    record = tiny.dataset()[Request(0, (0,))].texts[3].record
    assert record == json.loads(json.dumps(record))
    assert (record["text_index"], record["annot_id"], record["kind"], record["label"]) == (0, "val-0", "answer", 2)
    assert record["sent"] == "Why is Riley and chair there ?"
    assert record["choices"][0] == "No Casey ."
    assert record["family"] == "colour"


def test_own_classes(tiny):
    for line in tiny.lines:
        line["objects"][0] = "robot"
    tiny.metadata["names"][0] = "robot"
    with pytest.raises(ValueError, match=r"val.jsonl \(val-0\): the object class 'robot' .*data.config.class_names"):
        tiny.dataset()
    [image] = tiny.dataset(class_names=["robot", "chair", "person"])[Request(0, (0,))].images
    assert image.region_targets["object_class"].tolist() == [1, 3, 2, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line.pop("objects"), r"line 2 \(val-1\) has no 'objects'"),
        (lambda line: line.update(objects="person"), "expected a list of class names"),
        (lambda line: line.update(img_fn="../a.png"), "inside the image folder"),
        (lambda line: line.update(question=[]), r"val-1\): the question is \[\]"),
        (lambda line: line["question"].append([4]), "names the object 4, but the line has 4 objects"),
        (lambda line: line["question"].append([]), r"has the token \[\]"),
        (lambda line: line["answer_choices"][3].append(7), "choice 3 of answer_choices has the token 7"),
        (lambda line: line["answer_choices"].pop(), "answer_choices must hold four choices"),
        (lambda line: line.update(answer_label=4), r"the labels are \[4, 1\]"),
        (lambda line: line.update(answer_label=True), r"the labels are \[True, 1\]"),
        (lambda line: line.pop("rationale_label"), r"the labels are \[2, None\]"),
        (
            lambda line: [line.pop("rationale_label"), line.pop("answer_label")],
            "has no labels, unlike the lines before",
        ),
        (lambda line: line.update(annot_id="val-0"), "the annot_id val-0 is there twice"),
    ],
)
def test_broken_lines(tiny, change, message):
    change(tiny.lines[1])
    with pytest.raises(ValueError, match=f"val.jsonl.*{message}"):
        tiny.dataset()


def test_broken_files(tiny):
    tiny.write()
    tiny.file.write_text("{}\n{")
    with pytest.raises(ValueError, match=r"val.jsonl, line 1 has no 'annot_id'"):
        VCRFile(tiny.file)
    tiny.file.write_text("\n")
    with pytest.raises(ValueError, match="no question in the file"):
        VCRFile(tiny.file)
    tiny.file.write_text("nothing\n")
    with pytest.raises(ValueError, match="line 1 is not valid JSON"):
        VCRFile(tiny.file)
    with pytest.raises(FileNotFoundError, match="cannot read the VCR questions"):
        VCRFile(tiny.root / "none.jsonl")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": ["person"]}, r"names \['person'\] differ from the question's objects"),
        ({"boxes": BOXES[:2]}, "boxes must hold one entry for each of the 4 objects"),
        ({"boxes": [[1, 2, 3], *BOXES[1:]]}, r"box 0 is \[1, 2, 3\]"),
        ({"boxes": [[5, 5, 5, 9, 1], *BOXES[1:]]}, "box 0 .* is empty or inverted"),
        ({"segms": [[[1, 2]], [], [], []]}, "segms 0 must be a list of outlines"),
        ({"segms": [[[["x", 2]]], [], [], []]}, "segms 0 must be a list of outlines"),
        ({"attribute_ids": [[1], [2]]}, "attribute_ids must be a list of equally many numbers"),
        ({"attribute_ids": [[1], [2], [3], [-1]]}, "numbers from 0 for each of the 4 objects"),
        ({"width": 100.5}, "width and height are 100.5 and 60"),
        ({"width": 101}, "100 x 60 pixels, but its annotation file says 101 x 60"),
        ({"boxes": [[100, 5, 120, 9, 1], *BOXES[1:]]}, r"a.png \(val-0\): box 0 .* lies outside"),
    ],
)
def test_broken_metadata(tiny, change, message):
    tiny.metadata |= change
    with pytest.raises(ValueError, match=message):
        tiny.dataset()[Request(0, (0,))]


def test_missing_files_name_the_question(tiny):
    dataset = tiny.dataset()
    (tiny.root / "vcr1images" / "film" / "b.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"b.png: the file of val-1 is missing"):
        dataset[Request(1, (1,))]
    (tiny.root / "vcr1images" / "film" / "b.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"b.json: cannot read the metadata of val-1"):
        dataset[Request(1, (1,))]


def test_questions_of_an_image_must_agree_about_its_objects(tiny):
    tiny.lines[2]["objects"] = ["chair", *OBJECTS[1:]]
    dataset = tiny.dataset()
    with pytest.raises(ValueError, match="val-2 and val-0 are about the same image but list different objects"):
        dataset[Request(0, (0, 2))]


def test_an_object_without_outline_has_an_empty_mask(tiny):
    tiny.metadata["segms"][1] = []
    [image] = tiny.dataset()[Request(0, (0,))].images
    assert not image.roi_masks[1].any()
    question = VCRFile(tiny.file)[0]
    assert read_metadata(tiny.root / "vcr1images" / "film" / "a.json", question).polygons[1] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"question": "both"}, "data.config.question is 'both'"),
        ({"objects": "some"}, "must be one of all, mentioned, r2c"),
        ({"condition_on": "each"}, "is about rationales"),
        ({"max_pieces": 1}, "need at least 2"),
        ({"mask_size": 0}, "side of the detector's RoI maps"),
        ({"people_names": []}, "needs people_names"),
        ({"ask": 1}, "unknown key 'ask'; VCR takes question, condition_on"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        VCROptions.from_config(options)


def settings_of(tiny, **changes) -> DataSettings:
    files = {"images": "vcr1images", "questions": "{split}.jsonl"}
    return DataSettings(**({"name": "vcr", "root": str(tiny.root), "files": files} | changes))


def build(tiny, settings, **changes):
    known = {"boxes": "gt", "training": False, "seed": 0, "channel_order": "BGR", "with_objects": False}
    return VCRDataset.from_settings(settings, tiny.dataset().tokenizer, "val", **(known | changes))


def test_from_settings(tiny):
    dataset = build(tiny, settings_of(tiny, config={"question": "rationale"}, blank_image=True), training=True)
    assert (dataset.options.question, dataset.blank_image, dataset.flip_probability) == ("rationale", True, 0.5)
    assert build(tiny, settings_of(tiny)).flip_probability == 0
    with pytest.raises(ValueError, match=r"cannot come from 'online'; set data.boxes.train=gt"):
        build(tiny, settings_of(tiny), boxes="online")
    with pytest.raises(ValueError, match=r"data.config.max_pieces"):
        build(tiny, settings_of(tiny, max_text_length=20))
    with pytest.raises(ValueError, match=r"data.files.questions is not set"):
        build(tiny, settings_of(tiny, files={"images": "vcr1images"}))
    with pytest.raises(ValueError, match="train with condition_on=right"):
        build(tiny, settings_of(tiny, config={"question": "rationale", "condition_on": "each"}), training=True)


def test_texts_for_a_vocabulary(tiny):
    tiny.write()
    texts = VCRDataset.texts_of(settings_of(tiny), "val")
    assert len(texts) == 1 + 3
    assert set(NEUTRAL_NAMES) <= set(texts[0].split())
    assert texts[1].startswith("Why is Riley and chair there ? No Casey . Yes .")
