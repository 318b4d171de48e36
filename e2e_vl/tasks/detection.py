"""Object detection: boxes and classes of the detector, evaluated with COCO's average precision.

Each image has one empty text; use an encoder that ignores texts.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from jaxtyping import Int64
from torch import Tensor

from detector.boxes import pairwise_iou, rescale_detections
from detector.coco_ap import coco_metrics
from detector.errors import UserError
from detector.images import load_image
from detector.structures import Detector
from e2e_vl.drawing import BLUE, GREEN, RED, Colour, draw_boxes
from e2e_vl.examples import GeneratorFactory, ImageExample, Preprocessor, Targets, TextExample, stacked
from e2e_vl.predictions import Box, Id, Prediction, Score
from e2e_vl.samples import Categories, DatasetInfo, Sample, SampleText
from e2e_vl.structures import Batch, EncoderOutput, ModelOutput, TaskOutput, TextRegions
from e2e_vl.tasks.base import PredictionSummary, Task
from e2e_vl.tasks.config import DetectionConfig
from e2e_vl.text import TextTokenizer


@dataclasses.dataclass
class CategoryTargets(Targets):
    """The data set's categories for the detector's classes."""

    category_ids: Int64[np.ndarray, " K"] | Int64[Tensor, "M K"] | None = stacked()


class DetectionPreprocessor(Preprocessor):
    """Encodes the empty text of an image."""

    def encode_text(
        self, text: SampleText, sample: Sample, images: Sequence[ImageExample], make_generator: GeneratorFactory
    ) -> Iterable[TextExample]:
        targets = CategoryTargets(np.array(text.truth.ids, dtype=np.int64))
        yield TextExample(self.text_tokenizer.single(()), text.image_index, self.record(text, images), targets)


class TrueObject(msgspec.Struct, frozen=True):
    """An annotated object in a prediction."""

    box: Box
    category_id: int
    category: str
    is_crowd: bool
    area: float | None = None  # area of its mask, pixels; None: use the box


class DetectionPrediction(Prediction, kw_only=True):
    """The detections of one image, best score first."""

    image_id: Id
    boxes: tuple[Box, ...]
    scores: tuple[Score, ...]
    category_ids: tuple[int, ...]
    objects: tuple[TrueObject, ...]


class DetectionTask(Task):
    """Has no head and no loss of its own: the detection losses are in `Regions.losses`."""

    predicts_classes = True
    answers_questions = False
    prediction_class = DetectionPrediction

    def __init__(self, hidden_size: int, config: DetectionConfig | None = None):
        super().__init__()
        self.config = config or DetectionConfig()
        # id -> name, for pictures, set by `check_data`; unknown categories are shown as numbers
        self.category_names: dict[int, str] = {}

    def preprocessor(self, text_tokenizer: TextTokenizer) -> DetectionPreprocessor:
        return DetectionPreprocessor(text_tokenizer)

    def check_data(self, info: DatasetInfo, detector: Detector) -> None:
        """Store the category names."""
        truth = next(iter(info.truths()), None)
        if isinstance(truth, Categories) and info.class_names is not None:
            self.category_names = dict(zip(truth.ids, info.class_names, strict=True))

    def forward(self, batch: Batch, text_regions: TextRegions, encoded: EncoderOutput) -> TaskOutput:
        """Return no losses, and empty `logits` [M, 0]."""
        if self.training and batch.detection_targets is None:
            raise UserError("Detection is trained only with the detection losses; set detector.loss_weight to 1.")
        return TaskOutput(losses={}, logits=text_regions.features.new_zeros(len(batch), 0))

    def predict(self, batch: Batch, output: ModelOutput) -> list[DetectionPrediction]:
        """The detections of each image."""
        regions, category_ids = output.regions, batch.targets.category_ids
        predictions = []
        for row, image in enumerate(batch.image_index[:, 0].tolist()):
            sizes = batch.images.sizes[image].tolist(), batch.images.original_sizes[image].tolist()
            boxes, kept = rescale_detections(regions.boxes[image], *sizes)
            predictions.append(
                self.prediction(
                    batch.records[row],
                    boxes=boxes.tolist(),
                    scores=regions.scores[image][kept].tolist(),
                    category_ids=category_ids[row][regions.classes[image][kept]].tolist(),
                )
            )
        return predictions

    def correctness(self, prediction: DetectionPrediction) -> float:
        """F1 score of one image; 1 if there are neither objects nor detections.

        Detections with a score of at least `shown_score` count, and all objects that are not crowds.
        """
        shown, found = self._matches(prediction)
        total = len(shown) + sum(not entry.is_crowd for entry in prediction.objects)
        return 2 * len(found) / total if total else 1.0

    def _matches(self, prediction: DetectionPrediction) -> tuple[list[int], dict[int, int]]:
        """Rows of the detections with a sufficient score; and detection row -> row of the matched object.

        Each detection, best first, is matched to the unmatched object of its category with the highest IoU.
        """
        shown = [row for row, score in enumerate(prediction.scores) if score >= self.config.shown_score]
        rows = [row for row, entry in enumerate(prediction.objects) if not entry.is_crowd]
        if not shown or not rows:
            return shown, {}
        boxes = np.array([prediction.boxes[row] for row in shown], dtype=np.float64)
        iou = pairwise_iou(boxes, np.array([prediction.objects[row].box for row in rows], dtype=np.float64))
        found_ids = np.array([prediction.category_ids[row] for row in shown])
        iou[found_ids[:, None] != np.array([prediction.objects[row].category_id for row in rows])] = 0
        found = {}
        for number, row in enumerate(shown):
            best = int(iou[number].argmax())
            if iou[number, best] >= self.config.positive_iou:
                found[row] = rows[best]
                iou[:, best] = 0
        return shown, found

    def metrics(self, predictions: list[DetectionPrediction]) -> dict[str, float | None]:
        """COCO average precision, see `detector.coco_ap.coco_metrics`."""
        return coco_metrics([msgspec.to_builtins(prediction) for prediction in predictions])

    def draw(self, prediction: DetectionPrediction) -> np.ndarray:
        """Detections with a sufficient score in blue (wrong: red), missed objects in green."""
        names = self.category_names | {entry.category_id: entry.category for entry in prediction.objects}
        shown, found = self._matches(prediction)
        drawn: list[tuple[Box, str, Colour]] = []
        for row in shown:
            category = prediction.category_ids[row]
            label = f"{names.get(category, f'category {category}')} {prediction.scores[row]:.2f}"
            drawn.append((prediction.boxes[row], label, BLUE if row in found else RED))
        for number, entry in enumerate(prediction.objects):
            if number not in found.values():
                label = f"{'crowd of' if entry.is_crowd else 'missed'} {entry.category}"
                drawn.append((entry.box, label, GREEN))
        boxes, labels, colours = [list(column) for column in zip(*drawn, strict=True)] or [[], [], []]
        return draw_boxes(load_image(prediction.file_name, "RGB"), boxes, labels=labels, colours=colours)

    def describe(self, prediction: DetectionPrediction) -> PredictionSummary:
        """The number of objects found and of wrong boxes."""
        shown, found = self._matches(prediction)
        total = sum(not entry.is_crowd for entry in prediction.objects)
        answer = f"objects found: {len(found)} of {total}, wrong boxes: {len(shown) - len(found)}"
        return PredictionSummary(f"image {prediction.image_id}", answer, note=f"F1 {self.correctness(prediction):.2f}")
