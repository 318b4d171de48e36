from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator

import benchmark as tool
import grouped_steps
from e2e_vl.config import differences, load_config
from e2e_vl.run.build import build_run

ROOT = Path(__file__).parents[3]
TWELVE = ("data.flip=0", "data.synthetic.scenes.train=12")


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("benchmark")
    settings = {
        "output": str(folder / "run"),
        "detector": {"config": str(ROOT / "configs" / "detector" / "tiny.yaml")},
        "task": {"name": "refcoco"},
        "encoder": {
            "name": "vl_bert",
            "config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "geometry_dim": 64,
            },
        },
        "data": {
            "name": "refcoco",
            "root": str(folder / "data"),
            "files": {
                "images": "images/train2014",
                "instances": "refcoco+/instances.json",
                "refs": "refcoco+/refs(unc).p",
            },
            "resize": {"short_edge": [128], "long_edge": 160},
            "texts_per_image": 5,
            "synthetic": {"scenes": {"train": 1}},
        },
        "train": {"images_per_batch": 2},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def test_grouping_is_the_same_update_in_less_time(config_file, tmp_path, capsys):
    output = tmp_path / "new" / "result.json"
    options = ["--json", str(output), "--repetitions", "3", "--rois", "6,9", "--image-size", "128", "160"]
    status = tool.main(["train", "--config", str(config_file), *options, "train.clip_norm=2.0"])
    printed = capsys.readouterr().out
    assert status == 0
    result = json.loads(output.read_text(encoding="utf-8"))
    assert 0 < result["ratios"]["grouped_5_over_1"] < 1
    assert f"ratios.grouped_5_over_1 {result['ratios']['grouped_5_over_1']:.4g}".split() in [
        line.split() for line in printed.splitlines()
    ]
    checks = result["checks"]
    assert checks["loss"] > 0.01
    assert checks["loss_difference"] < 1e-5
    assert checks["max_gradient_difference"] < 1e-4

    assert set(result["machine"]) == {"cpu", "cores", "device", "threads", "torch", "python"}
    assert result["overrides"] == ["train.clip_norm=2.0"]
    settings = result["settings"]
    assert (settings["images_per_batch"], settings["texts_per_image"], settings["repetitions"]) == (2, 5, 3)
    assert settings["image_size"] == [128, 160]

    assert [case["rois"] for case in result["cases"]] == [6, 9]
    for case in result["cases"]:
        for name in ("grouped", "ungrouped"):
            times = case["times"][name]
            assert len(times["all"]) == 3
            assert 0 < times["min"] <= times["median"] <= times["max"]
            assert case["texts_per_second"][name] == pytest.approx(10 / times["median"])
        medians = {name: case["times"][name]["median"] for name in ("grouped", "ungrouped")}
        assert case["ratios"]["grouped_5_over_1"] == medians["grouped"] / medians["ungrouped"]
    assert result["cases"][0]["checks"]["loss"] != result["cases"][1]["checks"]["loss"]
    assert {path.name for path in config_file.parent.iterdir()} == {config_file.name}, "it must leave nothing behind"


