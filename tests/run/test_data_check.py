"""All problems of drawn data that were broken in several places, sizes, and photos that are shared."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e_vl.config import RunConfig, load_config
from e2e_vl.data.captions import CocoCaptions
from e2e_vl.data.overlap import PhotoId, PhotoIds
from e2e_vl.run import forked_work, split_walk
from e2e_vl.run.build import training_texts
from e2e_vl.run.data_check import DataReport, _Check, check_data
from e2e_vl.run.preflight import look_ahead

ROOT = Path(__file__).parents[2]
TINY = ("refcoco", "vqa", "vcr", "gqa", "nlvr2", "flickr30k", "pretraining")
MENTIONED = ("data.config.objects=mentioned",)  # then every text is a group, and several have one image
CONFIGS = {"detection": "demo/detection", "lxmert_questions": "vqa/lxmert", "lxmert_pairs": "nlvr2/lxmert"}
DRAWN_SPLITS = ("data.train_split=train", "data.eval_splits=[val]", "data.vocabulary=null")
DRAWN_SETS = "data.config.image_sets={train: train, val: val}"
WORDS = {  # what settings other than configs/tiny need for drawn data
    "lxmert_sentences": ("task.config.objectives.image_qa.answers=unused.json",),
    "lxmert_questions": (
        *(*DRAWN_SPLITS, DRAWN_SETS, "data.files.questions=lxmert/{split}_vqa.json"),
        *("data.files.features=lxmert/{images}_obj36.tsv", "data.files.answers=lxmert/trainval_label2ans.json"),
    ),
    "lxmert_pairs": (
        *(*DRAWN_SPLITS, "data.files.examples=lxmert/{split}_nlvr2.json"),
        "data.files.features=lxmert/{split}_obj36.tsv",
    ),
}


@pytest.fixture(scope="session")
def drawn(tiny_words) -> Path:
    """The drawn data of all formats; tests change copies of it."""
    return Path(next(word.removeprefix("data.root=") for word in tiny_words if word.startswith("data.root=")))


@pytest.fixture
def data(drawn, tmp_path) -> Path:
    return shutil.copytree(drawn, tmp_path / "data")


def settings(name: str, root: Path, *words: str) -> RunConfig:
    tiny = "tiny/lxmert_files" if name == "lxmert_sentences" else f"tiny/{name}"
    path = ROOT / "configs" / f"{CONFIGS.get(name, tiny)}.yaml"
    detector = f"detector.config={ROOT / 'configs' / 'detector' / 'tiny.yaml'}"
    return load_config(path, [detector, f"data.root={root}", "output=unused", *WORDS.get(name, ()), *words])


def as_photos(config: RunConfig, **changes) -> RunConfig:
    """The data as if they had not been drawn, whose names are then names of COCO."""
    synthetic = dataclasses.replace(config.data.synthetic, scenes={})
    return dataclasses.replace(config, data=dataclasses.replace(config.data, synthetic=synthetic, **changes))


def change_json(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def change_lines(path: Path, change: Callable[[list[str]], object]) -> None:
    lines = path.read_text().splitlines()
    change(lines)
    path.write_text("\n".join(lines) + "\n")


def has_all(report: DataReport, *fragments: str) -> None:
    lost = [part for part in fragments if not any(part in sentence for sentence in report.problems)]
    assert not lost, f"{lost} in none of {report.problems}"


@pytest.mark.parametrize("name", [*TINY, "detection"])
def test_intact_data_have_sizes_and_no_problem(name, drawn):
    report = check_data(settings(name, drawn))
    assert report.problems == [] and report.overlaps == []
    train, val = report.splits
    assert train.is_trained and not val.is_trained
    numbers = {"nlvr2": (48, 24), "vcr": (10, 4)}  # two images for each scene's pairs; scenes without a question
    assert (train.images, val.images) == numbers.get(name, (12, 6))
    assert train.missing_images == val.missing_images == train.boxes_outside == train.empty_boxes == 0
    assert train.texts >= 12 and train.boxes > 12
    if name != "detection":
        assert train.longest > train.mean_length > 1
    assert (train.answers is not None) == (name in ("vqa", "gqa"))
    assert report.counts_words


def break_refcoco(root: Path) -> None:
    path = root / "refcoco+" / "refs(unc).p"
    refs = pickle.loads(path.read_bytes())

    def change(content: dict) -> None:
        rows = content["annotations"]
        rows[1]["category_id"] = 999
        rows[-1]["bbox"][0] = "far"
        named = [ref["ann_id"] for ref in refs[:8] if ref["ann_id"] not in (rows[1]["id"], rows[-1]["id"])]
        next(row for row in rows if row["id"] == named[0])["bbox"][2] = 0  # an expression is about it

    change_json(root / "refcoco+" / "instances.json", change)
    refs[8]["sentences"][0].pop("sent")
    refs[9]["sentences"][0]["sent"] = " "
    refs[-1]["sentences"] = []
    path.write_bytes(pickle.dumps(refs, protocol=2))
    change_json(root / "detections" / "refcoco+_unc" / DETECTIONS, lambda rows: rows[2].pop("score"))


def break_vqa(root: Path) -> None:
    def change(content: dict) -> None:
        content["questions"][0]["question"] = ""
        content["questions"][3].pop("image_id")

    change_json(root / "vqa" / "v2_OpenEnded_mscoco_train_questions.json", change)
    change_json(
        root / "vqa" / "v2_mscoco_val_annotations.json", lambda content: content["annotations"][1].update(answers=[])
    )


def break_vcr(root: Path) -> None:
    def change(lines: list[str]) -> None:
        lines[0] = lines[0][:20]
        lines[2] = json.dumps(json.loads(lines[2]) | {"answer_label": 7})

    change_lines(root / "vcr" / "train.jsonl", change)
    question = json.loads((root / "vcr" / "val.jsonl").read_text().splitlines()[0])
    change_json(root / "vcr" / "vcr1images" / question["metadata_fn"], lambda content: content["boxes"].pop())


def break_gqa(root: Path) -> None:
    def change(content: dict) -> None:
        first, second, *_ = content.values()
        first.pop("imageId")
        second["isBalanced"] = "yes"

    change_json(root / "gqa" / "questions" / "train_balanced_questions.json", change)


def break_nlvr2(root: Path) -> None:
    def change(lines: list[str]) -> None:
        lines[0] = json.dumps(json.loads(lines[0]) | {"label": "maybe"})
        lines[3] = json.dumps(json.loads(lines[3]) | {"identifier": "x"})

    change_lines(root / "nlvr2" / "data" / "train.json", change)


def break_flickr30k(root: Path) -> None:
    first, second, *_ = (root / "flickr30k" / "train.txt").read_text().split()
    path = root / "flickr30k" / "Annotations" / f"{first}.xml"
    path.write_text(path.read_text().replace("<xmax>", "<xmax>-", 1))
    change_lines(root / "flickr30k" / "Sentences" / f"{second}.txt", lambda lines: lines.append("[/EN#1 a man]"))


def break_pretraining(root: Path) -> None:
    def change(content: dict) -> None:
        content["annotations"][0]["caption"] = ""
        content["annotations"][2]["image_id"] = -5

    change_json(root / "captions" / "captions_train.json", change)
    change_json(root / "detection" / "instances_train.json", lambda content: content["annotations"][1].pop("bbox"))


def break_lxmert_sentences(root: Path) -> None:
    def change(rows: list[dict]) -> None:
        rows[0]["img_id"] = "../a"
        rows[1].pop("sentf")
        rows[2]["labelf"]["vqa"] = [{}] * (len(rows[2]["sentf"]["vqa"]) + 1)
        rows[3]["img_id"] = rows[4]["img_id"]

    change_json(root / "lxmert" / "train.json", change)


def break_lxmert_questions(root: Path) -> None:
    def change(rows: list[dict]) -> None:
        rows[0].pop("sent")
        rows[1]["label"] = {"yes": "1"}
        rows[2]["img_id"] = "a/../../b"
        rows[3]["question_id"] = rows[4]["question_id"]

    change_json(root / "lxmert" / "train_vqa.json", change)
    change_json(root / "lxmert" / "val_vqa.json", lambda rows: rows[0].pop("label"))


def break_lxmert_pairs(root: Path) -> None:
    def change(rows: list[dict]) -> None:
        rows[0]["label"] = "True"
        rows[1].pop("img1")
        rows[2]["img0"] = "../a"

    change_json(root / "lxmert" / "train_nlvr2.json", change)


DETECTIONS = "res101_coco_minus_refer_notime_dets.json"
BROKEN = {
    "refcoco": (
        break_refcoco,
        [
            *("is empty or inverted", "has category 999", "expected four finite numbers", "a sentence has no 'sent'"),
            *("has no sentences", "sent is ' '", "has no 'score'"),
        ],
    ),
    "vqa": (break_vqa, ["has the text ''", "has no 'image_id'", "val_annotations.json: annotation of question"]),
    "vcr": (
        break_vcr,
        ["line 1 is not valid JSON", "line 3", "answer_label is 7, expected 0 to 3", "boxes must hold one entry"],
    ),
    "gqa": (break_gqa, ["has no 'imageId'", "isBalanced is 'yes'"]),
    "nlvr2": (break_nlvr2, ["line 1", "label is 'maybe', expected", "line 4 (x): the identifier"]),
    "flickr30k": (break_flickr30k, ["is inverted", "'[/EN#1 a man]' is no phrase"]),
    "pretraining": (break_pretraining, ["is empty; remove it", "is about image -5", "has no 'bbox'"]),
    "lxmert_sentences": (
        break_lxmert_sentences,
        ["image '../a' cannot name a file", "has no 'sentf'", "a list of labels of another length", "is listed twice"],
    ),
    "lxmert_questions": (
        break_lxmert_questions,
        [
            *("has no 'sent'", "label.yes is '1', expected a number", "image 'a/../../b' cannot name a file"),
            *("is listed twice", "val_vqa.json: some records have a label and others have none"),
        ],
    ),
    "lxmert_pairs": (
        break_lxmert_pairs,
        ["label is 'True', expected 0 or 1", "has no 'img1'", "image '../a' cannot name a file"],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_every_broken_record_is_named(name, data):
    break_it, fragments = BROKEN[name]
    break_it(data)
    report = check_data(settings(name, data))
    has_all(report, *fragments)
    assert len(set(report.problems)) == len(report.problems)
    assert all(facts.images for facts in report.splits), "the other records are read"


@pytest.mark.parametrize(("name", "words"), [*((name, ()) for name in BROKEN), ("vcr", MENTIONED)])
def test_several_processes_find_what_one_finds(name, words, data, monkeypatch):
    break_it, _ = BROKEN[name]
    break_it(data)
    for path in sorted((data / "images").rglob("*.*"))[::5]:
        path.unlink()
    config = as_photos(settings(name, data, "data.max_text_length=5", *words))
    alone = check_data(config, processes=1)
    assert alone.problems and any(facts.too_long for facts in alone.splits)
    monkeypatch.setattr(split_walk, "CHUNK", 2)
    monkeypatch.setattr(forked_work, "PATIENCE", 0.0)
    forked, work = [], forked_work._forked
    monkeypatch.setattr(forked_work, "_forked", lambda *words: forked.append(words) or work(*words))
    assert check_data(config, processes=2) == alone
    assert len(forked) == 2, "both splits are looked at by two processes"


def test_a_process_that_dies_is_no_problem_of_the_data(drawn, monkeypatch):
    monkeypatch.setattr(split_walk, "CHUNK", 2)
    monkeypatch.setattr(forked_work, "PATIENCE", 0.0)
    first, look = os.getpid(), split_walk.SplitWalk.look_at
    monkeypatch.setattr(
        split_walk.SplitWalk, "look_at", lambda *words: look(*words) if os.getpid() == first else os._exit(3)
    )
    with pytest.raises(ChildProcessError, match="was ended with status 3"):
        check_data(settings("refcoco", drawn), processes=2)


def test_a_broken_file_does_not_hide_the_others(data):
    (data / "vqa" / "v2_OpenEnded_mscoco_train_questions.json").write_text("[")
    change_json(data / "vqa" / "v2_mscoco_val_annotations.json", lambda content: content["annotations"][1].clear())
    report = check_data(settings("vqa", data))
    has_all(
        report, "train_questions.json: the questions are not one JSON object", "val_annotations.json: annotation of"
    )


def test_all_missing_files_are_named_once(data):
    for name in ("train", "val"):
        (data / "nlvr2" / "data" / f"{name}.json").unlink()
    report = check_data(settings("nlvr2", data))
    assert len(report.problems) == 2
    has_all(report, "train.json: cannot read the examples", "val.json: cannot read the examples")


def test_missing_images_are_counted(data):
    files = sorted((data / "images" / "train2014").iterdir())
    for path in files[:2]:
        path.unlink()
    report = check_data(settings("refcoco", data))
    assert sum(facts.missing_images for facts in report.splits) == 2
    assert str(files[0]) in [name for facts in report.splits for name in facts.missing_examples]
    has_all(report, "images of the split train that were looked at are missing")
    config = settings("refcoco", data, "data.skip_broken=true")
    assert check_data(config).problems == [], "training leaves them out"


def test_boxes_that_leave_their_image_and_long_texts_are_counted(data):
    change_json(
        data / "refcoco+" / "instances.json", lambda content: content["annotations"][0]["bbox"].__setitem__(2, 9999)
    )
    report = check_data(settings("refcoco", data, "data.max_text_length=4"))
    train, val = report.splits
    assert report.problems == []
    assert train.boxes_outside + val.boxes_outside == 1
    [shown] = filter(None, (train.boxes_outside_example, val.boxes_outside_example))
    assert "instances.json: image" in shown and "pixels" in shown
    assert 0 < train.too_long < train.texts and len(train.too_long_example.split()) > 2
    assert train.longest > 4


def test_problems_that_differ_in_values_only_are_of_one_kind():
    problems = ["a.json: row 1 is '2'", "a.json: row 30 is 'x y'", "b.json: row 1 is '2'", "c: [1, 2] is no box"]
    assert [len(kind) for kind in DataReport([], [], problems, True).alike()] == [2, 1, 1]


def test_photos_of_other_splits_and_data_sets_are_found(drawn):
    config = as_photos(settings("refcoco", drawn), train_split="val")
    [overlap] = check_data(as_photos(settings("refcoco", drawn), eval_splits=["val"])).overlaps or [None]
    assert overlap is None
    other = as_photos(settings("vqa", drawn), train_split="val")
    report = check_data(
        as_photos(settings("refcoco", drawn)), others=[("other.yaml", other)], detector_photos={PhotoId("coco", "1")}
    )
    [overlap] = [one for one in report.overlaps if "other.yaml" in one.elsewhere]
    assert (overlap.split, overlap.number, overlap.of) == ("val", 6, 6)
    assert overlap.elsewhere == "the training split val of other.yaml"
    assert len(overlap.examples) == 3 and config.data.train_split == "val"


def test_training_images_of_the_detector_are_found(drawn):
    config = as_photos(settings("refcoco", drawn))
    images = json.loads((drawn / "refcoco+" / "instances.json").read_text())["images"]
    photos = {PhotoId("coco", str(row["id"])) for row in images}
    [overlap] = check_data(config, detector_photos=photos).overlaps
    assert (overlap.number, overlap.elsewhere) == (6, "the training images of the detector")


def test_drawn_scenes_are_the_same_only_in_the_same_folder(drawn, data):
    others = [("a", settings("vqa", drawn)), ("b", settings("vqa", data))]
    report = check_data(settings("refcoco", drawn), others=others)
    assert report.overlaps == []
    swapped = settings("vqa", drawn, "data.train_split=val")
    [overlap] = check_data(settings("refcoco", drawn), others=[("a", swapped)]).overlaps
    assert overlap.number == 6


def test_some_images_only(drawn):
    report = check_data(settings("refcoco", drawn), max_images=3)
    assert [facts.images for facts in report.splits] == [3, 3]
    assert report.splits[0].looked_at == 0.25 and report.splits[0].texts >= 12


def test_scenes_that_are_not_drawn_are_refused(tmp_path):
    with pytest.raises(ValueError, match="are not drawn yet"):
        check_data(settings("refcoco", tmp_path / "nothing"))


@pytest.fixture
def opened(monkeypatch) -> Counter[Path]:
    """How often each file of annotations is opened."""
    times: Counter[Path] = Counter()
    open_file = Path.open

    def count(self, *words, **options):
        times[self] += self.suffix in (".json", ".p", ".jsonl", ".txt", ".xml")
        return open_file(self, *words, **options)

    monkeypatch.setattr(Path, "open", count)
    read_bytes, read_text = Path.read_bytes, Path.read_text
    monkeypatch.setattr(Path, "read_bytes", lambda self: times.update([self]) or _with(open_file, read_bytes, self))
    monkeypatch.setattr(
        Path, "read_text", lambda self, **options: times.update([self]) or _with(open_file, read_text, self, **options)
    )
    return times


def _with(open_file: Callable, read: Callable, path: Path, **options) -> object:
    """Read without counting the opening, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", open_file)
        return read(path, **options)


