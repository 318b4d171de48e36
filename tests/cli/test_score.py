"""`e2e-vl score`: the same numbers for the same predictions in every format, and what is refused or counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.ops import box_iou, generalized_box_iou

from e2e_vl.cli import score
from e2e_vl.metrics.refcoco import ReferringPrediction, referring_metrics
from e2e_vl.metrics.refinement import overlaps_of, refinement_metrics
from e2e_vl.predictions import write_list
from tests.conftest import ROOT
from tests.scoring.drawn import draw_flickr30k, draw_grefcoco, draw_predictions, draw_refcoco

DATA = ["--data", "refcoco", "--split", "val", "--resamples", "0"]


def run(folder: Path, content, *options: str, name: str = "predictions.json") -> dict:
    """Score what is written as JSON (lines); return the numbers."""
    path = folder / name
    if name.endswith(".jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
    elif content is not None:
        path.write_text(json.dumps(content))
    words = [str(path), *DATA, "--root", str(folder), "--json", str(folder / "numbers.json"), *options]
    assert score.main(words) == 0
    return json.loads((folder / "numbers.json").read_text("utf-8"))


def value(numbers: dict, name: str) -> float:
    return numbers["measures"][name]["value"]


def xywh(box: list[float]) -> list[float]:
    return [box[0], box[1], box[2] - box[0], box[3] - box[1]]


def best(prediction: dict) -> list[float]:
    return prediction["boxes"][int(np.argmax(prediction["scores"]))]


def run_predictions(rows: list[dict], predictions: list[dict]) -> list[ReferringPrediction]:
    """The same predictions as those of a run."""
    records = []
    for row, prediction in zip(rows, predictions, strict=True):
        truth = {"gt_box": row["box"], "image_size": row["size"], "sent_id": row["sent_id"]}
        answer = {"box": best(prediction), "score": 0.5, "candidate_boxes": prediction["boxes"]}
        records.append(ReferringPrediction.from_record(truth, **answer))
    return records


@pytest.mark.parametrize("seed", range(4))
def test_the_numbers_are_those_of_the_tested_metrics_and_of_torchvision(seed, tmp_path):
    rows = draw_refcoco(tmp_path, seed)
    predictions = draw_predictions(rows, seed)
    results = []
    for row, prediction in zip(rows, predictions, strict=True):
        for box, number in zip(prediction["boxes"], prediction["scores"], strict=True):
            results.append({"image_id": row["sent_id"], "bbox": box, "score": number, "category_id": 1})
    records = run_predictions(rows, predictions)
    truths = torch.tensor([row["box"] for row in rows], dtype=torch.float64)
    boxes = torch.tensor([best(prediction) for prediction in predictions], dtype=torch.float64)
    ious = box_iou(boxes, truths).diagonal()
    for convention in ("mattnet", "vlbert", "strict", "continuous", "generalized"):
        numbers = run(tmp_path, results, "--iou", convention, "--boxes", "xyxy")
        expected = referring_metrics(records, convention)
        assert value(numbers, "accuracy at 0.5") == expected["accuracy"], convention
        assert value(numbers, "ceiling") == expected["ceiling"], convention
        overlaps = []
        for row, prediction in zip(rows, predictions, strict=True):
            overlaps.append(overlaps_of(best(prediction), None, [], [row["box"]], convention, row["size"]))
        refined = refinement_metrics(overlaps, convention)
        for name, metric in (("0.75", "accuracy_75"), ("0.9", "accuracy_90")):
            assert value(numbers, f"accuracy at {name}") == refined[metric], convention
        if convention != "generalized":  # it may be below 0
            assert value(numbers, "mean IoU") == pytest.approx(refined["mean_iou"], abs=1e-12), convention
        if convention == "continuous":
            assert value(numbers, "mean IoU") == pytest.approx(float(ious.mean()), abs=1e-12)
            for threshold in (0.6, 0.7, 0.8, 0.9):
                share = float((ious >= threshold).double().mean())
                assert value(numbers, f"accuracy at {threshold}") == share
        if convention == "generalized":
            share = (generalized_box_iou(boxes, truths).diagonal() >= 0.5 - 1e-9).double().mean()
            assert value(numbers, "accuracy at 0.5") == float(share)


def in_formats(rows: list[dict], predictions: list[dict]) -> dict[str, tuple]:
    """Format -> content, further options, and name of the file."""
    pairs = list(zip(rows, predictions, strict=True))
    boxes = [best(prediction) for prediction in predictions]
    thousandths = []
    for row, box in zip(rows, boxes, strict=True):
        height, width = row["size"]
        thousandths.append((np.array(box) / np.tile([width, height], 2) * 1000).tolist())
    thousandth_texts = [f"It is <|box_start|>({a},{b}),({c},{d})<|box_end|>" for a, b, c, d in thousandths]
    lmms = []
    for row, text in zip(rows, thousandth_texts, strict=True):
        question = {"question_id": str(row["ann_id"]), "answer": row["words"], "bbox": [0, 0, 1, 1]}
        lmms.append({"doc_id": len(lmms), "doc": question, "filtered_resps": [text], "resps": [[text]]})
    ids = list(range(len(rows)))
    mdetr_images = []
    mdetr_annotations = []
    questions = []
    for number, row in enumerate(rows):
        mdetr_images.append({"id": number, "file_name": row["file_name"], "caption": row["words"]})
        annotation = {"image_id": number, "original_id": row["ann_id"], "bbox": xywh(row["box"]), "id": number}
        mdetr_annotations.append(annotation)
        questions.append({"image": f"train2014/{row['file_name']}", "sent": row["words"], "bbox": row["box"]})
    asked = ("--questions", "questions.json")
    instances = [{"pred_instances": {"bboxes": p["boxes"], "scores": p["scores"]}} for p in predictions]
    return {
        "submission": ([{"sent_id": r["sent_id"], "box": best(p)} for r, p in pairs], (), "boxes.json", None),
        "mdetr": (
            {str(number): prediction for number, prediction in enumerate(predictions)},
            asked,
            "mdetr.json",
            {"images": mdetr_images, "annotations": mdetr_annotations},
        ),
        "mmdetection": (
            [{"img_id": number, **row} for number, row in zip(ids, instances, strict=True)],
            asked,
            "mmdetection.json",
            {"images": mdetr_images, "annotations": mdetr_annotations},
        ),
        "texts in pixels": (
            [{"answer": str(box), "gt_bbox": r["box"]} for r, box in zip(rows, boxes, strict=True)],
            asked,
            "qwen.jsonl",
            questions,
        ),
        "lmms-eval": (lmms, ("--coordinates", "0-1000"), "lmms.jsonl", None),
    }


@pytest.mark.parametrize("seed", range(3))
def test_every_format_gives_the_same_numbers(seed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = draw_refcoco(tmp_path, seed)
    predictions = draw_predictions(rows, seed)
    write_list(tmp_path / "run.json", run_predictions(rows, predictions))
    expected = run(tmp_path, None, name="run.json")
    assert expected["format"] == "a run of this package" and expected["official_split"] is None
    for name, (content, options, file, questions) in in_formats(rows, predictions).items():
        (tmp_path / "questions.json").write_text(json.dumps(questions))
        numbers = run(tmp_path, content, *options, name=file)
        for threshold in (0.5, 0.6, 0.7, 0.8, 0.9):
            measure = f"accuracy at {threshold}"
            assert value(numbers, measure) == value(expected, measure), (name, measure)
        assert value(numbers, "mean IoU") == pytest.approx(value(expected, "mean IoU"), abs=1e-9), name
        if "ceiling" in numbers["measures"]:
            assert value(numbers, "ceiling") == value(expected, "ceiling"), name


def fails(folder: Path, content, *options: str, capsys) -> str:
    path = folder / "predictions.json"
    path.write_text(json.dumps(content))
    capsys.readouterr()
    assert score.main([str(path), *DATA, "--root", str(folder), *options]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def test_missing_repeated_and_unknown_records_are_errors_or_counted(tmp_path, capsys):
    rows = draw_refcoco(tmp_path, 0)
    right = [{"sent_id": row["sent_id"], "box": row["box"]} for row in rows]
    assert "3 of 48 texts" in fails(tmp_path, right[3:], capsys=capsys)
    wrong = run(tmp_path, right[3:], "--missing", "wrong")
    assert value(wrong, "accuracy at 0.5") == 45 / 48 and wrong["counts"]["missing"] == 3
    assert value(run(tmp_path, right[3:], "--missing", "skip"), "accuracy at 0.5") == 1
    assert run(tmp_path, [*right, *right[:2]])["counts"]["repeated"] == 2, "the padding of a distributed sampler"
    other = {"sent_id": rows[0]["sent_id"], "box": [0, 0, 5, 5]}
    assert "two different predictions" in fails(tmp_path, [*right, other], capsys=capsys)
    stray = {"sent_id": 1, "box": [0, 0, 5, 5]}
    assert "no text of the split val" in fails(tmp_path, [*right, stray], capsys=capsys)
    assert run(tmp_path, [*right, stray], "--skip-unknown")["counts"]["unknown"] == 1


def test_a_split_of_another_size_is_named(tmp_path, capsys):
    row = draw_refcoco(tmp_path, 0)[0]
    same = [{"sent_id": row["sent_id"], "box": row["box"]}] * 8811
    assert "lmms-lab/RefCOCO has them" in fails(tmp_path, same, capsys=capsys)


def test_what_a_file_does_not_tell_must_be_stated(tmp_path, capsys):
    rows = draw_refcoco(tmp_path, 0)
    normalised = []
    thousandths = []
    for row in rows:
        sides = np.tile(row["size"][::-1], 2)
        normalised.append({"sent_id": row["sent_id"], "box": (np.array(row["box"]) / sides).tolist()})
        text = str((np.array(row["box"]) / sides * 990).round().tolist())
        thousandths.append({"sent_id": row["sent_id"], "response": text})
    message = fails(tmp_path, normalised, capsys=capsys)
    assert "not in pixels" in message and "all lie between 0 and 1" in message
    assert value(run(tmp_path, normalised, "--coordinates", "0-1"), "mean IoU") == pytest.approx(1)
    assert "0-999 or 0-1000" in fails(tmp_path, thousandths, capsys=capsys)
    both = [{**row, "answer": "the truth"} for row in thousandths]
    assert "--answer" in fails(tmp_path, both, capsys=capsys)
    assert run(tmp_path, both, "--answer", "response", "--coordinates", "0-999")["format"] == "texts under 'response'"
    layout = [{"sent_id": row["sent_id"], "box": xywh(row["box"])} for row in rows]
    assert "--boxes" in fails(tmp_path, layout, capsys=capsys)


def test_answers_without_a_box_are_wrong_and_counted(tmp_path):
    rows = draw_refcoco(tmp_path, 0)
    answers = [{"sent_id": row["sent_id"], "response": str(row["box"])} for row in rows]
    answers[0]["response"] = "I see no [1] such object."
    numbers = run(tmp_path, answers)
    assert numbers["coordinates"] == "pixels" and numbers["counts"]["without_box"] == 1
    assert value(numbers, "accuracy at 0.5") == 47 / 48


def official_grec(rows: list[dict], predictions: list[dict], min_score: float) -> tuple[float, float, float]:
    """Pr@(F1=1), N-acc and T-acc as GREC defines them, with torchvision's generalised IoU."""
    right = []
    empty = []
    full = []
    for row, prediction in zip(rows, predictions, strict=True):
        boxes = [b for b, s in zip(prediction["boxes"], prediction["scores"], strict=True) if s >= min_score]
        if not row["boxes"]:
            right.append(not boxes)
            empty.append(not boxes)
            continue
        full.append(bool(boxes))
        matched = 0
        if boxes:
            overlaps = generalized_box_iou(torch.tensor(boxes).double(), torch.tensor(row["boxes"]).double())
            while overlaps.numel() and overlaps.max() >= 0.5:
                best_row, best_column = divmod(int(overlaps.argmax()), overlaps.shape[1])
                overlaps = overlaps[torch.arange(len(overlaps)) != best_row]
                overlaps = overlaps[:, torch.arange(overlaps.shape[1]) != best_column]
                matched += 1
        right.append(2 * matched / (len(boxes) + len(row["boxes"])) >= 1)
    return float(np.mean(right)), float(np.mean(empty)), float(np.mean(full))