@pytest.fixture(scope="module")
def batches(config_file, tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("data")
    config = load_config(config_file, [f"output={folder / 'run'}", f"data.root={folder / 'data'}", *TWELVE])
    run = build_run(config)
    return run.model, *grouped_steps.grouped_and_single(config, run)


def test_both_ways_hold_the_same_texts_and_pixels(batches):
    _, grouped, singles = batches
    assert (len(grouped.images), len(grouped), len(singles)) == (2, 10, 5)
    wanted = {record["text_index"] for record in grouped.records}
    found = [record["text_index"] for batch in singles for record in batch.records]
    assert len(found) == len(set(found))
    assert set(found) == wanted
    for batch in singles:
        assert torch.equal(batch.images.pixels, grouped.images.pixels)
        assert batch.image_index.tolist() == [[0], [1]]


def test_the_check_sees_a_missing_text(batches):
    model, grouped, singles = batches
    right = grouped_steps.compare_gradients(model, grouped, singles)
    wrong = grouped_steps.compare_gradients(model, grouped, [*singles[:4], singles[0]])
    assert grouped_steps.is_same_update({"cases": [{"checks": right}]})
    assert not grouped_steps.is_same_update({"cases": [{"checks": right}, {"checks": wrong}]})
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.fixture(scope="module")
def uneven(config_file, tmp_path_factory):
    """A run with the softmax loss whose single batches have 1, 2, 1, 2 and 0 texts with a positive region."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("uneven")
    words = [f"output={folder / 'run'}", f"data.root={folder / 'data'}", *TWELVE, "task.config={loss: softmax}"]
    no_dropout = [f"encoder.config.{name}_dropout_prob=0" for name in ("hidden", "attention_probs", "region")]
    words += ["train.optimizer=sgd", "train.lr=1.0", "train.momentum=0", "train.clip_norm=null", *no_dropout]
    config = load_config(config_file, words)
    run = build_run(config)
    grouped, singles = grouped_steps.grouped_and_single(config, run)
    outside = torch.tensor([-50.0, -50.0, -10.0, -10.0])  # no region is near
    for single, image in ((0, 0), (2, 1), (4, 0), (4, 1)):
        text = singles[single].records[image]["text_index"]
        rows = [row for row, record in enumerate(grouped.records) if record["text_index"] == text]
        grouped.targets.box[rows] = outside
        singles[single].targets.box[image] = outside
    return config, run.model, grouped, singles


def test_batches_with_different_counts_are_the_same_update(uneven):
    config, model, grouped, singles = uneven
    with torch.no_grad():
        counts = [model(batch).task.losses["referring"].count.item() for batch in (grouped, *singles)]
    assert counts == [6, 1, 2, 1, 2, 0]
    checks = grouped_steps.compare_gradients(model, grouped, singles)
    assert checks["loss"] > 0.01
    assert checks["max_gradient_difference"] < 1e-4
    assert grouped_steps.is_same_update({"cases": [{"checks": checks}]})

    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    updates = []
    for batches in ([grouped], singles):
        stepper = grouped_steps.Stepper(config, copy.deepcopy(model), Accelerator())
        stepper.step(batches, stepper.counts(grouped))
        updates.append({name: p.detach() - before[name] for name, p in stepper.model.named_parameters()})
    largest = max(update.abs().max() for update in updates[0].values())
    assert largest > 1e-3
    assert max((updates[0][name] - updates[1][name]).abs().max() for name in before) < 1e-3 * largest


def test_nothing_labelled_is_no_error(uneven):
    _, model, grouped, singles = uneven
    nothing = copy.deepcopy([grouped, *singles])
    for batch in nothing:
        batch.targets.box[:] = torch.tensor([-50.0, -50.0, -10.0, -10.0])
    checks = grouped_steps.compare_gradients(model, nothing[0], nothing[1:])
    assert checks == {"loss": 0, "loss_difference": 0, "max_gradient_difference": 0}


def test_random_boxes_fill_up_and_are_the_same_in_every_batch(batches):
    _, grouped, singles = batches
    for number in (3, 20):
        changed = grouped_steps.with_rois([grouped, *singles], number, seed=1)
        for batch in changed:
            for boxes, own, size, first in zip(
                batch.boxes, grouped.boxes, grouped.images.sizes, changed[0].boxes, strict=True
            ):
                assert torch.equal(boxes, first)
                assert boxes.shape == (number, 4)
                assert torch.equal(boxes[: len(own)], own[:number])
                assert (boxes[:, 2:] - boxes[:, :2]).min() > 1
                assert boxes.min() >= 0
                assert (boxes[:, 2:] <= size.flip(0)).all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.texts_per_image=1"], "data.texts_per_image is 1"),
        (["data.texts_per_image=60"], "images have 60 texts"),
        (["--repetitions", "0"], "0 repetitions"),
        (["--rois", "0"], "0 boxes per image"),
        (["--rois", "5", "data.boxes.train=online", "detector.loss_weight=1"], "finds its predicted boxes"),
    ],
)
def test_bad_settings_are_one_sentence(config_file, capsys, words, message):
    assert tool.main(["train", "--config", str(config_file), *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


@pytest.mark.parametrize("name", tool.PRESETS)
def test_presets_load(name):
    file, (height, width), _ = tool.PRESETS[name]
    config = load_config(file)
    assert config.data.texts_per_image == 5
    assert config.data.resize.short_edge[-1] <= height
    assert config.data.resize.long_edge >= width


def test_presets_of_base_size_differ_in_the_encoder_only():
    configs = [load_config(tool.PRESETS[name][0]) for name in ("base", "base_visual_bert", "base_lxmert")]
    assert len({config.encoder.name for config in configs}) == 3
    for config in configs[1:]:
        assert all(line.startswith("encoder.") for line in differences(configs[0], config))
        assert config.encoder.config["hidden_size"] == configs[0].encoder.config["hidden_size"]


def test_sweep_over_precision_checkpointing_and_texts(config_file, tmp_path, capsys):
    output = tmp_path / "steps.json"
    words = ["detector.overrides={MODEL: {RESNETS: {NORM: FrozenBN}}}", "data.texts_per_image=3"]
    options = ["--sweep", "--repetitions", "1", "--warm-up", "0", "--rois", "6", "--json", str(output)]
    assert tool.main(["train", "--config", str(config_file), *options, *words]) == 0
    cases = json.loads(output.read_text(encoding="utf-8"))["cases"]
    assert [(c["texts_per_image"], c["precision"], c["activation_checkpointing"]) for c in cases] == [
        (texts, precision, checkpointing)
        for checkpointing in (False, True)
        for precision in ("fp32", "bf16")
        for texts in (1, 3)
    ]
    assert all(0 < case["seconds_forward_backward"] < case["seconds"] and case["peak_gib"] > 0.05 for case in cases)
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("| 6 |")]) == 8
    assert tool.main(["train", "--config", str(config_file), *options, *words, "--no-checkpointing"]) == 0
    assert json.loads(output.read_text(encoding="utf-8"))["cases"][-1]["activation_checkpointing"] is False
    assert tool.main(["train", "--config", str(config_file), "--sweep"]) == 2
    assert "--rois" in capsys.readouterr().err
