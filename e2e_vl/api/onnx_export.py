"""Write a trained model as ONNX files, which `e2e_vl/api/onnx_model.py` answers with, without torch.

Two graphs, with the names of their inputs and outputs in `DetectorGraph` and `AnswerGraph`: the detector runs once for
an image, and the other graph once for each text about it. Sizes of images, numbers of boxes and lengths of texts may
change from call to call.

Shape legend: see `e2e_vl/structures.py`; here R counts all regions of the image, the whole image included.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from detector import roi_heads, rpn
from detector.boxes import whole_image_boxes
from detector.errors import UserError
from detector.io import atomic_files, write_json
from detector.operators import nms
from detector.roi_pooler import RoIPooler, assign_levels, to_rois
from detector.rpn import RPNOutput
from detector.structures import FeatureMaps, ImageBatch, RoIFeatures
from e2e_vl.api.model import TrainedModel
from e2e_vl.api.onnx_model import ANSWER, DETECTOR, SETTINGS, TOKENIZER, OnnxModel, OnnxSettings
from e2e_vl.metrics.vqa import UNKNOWN
from e2e_vl.model import VisionLanguageModel
from e2e_vl.structures import Batch, TextBatch, TextRegions
from e2e_vl.tasks.question_answering import AnswerTask
from e2e_vl.text import Template

TOLERANCE = 1e-4  # of features and probabilities; of features relative to their largest value
OPSET = 18
TRACED_SIZE = (256, 320)  # (height, width) of the image that the graphs are traced with, in pixels
CHECKED_SIZE = (224, 288)  # of another one, with which the files are compared with the model
TRACED_WORDS = 9
TRACED_REGIONS = 7


class DetectorGraph(nn.Module):
    """Finds the regions of one image, as the model's detector does in evaluation, and describes them.

    The numbers of proposals and of described boxes are fixed inside, because most of the work is on them: the boxes
    that an image lacks are empty, and are cut at the end.
    """

    inputs = ("image",)
    outputs = ("boxes", "scores", "classes", "features")

    def __init__(self, network: VisionLanguageModel) -> None:
        super().__init__()
        self.detector = copy.deepcopy(network.detector).eval()
        self.whole_image = network.encoder.uses_whole_image
        heads = self.detector.roi_heads
        if len(heads.pool.strides) > 1:
            heads.pool = PoolFromEveryLevel(self.detector.config)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the regions, the best first; row 0 is the whole image if the encoder uses it.

        Args:
            image: uint8 [height, width, 3], RGB, resized.

        Returns:
            boxes: float32 [R, 4], in pixels of the resized image.
            scores: float32 [R], of the detected classes; 1 for the whole image.
            classes: int64 [R], 0 .. K-1; K for the whole image.
            features: float32 [R, D].
        """
        heads = self.detector.roi_heads
        size = image.shape[:2]
        maps = self.feature_maps(image)
        with nms_in_graph():
            [proposals] = self.detector.proposal_generator.propose(self.run_rpn(maps), [size]).boxes
            num_proposals = self.detector.proposal_generator.config.post_nms_topk_test
            is_real = torch.arange(num_proposals) < proposals.shape[0]
            proposals = resize_rows(proposals, num_proposals)
            described = self.describe(maps, proposals)
            logits, deltas = heads.box_predictor(described.predictor)
            deltas = deltas.masked_fill(~is_real[:, None], torch.nan)  # no detection comes from them
            detections = heads.detect(logits, deltas, [proposals], [size])
        [boxes], [scores], [classes], [proposal_index] = detections
        num_regions = boxes.shape[0]
        if heads.config.features_of == "final":
            described = self.describe(maps, resize_rows(boxes, heads.config.detections_per_image))
            features = described.region[:num_regions]
        else:
            features = described.region[proposal_index]
        if self.whole_image:
            [whole_box] = whole_image_boxes(torch.tensor([size]))
            boxes = torch.cat((whole_box, boxes))
            scores = F.pad(scores, (1, 0), value=1.0)
            classes = F.pad(classes, (1, 0), value=self.detector.num_classes)
            features = torch.cat((self.describe(maps, whole_box).region, features))
        return boxes, scores, classes, features

    def feature_maps(self, image: Tensor) -> FeatureMaps:
        """Normalise and pad an image as the detector does, and run the backbone."""
        config = self.detector.config
        pixels = image.permute(2, 0, 1).float()
        if config.input.format == "BGR":
            pixels = pixels.flip(0)
        mean = torch.tensor(config.input.pixel_mean)[:, None, None]
        std = torch.tensor(config.input.pixel_std)[:, None, None]
        height, width = image.shape[:2]
        margins = (0, -width % config.size_divisibility, 0, -height % config.size_divisibility)
        pixels = F.pad((pixels - mean) / std, margins)[None]
        return self.detector.features(ImageBatch(pixels, None, None, []))

    def run_rpn(self, maps: FeatureMaps) -> RPNOutput:
        """Run the region proposal network; each map gets so many empty anchors that there always are k for a top-k."""
        network = self.detector.proposal_generator
        spare = network.config.pre_nms_topk_test
        finest = maps[network.in_features[0]]
        padded = [side * network.anchor_generators[0].stride for side in finest.shape[2:]]  # (height, width), pixels
        anchors = []
        objectness = []
        deltas = []
        for name, generator in zip(network.in_features, network.anchor_generators, strict=True):
            scores, shifts = network.rpn_head(maps[name])
            anchors.append(F.pad(generator(*scores.shape[2:], padded), (0, 0, 0, spare)))
            scores = scores.permute(0, 2, 3, 1).flatten(1)
            objectness.append(F.pad(scores, (0, spare), value=-torch.inf))
            shifts = shifts.permute(0, 2, 3, 1).reshape(1, -1, 4)
            deltas.append(F.pad(shifts, (0, 0, 0, spare)))
        counts = tuple(level.shape[1] for level in objectness)
        return RPNOutput(torch.cat(anchors), torch.cat(objectness, dim=1), torch.cat(deltas, dim=1), counts)

    def describe(self, maps: FeatureMaps, boxes: Tensor) -> RoIFeatures:
        """Describe boxes [J, 4] all at once; `ROIHeads.describe` would take some at a time."""
        heads = self.detector.roi_heads
        return heads._describe([maps[name] for name in heads.in_features], to_rois([boxes]), None)


