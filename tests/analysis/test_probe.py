"""Linear probes, features at every depth, and gradients of stages."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from e2e_vl.analysis.gradients import list_stages, measure_gradients, trunk_stages
from e2e_vl.analysis.linear_probe import fit_probe, read_labels
from e2e_vl.analysis.probe import (
    collect_features,
    describe_batch,
    find_named_boxes,
    first_about_image,
    list_models,
    mean_over_boxes,
    open_boxes,
)
from e2e_vl.analysis.probe_report import REGION_FEATURE, ProbeResults, ProbeRow, choose_curves, merge_orders
from e2e_vl.data.batching import collate
from e2e_vl.run.build import build_model, build_run
from e2e_vl.run.checkpoint import load_initial_model, load_model
from e2e_vl.samples import AnnotatedObjects
from e2e_vl.targets import Ragged
from e2e_vl.text import load_tokenizer
from tests.conftest import ENCODERS, ROOT
from tests.run.runs import first_texts
from tests.weights.starts import replaced

pytestmark = pytest.mark.usefixtures("on_cpu")
FPN = f"detector.config={ROOT / 'configs' / 'detector' / 'tiny_fpn.yaml'}"


def test_a_probe_reads_what_features_say_and_nothing_off_noise():
    classes = torch.randint(0, 4, (2000,))
    is_train = torch.arange(2000) % 2 == 0
    told = torch.cat([F.one_hot(classes, 4) * 3.0 + 100, torch.randn(2000, 8), torch.ones(2000, 1)], dim=1)
    assert fit_probe(told, classes, is_train).accuracy == 1.0
    guessed = fit_probe(torch.randn(2000, 16), classes, is_train)
    assert guessed.accuracy == pytest.approx(0.25, abs=0.06) and guessed.chance == pytest.approx(0.25, abs=0.06)
    assert (guessed.trained_on, guessed.judged) == (1000, 1000)
    assert fit_probe(told, classes, is_train) == fit_probe(told, classes, is_train)


def test_a_probe_leaves_out_objects_without_a_value_and_labels_that_cannot_be_learned():
    classes = torch.tensor([0, 1, 0, 1, -1, -1])
    is_train = torch.tensor([True, True, False, False, True, False])
    probe = fit_probe(torch.tensor([[0.0], [1.0], [0.0], [1.0], [9.0], [9.0]]), classes, is_train)
    assert (probe.accuracy, probe.trained_on, probe.judged) == (1.0, 2, 2)
    assert fit_probe(torch.zeros(6, 1), classes, is_train & (classes == 0)) is None
    assert fit_probe(torch.zeros(6, 1), classes, torch.ones(6, dtype=torch.bool)) is None


def objects_with(attributes: list[list[int]], names: list[str]) -> AnnotatedObjects:
    count = len(attributes)
    boxes = np.tile([0.0, 0.0, 1.0, 1.0], (count, 1))
    categories = tuple("ab"[number % 2] for number in range(count))
    return AnnotatedObjects(boxes, "test", names=categories, attributes=np.array(attributes), attribute_names=names)


def test_attributes_that_exclude_each_other_make_one_label_and_others_one_each():
    drawn = objects_with([[0, 2], [1, 3], [0, 3]], ["red", "blue", "small", "big"])
    labels = read_labels([drawn, drawn])
    assert list(labels) == ["class", "colour", "size"]
    assert labels["colour"].classes == ("red", "blue") and labels["size"].values.tolist() == [0, 1, 1] * 2
    free = objects_with([[0, 1], [1, -1], [-1, -1]], ["wet", "wooden"])
    labels = read_labels([free])
    assert labels["wooden"].values.tolist() == [1, 1, 0] and labels["wet"].classes == ("no", "yes")


def test_a_map_is_averaged_over_a_box():
    columns = torch.arange(8.0).expand(1, 1, 6, 8)  # stride 4: the centre of column i is at pixel 4 * i + 2
    pooled = mean_over_boxes(columns, torch.tensor([[0.0, 8.0, 4.0, 16.0, 20.0]]), width=32)
    assert pooled.item() == pytest.approx(2.5)


def test_stages_of_both_kinds_of_detectors(tiny_config):
    backbone = ["stem", "res2", "res3", "res4"]
    encoder = ["region projection", "embeddings", "layer 1", "layer 2", "encoder, other", "head"]
    model = build_model(tiny_config(), vocab_size=50)
    assert list(trunk_stages(model.detector.backbone)) == backbone
    assert list(list_stages(model)) == [*backbone, "rpn", "res5", "box_predictor", *encoder]
    model = build_model(tiny_config(FPN), vocab_size=50)
    assert list(trunk_stages(model.detector.backbone)) == [*backbone, "res5"]
    assert list(list_stages(model)) == [*backbone, "res5", "fpn", "rpn", "box_head", "box_predictor", *encoder]
    stages = list_stages(model)
    parameters = itertools.chain.from_iterable(stages.values())
    assert sorted(map(id, parameters)) == sorted(map(id, model.parameters()))


def test_the_layers_of_lxmert_have_the_names_of_their_stacks(tiny_config):
    model = build_model(replaced(tiny_config(), encoder=ENCODERS["lxmert"]), vocab_size=50)
    assert [name for name in list_stages(model) if name.startswith(("layer", "r_", "x_"))] == [
        "layer 1",
        "x_layer 1",
        "r_layer 1",
    ]


def test_gradients_of_a_frozen_detector_are_zero(tiny_config):
    config = tiny_config("detector.freeze=true", "detector.loss_weight=0", "data.boxes.train=gt")
    run = build_run(config)
    stages = measure_gradients(config, run.model, [first_texts(run, 2)], is_untrained=True)
    by_name = {row.stage: row for row in stages}
    for name in ("stem", "res4", "res5"):
        row = by_name[name]
        assert (row.is_trained, row.task_gradient, row.update, row.agreement) == (False, 0.0, 0.0, None)
    assert by_name["layer 1"].task_gradient > 0 and by_name["layer 1"].update > 0


def test_gradients_are_those_of_the_losses(tiny_config):
    """The gradient of one batch agrees with itself; the first update of Adam is as large as its rate."""
    config = tiny_config("data.boxes.train=gt", "train.weight_decay=0", "train.max_grad_norm=null")
    run = build_run(config)
    batch = first_texts(run, 2)
    model = run.model
    head = list(model.task.parameters())
    count = sum(parameter.numel() for parameter in head)
    rows = {row.stage: row for row in measure_gradients(config, model, [batch], is_untrained=True)}
    assert rows["stem"].agreement == pytest.approx(1.0)
    assert rows["stem"].task_gradient > 0 and rows["stem"].detection_gradient > 0
    assert rows["rpn"].task_gradient == 0 and rows["head"].detection_gradient == 0
    assert rows["head"].update * rows["head"].weight_norm <= config.train.lr * count**0.5 * 1.01
    unknown = measure_gradients(config, model, [batch, batch])
    assert all(row.update is None for row in unknown)
    by_name = {row.stage: row for row in unknown}
    model.zero_grad()
    torch.manual_seed(config.seed)
    sum(loss.mean for loss in model(batch).task_losses.values()).backward()
    norm = torch.cat([parameter.grad.flatten() for parameter in head]).norm()
    assert by_name["head"].task_gradient == pytest.approx(float(norm), rel=0.2)  # batch norms saw more batches


@pytest.mark.parametrize("encoder", ENCODERS)
def test_features_are_in_the_order_of_the_boxes_at_every_depth(tiny_config, trained_run, encoder):
    config = tiny_config("data.boxes.train=gt")
    if ENCODERS[encoder] is not None:
        config = replaced(config, encoder=ENCODERS[encoder])
    tokenizer = load_tokenizer(str(trained_run.path / "model" / "tokenizer"))
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer).eval()
    boxes = open_boxes(config, model, tokenizer, "val", max_images=3, reads_texts=True)
    [requests] = boxes.requests
    batch = collate([boxes.examples[request] for request in requests])
    described = describe_batch(model, batch, reads_texts=True)
    features = described.boxes
    layers = [f"encoder {number}" for number in range(model.encoder.num_joint_layers + 1)]
    assert list(features) == ["stem", "res2", "res3", "res4", REGION_FEATURE, *layers]
    assert list(described.words) == ["words, embeddings", *(f"words, {layer}" for layer in layers)]
    counts = [len(objects) for objects in boxes.objects()]
    with torch.no_grad():
        regions, text_regions, encoded = model.encode(batch)
    first = int(model.encoder.uses_whole_image)
    assert torch.equal(features[REGION_FEATURE], torch.cat([rows[first:] for rows in regions.features]))
    first_texts_of_images = first_about_image(batch.image_index).nonzero().flatten().tolist()
    assert len(batch) > len(first_texts_of_images) == 3, "all texts are read for their words"
    for text, part in zip(first_texts_of_images, features[layers[-1]].split(counts), strict=True):
        is_box = text_regions.attention_mask[text] & (text_regions.row[text] >= 0)
        torch.testing.assert_close(part, encoded.regions[text][is_box])
    without_texts = describe_batch(model, batch, reads_texts=False)
    assert list(without_texts.boxes) == list(features)[:5] and not without_texts.words
    assert all(torch.equal(values, features[depth]) for depth, values in without_texts.boxes.items())


def open_first_images(config, trained_run, count):
    tokenizer = load_tokenizer(str(trained_run.path / "model" / "tokenizer"))
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer).eval()
    return model, open_boxes(config, model, tokenizer, "val", max_images=count, reads_texts=True)


def test_words_are_those_about_the_object_that_an_expression_means(tiny_config, trained_run):
    config = tiny_config("data.boxes.train=gt")
    model, boxes = open_first_images(config, trained_run, 3)
    [requests] = boxes.requests
    batch = collate([boxes.examples[request] for request in requests])
    described = describe_batch(model, batch, reads_texts=True)
    assert len(described.named_rows) == len(batch), "an expression is one phrase for its target"
    all_boxes = np.concatenate([objects.boxes for objects in boxes.objects()])
    texts = [text for request in requests for text in boxes.dataset.sample(request.texts).texts]
    for text, row in zip(texts, described.named_rows.tolist(), strict=True):
        assert text.truth.boxes[0] == pytest.approx(all_boxes[row], abs=0.01)
    with torch.no_grad():
        _, _, encoded = model.encode(batch)
        table = model.encoder.get_input_embeddings().weight
    for number, (text, length) in enumerate(zip(texts, batch.texts.lengths.tolist(), strict=True)):
        words = slice(1, length - 1)  # without special tokens
        assert length - 2 == len(boxes.examples.preprocessor.text_tokenizer.pieces(text.words))
        mean = table[batch.texts.input_ids[number, words]].mean(dim=0)
        torch.testing.assert_close(described.words["words, embeddings"][number], mean)
        states = described.words[f"words, encoder {model.encoder.num_joint_layers}"]
        torch.testing.assert_close(states[number], encoded.text[number, words].mean(dim=0))


def test_phrases_with_several_boxes_or_another_box_name_no_object(tiny_config, trained_run):
    _, boxes = open_first_images(tiny_config("data.boxes.train=gt"), trained_run, 2)
    [requests] = boxes.requests
    batch = collate([boxes.examples[request] for request in requests])
    spans, rows = find_named_boxes(batch)
    assert spans.counts.tolist() == [1] * len(batch)
    phrases = batch.phrases
    moved = phrases.boxes.values.clone()
    moved[0] += 1000  # far from all objects
    ragged = dataclasses.replace(phrases.boxes, values=moved)
    batch.phrases = dataclasses.replace(phrases, boxes=ragged)
    spans, remaining = find_named_boxes(batch)
    assert spans.counts.tolist() == [0] + [1] * (len(batch) - 1)
    assert torch.equal(remaining, rows[1:])
    counts = torch.tensor([2, 0] + [1] * (len(batch) - 2))
    batch.phrases = dataclasses.replace(phrases, boxes=Ragged(phrases.boxes.values, counts))
    spans, remaining = find_named_boxes(batch)
    assert spans.counts.tolist() == [0, 0] + [1] * (len(batch) - 2)
    assert torch.equal(remaining, rows[2:])
    batch.phrases = None
    spans, remaining = find_named_boxes(batch)
    assert spans.counts.tolist() == [0] * len(batch) and not len(remaining)


def test_rows_of_named_boxes_are_counted_over_all_batches(tiny_config, trained_run):
    config = tiny_config("data.boxes.train=gt", "eval.images_per_batch=1", "data.workers=0")
    model, boxes = open_first_images(config, trained_run, 3)
    assert len(boxes.requests) == 3
    features = collect_features(config, model, boxes, boxes.objects(), name="model")
    [requests] = open_first_images(tiny_config("data.boxes.train=gt"), trained_run, 3)[1].requests
    batch = collate([boxes.examples[request] for request in requests])
    together = describe_batch(model, batch, reads_texts=True)
    assert features.named_rows.tolist() == together.named_rows.tolist()
    last = list(features.words)[-1]
    torch.testing.assert_close(features.words[last], together.words[last], atol=1e-4, rtol=1e-3)


def test_a_pyramid_is_a_depth_of_its_own(tiny_config, trained_run):
    config = tiny_config(FPN)
    tokenizer = load_tokenizer(str(trained_run.path / "model" / "tokenizer"))
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    boxes = open_boxes(config, model, tokenizer, "val", max_images=2, reads_texts=False)
    features = collect_features(config, model, boxes, boxes.objects(), name="model").boxes
    assert list(features) == ["stem", "res2", "res3", "res4", "res5", "fpn", REGION_FEATURE]
    assert features["fpn"].shape[1] == 5 * 32  # p2 .. p6


def test_models_of_a_run_by_step(trained_run, tiny_config):
    """The last checkpoint stands for the last model too, because the optimiser's state lies beside it."""
    config, _, _ = load_model(trained_run.path)
    models = list_models(trained_run.path, config, limit=10)
    steps = [model.step for model in models]
    assert steps == sorted(set(steps)) and (steps[0], steps[-1]) == (0, 8)
    assert models[0].folder is None and models[-1].optimizer_state.is_file()
    assert [model.step for model in list_models(trained_run.path, config, limit=2)] == [0, 8]
    assert [model.step for model in list_models(trained_run.path / "model", config, limit=2)] == [0, 8]