@pytest.mark.parametrize("seed", range(5))
def test_grefcoco_is_scored_as_its_official_evaluator_does(seed, tmp_path):
    rows = draw_grefcoco(tmp_path, seed)
    generator = np.random.default_rng(seed)
    content = {}
    predictions = []
    for row in rows:
        boxes = [(np.array(box) + generator.normal(0, 4, 4)).tolist() for box in row["boxes"]] or [row["box"]]
        prediction = {"boxes": boxes, "scores": generator.uniform(0.6, 1, len(boxes)).tolist()}
        content[row["sent_id"]] = prediction
        predictions.append(prediction)
    numbers = run(tmp_path, content, "--data", "grefcoco")
    names = ("Pr@(F1=1)", "N-acc", "T-acc")
    assert tuple(value(numbers, name) for name in names) == official_grec(rows, predictions, 0.7)
    numbers = run(tmp_path, content, "--data", "grefcoco", "--min-score", "0.9")
    assert tuple(value(numbers, name) for name in names) == official_grec(rows, predictions, 0.9)


def test_phrases_of_captions_with_any_box_and_with_merged_boxes(tmp_path, capsys):
    draw_flickr30k(tmp_path)
    men = [[10, 10, 310, 110], [210, 10, 310, 110]]
    record = {"image_id": 77, "sentence_id": 0, "boxes": [men, [[200, 200, 210, 210], [10, 10, 60, 110]]]}
    options = ("--data", "flickr30k")
    numbers = run(tmp_path, [record], *options)
    assert {name: value(numbers, name) for name in numbers["measures"]} == {
        "R@1, any box": 0.0,
        "R@5, any box": 1.0,
        "R@10, any box": 1.0,
        "upper bound, any box": 1.0,
        "R@1, merged boxes": 0.5,
        "R@5, merged boxes": 1.0,
        "R@10, merged boxes": 1.0,
        "upper bound, merged boxes": 1.0,
    }
    assert numbers["counts"]["phrases"] == 2
    phrases = [{"id": "1", "box": men[1]}, {"id": "2", "box": None}]
    single = run(tmp_path, [{"image": "77", "sentence": 0, "phrases": phrases}], *options)
    assert set(single["measures"]) == {"R@1, any box", "R@1, merged boxes"} and value(single, "R@1, any box") == 0.5
    message = fails(tmp_path, [record], *options, "--iou", "vlbert", capsys=capsys)
    assert "--iou is for referring expressions" in message
    record["boxes"].pop()
    assert "1 phrases, but 2" in fails(tmp_path, [record], *options, capsys=capsys)


