"""Object detection: boxes and classes of the detector, evaluated with COCO's average precision.

Each image has one empty text; use an encoder that ignores texts. Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Int64
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor
from typing_extensions import override

from detector.boxes import pairwise_iou, rescale_detections
from detector.errors import UserError
from e2e_vl.drawing import BLUE, GREEN, RED, Colour, draw_boxes
from e2e_vl.io import Id, Score
from e2e_vl.predictions import Box, Prediction, TrueObject
from e2e_vl.preprocessing import EncodedText, GeneratorFactory, Preprocessor
from e2e_vl.samples import CategorisedObjects, Sample, SampleText
from e2e_vl.structures import Batch, EncoderOutput, ModelOutput, TaskOutput, TextRegions
from e2e_vl.targets import Targets, stacked
from e2e_vl.tasks.base import PredictionSummary, Task, load_predicted_image
from e2e_vl.tasks.config import DetectionConfig
from e2e_vl.text import TextTokenizer
from e2e_vl.transforms import LoadedImage

SHOWN_SCORE = 0.5  # of detections, for the score of a single image and pictures

# COCO average precision, computed with pycocotools


SUMMARY = {"AP": 0, "AP50": 1, "AP75": 2, "APs": 3, "APm": 4, "APl": 5, "AR100": 8}  # index in `COCOeval.stats`


def coco_metrics(records: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Compute COCO's box metrics.

    Args:
        records: one per image; include images without objects or without detections. Boxes are xyxy in pixels of the
            original image:

                image_id        int
                boxes           list of [x1, y1, x2, y2], one per detection
                scores          list of floats, one per detection
                category_ids    list of ints, one per detection
                objects         ground truth: a list of {"box", "category_id"} with the optional keys "category" (a
                                name), "area" (of the object's mask; default: the box area) and "is_crowd"

    Returns:
        values in 0 .. 1, or None if there is no object: `AP` (mean over the categories and the IoU thresholds 0.5,
        0.55, ..., 0.95), `AP50`, `AP75`, `APs`, `APm`, `APl` (objects with an area below 32^2, up to 96^2, above),
        `AR100` (mean recall), and `AP/<category>` for each category in the ground truth. The 100 detections with the
        highest scores count in each image. As in COCO, detections of crowds and of categories without any object are
        ignored.
    """
    categories: dict[int, str] = {}
    images = []
    objects = []
    detections = []
    for record in records:
        image_id = record["image_id"]
        images.append({"id": image_id})
        for true_object in record["objects"]:
            category_id = true_object["category_id"]
            categories[category_id] = str(true_object.get("category", category_id))
            annotation = _annotation(image_id, category_id, true_object["box"])
            annotation["iscrowd"] = int(true_object.get("is_crowd", False))
            if true_object.get("area") is not None:
                annotation["area"] = true_object["area"]
            objects.append(annotation)
        rows = zip(record["boxes"], record["scores"], record["category_ids"], strict=True)
        for box, score, category_id in rows:
            detections.append(_annotation(image_id, category_id, box) | {"score": score})
    truth = _dataset(images, categories, objects)
    evaluation = COCOeval(truth, _dataset(images, categories, detections), iouType="bbox")
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    metrics: dict[str, float | None] = {}
    for name, index in SUMMARY.items():
        value = float(evaluation.stats[index])
        metrics[name] = None if value < 0 else value
    # [IoU thresholds, recalls, categories], all areas and 100 detections; -1 where there is no object
    precision = evaluation.eval["precision"][..., 0, -1]
    names = list(categories.values())
    for column, category_id in enumerate(evaluation.params.catIds):
        name = categories[category_id]
        if names.count(name) > 1:
            name = f"{name} {category_id}"
        values = precision[:, :, column]
        values = values[values > -1]
        metrics[f"AP/{name}"] = float(values.mean()) if len(values) else None
    return metrics


def _annotation(image_id: Id, category_id: int, box: Sequence[float]) -> dict[str, Any]:
    """Make COCO's annotation of an object or detection with an xyxy box.

    The area of an unmatched detection decides whether it counts in APs, APm or APl.
    """
    x1, y1, x2, y2 = box
    width = x2 - x1
    height = y2 - y1
    return {
        "image_id": image_id,
        "category_id": category_id,
        "bbox": [x1, y1, width, height],
        "area": width * height,
        "iscrowd": 0,
    }


def _dataset(images: list[dict], categories: dict[int, str], annotations: list[dict[str, Any]]) -> COCO:
    """Build a `COCO` object without a file. `COCO.loadRes` fails if there are no detections."""
    dataset = COCO()
    dataset.dataset = {
        "images": images,
        "categories": [{"id": category_id, "name": name} for category_id, name in categories.items()],
        # ids start at 1: pycocotools reads the id 0 of a matched object as "no match"
        "annotations": [annotation | {"id": number} for number, annotation in enumerate(annotations, start=1)],
    }
    with contextlib.redirect_stdout(io.StringIO()):
        dataset.createIndex()
    return dataset


@dataclasses.dataclass
class CategoryTargets(Targets):
    """The data set's categories for the detector's classes."""

    category_ids: Int64[np.ndarray, " K"] | Int64[Tensor, "M K"] | None = stacked()


class DetectionPrediction(Prediction, kw_only=True):
    """The detections of one image, best score first."""

    metadata_fields = Prediction.metadata_fields | {"image_id"}
    image_id: Id
    boxes: tuple[Box, ...]
    scores: tuple[Score, ...]
    category_ids: tuple[int, ...]
    categories: tuple[str, ...] = ()  # the names of the detected classes; empty: unknown
    objects: tuple[TrueObject, ...]