@pytest.mark.parametrize("name", TINY)
def test_each_file_is_read_once(name, drawn, opened):
    """By a check, whichever splits and boxes need it; files of one image are read for that image."""
    config = settings(name, drawn, "data.eval_splits=[val, train]" if name != "gqa" else "seed=1")
    check_data(config)
    assert sum(opened.values()), "files are read"
    by_entry = ("questions", "eval")  # files of any size: their entries are found once, and read one by one later
    often = {path: times for path, times in opened.items() if times > 1 + (path.parent.name in by_entry)}
    assert not often


def test_a_run_reads_refcoco_once_before_it_begins(drawn, opened, tmp_path):
    config = settings("refcoco", drawn, f"output={tmp_path / 'run'}", "eval.boxes=[gt, detections, online]")
    known = look_ahead(config, 1)
    assert len(known.datasets) == 4
    read = {path.name: times for path, times in opened.items() if path.parent.name == "refcoco+"}
    assert read == {"instances.json": 1, "refs(unc).p": 1}
    first, *others = known.datasets.values()
    assert all(one.instances is first.instances for one in others)


@pytest.mark.parametrize(
    ("name", "boxes", "folders"),
    [
        ("flickr30k", "gt, online", ("flickr30k", "Sentences", "Annotations")),
        ("pretraining", "gt, online", ("captions",)),
        ("visual_genome", "detections, online", ("visual_genome",)),
    ],
)
def test_a_run_reads_the_files_of_a_split_once(name, boxes, folders, drawn, opened, tmp_path):
    """For all box sources, and for the vocabulary."""
    config = settings(
        name, drawn, f"output={tmp_path / 'run'}", f"eval.boxes=[{boxes}]", "data.eval_splits=[val, train]"
    )
    known = look_ahead(config, 1)
    assert len(known.datasets) == 5 and list(training_texts(config, known.shared))
    read = {path: times for path, times in opened.items() if path.parent.name in folders and times}
    assert len(read) >= 2 and set(read.values()) == {1}, read