def test_texts_about_phrases_by_caption_and_by_phrase(tmp_path, capsys):
    draw_flickr30k(tmp_path)
    options = ("--data", "flickr30k")
    caption = {"image_id": "77.jpg", "sentence_id": 0}
    texts = ["They are at [20, 33, 620, 366].", "Red: (20, 33), (120, 366)"]  # thousandths of 500 x 300 pixels
    by_caption = [{**caption, "answers": texts}]
    assert "may be in 0-999 or 0-1000" in fails(tmp_path, by_caption, *options, capsys=capsys)
    numbers = run(tmp_path, by_caption, *options, "--coordinates", "0-1000")
    assert (value(numbers, "R@1, any box"), value(numbers, "R@1, merged boxes")) == (0.5, 1)
    by_phrase = [
        {**caption, "phrase": "red", "response": texts[1]},
        {**caption, "phrase": "A day", "response": "no box"},
        {**caption, "phrase": "two  men", "response": texts[0]},
    ]
    same = run(tmp_path, by_phrase, *options, "--coordinates", "0-1000")
    assert same["measures"] == numbers["measures"] and same["counts"]["other_phrases"] == 1
    assert same["format"] == "texts under 'response' by phrase"
    by_phrase[0]["response"] = None
    wrong = run(tmp_path, by_phrase, *options, "--coordinates", "0-1000")
    assert value(wrong, "R@1, merged boxes") == 0.5 and wrong["counts"]["without_box"] == 1
    assert "too many records about 'red'" in fails(tmp_path, [*by_phrase, by_phrase[0]], *options, capsys=capsys)
    assert "no record about its phrase 'two men'" in fails(tmp_path, by_phrase[:2], *options, capsys=capsys)


