"""The whole model: pixel masks, gradients, and one detector pass for several texts."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch

from detector.images import normalise_images
from e2e_vl.config import RunConfig, SyntheticDataConfig
from e2e_vl.config_files import load_config
from e2e_vl.data.batching import Request
from e2e_vl.model import VisionLanguageModel
from e2e_vl.run.build import Run, build_run
from e2e_vl.structures import Batch, MaskingBatch
from e2e_vl.targets import Ragged
from tests.run.runs import first_texts
from tests.weights.starts import replaced

ROOT = Path(__file__).parents[1]
PARTS = ("detector", "encoder", "task")
TASK_ONLY = "data.boxes.train=gt", "detector.loss_weight=0"
NO_DROPOUT = tuple(f"encoder.config.{part}_dropout_prob=0" for part in ("hidden", "attention_probs", "region"))
RESNETS = "detector.overrides.MODEL.RESNETS"
FREEZE_AT = "detector.overrides.MODEL.BACKBONE.FREEZE_AT"

pytestmark = pytest.mark.usefixtures("on_cpu")


def built(config: RunConfig) -> Run:
    """A run whose model has the same random start in every test."""
    torch.manual_seed(3)
    run = build_run(config)
    run.model.train()
    return run


def built_for(config: RunConfig, texts: int = 2) -> tuple[VisionLanguageModel, Batch]:
    """The model, and the first texts about each of two images."""
    run = built(config)
    return run.model, first_texts(run, 2, texts)


# Pixel masks


def test_pixels_of_a_masked_box_change_nothing_at_all(tiny_config):
    model, batch = built_for(tiny_config())
    model.eval()
    masks = [torch.tensor([[20.3, 30.0, 70.9, 81.0], [60.0, 70.0, 100.0, 127.5]]), torch.zeros(0, 4)]
    changed = batch.images.pixels.clone()
    changed[0, :, 30:81, 20:71] = torch.randint(256, (3, 51, 51))
    changed[0, :, 70:128, 60:100] = 100
    other = dataclasses.replace(batch, images=dataclasses.replace(batch.images, pixels=changed))
    with torch.no_grad():
        one, two = (
            model(dataclasses.replace(given, masking=MaskingBatch(pixel_masks=masks))) for given in (batch, other)
        )
        shown = model(other)
    same = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    same(one.task.logits, two.task.logits)
    for name in ("boxes", "features", "class_logits"):
        same(getattr(one.regions, name), getattr(two.regions, name))
    features = [output.regions.features[0] for output in (shown, one)]  # without the mask they change
    assert features[0].shape != features[1].shape or not torch.allclose(*features, rtol=1e-4, atol=1e-5)


# The whole image


@pytest.mark.parametrize("name", ["refcoco", "vcr"])
def test_the_whole_image_can_be_kept_from_the_sequence(tiny_words, tmp_path, name):
    """Tasks see neither its box nor a state of it, and every text has one region less."""
    words = [word for word in tiny_words if not word.startswith("data.synthetic")]
    words += [f"output={tmp_path}", "data={flip: 0, boxes: {train: gt}}", "encoder.config.image_feature_on_words=true"]
    if name == "refcoco":
        words.append("task.config={loss: binary, whole_image_can_win: true}")
    counts = {}
    for in_sequence in (True, False):
        own = [*words, f"encoder.config.whole_image_in_sequence={in_sequence}"]
        config = load_config(ROOT / "configs" / "tiny" / f"{name}.yaml", own)
        run = built(replaced(config, data={"synthetic": SyntheticDataConfig()}))  # the data are there
        model, batch = run.model.eval(), first_texts(run, 3, 1)
        with torch.no_grad():
            output = model(batch)
        regions = output.text_regions
        assert all(loss.mean.isfinite() for loss in output.losses.values())
        reads_image = (batch.image_index >= 0).any(dim=1)
        assert reads_image.sum() >= 3
        assert torch.equal(regions.is_whole_image.any(dim=1), reads_image & in_sequence)
        assert torch.equal(output.encoded.regions.abs().sum(dim=-1) > 0, regions.attention_mask)
        assert [len(boxes) - 1 for boxes in output.regions.boxes] == [len(boxes) for boxes in batch.boxes]
        counts[in_sequence] = count = regions.attention_mask.sum(dim=1)
        records = model.task.predict(output)
        assert output.losses["referring" if name == "refcoco" else "region_class"].count == count.sum()
        if name == "refcoco":
            assert [len(record.candidate_boxes) for record in records] == count.tolist()
    assert torch.equal(counts[True], counts[False] + reads_image.long())


# Gradients


@pytest.mark.parametrize(
    ("freeze_at", "first_trained", "frozen", "norm"),
    [(0, "stem", [], "FrozenBN"), (0, "stem", [], "BN"), (2, "res3", ["stem", "res2"], "BN")],
)
def test_the_task_loss_reaches_the_first_trained_stage(tiny_config, freeze_at, first_trained, frozen, norm):
    model, batch = built_for(tiny_config(f"{FREEZE_AT}={freeze_at}", f"{RESNETS}.NORM={norm}", *TASK_ONLY))
    output = model(batch)
    assert set(output.losses) == {"referring"}
    output.losses["referring"].mean.backward()
    first = getattr(model.detector.backbone, first_trained)
    assert all(parameter.grad is not None for parameter in first.parameters())
    weight = first.conv1.weight if first_trained == "stem" else first[0].conv1.weight
    assert weight.grad.abs().max() > 0
    for stage in frozen:
        assert all(one.grad is None for one in getattr(model.detector.backbone, stage).parameters())


# Several texts about one image


def test_k_texts_of_an_image_are_k_batches_of_one(tiny_config):
    """With one pass of the detector."""
    run = built(tiny_config(*NO_DROPOUT, f"{RESNETS}.NORM=FrozenBN", *TASK_ONLY))
    model, data, passes = run.model, run.train_data, []
    group = next(index for index, texts in enumerate(data.groups) if len(texts) >= 3)
    texts = tuple(data.groups[group][:3])
    model.detector.backbone.register_forward_pre_hook(lambda _, given: passes.append(len(given[0])))

    together = model(run.collate([data[Request(group, texts)]])).losses["referring"]
    assert passes == [1]
    together.mean.backward()
    grouped = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}

    model.zero_grad(set_to_none=True)
    singles = [model(run.collate([data[Request(group, (text,))]])).losses["referring"] for text in texts]
    total, count = sum(loss.total for loss in singles), sum(loss.count for loss in singles)
    assert count == together.count
    torch.testing.assert_close(total / count, together.mean, rtol=1e-6, atol=1e-7)
    (total / count).backward()
    alone = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert alone.keys() == grouped.keys()
    for part in PARTS:
        own = {name: value for name, value in alone.items() if name.startswith(f"{part}.")}
        largest = float(max(value.abs().max() for value in own.values()))
        assert largest > 0
        for name, value in own.items():
            torch.testing.assert_close(grouped[name], value, rtol=1e-4, atol=1e-6 * largest, msg=name)


# Two images per text


def refer_to_both_images(batch: Batch) -> Batch:
    """The first text twice, about two images in either order."""
    texts = dataclasses.replace(
        batch.texts,
        **{name: getattr(batch.texts, name)[[0, 0]] for name in ("input_ids", "token_type_ids", "attention_mask")},
    )
    targets = dataclasses.replace(batch.targets, boxes=Ragged(batch.targets.boxes.values[[0, 0]], torch.tensor([1, 1])))
    return dataclasses.replace(batch, texts=texts, targets=targets, image_index=torch.tensor([[0, 1], [1, 0]]))


def test_two_images_need_an_encoder_that_tells_them_apart(tiny_config):
    model, batch = built_for(tiny_config(), texts=1)
    with pytest.raises(ValueError, match=r"encoder\.config\.max_images to 2"):
        model(refer_to_both_images(batch))


@pytest.mark.parametrize(("in_sequence", "relative"), [(True, False), (False, True)])
def test_swapped_images_give_other_scores(tiny_config, in_sequence, relative):
    settings = {"max_images": 2, "uses_whole_image": True, "image_feature_on_words": True}
    settings |= {"whole_image_in_sequence": in_sequence, "relative_geometry": relative}
    words = [f"encoder.config.{name}={value}" for name, value in settings.items()]
    model, batch = built_for(tiny_config(*NO_DROPOUT, *TASK_ONLY, *words), texts=1)
    batch = refer_to_both_images(batch)
    batch.images = normalise_images(batch.images, model.detector.config.input)
    batch.images.pixels.requires_grad_()
    output = model(batch)
    regions, logits = output.text_regions, output.task.logits
    counts = [len(boxes) for boxes in batch.boxes]
    assert (regions.row >= 0).sum(dim=1).tolist() == [sum(counts)] * 2
    assert regions.is_whole_image.sum(dim=1).tolist() == [2 * in_sequence] * 2
    for image in range(2):
        own = (regions.image == image) & (regions.row >= 0)
        assert regions.image_slot[own].tolist() == [image] * counts[image] + [1 - image] * counts[image]
        one, other = logits[0, own[0]], logits[1, own[1]]
        assert ((one - other).abs() > 1e-5).all()
    sum(loss.mean for loss in output.losses.values()).backward()
    assert (batch.images.pixels.grad.abs().sum(dim=(1, 2, 3)) > 0).all()
    assert (model.encoder.embeddings.image_slot_embeddings.weight.grad.abs().sum(dim=1) > 0).all()