def test_the_model_that_a_run_started_from_is_built_again(tiny_config, trained_run):
    torch.manual_seed(trained_run.config.seed)
    started = build_run(tiny_config(f"output={trained_run.path}"), writes=False).model.state_dict()
    _, model, _ = load_initial_model(trained_run.path)
    assert all(torch.equal(value, started[name]) for name, value in model.state_dict().items())
    assert not torch.equal(
        trained_run.model.state_dict()["task.head.output.weight"], started["task.head.output.weight"]
    )


def test_orders_of_two_runs_are_merged():
    assert merge_orders([["stem", "res4", "feature"], ["stem", "res4", "fpn", "feature", "encoder 0"]]) == [
        *("stem", "res4", "fpn", "feature", "encoder 0")
    ]
    depths = ["stem", "res2", "res3", "res4", REGION_FEATURE, *(f"encoder {number}" for number in range(13))]
    curves = ["stem", "res3", "res4", REGION_FEATURE, "encoder 0", "encoder 12"]
    assert choose_curves(depths) == curves
    words = ["words, embeddings", *(f"words, encoder {number}" for number in range(13))]
    assert choose_curves([*depths, *words]) == [*curves, "words, embeddings", "words, encoder 12"]


def test_regions_and_words_have_a_chance_each():
    rows = []
    for depth, accuracy, chance in ((REGION_FEATURE, 0.5, 0.2), ("words, embeddings", 0.75, 0.25)):
        rows.append(ProbeRow("run", 0, depth, "colour", accuracy, chance, trained_on=8, judged=8))
    results = ProbeResults(["run"], "data", "val", images=2, boxes=16, phrases=16, probes=rows)
    regions, words = results.tables()[0]["parts"]
    assert regions == {"name": "chance", "chance": [[0.2]], "rows": {REGION_FEATURE: [[0.5]]}}
    assert words == {"name": "chance, words", "chance": [[0.25]], "rows": {"words, embeddings": [[0.75]]}}
    assert results.summary_lines()[-1] == "  colour (chance 0.25): words, embeddings 0.75"
