"""The visual branch, the encoder and the referring task against the official VL-BERT code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from detector.boxes import pairwise_iou
from detector.faster_rcnn import FasterRCNN
from e2e_vl.encoders.layers import SequenceLayout, geometry_embedding
from e2e_vl.encoders.vl_bert import VLBertModel
from e2e_vl.model import VisionLanguageModel
from e2e_vl.structures import Batch
from e2e_vl.targets import Ragged
from e2e_vl.tasks.refcoco import ReferringTargets
from tests.parity import vl_bert_common as common
from tests.parity.vl_bert_common import (
    RELATIVE,
    Golden,
    SpecialTokens,
    assert_gradients_near,
    assert_laid_out,
    assert_near,
    cnn_float32_tolerance,
    detector_config,
    encoder_config,
    image_batch,
    is_cnn,
    make_model,
    padded,
    recorded_texts,
    without_pooler,
)
from tests.regions import regions_of_own_images

golden = common.golden


def test_geometry_embedding(golden):
    ops = golden["ops"]
    ours = geometry_embedding(ops["coord.boxes"], ops["coord.image_wh"].flip(-1), ops["coord.out"][0].numel())
    assert_near(ours, ops["coord.out"].flatten(1), "coord.out")


def test_iou_counts_inclusive_pixels(golden):
    ops = golden["ops"]
    assert_near(pairwise_iou(ops["iou.boxes"], ops["iou.query"], plus_one=True), ops["iou.out"], "iou.out")


def test_roi_align(golden):
    ops = golden["ops"]
    heads = FasterRCNN(detector_config(golden)).roi_heads
    features = ops["roi_align.features"].clone().requires_grad_()
    pooled = heads.pool([features], ops["roi_align.rois"])
    assert_near(pooled, ops["roi_align.out"], "roi_align.out")
    pooled.backward(ops["roi_align.grad_out"])
    assert_near(features.grad, ops["roi_align.grad_features"], "roi_align.grad_features")


def described_regions(
    model: VisionLanguageModel, golden: Golden, pixels: Tensor, roi_masks: list[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Features [N, R, D] and region vectors [N, R, V] of the recorded boxes, zero at padding."""
    data = golden.part("visual", "e2e.")
    mask = data["box_mask"]
    images = image_batch(pixels, data["im_info"])
    boxes = [rows[kept].to(pixels.dtype) for rows, kept in zip(data["boxes"], mask, strict=True)]
    regions = model.detector(images, boxes, roi_masks=roi_masks)
    features = padded(tuple(regions.features), mask)
    return features, region_vectors(model, features, padded(tuple(boxes), mask), data["im_info"], mask)


def region_vectors(
    model: VisionLanguageModel, features: Tensor, boxes: Tensor, im_info: Tensor, mask: Tensor
) -> Tensor:
    sizes = im_info[:, None, [1, 0]].expand(*mask.shape, 2)
    regions = regions_of_own_images(features, boxes, sizes, mask, torch.zeros_like(mask, dtype=torch.long))
    return model.encoder.embeddings.region_vectors(regions) * mask[..., None]


def test_visual_branch(golden, vl_bert_keys):
    model, data = make_model(golden, vl_bert_keys), golden.part("visual", "e2e.")
    with torch.no_grad():
        features, vectors = described_regions(model, golden, data["images"])
        maps = model.detector.features(image_batch(data["images"], data["im_info"]))
        assert_near(maps["res4"], data["body4"], "body4")
    assert_near(features, data["obj_reps_raw"], "obj_reps_raw")
    assert_near(vectors, data["obj_reps"], "obj_reps")


def test_visual_branch_of_chosen_regions_up_to_res5(golden, vl_bert_keys):
    model, data = make_model(golden, vl_bert_keys), golden.part("visual", "e2e.")
    image, row = data["box_mask"].nonzero()[data["roi_index"]].unbind(dim=1)
    rois = torch.cat([image[:, None].float(), data["boxes"][image, row]], dim=1)
    with torch.no_grad():
        assert_near(model.detector.roi_heads.pool([data["body4"]], rois), data["roi_align"], "roi_align")
        assert_near(model.detector.roi_heads.res5_map(data["body4"], rois), data["c5"], "c5")


