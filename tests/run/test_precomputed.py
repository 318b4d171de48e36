"""Training on precomputed features: the losses of the live detector, without the detector."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from detector.images import ResizeRule
from detector.structures import ImageBatch, PrecomputedDetector, PrecomputedFeatures
from e2e_vl.config import ExtractionConfig, RunConfig
from e2e_vl.config_files import load_config
from e2e_vl.data.batching import Request
from e2e_vl.data.features import open_features
from e2e_vl.data.user_inputs import list_images, read_given_boxes
from e2e_vl.extraction.bulk import ExtractionJob, extract_images, make_stamp
from e2e_vl.extraction.regions import LoadedDetector
from e2e_vl.run.build import Run, build_run
from e2e_vl.run.checkpoint import load_model
from e2e_vl.run.launch import make_accelerator
from e2e_vl.run.train import train
from tests.conftest import cpu_with_one_thread
from tests.run.runs import ROOT, predictions_of

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(scope="module")
def config(tiny_words, tmp_path_factory) -> RunConfig:
    """Settings of the run with a live detector."""
    words = "detector={loss_weight: 0, freeze: true}", "data.boxes.train=gt"
    output = f"output={tmp_path_factory.mktemp('precomputed') / 'run'}"
    return load_config(ROOT / "configs" / "tiny" / "refcoco.yaml", [*tiny_words, *words, output])


@pytest.fixture(scope="module")
def live(config) -> Run:
    with cpu_with_one_thread():
        return build_run(config)


@pytest.fixture(scope="module")
def features(live, config) -> Path:
    """Features of all annotated boxes, made by the live run's detector."""
    data, output = config.data, Path(config.output).with_name("features")
    instances = Path(data.root) / data.files["instances"]
    sizes = data.resize
    resize = ResizeRule(sizes.short_edge[-1], sizes.long_edge, sizes.rounding, sizes.library)
    settings = ExtractionConfig("given", image_feature=True)
    source = LoadedDetector(live.model.detector, resize)
    images, given = list_images(instances, Path(data.root) / data.files["images"]), read_given_boxes(instances)
    stamp = make_stamp(source, settings, boxes_file=instances)
    job = ExtractionJob(images, output, "npz", source, settings, given, stamp, workers=0)
    with cpu_with_one_thread():
        assert not extract_images(job, make_accelerator("no")).failures
    return output


@pytest.fixture
def precomputed_config(tiny_config, features):
    boxes = "data.boxes.train=precomputed", "eval.boxes=[precomputed]", f"data.files.features={features}"
    return lambda *words: tiny_config("detector={backend: precomputed, loss_weight: 0}", *boxes, *words)


def test_losses_and_gradients_are_those_of_the_live_detector(live, precomputed_config):
    run = build_run(precomputed_config())
    assert not list(run.model.detector.parameters())
    for name in ("encoder", "task"):
        getattr(run.model, name).load_state_dict(getattr(live.model, name).state_dict())
    for one in (live, run):
        one.model.train()
    groups = live.train_data.groups
    assert [*run.train_data.groups] == [*groups]
    for group in range(4):
        request = Request(group, tuple(groups[group][:3]))
        outputs = []
        for one in (live, run):
            output = one.model(one.collate([one.train_data[request]]))
            one.model.zero_grad()
            output.losses["referring"].mean.backward()
            outputs.append(output)
        expected, found = outputs
        assert set(found.losses) == set(expected.losses)
        for name, loss in expected.losses.items():
            assert found.losses[name].mean.item() == pytest.approx(loss.mean.item(), abs=1e-5), name
        assert torch.allclose(found.task.logits, expected.task.logits, atol=1e-5)
        for part in ("encoder", "task"):
            gradients = dict(getattr(live.model, part).named_parameters())
            for name, parameter in getattr(run.model, part).named_parameters():
                if parameter.grad is not None:
                    assert torch.allclose(parameter.grad, gradients[name].grad, atol=1e-4), name


def test_a_run_on_precomputed_features(features, precomputed_config):
    """It trains, evaluates, is saved and loaded, and opens no image."""
    config = precomputed_config("train.max_steps=2", "data.files.images=nowhere", "eval.report_pictures=0")
    metrics = train(config)
    assert metrics["val/count_precomputed_boxes"] > 0
    predictions = predictions_of(config.output, "val_precomputed")
    store = open_features(features)
    for record in predictions:
        boxes = store[str(record["image_id"])].boxes
        assert np.allclose(record["candidate_boxes"], boxes, atol=1.5)  # clamped to the last pixel
    _, model, _ = load_model(Path(config.output))
    assert isinstance(model.detector, PrecomputedDetector)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.boxes.train=gt"], "The box source is gt and detector.backend is precomputed"),
        (["detector.backend=builtin"], "The box source is precomputed and detector.backend is builtin"),
        (["data.files.features=nowhere.tsv"], r"nowhere\.tsv"),
        (["data.flip=0.5"], r"set data\.flip to 0"),
        (["data.files.features=FEW"], r"image \d+ .*split train"),  # those of other images
    ],
)
def test_settings_that_do_not_fit(words, message, precomputed_config, features, tmp_path):
    shutil.copy(max(features.glob("*.npz")), tmp_path)
    words = [word.replace("FEW", str(tmp_path)) for word in words]
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        build_run(precomputed_config(*words))


def test_the_whole_image_comes_first(live):
    detector = PrecomputedDetector(live.model.detector.config)
    width = detector.feature_dim
    sizes, features = torch.tensor([[8, 9]]), PrecomputedFeatures([torch.ones(2, width)], torch.zeros(1, width))
    images = ImageBatch(torch.zeros(1, 3, 0, 0), sizes, sizes, ["a.jpg"], features)
    regions = detector(images, [torch.tensor([[0.0, 0, 4, 4], [1, 1, 5, 5]])], whole_image=True)
    assert torch.equal(regions.boxes[0], torch.tensor([[0.0, 0, 8, 7], [0, 0, 4, 4], [1, 1, 5, 5]]))
    assert regions.features[0][:, 0].tolist() == [0, 1, 1] and regions.class_logits[0].shape == (3, 0)
