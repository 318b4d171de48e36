"""VL-BERT's pre-training (paper, section 3.3): masked words and masked regions, each with the other as a clue.

Reads from a batch
    targets["mlm_labels"]    int64 [M, L], the masked wordpieces; -1 = nothing to predict
    targets["is_match"]      int64 [M], 1 if the text belongs to its image; only for the relationship objective
    targets["region_seed"]   int64 [M], optional: makes the choice of regions depend on the text alone
    region_targets["class_probs"]  N x float [R, C], optional: class distributions from a file

Texts that look at no image are the text-only corpus: their words are an objective of their own.

Shape legend
    N   images in the batch
    M   texts in the batch
    L   wordpieces of the longest text
    R   regions of the text with the most regions
    H   hidden size
    V   wordpieces of the vocabulary
    C   region classes, background included
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from detector.interface import Detector
from detector.pixel_masking import mask_rectangles
from detector.structures import Loss
from e2e_vl.structures import Batch, EncoderOutput, ModelOutput, TaskOutput, TextRegions
from e2e_vl.tasks.base import Task
from e2e_vl.tasks.pretraining_asked import answer_lines, describe_answer, hide_asked
from e2e_vl.tasks.pretraining_inputs import (
    cut_to_length,
    describe_classes,
    draw_regions,
    image_seeds,
    with_black_pixels,
    without_hidden_features,
)

CHOICES = {
    "region_labels": ("distribution", "class"),
    "teacher": ("frozen", "current", "file"),
    "hidden_pixels": ("mean", "black"),
    "background": ("last", "first"),
}


@dataclasses.dataclass
class PretrainingConfig:
    """Weights of the objectives (0 = off) and their rules; the defaults are those of the official code.

    Attributes:
        masked_words: weight of masked language modelling with visual clues.
        masked_text: weight of masked language modelling of the text-only corpus.
        masked_regions: weight of masked RoI classification with linguistic clues.
        relationship: weight of sentence-image relationship prediction; needs the encoder's pooler (`with_pooler`).
        vocab_size: V, the encoder's; filled in when the model is built.
        region_classes: C, classes of the detector and the background; 1601 for Visual Genome's.
        region_probability: chance of a region to be predicted.
        hide_probability: chance of a region that is to be predicted to be hidden; the paper always hides it (1.0).
        region_labels: "distribution": the detector's whole class distribution (official code). "class": its best
            class (paper).
        teacher: whose distribution: "frozen" = a copy of the detector as it was when training began; "current" = the
            detector in training; "file" = `region_targets["class_probs"]`.
        hide_pixels: hide a region in the image, before the detector. False: only its feature, which a learned vector
            replaces (the encoder's `hidden_region_feature`), although neighbours and the whole image still show it.
        hidden_pixels: what hidden pixels become. "mean": zero in the network's input, which is the mean colour
            (official code). "black": zero in the image, before the mean is subtracted (paper, section 3.3).
        background: place of the background among the region classes, with a detector as teacher. "last": behind the
            detector's classes, as in Detectron2. "first": as in the files that the official code learns from, and so in
            the region classifier of its checkpoints. Class distributions from a file stay as they are in it.
        max_own_regions: most boxes when the detector finds them itself; None = all its detections.
        max_length: wordpieces and regions of a text together; None = no cut.
    """

    masked_words: float = 1.0
    masked_text: float = 1.0
    masked_regions: float = 1.0
    relationship: float = 0.0
    vocab_size: int | None = None
    region_classes: int = 1601
    region_probability: float = 0.15
    hide_probability: float = 0.9
    region_labels: Literal["distribution", "class"] = "distribution"
    teacher: Literal["frozen", "current", "file"] = "frozen"
    hide_pixels: bool = True
    hidden_pixels: Literal["mean", "black"] = "mean"
    background: Literal["last", "first"] = "last"
    max_own_regions: int | None = 100
    max_length: int | None = 64

    def __post_init__(self) -> None:
        for name in ("masked_words", "masked_text", "masked_regions", "relationship"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"task.config.{name} is {getattr(self, name)}; a weight must not be negative.")
        for name in ("region_probability", "hide_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"task.config.{name} is {getattr(self, name)}; it must be from 0 to 1.")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f'task.config.{name} is "{getattr(self, name)}"; choose one of {", ".join(choices)}.')
        if self.max_length is not None and self.max_length < 3:
            raise ValueError(f"task.config.max_length is {self.max_length}; two wordpieces and a region need 3.")

    @property
    def has_background_last(self) -> bool:
        """The background is the last region class; official files have it first."""
        return self.teacher != "file" and self.background == "last"


class WordHead(nn.Module):
    """BERT's masked-language-modelling head: Linear, GELU, LayerNorm, then the encoder's own word table and a bias."""

    def __init__(self, hidden_size: int, vocab_size: int):
        super().__init__()
        self.transform = nn.ModuleDict({"dense": nn.Linear(hidden_size, hidden_size)})
        self.transform["norm"] = nn.LayerNorm(hidden_size, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        nn.init.normal_(self.transform["dense"].weight, std=0.02)
        nn.init.zeros_(self.transform["dense"].bias)

    def forward(self, states: Tensor, word_table: Tensor) -> Tensor:
        """States [..., H] and the word table [V, H] -> logits [..., V]."""
        states = self.transform["norm"](F.gelu(self.transform["dense"](states)))
        return F.linear(states, word_table, self.bias)


class RegionClassifier(nn.Module):
    """Linear, GELU, Linear to the region classes: [..., H] -> [..., C]."""

    def __init__(self, hidden_size: int, classes: int):
        super().__init__()
        self.transform = nn.ModuleDict({"dense": nn.Linear(hidden_size, hidden_size)})
        self.output = nn.Linear(hidden_size, classes)
        for linear in (self.transform["dense"], self.output):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        return self.output(F.gelu(self.transform["dense"](states)))


class PretrainingTask(Task):
    """The four objectives. Each loss is a mean over all labelled items of the batch, 0 if there is none."""

    def __init__(self, hidden_size: int, config: PretrainingConfig | None = None):
        super().__init__()
        self.config = config or PretrainingConfig()
        if self.config.vocab_size is None:
            raise ValueError("task.config.vocab_size is missing; it is the size of the encoder's vocabulary.")
        self.mlm = WordHead(hidden_size, self.config.vocab_size)
        self.region_classifier = RegionClassifier(hidden_size, self.config.region_classes)
        self.relationship = nn.Linear(hidden_size, 2) if self.config.relationship else None
        if self.relationship is not None:
            nn.init.normal_(self.relationship.weight, std=0.02)
            nn.init.zeros_(self.relationship.bias)
        self.teacher: Detector | None = None
        self.whole_image = True

    def initialise(self, tokenizer: PreTrainedTokenizerBase, encoder: nn.Module, detector: Detector) -> None:
        """Keep a frozen copy of the detector, if it is the teacher.

        Raises:
            ValueError: the encoder or the detector does not fit the objectives.
        """
        config = self.config
        self.whole_image = encoder.whole_image_is_region
        if config.relationship and not encoder.config.with_pooler:
            raise ValueError("task.config.relationship needs encoder.config.with_pooler: true.")
        if not config.masked_regions:
            return
        if not encoder.config.hidden_region_embedding and encoder.config.region_word != "img":
            raise ValueError(
                "task.config.masked_regions needs encoder.config.hidden_region_embedding: true, or region_word: img."
            )
        if not config.hide_pixels and not encoder.config.hidden_region_feature:
            raise ValueError("task.config.hide_pixels: false needs encoder.config.hidden_region_feature: true.")
        if config.teacher != "file" and detector.num_classes + 1 != config.region_classes:
            raise ValueError(
                f"task.config.region_classes is {config.region_classes}, but the detector has {detector.num_classes} "
                "classes and the background; make them agree."
            )
        if config.teacher == "frozen":
            self.teacher = copy.deepcopy(detector).requires_grad_(False).eval()

    def check_data(self, dataset: Any, detector: Detector) -> None:
        """Objectives need their data: a corpus (`dataset.corpus`), captions of other images (`dataset.config`)."""
        if self.config.masked_text and getattr(dataset, "corpus", True) is None:
            raise ValueError(
                f"task.config.masked_text is {self.config.masked_text}, but the data have no text-only corpus; set "
                "data.files.corpus and data.config.use_corpus=true, or task.config.masked_text=0."
            )
        if self.config.relationship and getattr(getattr(dataset, "config", None), "relationship", None) == 0:
            raise ValueError(
                f"task.config.relationship is {self.config.relationship}, but every text belongs to its image: "
                "data.config.relationship is 0; set it to 0.5, or task.config.relationship=0."
            )

    def train(self, mode: bool = True) -> PretrainingTask:
        """As in `nn.Module`; the frozen teacher stays in evaluation mode."""
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def prepare(self, batch: Batch, detector: Detector) -> Batch:
        """Choose the regions to predict, hide them, and cut what is too long.

        A batch that comes with `hidden_regions` was prepared before and stays as it is.

        Raises:
            ValueError: the class distributions are to come from a file, and the batch has none; or pixels are to be
                hidden, and the batch has precomputed features.
        """
        config = self.config
        if batch.hidden_regions is not None:
            return batch
        if config.masked_regions and config.hide_pixels and batch.images.precomputed is not None:
            raise ValueError(
                "Precomputed features have no pixels to hide, so hidden regions would stay visible; set "
                "task.config.hide_pixels to false and encoder.config.hidden_region_feature to true."
            )
        boxes = batch.boxes
        if config.masked_regions or boxes is None:
            boxes, batch = self._label_regions(batch, detector)
        if config.masked_regions:
            device = batch.looks_at.device
            counts = [len(rows) for rows in boxes]
            labelled, hidden = draw_regions(
                counts, image_seeds(batch), config.region_probability, config.hide_probability, device
            )
            batch.region_targets["is_labelled"] = labelled
            batch.hidden_regions = hidden
            if config.hide_pixels:
                self._hide_pixels(batch, boxes, detector)
            batch.images = without_hidden_features(batch.images, hidden)
        if config.max_length is not None:
            batch = cut_to_length(batch, boxes, config.max_length, whole_image=self.whole_image)
        return batch

    def prepare_asked(self, batch: Batch, detector: Detector) -> Batch:
        """Hide the boxes of `batch.pixel_masks`, which become the first candidates, and no others; then cut.

        Raises:
            ValueError: boxes are to be hidden, but the model never learned to recognise hidden ones.
        """
        teacher = None
        if self.config.teacher != "file":
            teacher = detector if self.teacher is None else self.teacher
        if batch.pixel_masks is not None and not self.config.masked_regions:
            raise ValueError("The run was pre-trained without masked regions; leave --hide out.")
        most, classes = self.config.max_own_regions, self.config.region_classes
        background_first = not self.config.has_background_last
        batch = hide_asked(batch, detector, teacher, most, classes, background_first=background_first)
        if self.config.hide_pixels:
            self._hide_pixels(batch, batch.boxes, detector)
        if self.config.max_length is not None:
            batch = cut_to_length(batch, batch.boxes, self.config.max_length, whole_image=self.whole_image)
        return batch

    def _hide_pixels(self, batch: Batch, boxes: list[Tensor], detector: Detector) -> None:
        """Take the pixels of `hidden_regions`, of the boxes N x [R, 4], out of the batch's images."""
        masks = [
            mask_rectangles(rows[is_hidden], size, "vl_bert").to(rows.dtype)
            for rows, is_hidden, size in zip(boxes, batch.hidden_regions, batch.images.sizes.tolist(), strict=True)
        ]
        if self.config.hidden_pixels == "mean":
            batch.pixel_masks = masks
        else:
            batch.images = with_black_pixels(batch.images, masks, detector)

    def _label_regions(self, batch: Batch, detector: Detector) -> tuple[list[Tensor], Batch]:
        """Boxes, and a copy of the batch that has them with their class distributions."""
        boxes, config = batch.boxes, self.config
        targets = dict(batch.region_targets)
        if config.teacher == "file" and config.masked_regions and "class_probs" not in targets:
            raise ValueError(
                "task.config.teacher is file, but the data come without class distributions of their boxes; set it to "
                "frozen or current."
            )
        if boxes is None or config.teacher != "file":
            teacher = detector if self.teacher is None else self.teacher
            boxes, targets["class_probs"] = describe_classes(
                teacher,
                batch.images,
                boxes,
                config.max_own_regions,
                background_first=not config.has_background_last,
            )
        return boxes, dataclasses.replace(batch, boxes=boxes, region_targets=targets)

    def forward(self, batch: Batch, regions: TextRegions, encoded: EncoderOutput) -> TaskOutput:
        """The weighted losses `masked_words`, `masked_text`, `masked_regions`, `relationship`.

        Returns:
            `logits` float32 [labelled words, V], and in `details` what `predict` counts: for each objective how many
            items a text has and how many were right, float [M].
        """
        config = self.config
        losses: dict[str, Loss] = {}
        details: dict[str, Tensor] = {}
        has_image = (batch.looks_at >= 0).any(dim=1)

        labels = batch.targets["mlm_labels"]
        is_labelled = labels >= 0
        truth = labels[is_labelled]
        text = is_labelled.nonzero()[:, 0]  # which text a labelled word belongs to
        logits = _float(self.mlm(encoded.text[is_labelled], encoded.word_table))
        each = F.cross_entropy(logits, truth, reduction="none")
        for name, weight, chosen in (
            ("masked_words", config.masked_words, has_image[text]),
            ("masked_text", config.masked_text, ~has_image[text]),
        ):
            if weight:
                losses[name] = Loss(weight * (each * chosen).sum(), chosen.sum().float())
        details |= _count(text, logits.argmax(dim=1) == truth, len(batch), "words")

        if config.masked_regions:
            loss, text, is_right = self._region_loss(batch, regions, encoded)
            losses["masked_regions"] = loss
            details |= _count(text, is_right, len(batch), "regions")
        if self.relationship is not None:
            scores = _float(self.relationship(encoded.pooled[has_image]))
            truth = batch.targets["is_match"][has_image]
            each = F.cross_entropy(scores, truth, reduction="none")
            losses["relationship"] = Loss(config.relationship * each.sum(), has_image.sum().float())
            details |= _count(has_image.nonzero()[:, 0], scores.argmax(dim=1) == truth, len(batch), "relationship")
        return TaskOutput(losses=losses, logits=logits, details=details)

    def _region_loss(self, batch: Batch, regions: TextRegions, encoded: EncoderOutput) -> tuple[Loss, Tensor, Tensor]:
        """Soft cross entropy of the labelled regions; of each, its text and whether its best class was found.

        Rows of class distributions that do not add up to 1 (by 0.1 or more) are ignored, as in the official code.
        """
        chosen = regions.gather(batch.region_targets["is_labelled"], fill=False)
        probabilities = regions.gather(batch.region_targets["class_probs"], fill=0.0)[chosen]
        if probabilities.shape[1] != self.config.region_classes:
            raise ValueError(
                f"The class distributions have {probabilities.shape[1]} columns, but task.config.region_classes is "
                f"{self.config.region_classes}; make them agree."
            )
        usable = (probabilities.sum(dim=1) - 1).abs() < 0.1
        probabilities, text = probabilities[usable], chosen.nonzero()[:, 0][usable]
        logits = _float(self.region_classifier(encoded.regions[chosen][usable]))
        best = probabilities.argmax(dim=1)
        if self.config.region_labels == "class":
            each = F.cross_entropy(logits, best, reduction="none")
        else:
            each = -(probabilities.to(logits.dtype) * logits.log_softmax(dim=1)).sum(dim=1)
        count = each.new_tensor(float(len(each)))
        return Loss(self.config.masked_regions * each.sum(), count), text, logits.argmax(dim=1) == best

    def predict(self, batch: Batch, output: ModelOutput) -> list[dict[str, Any]]:
        """How many masked items of each text were found: keys `words`, `words_right`, `regions`, ... of captions."""
        details = {name: values.tolist() for name, values in output.task.details.items()}
        return [
            {**record, **{name: values[row] for name, values in details.items()}}
            for row, record in enumerate(batch.records)
            if int(batch.looks_at[row].max()) >= 0
        ]

    def answer(self, batch: Batch, output: ModelOutput, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """The best words at every [MASK] and the best classes of every hidden region, see `describe_answer`."""
        is_hidden = output.text_regions.is_hidden[0]
        region_logits = _float(self.region_classifier(output.encoded.regions[0, is_hidden]))
        return describe_answer(
            batch,
            output.task.logits,
            region_logits,
            tokenizer,
            background_first=not self.config.has_background_last,
            are_detectors=self.config.teacher != "file",
        )

    def answer_lines(self, record: dict[str, Any]) -> list[str]:
        """The text with the best words in it, then the alternatives."""
        return answer_lines(record)

    def correct(self, record: dict[str, Any]) -> float:
        """Share of the masked words that were found; 1 if none was masked."""
        return record["words_right"] / record["words"] if record["words"] else 1.0

    def metrics(self, records: list[dict[str, Any]]) -> dict[str, float]:
        """`masked_words`, `masked_regions`, `relationship`: share of all masked items that were found."""
        scores = {}
        for name, metric in (("words", "masked_words"), ("regions", "masked_regions"), ("relationship",) * 2):
            total = sum(record.get(name, 0) for record in records)
            if total:
                scores[metric] = sum(record[f"{name}_right"] for record in records) / total
        return scores


def _float(values: Tensor) -> Tensor:
    """At least float32: losses are never computed in half precision."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _count(text: Tensor, is_right: Tensor, texts: int, name: str) -> dict[str, Tensor]:
    """Items and right items of each text, float [M]."""
    return {
        name: torch.bincount(text, minlength=texts).float(),
        f"{name}_right": torch.bincount(text, weights=is_right.float(), minlength=texts),
    }