def test_visual_branch_gradients_in_float64(golden, vl_bert_keys):
    model, data = make_model(golden, vl_bert_keys).double(), golden.part("visual", "e2e.")
    pixels = data["images"].double().requires_grad_()
    _, vectors = described_regions(model, golden, pixels)
    (vectors * data["upstream"]).sum().backward()
    tolerance = cnn_float32_tolerance(golden, "visual.e2e.grad")
    parameters = dict(model.named_parameters())
    for name, recorded in golden.part("visual", "e2e.grad64.").items():
        assert_near(parameters[vl_bert_keys.our_key(name)].grad, recorded, f"grad64.{name}")
    for name, recorded in golden.part("visual", "e2e.grad.").items():
        relative = tolerance if is_cnn(name) else RELATIVE
        assert_near(parameters[vl_bert_keys.our_key(name)].grad, recorded, f"grad.{name}", relative)
    assert_near(pixels.grad, data["grad_images"], "grad_images", tolerance)


def test_instance_masks_on_res5(golden, vl_bert_keys):
    model, data = make_model(golden, vl_bert_keys), golden.part("visual", "segms.")
    kept = golden["visual"]["e2e.box_mask"]
    masks = [rows[real] for rows, real in zip(data["masks"], kept, strict=True)]
    with torch.no_grad():
        features, vectors = described_regions(model, golden, golden["visual"]["e2e.images"], masks)
    assert_near(features, data["obj_reps_raw"], "segms.obj_reps_raw")
    assert_near(vectors, data["obj_reps"], "segms.obj_reps")


def test_strided_res5(golden, vl_bert_keys):
    if "nondilated.obj_reps_raw" not in golden["visual"]:
        pytest.skip("the set has no strided res5; it is optional")
    model = make_model(golden, vl_bert_keys, dilated=False)
    with torch.no_grad():
        features, _ = described_regions(model, golden, golden["visual"]["e2e.images"])
    assert_near(features, golden["visual"]["nondilated.obj_reps_raw"], "nondilated.obj_reps_raw")


def test_precomputed_features(golden, vl_bert_keys):
    model, rows = make_model(golden, vl_bert_keys), golden["visual"]["prec.boxes"]
    mask = golden["visual"]["e2e.box_mask"]
    rows = rows * mask[..., None]
    with torch.no_grad():
        ours = region_vectors(model, rows[..., 4:], rows[..., :4], golden["visual"]["e2e.im_info"], mask)
    assert_near(ours, golden["visual"]["prec.obj_reps"], "prec.obj_reps")


def encode_recorded(model: VLBertModel, arrays: dict[str, Tensor]):
    """Run the encoder from the recorded region vectors; returns packed states of every stage by name."""
    stages: dict[str, Tensor] = {}
    hooks = [model.embeddings.norm.register_forward_pre_hook(lambda _, args: stages.update(embedding_sum=args[0]))]
    for index, layer in enumerate(model.layers):
        hooks.append(layer.register_forward_hook(lambda _, __, out, i=index: stages.update({f"layer {i}": out[0]})))
    vectors, words = arrays["object_vl_embeddings"].split([model.config.visual_size, model.hidden_size], dim=-1)
    texts = recorded_texts(arrays)
    stages["embedding_output"], layout = model.embeddings.join(
        texts, arrays["text_visual_embeddings"], words, vectors, arrays["object_mask"], arrays["object_mask"].long() * 0
    )
    run = model.encode(stages["embedding_output"], layout, None, output_attentions=True)
    stages["last"] = run.output
    for hook in hooks:
        hook.remove()
    return stages, torch.stack(run.attentions), layout


