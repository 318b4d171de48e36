"""`e2e-vl ask`: questions about images, on tiny trained runs of every task."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

import e2e_vl
from e2e_vl.cli import main as tool
from e2e_vl.config_files import save_config
from e2e_vl.data.batching import Request, collate
from e2e_vl.run.build import build_examples
from e2e_vl.run.checkpoint import load_model
from e2e_vl.tasks.refcoco import ReferringTask
from tests.cli.calls import ask, corners, data_root, first_image, is_picture, refused, tagged
from tests.run.runs import predictions_of
from tests.same import assert_same
from tests.weights.starts import replaced

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture
def answered(tmp_path, capsys) -> Callable[..., tuple[dict, list[str]]]:
    """`answered(run, image, text, ...)`: the content of answer.json and the printed lines of one call."""

    def make(run: Path, image: Path | tuple[Path, ...], text: str, *more: object) -> tuple[dict, list[str]]:
        capsys.readouterr()
        assert tool.main(ask(run, image, text, *more, "--output", tmp_path / "out")) == 0
        assert is_picture(tmp_path / "out" / "regions.png") and is_picture(tmp_path / "out" / "answer.png")
        return json.loads((tmp_path / "out" / "answer.json").read_text()), capsys.readouterr().out.splitlines()

    return make


def test_a_phrase_among_given_boxes(trained_run, tmp_path, answered):
    """On the command line or in a file; the answer is the one of the Python API."""
    record = predictions_of(trained_run.path)[0]
    given = [[2.0, 3.0, 40.0, 50.0], [30.0, 20.0, 70.0, 61.0]]
    (tmp_path / "list.json").write_text(json.dumps(given))
    expected = e2e_vl.load(trained_run.path).ask(record["file_name"], record["text"], boxes=given)
    for words in (["2,3,40,50", "30,20,70,61"], [tmp_path / "list.json"]):
        answer, printed = answered(trained_run.path, record["file_name"], record["text"], "--boxes", *words)
        np.testing.assert_allclose(answer["regions"], given, atol=1e-3)
        assert answer["box"] == pytest.approx(expected.box, abs=1e-3) and answer["box"] in answer["candidate_boxes"]
        assert answer["score"] == pytest.approx(expected.score) and answer["text"] == record["text"]
        assert expected.text in printed[0]


@pytest.mark.parametrize(("task", "file"), [("vqa", "val"), ("gqa", "val_all")])
def test_a_question_gets_the_answer_of_the_evaluation(vqa_run, run_of, answered, task, file):
    run = vqa_run if task == "vqa" else run_of("gqa", "lxmert")
    record = predictions_of(run, f"{file}_gt")[0]
    boxes = corners(run, record["file_name"])
    answer, printed = answered(run, record["file_name"], record["text"], "--boxes", *boxes)
    assert dict(answer["top_answers"]) == pytest.approx(dict(record["top_answers"]), abs=1e-3)
    mark = " (unsure)" if answer["is_unsure"] else ""
    assert printed[0] == f"{answer['score']:.3f}  {answer['answer']}{mark}"
    assert len(answer["attention"]) == len(answer["regions"]) == len(boxes)
    assert 0 < sum(answer["attention"]) < 1 + 1e-5


@pytest.mark.parametrize("kind", ["answer", "rationale"])
def test_choices_get_the_probabilities_of_the_evaluation(vcr_runs, answered, kind):
    run = vcr_runs[kind == "rationale"]
    root = data_root(run) / "vcr"
    question = json.loads((root / "val.jsonl").read_text().splitlines()[0])
    more = ["--boxes", root / "vcr1images" / question["metadata_fn"]]
    more += ["--choices", *(tagged(choice) for choice in question[f"{kind}_choices"])]
    if kind == "rationale":
        more += ["--answer", tagged(question["answer_choices"][question["answer_label"]])]
    answer, printed = answered(run, root / "vcr1images" / question["img_fn"], tagged(question["question"]), *more)
    np.testing.assert_allclose(answer["probabilities"], predictions_of(run)[0]["probabilities"], atol=1e-3)
    assert printed[0].split()[0] == f"{max(answer['probabilities']):.3f}"
    assert len(answer["attention"]) == len(question["objects"]) == len(answer["named_boxes"])


def test_masked_words_get_what_the_model_says_there(pretraining_run, answered):
    words = ["task.config.objectives.masked_words.probability=0", "task.config.region_probability=0"]
    config, model, tokenizer = load_model(pretraining_run, overrides=words)
    example = build_examples(config, model, tokenizer, "val", boxes="gt")[Request(0, (0,))]
    [text] = example.texts
    words = text.record["text"].split()
    text.encoding.input_ids[2], text.targets.parts["masked_words"].labels[2] = tokenizer.mask_token_id, 0
    with torch.no_grad():
        [shares] = model(collate([example])).task.parts["masked_words"].softmax(dim=1)

    image, asked = text.record["file_name"], " ".join([words[0], "[MASK]", *words[2:]])
    answer, printed = answered(pretraining_run, image, asked, "--boxes", *corners(pretraining_run, image))
    [found] = answer["masks"]
    assert len(found) == 5 and "masked_regions" not in answer
    ids = tokenizer.convert_tokens_to_ids([word for word, _ in found])
    assert ids == shares.topk(5).indices.tolist()
    assert [share for _, share in found] == pytest.approx(shares[ids].tolist(), abs=1e-4)
    assert printed[0] == answer["filled"] == asked.replace("[MASK]", found[0][0].removeprefix("##"))
    assert len(answer["attention"]) == len(answer["regions"])


def test_a_masked_region_is_named_without_its_pixels(pretraining_run, tmp_path, answered):
    image = first_image(pretraining_run)
    boxes = corners(pretraining_run, image)
    x1, y1, x2, y2 = (int(float(value)) for value in boxes[0].split(","))
    pixels = np.array(Image.open(image).convert("RGB"))
    other = pixels.copy()
    inside = other[y1 + 6 : y2 - 6, x1 + 6 : x2 - 6]  # resizing mixes neighbours
    inside[:] = np.random.default_rng(0).integers(0, 255, inside.shape)
    answers = []
    for name, content in (("first", pixels), ("second", other)):
        Image.fromarray(content).save(tmp_path / f"{name}.png")
        more = ["--boxes", *boxes, "--mask", boxes[0]]
        answer, _ = answered(pretraining_run, tmp_path / f"{name}.png", "a [MASK] circle", *more)
        assert len(answer["regions"]) == len(boxes)  # the masked one is not there twice
        np.testing.assert_allclose(answer["regions"][0], answer["masked_regions"][0]["box"], atol=1e-3)
        np.testing.assert_allclose(answer["regions"][0], [float(value) for value in boxes[0].split(",")], atol=0.1)
        answers.append(answer)
    [[first], [second]] = [answer.pop("masked_regions") for answer in answers]
    assert first.pop("seen") != second.pop("seen") and len(second["classes"]) == 5
    assert_same(first, second)
    assert_same(answers[0]["masks"], answers[1]["masks"])


def test_a_masked_region_without_a_masked_word_looks_at_the_others(pretraining_run, answered):
    image = first_image(pretraining_run)
    answer, _ = answered(pretraining_run, image, "a red circle", "--mask", *corners(pretraining_run, image)[:2])
    assert "masks" not in answer and len(answer["masked_regions"]) == 2
    assert len(answer["attention"]) == len(answer["regions"]) and 0 < sum(answer["attention"]) < 1


def test_a_sentence_about_two_photos(run_of, tmp_path, answered):
    run = run_of("nlvr2", "visual_bert")
    record = predictions_of(run)[0]
    answer, printed = answered(run, tuple(map(Path, record["file_names"])), record["text"])
    assert answer["prediction"] in ("True", "False") and 0.5 <= answer["score"] <= 1
    assert printed[0].removesuffix(" (unsure)") == f"{answer['score']:.3f}  {answer['prediction']}"
    assert is_picture(tmp_path / "out" / "answer_2.png") and is_picture(tmp_path / "out" / "regions_2.png")


def test_the_phrases_of_a_sentence_get_the_boxes_of_the_evaluation(run_of, answered):
    run = run_of("flickr30k")
    record = predictions_of(run)[0]
    image, text = record["file_name"], record["text"]
    for phrase in dict.fromkeys(record["phrases"]):
        text = text.replace(phrase, f"[{phrase}]", 1)
    answer, _ = answered(run, image, text, "--boxes", *corners(run, image))
    assert answer["phrases"] == list(dict.fromkeys(record["phrases"]))
    rows = [record["phrases"].index(phrase) for phrase in answer["phrases"]]
    np.testing.assert_allclose(answer["boxes"], [record["boxes"][row] for row in rows], atol=0.5)
    np.testing.assert_allclose(answer["scores"], [record["scores"][row] for row in rows], atol=1e-3)


def test_a_task_without_answer_lines_prints_no_empty_line(trained_run, monkeypatch, capsys):
    monkeypatch.setattr(ReferringTask, "answer_lines", lambda self, prediction: [])
    capsys.readouterr()
    assert tool.main(ask(trained_run.path, first_image(trained_run.path), "the circle", "--boxes", "5,5,40,50")) == 0
    assert "" not in capsys.readouterr().out.splitlines()


def test_a_file_of_questions_has_paths_and_addresses(trained_run, tmp_path, capsys):
    image, file = first_image(trained_run.path), tmp_path / "questions.json"
    (tmp_path / "a.png").write_bytes(image.read_bytes())
    file.write_text(json.dumps([{"image": name, "text": "star"} for name in ("a.png", str(image), image.as_uri())]))
    assert tool.main(["ask", "--run", str(trained_run.path), "--json", str(file)]) == 0
    scores = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[0].isdigit()]
    assert len(scores) == 3 and len(set(scores)) == 1
    for name, message in (("gs://bucket/a.png", "is a URL"), (".", "is a folder")):
        file.write_text(json.dumps([{"image": name, "text": "star"}]))
        assert message in refused(["ask", "--run", str(trained_run.path), "--json", str(file)], capsys)


def test_bad_images_of_a_folder_do_not_lose_the_other_answers(trained_run, tmp_path, capsys):
    folder, out, content = tmp_path / "photos", tmp_path / "out", first_image(trained_run.path).read_bytes()
    folder.mkdir()
    for name, part in (("a", content), ("b", content[:500]), ("c", b""), ("d", content)):
        (folder / f"{name}.jpg").write_bytes(part)
    assert tool.main(ask(trained_run.path, folder, "the red elephant", "--output", out)) == 2
    printed = capsys.readouterr()
    assert sorted(path.name for path in out.iterdir()) == ["0001", "0004"]
    assert json.loads((out / "0004" / "answer.json").read_text("utf-8"))["image"] == str(folder / "d.jpg")
    assert printed.err.startswith("error: 2 of 4 questions have no answer: ") and printed.err.count("\n") == 1
    assert "b.jpg" in printed.err and "c.jpg" in printed.err and "a.jpg" not in printed.err
    assert printed.out.count(": elephant; the model does not know") == 2 and "Warning" not in printed.err


def test_a_video_is_asked_about_frame_by_frame(trained_run, tmp_path, capsys):
    """At the rate of --fps, in order of time; each answer says which frame it is about."""
    clip = tmp_path / "clip.avi"
    image = cv2.imread(str(first_image(trained_run.path)))
    writer = cv2.VideoWriter(str(clip), cv2.VideoWriter_fourcc(*"MJPG"), 4.0, image.shape[1::-1])
    for _ in range(4):
        writer.write(image)
    writer.release()
    out = tmp_path / "out"
    assert tool.main(ask(trained_run.path, clip, "the star", "--fps", 2, "--output", out)) == 0
    printed = capsys.readouterr().out.splitlines()
    names = [f"{clip} at 0.00 s", f"{clip} at 0.50 s"]
    assert [line for line in printed if line.endswith(": the star")] == [f"{name}: the star" for name in names]
    records = [json.loads((out / number / "answer.json").read_text("utf-8")) for number in ("0001", "0002")]
    assert [record["image"] for record in records] == names
    assert tool.main(ask(trained_run.path, clip, "the star")) == 0  # one frame per second
    assert capsys.readouterr().out.count(" at ") == 0, "one question is not named"
    photo = first_image(trained_run.path)
    assert "--fps is for a video file" in refused(ask(trained_run.path, photo, "the star", "--fps", 2), capsys)


@pytest.mark.parametrize(("setting", "message"), [("blank_text", "the text"), ("blank_image", "the image")])
def test_runs_that_cannot_answer(trained_run, tmp_path, capsys, setting, message):
    shutil.copytree(trained_run.path / "model", tmp_path / "model")
    save_config(replaced(trained_run.config, data={setting: True}), tmp_path / "model" / "config.yaml")
    assert message in refused(ask(tmp_path / "model", first_image(trained_run.path), "x"), capsys)


VCR = ("Why is [0] there?", "--boxes", "person:1,2,30,40")
UNANSWERABLE = [
    ("vcr", VCR[:1], "takes boxes"),
    ("vcr", (*VCR, "--choices", *"abcd", "--answer", "x"), "four choices, and no answer"),
    ("vqa", ("  ",), "The text is empty"),
    ("vqa", ("x", "--choices", "a"), "takes no choices"),
    ("vqa", ("x", "--mask", "1,2,30,40"), "takes no boxes to mask"),
    ("pretraining", ("a", "--mask", "5000,2,6000,40"), "boxes to mask"),
    ("pretraining", ("[MASK] " * 80,), "longer than task.config.max_length"),
]


@pytest.mark.parametrize(("task", "words", "message"), UNANSWERABLE)
def test_what_a_task_cannot_answer(request, capsys, task, words, message):
    run = request.getfixturevalue("vcr_runs")[0] if task == "vcr" else request.getfixturevalue(f"{task}_run")
    assert message in refused(ask(run, first_image(run), *words), capsys)


def test_images_that_do_not_fit(vqa_run, tmp_path, capsys):
    image = first_image(vqa_run)
    assert "about 1 image, and 2 are given" in refused(ask(vqa_run, (image, image), "x"), capsys)
    assert "no.png" in refused(ask(vqa_run, tmp_path / "no.png", "x"), capsys)