class PoolFromEveryLevel(RoIPooler):
    """Pools all RoIs from all levels and chooses afterwards: numbers of RoIs of a level cannot be traced."""

    @override
    def __call__(self, maps: Sequence[Tensor], rois: Tensor, step: int = 1) -> Tensor:
        first = int(math.log2(self.strides[0]))
        levels = assign_levels(rois[:, 1:], first, first + len(self.strides) - 1, self.level_rule) - first
        pooled = torch.zeros(())
        for number, (level_map, stride) in enumerate(zip(maps, self.strides, strict=True)):
            is_of_level = (levels == number)[:, None, None, None]
            pooled = torch.where(is_of_level, self._pool(level_map, rois, stride, step), pooled)
        return pooled


def resize_rows(values: Tensor, number: int) -> Tensor:
    """Return the first `number` rows, filled up with zeros."""
    return torch.cat((values, values.new_zeros(number, values.shape[1])))[:number]


@contextlib.contextmanager
def nms_in_graph() -> Iterator[None]:
    """Replace the NMS of the detector's selection by one without a decision that depends on data."""
    with (
        mock.patch.object(rpn, "nms_per_image", nms_of_one_image),
        mock.patch.object(roi_heads, "nms_per_image", nms_of_one_image),
    ):
        yield


def nms_of_one_image(
    boxes: Tensor,
    scores: Tensor,
    image: Tensor,
    group: Tensor,
    *,
    sizes: Sequence[tuple[int, int]],
    num_groups: int,
    threshold: float,
    limit: int,
    is_usable: Tensor | None = None,
) -> list[Tensor]:
    """Do what `detector.boxes.nms_per_image` does for one image, in a single call of NMS.

    Groups are moved to the cells of a grid, not to those of a row: the coordinates of a thousand classes would be so
    large that float32, which NMS of ONNX computes in, would lose fractions of pixels.
    """
    [size] = sizes
    rows = torch.arange(boxes.shape[0])
    if is_usable is not None:
        rows = is_usable.nonzero()[:, 0]
    columns = math.isqrt(num_groups - 1) + 1
    cells = torch.stack((group % columns, group // columns), dim=1)
    side = torch.sym_max(*size) + 1
    moved = boxes + (cells * side).to(boxes.dtype).repeat(1, 2)
    return [rows[nms(moved[rows], scores[rows], threshold)][:limit]]


class TracedLengths(list[int]):
    """`TextBatch.lengths` as sizes of the graph; in a tensor, they would become values that nothing is known of."""

    def tolist(self) -> list[int]:
        return list(self)


class TracedRegions(TextRegions):
    """Regions of one text, as many as there are rows; their mask says which are padding."""

    @property
    @override
    def lengths(self) -> list[int]:
        return [self.boxes.shape[1]]


class AnswerGraph(nn.Module):
    """Answers one text about the regions of one image with the encoder and the task."""

    inputs = ("input_ids", "token_type_ids", "image_size", "boxes", "features")
    outputs = ("probabilities",)

    def __init__(self, network: VisionLanguageModel, template: Template) -> None:
        """Wrap the network; `template` is the layout of its texts."""
        super().__init__()
        self.encoder = network.encoder
        self.task = network.task
        self.from_end = None if template.summary is None else len(template.parts) - template.summary

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor, image_size: Tensor, boxes: Tensor, features: Tensor
    ) -> tuple[Tensor]:
        """Return the probability of each answer, or of each region, the null candidate last if the task has one.

        Args:
            input_ids, token_type_ids: int64 [L].
            image_size: int64 [2], (height, width) of the resized image.
            boxes, features: [R, 4] and [R, D], of `DetectorGraph`.

        Returns:
            float32 [Y], or [R] or [R + 1]; 0 for a region that cannot be the answer.
        """
        length = input_ids.shape[0]
        number = boxes.shape[0]
        texts = TextBatch(
            input_ids[None],
            token_type_ids[None],
            torch.ones_like(input_ids, dtype=torch.bool)[None],
            None if self.from_end is None else torch.tensor([length - self.from_end]),
            lengths=TracedLengths([length]),
        )
        regions = self.text_regions(image_size, boxes, features)
        encoded = self.encoder(texts, regions)
        if self.encoder.uses_whole_image and not self.encoder.whole_image_is_region:
            regions = regions.without_whole_image()
        batch = Batch(images=None, boxes=None, texts=texts, image_index=torch.zeros(1, 1, dtype=torch.long))
        logits = self.task(batch, regions, encoded).logits
        probabilities = logits.sigmoid() if self.task.config.loss == "binary" else logits.softmax(dim=1)
        if self.task.predicts_box:  # without the padding
            probabilities = torch.cat((probabilities[:, :number], probabilities[:, number + 1 :]), dim=1)
        return (probabilities[0],)

    def text_regions(self, image_size: Tensor, boxes: Tensor, features: Tensor) -> TextRegions:
        """Return the regions of the text, and one row of padding, without which there might be none at all."""
        number = boxes.shape[0]
        position = torch.arange(number + 1)[None]
        is_real = position < number
        row = (position - int(self.encoder.uses_whole_image)).masked_fill(~is_real, -1)
        zero = torch.zeros_like(row)
        return TracedRegions(
            features=F.pad(features, (0, 0, 0, 1))[None],
            boxes=F.pad(boxes, (0, 0, 0, 1))[None],
            image_sizes=image_size.float().expand(1, number + 1, 2),
            attention_mask=is_real,
            image_slot=zero,
            image=zero.masked_fill(~is_real, -1),
            row=row,
            is_masked=zero.bool(),
            classes=zero - 1,
        )


def export_onnx(model: TrainedModel, output: Path) -> dict[str, float]:
    """Write the files of `OnnxModel`, and return how much each graph differs from the model.

    Raises:
        UserError: the model has a part that is not exported.
        FloatingPointError: a graph differs by more than `TOLERANCE`.
    """
    check_exportable(model)
    network = copy.deepcopy(model.network).cpu().float().eval()
    template = text_template(model)
    detect = DetectorGraph(network)
    answer = AnswerGraph(network, template)
    with atomic_files(output, SETTINGS) as part, torch.no_grad():
        write_graph(detect, (random_image(TRACED_SIZE),), part / DETECTOR, {"image": ("height", "width", None)})
        variable_sizes = {
            "input_ids": ("length",),
            "token_type_ids": ("length",),
            "boxes": ("regions", None),
            "features": ("regions", None),
        }
        inputs = random_inputs(network, TRACED_SIZE, TRACED_WORDS, TRACED_REGIONS)
        write_graph(answer, inputs, part / ANSWER, variable_sizes)
        model.tokenizer.backend_tokenizer.save(str(part / TOKENIZER))
        write_json(part / SETTINGS, msgspec.to_builtins(make_settings(model, template)))
        exported = OnnxModel(part)
        differences = {
            DETECTOR: compare_features(network, exported),
            ANSWER: compare_probabilities(network, answer, exported),
        }
    for name, difference in differences.items():
        if not difference <= TOLERANCE:
            raise FloatingPointError(f"The exported {name} differs from the model by {difference:.1e}.")
    return differences


def check_exportable(model: TrainedModel) -> None:
    """Raise a UserError if the files would not answer as the model does."""
    config = model.config
    if config.detector.backend != "builtin":
        raise UserError(f"{model.name}: only the built-in detector is exported, not {config.detector.backend}.")
    if model.network.segmentation is not None:
        raise UserError(f"{model.name}: masks are not exported; train without segmentation.weight.")
    if model.network.box_refinement is not None:
        raise UserError(f"{model.name}: the refinement of boxes is not exported; train without box_refinement.weight.")
    if not (model.network.task.predicts_box or isinstance(model.network.task, AnswerTask)):
        raise UserError(
            f"{model.name}: only models that choose a region or an answer of a list are exported, and not the task "
            f"{config.task.name}."
        )
    if config.data.canvas is not None:
        raise UserError(f"{model.name}: the padding of data.canvas is not exported; set it to null.")


def text_template(model: TrainedModel) -> Template:
    """Return the layout of a user's text."""
    layout = model.network.encoder.layout
    return layout.question if isinstance(model.network.task, AnswerTask) else layout.single


def make_settings(model: TrainedModel, template: Template) -> OnnxSettings:
    """Return what the runtime must know besides the graphs."""
    task = model.network.task
    resize = model.config.data.resize
    answers: Sequence[str] = ()
    never: Sequence[str] = ()
    if isinstance(task, AnswerTask):
        answers = task.answers
        if not task.config.unknown_can_win:
            never = [UNKNOWN]
    tokens = []
    for token in template.parts:
        tokens.append(getattr(model.tokenizer, token) if isinstance(token, str) else None)
    return OnnxSettings(
        short_edge=resize.short_edge[-1],
        long_edge=resize.long_edge,
        rounding=resize.rounding,
        library=resize.library,
        tokens=tokens,
        segments=list(template.segments),
        max_length=model.config.data.max_text_length,
        whole_image=model.network.encoder.uses_whole_image,
        predicts_box=task.predicts_box,
        top_answers=0 if task.predicts_box else task.config.top_answers,
        answers=list(answers),
        never_answered=list(never),
        class_names=list(model.class_names or ()),
    )


def stable_sort(values: Any, stable: bool, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    """Translate torch's stable sort, which the exporter does not know; of equal values, TopK takes the first one."""
    from onnxscript import opset18 as op  # late: an extra

    numbers = op.CastLike(values, op.Constant(value_int=0))  # int64: TopK takes no uint8
    length = op.Shape(values, start=dim, end=dim + 1)
    ordered, rows = op.TopK(numbers, length, axis=dim, largest=int(descending), sorted=1)
    return op.CastLike(ordered, values), rows


def write_graph(
    graph: DetectorGraph | AnswerGraph,
    inputs: tuple[Tensor, ...],
    path: Path,
    variable_sizes: Mapping[str, Sequence[str | None]],
) -> None:
    """Trace a graph and write it as one ONNX file, its weights included.

    `variable_sizes`: of inputs by name, the name of each axis whose size may change, and None for the others.
    """
    shapes = []
    for name in graph.inputs:
        axes = variable_sizes.get(name, ())
        shapes.append({number: torch.export.Dim.DYNAMIC for number, axis in enumerate(axes) if axis is not None})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torchvision calls an old name of torch
        program = torch.export.export(
            graph, inputs, dynamic_shapes=tuple(shapes), prefer_deferred_runtime_asserts_over_guards=True
        )
        exported = torch.onnx.export(
            program,
            dynamo=True,
            input_names=graph.inputs,
            output_names=graph.outputs,
            opset_version=OPSET,
            custom_translation_table={torch.ops.aten.sort.stable: stable_sort},
            verbose=False,
        )
    exported.save(path)


def random_image(size: tuple[int, int]) -> Tensor:
    """Return an image of noise, uint8 [height, width, 3]."""
    random = torch.Generator().manual_seed(0)
    return torch.randint(256, (*size, 3), generator=random, dtype=torch.uint8)


def random_inputs(
    network: VisionLanguageModel, size: tuple[int, int], num_words: int, num_regions: int
) -> tuple[Tensor, ...]:
    """Return random inputs of `AnswerGraph`."""
    random = torch.Generator().manual_seed(0)
    config = network.encoder.config
    height, width = size
    corners = torch.rand(2, num_regions, 2, generator=random).sort(dim=0).values * torch.tensor([width, height])
    input_ids = torch.randint(config.vocab_size, (num_words,), generator=random)
    features = torch.randn(num_regions, config.feature_dim, generator=random)
    return input_ids, torch.zeros_like(input_ids), torch.tensor(size), torch.cat(list(corners), dim=1), features


def compare_features(network: VisionLanguageModel, exported: OnnxModel) -> float:
    """Return the largest difference of features from the model's of the same boxes, relative to the largest feature."""
    image = random_image(CHECKED_SIZE)
    regions = exported.detect(image.numpy())
    is_bgr = network.detector.config.input.format == "BGR"
    pixels = (image.flip(2) if is_bgr else image).permute(2, 0, 1)[None]
    size = torch.tensor([CHECKED_SIZE])
    whole_image = network.encoder.uses_whole_image
    boxes = torch.tensor(regions.boxes[int(whole_image) :])
    expected = network.detector(ImageBatch(pixels, size, size, ["noise"]), [boxes], whole_image=whole_image)
    if not len(regions.boxes):
        return 0.0
    features = expected.features[0].numpy()
    return float(np.abs(regions.features - features).max() / np.abs(features).max())


def compare_probabilities(network: VisionLanguageModel, graph: AnswerGraph, exported: OnnxModel) -> float:
    """Return the largest difference of the probabilities of random inputs."""
    inputs = random_inputs(network, CHECKED_SIZE, TRACED_WORDS + 5, TRACED_REGIONS + 4)
    [expected] = graph(*inputs)
    probabilities = exported.run_answer(*(values.numpy() for values in inputs))
    return float(np.abs(probabilities - expected.numpy()).max())