def test_a_missing_file_is_named_before_the_data(tmp_path, capsys):
    assert score.main([str(tmp_path / "nope.json"), *DATA, "--root", str(tmp_path)]) == 2
    assert "nope.json: no such file" in capsys.readouterr().err
    (tmp_path / "boxes.json").write_text("[]")
    assert score.main([str(tmp_path / "boxes.json"), *DATA, "--root", str(tmp_path)]) == 2
    assert "--root is the folder of the data set, which `e2e-vl download" in capsys.readouterr().err


def test_images_of_a_pretraining_are_counted_and_left_out(tmp_path, capsys):
    rows = draw_refcoco(tmp_path, 0)
    answers = [{"sent_id": row["sent_id"], "box": row["box"]} for row in rows]
    for answer in answers[:4]:
        answer["box"] = [0, 0, 1, 1]
    (tmp_path / "list.txt").write_text(f"{rows[0]['file_name']}\nCOCO_val2014_000000999999.jpg\n")
    numbers = run(tmp_path, answers, "--pretraining-images", str(tmp_path / "list.txt"))
    leakage = numbers["leakage"]
    assert (leakage["seen"], leakage["images"], leakage["unseen_measures"]["accuracy at 0.5"]) == (1, 12, 1)
    assert value(numbers, "accuracy at 0.5") == 44 / 48
    assert "leakage: 1 of 12 images" in capsys.readouterr().out
    (tmp_path / "list.txt").write_text("12\n")
    assert "--pretraining-ids" in fails(
        tmp_path, answers, "--pretraining-images", str(tmp_path / "list.txt"), capsys=capsys
    )


def test_intervals_and_all_counts_are_in_the_json(tmp_path):
    rows = draw_refcoco(tmp_path, 0)
    numbers = run(tmp_path, [{"sent_id": r["sent_id"], "box": r["box"]} for r in rows], "--resamples", "50")
    assert numbers["measures"]["accuracy at 0.5"] == {"value": 1, "interval": [1, 1], "count": 48}
    assert numbers["iou"] == "continuous" and numbers["resampled"] == "images"
    assert numbers["counts"] == {
        "expressions": 48,
        "refs": 24,
        "images": 12,
        "records": 48,
        "missing": 0,
        "repeated": 0,
        "unknown": 0,
        "without_box": 0,
        "inverted": 0,
        "outside": 0,
    }


def test_scoring_does_not_import_torch(tmp_path):
    rows = draw_refcoco(tmp_path, 0)
    (tmp_path / "boxes.json").write_text(json.dumps([{"sent_id": r["sent_id"], "box": r["box"]} for r in rows]))
    words = ["score", str(tmp_path / "boxes.json"), *DATA, "--root", str(tmp_path)]
    program = f"import sys; from e2e_vl.cli.main import main; main({words}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True)
