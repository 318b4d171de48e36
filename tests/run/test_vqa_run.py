"""configs/tiny/vqa.yaml from drawing to predictions: the list of answers, saving and loading, controls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from e2e_vl.config import load_config
from e2e_vl.data.batching import Request
from e2e_vl.run.build import build_run, build_tokenizer, make_synthetic_data
from e2e_vl.run.checkpoint import load_model
from e2e_vl.run.evaluate import evaluate_run
from e2e_vl.run.train import train
from tests.official_vqa import vqa_accuracy
from tests.same import assert_same

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    words = [
        f"detector.config={ROOT / 'configs' / 'detector' / 'tiny.yaml'}",
        f"data.root={tmp_path_factory.mktemp('vqa') / 'data'}",
    ]
    make_synthetic_data(load_config(ROOT / "configs" / "tiny" / "vqa.yaml", [*words, "output=unused"]))
    return words


@pytest.fixture
def config_of(words, tmp_path):
    def make(*more: str):
        own = [*words, f"output={tmp_path / 'run'}", *more]
        return load_config(ROOT / "configs" / "tiny" / "vqa.yaml", own)

    return make


def test_a_run_trains_evaluates_and_is_loaded_with_its_answers(config_of, tmp_path):
    metrics = train(config_of("train.max_steps=3", "eval.boxes=[gt,online]"))
    run, moved = tmp_path / "run", tmp_path / "moved"
    assert metrics["val/count_gt_boxes"] == 42
    assert 0 <= metrics["val/accuracy_predicted_boxes"] <= 1
    answers = json.loads((run / "answers.json").read_text())
    assert {"yes", "no"} <= set(answers)

    (run / "answers.json").unlink()
    run.rename(moved)  # a run needs neither its old place nor the data to answer
    _, model, _ = load_model(moved, overrides=["data.root=nowhere"])
    assert model.task.answers == answers and model.task.head.output.out_features == len(answers)

    again, path = evaluate_run(moved, split="val", boxes="gt", output=tmp_path / "p.json")
    assert again["val/accuracy_gt_boxes"] == metrics["val/accuracy_gt_boxes"]
    records = json.loads(path.read_text())
    assert_same(records, json.loads((moved / "predictions_val_gt.json").read_text()))
    assert {record["answer"] for record in records} <= set(answers)
    report = vqa_accuracy(records, records, 12)
    assert report["overall"] == pytest.approx(100 * metrics["val/accuracy_gt_boxes"], abs=1e-9)


def test_a_run_is_continued(config_of):
    settings = "train.max_steps=2", "eval.boxes=[gt]", "train.save_every_epochs=0.5"
    train(config_of(*settings))
    assert train(config_of("train.max_steps=3", *settings[1:]), resume=True)["steps"] == 3


def test_answers_from_a_text_file(config_of, tmp_path):
    path = tmp_path / "answers.txt"
    path.write_text("<unk>\nyes\nno\nt - shirt\n")
    run = build_run(config_of(f"data.files.answers={path}"))
    assert run.model.task.answers == ["<unk>", "yes", "no", "t  shirt"]  # the official punctuation step
    assert not Path(config_of().output, "answers.json").exists()


def test_too_rare_answers(config_of):
    with pytest.raises(ValueError, match="no answer belongs to at least 500 of the"):
        build_run(config_of("task.config.min_answer_count=500"))


def test_rows_start_from_words(config_of):
    run = build_run(config_of())
    table = run.model.encoder.get_input_embeddings().weight
    row = run.model.task.answers.index("yes")
    ids = run.tokenizer.convert_tokens_to_ids(["yes"])
    torch.testing.assert_close(run.model.task.head.output.weight[row], table[ids[0]])


def test_the_vocabulary_has_questions_and_answers(config_of):
    tokenizer = build_tokenizer(config_of())
    assert tokenizer.unk_token not in tokenizer.tokenize("What color is the yellow star? yes no")
    assert tokenizer.tokenize("yes no") == ["yes", "no"]


@pytest.mark.parametrize("control", ["data.blank_image=true", "data.blank_text=true"])
@pytest.mark.parametrize("boxes", ["gt", "online"])
def test_controls_train(config_of, control, boxes):
    run = build_run(config_of(control, f"data.boxes.train={boxes}"))
    examples = run.train_data
    batch = run.collate([examples[Request(group, tuple(examples.groups[group][:3]))] for group in range(2)])
    output = run.model(batch)
    output.losses["vqa"].mean.backward()
    assert torch.isfinite(output.losses["vqa"].mean)
    if control == "data.blank_image=true":  # two images of one size look the same
        assert torch.equal(batch.images.pixels[0], batch.images.pixels[1])
        if boxes == "gt":
            assert [len(rows) for rows in batch.boxes] == [0, 0]
    else:
        assert len(batch.texts.input_ids.unique(dim=0)) == 1
