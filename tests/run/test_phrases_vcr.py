"""Phrases beside VCR: of captions that are joined with its questions, and the names in its own texts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from e2e_vl.config import RunConfig, load_config
from e2e_vl.data.batching import Request
from e2e_vl.io import read_log
from e2e_vl.run.build import build_run
from e2e_vl.run.train import train
from tests.run.test_phrases_joined import CAPTIONS
from tests.weights.starts import replaced

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("on_cpu")


def vcr_alone(tmp_path: Path, *words: str) -> RunConfig:
    return load_config(
        ROOT / "configs" / "tiny" / "vcr.yaml",
        [
            f"detector.config={ROOT / 'configs' / 'detector' / 'tiny.yaml'}",
            *(f"data.root={tmp_path / 'data'}", f"output={tmp_path / 'run'}"),
            "data.synthetic.formats=[refcoco+, detections, flickr30k, vcr]",
            *("data.synthetic.scenes={train: 4, val: 3}", "data.texts_per_image=2", "data.boxes.train=gt"),
            *("phrases={weight: 1.0, layer: 1, size: 8}", "train.max_steps=3", "train.warmup_steps=0"),
            *("eval.boxes=[gt]", "eval.every_epochs=0", "eval.report_pictures=2", *words),
        ],
    )


def vcr_joined(tmp_path: Path, *words: str, instances: bool = False) -> RunConfig:
    """VCR's questions and the captions of Flickr30K's format, whose boxes have no classes without an instances file."""
    config = vcr_alone(tmp_path, *words)
    own = {"name": "vcr", "splits": {"train": "train", "val": "val"}, "files": config.data.files}
    files = {key: file for key, file in CAPTIONS["files"].items() if instances or key != "instances"}
    return replaced(
        config,
        data={
            "name": "joined",
            "files": {},
            "config": {"parts": {"asked": own | {"config": config.data.config}, "said": CAPTIONS | {"files": files}}},
            "train_split": "train",
            "eval_splits": ["val"],
        },
    )


def check_run(run: Path, metrics: dict[str, float]) -> list[dict]:
    """Both losses were there, and both metrics; the records of the evaluation."""
    log = [line for line in read_log(run / "log.jsonl") if line["kind"] == "train"]
    for loss in ("choice", "region_class", "phrases"):
        assert any(line[loss] > 0 for line in log) and all(0 <= line[loss] < 100 for line in log), loss
    assert 0 <= metrics["val/accuracy_gt_boxes"] <= 1 and 0 <= metrics["val/phrase_accuracy_gt_boxes"] <= 1
    assert (run / "report.html").is_file()
    return json.loads((run / "predictions_val_gt.json").read_text())


def test_captions_beside_questions(tmp_path):
    records = check_run(tmp_path / "run", train(vcr_joined(tmp_path)))
    captions = [record for record in records if record.get("only_phrases")]
    questions = [record for record in records if not record.get("only_phrases")]
    assert captions and questions
    assert all(record["correct"] is None and record["grounded"] for record in captions)
    assert not any({"choice", "probabilities", "annot_id"} & record.keys() for record in captions)
    assert all(record["correct"] in (0, 1) and len(record["probabilities"]) == 4 for record in questions)
    assert not any("correct" in phrase for record in questions for phrase in record["grounded"])


def test_captions_add_nothing_to_the_losses_of_questions(tmp_path):
    """A mixed batch has the losses of its questions, and the phrases' gradients reach the detector's backbone."""
    built = build_run(vcr_joined(tmp_path))
    data, model = built.train_data, built.model.eval()
    number = len(data.dataset.members[0])  # the captions begin behind the questions
    examples = [data[Request(group, tuple(data.groups[group][:1]))] for group in range(len(data.groups))]
    is_question = [example.texts[0].record["text_index"] < number for example in examples]
    mixed = built.collate(examples)
    assert mixed.targets.has_target.tolist() == [known for known in is_question for _ in range(4 if known else 1)]
    classes = [set(one.tolist()) for one in mixed.region_labels.classes]
    assert all((one == {-1}) != known for one, known in zip(classes, is_question, strict=True))
    masks = [bool((one == 1).all()) for one in mixed.roi_masks]
    assert all(mask != known for mask, known in zip(masks, is_question, strict=True)), "drawn shapes are no rectangles"

    output = model(mixed)
    task = model.task(mixed, output.text_regions, output.encoded)
    known = mixed.targets.has_target
    assert task.logits.shape == (sum(is_question), 4)
    assert float(task.losses["choice"].count) in (sum(is_question), 4 * sum(is_question))
    assert float(task.losses["region_class"].count) == float(output.text_regions.attention_mask[known].sum())
    summary = output.encoded.summary.detach().clone().requires_grad_()
    output.encoded.summary = summary
    model.task(mixed, output.text_regions, output.encoded).losses["choice"].total.backward(retain_graph=True)
    assert (summary.grad.abs().amax(dim=1) > 0).tolist() == known.tolist()

    captions = built.collate([one for one, asked in zip(examples, is_question, strict=True) if not asked])
    model.zero_grad()
    alone = model(captions).task_losses
    for name in ("choice", "region_class"):
        assert (alone[name].total.item(), alone[name].count.item()) == (0, 0), "the loss is there on every process"
    assert alone["phrases"].total > 0
    alone["phrases"].total.backward()
    reached = [parameter.grad for parameter in model.detector.parameters() if parameter.grad is not None]
    assert any(gradient.abs().sum() > 0 for gradient in reached)


def test_captions_whose_objects_have_other_classes(tmp_path):
    with pytest.raises(ValueError, match="annotated objects of different classes"):
        build_run(vcr_joined(tmp_path, instances=True))


def test_captions_need_phrases(tmp_path):
    with pytest.raises(ValueError, match=r"has no four choices, so VCR has nothing to learn .* phrases.weight"):
        train(vcr_joined(tmp_path, "phrases.weight=0"))


def test_names_as_phrases(tmp_path):
    words = ("data.config.names_are_phrases=true", "task.config.ground_words=false")
    records = check_run(tmp_path / "run", train(vcr_alone(tmp_path, *words)))
    for record in records:
        text = f"{record['sent']} {record['choices'][record['choice']]}"
        names = [name for name, _ in record["named_boxes"]]
        assert "correct" in record["grounded"][0], "each question names an object"
        for phrase in record["grounded"]:
            assert phrase["text"] in names and phrase["text"] in text


def test_names_that_carry_their_regions_are_no_phrases(tmp_path):
    with pytest.raises(ValueError, match=r"which region a name means, but task\.config\.ground_words adds that region"):
        train(vcr_alone(tmp_path, "data.config.names_are_phrases=true"))


def test_the_phrases_of_a_batch_are_the_named_boxes(tmp_path):
    config = vcr_alone(tmp_path, "data.config.names_are_phrases=true", "task.config.ground_words=false", "data.flip=1")
    data = build_run(config).train_data
    example = data[Request(0, tuple(data.groups[0][:1]))]
    [image] = example.images
    assert image.image_transform.flipped and len(example.texts) == 4
    for text in example.texts:
        stated = dict(map(tuple, ((name, tuple(box)) for name, box in text.record["named_boxes"])))
        assert len(text.phrases.spans) == len(text.phrases.boxes) > 0
        for (first, end), box in zip(text.phrases.spans, text.phrases.boxes, strict=True):
            start, stop = text.phrases.offsets[first][0], text.phrases.offsets[end - 1][1]
            name = text.phrases.words[start:stop]
            ours = image.image_transform.transform_boxes(np.array([stated[name]]))
            torch.testing.assert_close(torch.tensor(box), torch.tensor(ours, dtype=torch.float32), atol=1.5, rtol=0)