class DetectionPreprocessor(Preprocessor):
    """Encodes the empty text of an image."""

    prediction_class = DetectionPrediction
    learns_from = (CategorisedObjects,)

    @override
    def truth_record(self, truth: CategorisedObjects, *, flipped: bool) -> dict[str, Any]:
        return {"objects": [msgspec.to_builtins(true_object) for true_object in truth.objects]}

    @override
    def encode_text(
        self, text: SampleText, sample: Sample, images: Sequence[LoadedImage], make_generator: GeneratorFactory
    ) -> Iterable[EncodedText]:
        record = self.record(text, images)
        targets = CategoryTargets(np.array(text.truth.category_ids, dtype=np.int64))
        yield EncodedText(self.text_tokenizer.single(()), text.image_index, record, targets)


class DetectionTask(Task):
    """Has no head and no loss of its own: the detection losses are in `Regions.losses`."""

    predicts_classes = True
    answers_questions = False
    hub_task = "object-detection"
    prediction_class = DetectionPrediction

    def __init__(self, hidden_size: int, config: DetectionConfig | None = None):
        super().__init__()
        self.config = config or DetectionConfig()

    @override
    def preprocessor(self, text_tokenizer: TextTokenizer) -> DetectionPreprocessor:
        return DetectionPreprocessor(text_tokenizer)

    def forward(self, batch: Batch, text_regions: TextRegions, encoded: EncoderOutput) -> TaskOutput:
        if self.training and batch.detection_targets is None:
            raise UserError("Detection is trained only with the detection losses; set detector.loss_weight to 1.")
        return TaskOutput(losses={}, logits=text_regions.features.new_zeros(len(batch), 0))

    @override
    def predict(self, output: ModelOutput) -> list[DetectionPrediction]:
        batch = output.batch
        regions = output.regions
        category_ids = batch.targets.category_ids
        predictions = []
        for row, image in enumerate(batch.image_index[:, 0].tolist()):
            size = batch.images.sizes[image].tolist()
            original_size = batch.images.original_sizes[image].tolist()
            boxes, in_image = rescale_detections(regions.boxes[image], size, original_size)
            classes = regions.classes[image][in_image]
            categories: list[str] = []
            if output.class_names is not None:
                categories = [output.class_names[class_index] for class_index in classes.tolist()]
            predictions.append(
                self.prediction(
                    batch.records[row],
                    boxes=boxes.tolist(),
                    scores=regions.scores[image][in_image].tolist(),
                    category_ids=category_ids[row][classes].tolist(),
                    categories=categories,
                )
            )
        return predictions

    @override
    def correctness(self, prediction: DetectionPrediction) -> float:
        """Return the F1 score of one image; 1 if there are neither objects nor detections.

        Detections with a score of at least `SHOWN_SCORE` count, and all objects that are not crowds.
        """
        shown, matched = self._matches(prediction)
        total = len(shown) + sum(not true_object.is_crowd for true_object in prediction.objects)
        return 2 * len(matched) / total if total else 1.0

    def _matches(self, prediction: DetectionPrediction) -> tuple[list[int], dict[int, int]]:
        """Return the rows of the detections with a sufficient score; and detection row -> row of the matched object.

        Each detection, best first, is matched to the unmatched object of its category with the highest IoU.
        """
        shown = [row for row, score in enumerate(prediction.scores) if score >= SHOWN_SCORE]
        object_rows = [row for row, true_object in enumerate(prediction.objects) if not true_object.is_crowd]
        if not shown or not object_rows:
            return shown, {}
        boxes = np.array([prediction.boxes[row] for row in shown], dtype=np.float64)
        category_ids = np.array([prediction.category_ids[row] for row in shown])
        objects = [prediction.objects[row] for row in object_rows]
        object_boxes = np.array([true_object.box for true_object in objects], dtype=np.float64)
        object_category_ids = np.array([true_object.category_id for true_object in objects])
        iou = pairwise_iou(boxes, object_boxes)
        iou[category_ids[:, None] != object_category_ids] = 0
        matched = {}
        for number, row in enumerate(shown):
            best = int(iou[number].argmax())
            if iou[number, best] >= self.config.positive_iou:
                matched[row] = object_rows[best]
                iou[:, best] = 0
        return shown, matched

    @override
    def metrics(self, predictions: list[DetectionPrediction]) -> dict[str, float | None]:
        return coco_metrics([msgspec.to_builtins(prediction) for prediction in predictions])

    @override
    def draw(self, prediction: DetectionPrediction) -> np.ndarray:
        """Draw detections with a sufficient score in blue (wrong: red), and missed objects in green."""
        shown, matched = self._matches(prediction)
        boxes: list[Box] = []
        labels: list[str] = []
        colours: list[Colour] = []
        for row in shown:
            category = f"category {prediction.category_ids[row]}"
            if prediction.categories:
                category = prediction.categories[row]
            boxes.append(prediction.boxes[row])
            labels.append(f"{category} {prediction.scores[row]:.2f}")
            colours.append(BLUE if row in matched else RED)
        for row, true_object in enumerate(prediction.objects):
            if row in matched.values():
                continue
            reason = "crowd of" if true_object.is_crowd else "missed"
            boxes.append(true_object.box)
            labels.append(f"{reason} {true_object.category}")
            colours.append(GREEN)
        return draw_boxes(load_predicted_image(prediction), boxes, labels=labels, colours=colours)

    @override
    def describe(self, prediction: DetectionPrediction) -> PredictionSummary:
        shown, matched = self._matches(prediction)
        total = sum(not true_object.is_crowd for true_object in prediction.objects)
        answer = f"objects found: {len(matched)} of {total}, wrong boxes: {len(shown) - len(matched)}"
        return PredictionSummary(f"image {prediction.image_id}", answer, note=f"F1 {self.correctness(prediction):.2f}")