@pytest.mark.parametrize("name", ["vlbert", "vlbert_variant"])
def test_encoder(golden, vl_bert_keys, name):
    arrays, recorded = golden.part(name, "in."), golden.part(name, "out.")
    model = VLBertModel(encoder_config(golden, name)).eval()
    official = {f"vlbert.{key}": value for key, value in golden.part(name, "state.").items()}
    if not official:
        official = {key: value for key, value in golden["trunk"].items() if key.startswith("vlbert.")}
    state = vl_bert_keys.split_state(without_pooler(model, official))["encoder"]
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert {key.rsplit(".", 1)[0] for key in missing} == {
        "embeddings.region_projection",
        "embeddings.region_word_embedding",
    }

    with torch.no_grad():
        stages, attentions, layout = encode_recorded(model, arrays)
    valid = recorded["valid"]
    assert torch.equal(layout.attention_mask, valid)
    for stage in ("embedding_sum", "embedding_output"):
        assert_near(stages[stage][valid], recorded[stage][valid], stage)
    for index, states in enumerate(recorded["hidden_states"]):
        assert_near(stages[f"layer {index}"][valid], states[valid], f"hidden_states {index}")
    queries = valid[None, :, None].expand(attentions.shape[:-1])
    assert_near(attentions[queries], recorded["attention_probs"][queries], "attention_probs")

    slots = layout.unpack(stages["last"])
    length = arrays["text_mask"].shape[1]
    assert_near(slots[:, length:-1], recorded["object_separate"], "object_separate")
    real_words = arrays["text_mask"]
    assert_near(slots[:, :length][real_words], recorded["text_separate"][real_words], "text_separate")
    if "pooled" in recorded:
        assert_near(model.pooler(stages["last"]), recorded["pooled"], "pooled")


@pytest.mark.parametrize("name", ["vlbert", "vlbert_variant"])
def test_position_and_segment_ids(golden, name):
    arrays, recorded = golden.part(name, "in."), golden.part(name, "out.")
    embeddings = VLBertModel(encoder_config(golden, name)).embeddings
    texts = recorded_texts(arrays)
    layout = SequenceLayout.from_masks(texts.attention_mask, arrays["object_mask"])
    ids = {
        "position_ids": embeddings.position_ids(texts.attention_mask, arrays["object_mask"].long() * 0),
        "token_type_ids": embeddings.token_type_ids(texts.token_type_ids, arrays["object_mask"]),
    }
    for kind, slots in ids.items():
        assert torch.equal(slots.gather(1, layout.slot)[recorded["valid"]], recorded[kind][recorded["valid"]])


def refcoco_batch(golden: Golden, dtype: torch.dtype = torch.float32) -> Batch:
    """The recorded images and expressions. Row 0 of the boxes, the whole image, is left to the detector."""
    data, encoder = golden.part("refcoco", "in."), golden.part("refcoco", "vlbert_in.")
    boxes = [rows[kept][1:].to(dtype) for rows, kept in zip(data["boxes"], encoder["object_mask"], strict=True)]
    return Batch(
        images=image_batch(data["image"].to(dtype), data["im_info"]),
        boxes=boxes,
        texts=recorded_texts(encoder),
        image_index=torch.arange(len(boxes))[:, None],
        targets=ReferringTargets(Ragged(data["gt_box"].to(dtype), torch.ones(len(data["gt_box"]), dtype=torch.int64))),
        records=[{"text_index": index} for index in range(len(boxes))],
    )