def test_what_only_another_run_reads_is_freed(drawn, monkeypatch):
    kept = []
    read = CocoCaptions.__init__

    def reads(self, *args, **options) -> None:
        read(self, *args, **options)
        kept.append(weakref.ref(self))

    monkeypatch.setattr(CocoCaptions, "__init__", reads)
    check = _Check(settings("refcoco", drawn), PhotoIds(), None, 1)
    check.run([("other.yaml", settings("pretraining", drawn))], None)
    assert kept and all(one() is None for one in kept)


def test_region_graphs_are_checked_where_phrases_are_asked_for(data):
    sizes = check_data(settings("visual_genome", data))
    assert sizes.problems == [] and [facts.images for facts in sizes.splits] == [12, 6]

    def change(content: list) -> None:
        regions = [region for graph in content for region in graph["regions"] if region["synsets"]]
        regions[0]["objects"][0].pop("w")
        regions[1]["phrase"] += " here"
        regions[2].pop("synsets")

    change_json(data / "visual_genome" / "region_graphs_train.json", change)
    report = check_data(settings("visual_genome", data))
    has_all(
        report, "has no 'w'", "1 of 85 regions, region 2 the first of them, have other descriptions", "has no 'synsets'"
    )
    assert len(report.problems) == 3
    assert check_data(settings("visual_genome", data, "phrases.weight=0")).problems == []


@pytest.mark.parametrize(("name", "file"), [("lxmert_sentences", "val"), ("lxmert_questions", "val_vqa")])
def test_photos_of_visual_genome_are_found_in_files_of_lxmert(name, file, data):
    path = data / "lxmert" / f"{file}.json"
    first = json.loads(path.read_text())[0]["img_id"]

    def change(rows: list[dict]) -> None:
        for row in rows:
            row["img_id"] = "2375429" if row["img_id"] == first else row["img_id"]

    change_json(path, change)
    config = as_photos(settings(name, data, "data.config.leave_out_unseen=false"))
    detector_photos = {PhotoId("vg", "2375429"), PhotoId("vg", "5")}
    [overlap] = check_data(config, detector_photos=detector_photos).overlaps
    assert (overlap.split, overlap.number, overlap.examples) == ("val", 1, ("2375429",))
    assert overlap.elsewhere == "the training images of the detector"