def test_refcoco_inputs_logits_and_loss(golden, vl_bert_keys):
    model, recorded = make_model(golden, vl_bert_keys), golden["refcoco"]
    batch, mask = refcoco_batch(golden), recorded["vlbert_in.object_mask"]
    with torch.no_grad():
        output = model(batch)
        vectors = model.encoder.embeddings.region_vectors(output.text_regions)
        words = model.encoder.embeddings.word_vectors(batch.texts, vectors, output.text_regions)
    size = model.encoder.config.visual_size
    assert torch.equal(output.text_regions.attention_mask, mask)
    assert_near(vectors[mask], recorded["vlbert_in.object_vl_embeddings"][mask][:, :size], "region vectors")
    real_words = batch.texts.attention_mask
    expression = recorded["in.expression"]
    inner = batch.texts.input_ids[:, 1:-1] * (expression > 0)  # [CLS] expression [SEP], padded with 0
    assert torch.equal(inner, expression)
    special = SpecialTokens.of(batch.texts)
    pieces = [row[row > 0].tolist() for row in expression]
    assert_laid_out([special.fill_template(model.encoder.layout.single, row) for row in pieces], batch.texts)
    words = words.expand(*real_words.shape, -1)
    assert_near(words[real_words], recorded["vlbert_in.text_visual_embeddings"][real_words], "word vectors")

    positive = model.task.positive_regions(output.text_regions, batch.targets.boxes)
    assert torch.equal(positive[mask], recorded["in.label"][mask] == 1)
    for boxes, referred, ious, real in zip(
        output.text_regions.boxes, batch.targets.boxes.values, recorded["in.iou"], mask, strict=True
    ):
        assert_near(pairwise_iou(boxes[real], referred[None], plus_one=True)[:, 0], ious[real], "iou")
    assert_near(output.task.logits[mask], recorded["out.label_logits"][mask], "label_logits")
    assert_near(output.losses["referring"].mean, recorded["out.loss"], "loss")
    assert float(recorded["out.loss"]) == pytest.approx(golden.meta["values"]["refcoco"]["loss"], rel=1e-6)


def test_refcoco_predictions_never_choose_padding(golden, vl_bert_keys):
    model, recorded = make_model(golden, vl_bert_keys), golden["refcoco"]
    batch = refcoco_batch(golden)
    with torch.no_grad():
        output = model(batch)
    predictions = model.task.predict(output)
    assert output.task.logits.argmax(dim=1).tolist() == golden.meta["values"]["refcoco"]["argmax_padding_masked"]
    ours = torch.tensor([prediction.box for prediction in predictions])
    assert_near(ours, recorded["out.pred_boxes_padding_masked"], "pred_boxes_padding_masked")
    counts = recorded["vlbert_in.object_mask"].sum(dim=1).tolist()
    assert [len(prediction.candidate_boxes) for prediction in predictions] == counts
    assert [prediction.text_index for prediction in predictions] == list(range(len(batch)))


def test_refcoco_official_predictions_are_ours_with_padding_as_a_candidate(golden, vl_bert_keys):
    """The official code lets padded boxes win: they score as a state of zeros, and their corners are a filler."""
    model, recorded = make_model(golden, vl_bert_keys), golden["refcoco"]
    batch, mask = refcoco_batch(golden), recorded["vlbert_in.object_mask"]
    with torch.no_grad():
        logits = model(batch).task.logits
        logits[~mask] = model.task.head(torch.zeros(1, 1, model.encoder.hidden_size)).squeeze()
    assert_near(logits, recorded["out.label_logits"], "label_logits with padding")
    best = logits.argmax(dim=1)
    assert best.tolist() == golden.meta["values"]["refcoco"]["argmax_official"]
    boxes = recorded["in.boxes"][torch.arange(len(batch)), best]
    assert_near(boxes / batch.images.scales.repeat(1, 2), recorded["out.pred_boxes"], "pred_boxes")


def test_refcoco_gradients(golden, vl_bert_keys):
    """All gradients in float64: those recorded in float64 for the CNN, and the float32 ones of everything behind it."""
    model = make_model(golden, vl_bert_keys).double()
    model(refcoco_batch(golden, torch.float64)).losses["referring"].mean.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert_gradients_near(golden, "refcoco", gradients, vl_bert_keys.our_key)


def test_refcoco_frozen_parameters_get_no_gradient(golden, vl_bert_keys):
    model = make_model(golden, vl_bert_keys)
    model(refcoco_batch(golden)).losses["referring"].mean.backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    frozen = {vl_bert_keys.our_key(name) for name in golden.meta["no_grad_params"]["refcoco"]}
    assert not with_gradient & frozen
    assert with_gradient == {vl_bert_keys.our_key(name) for name in golden.meta["grad_norms"]["refcoco"]}
