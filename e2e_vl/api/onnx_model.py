"""Answer questions with the ONNX files of `e2e-vl export --format onnx`, in onnxruntime and without torch.

Shape legend: see `e2e_vl/structures.py`; here R counts all regions of the image, the whole image included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64, UInt8
from tokenizers import Tokenizer

from detector.config import ResizeLibrary, Rounding
from detector.errors import MissingFileError, UserError
from detector.image_files import read_image
from detector.io import read_json
from detector.resize_rule import ResizeRule, resize_image, resize_like_torch
from e2e_vl.data.user_images import to_image_file
from e2e_vl.registry import Config

DETECTOR = "detector.onnx"
ANSWER = "answer.onnx"
TOKENIZER = "tokenizer.json"
SETTINGS = "settings.json"


class OnnxSettings(Config):
    """What must be known besides the graphs."""

    short_edge: int  # see `ResizeRule`
    long_edge: int
    rounding: Rounding
    library: ResizeLibrary
    tokens: list[int | None]  # ids of special tokens around the wordpieces of the text, which None stands for
    segments: list[int]  # of each of `tokens`
    max_length: int | None  # most wordpieces, special tokens included; None: no limit
    whole_image: bool  # region 0 is the whole image
    predicts_box: bool  # the answer is a region; otherwise one of `answers`
    top_answers: int  # number of best answers, unless the user asks for another one
    answers: list[str]
    never_answered: list[str]  # of `answers`, those that have a probability but are never the answer
    class_names: list[str]  # of the detector's classes; empty: unknown


class ImageRegions(NamedTuple):
    """The output of the detector's graph."""

    boxes: Float32[np.ndarray, "R 4"]  # in pixels of the resized image
    scores: Float32[np.ndarray, " R"]
    classes: Int64[np.ndarray, " R"]
    features: Float32[np.ndarray, "R D"]


@dataclasses.dataclass(frozen=True)
class OnnxAnswer:
    """The answer to one text. Boxes are xyxy in pixels of the original image."""

    question: str
    answer: str | None  # None: the model predicts a box
    score: float  # probability of the answer or the box, or that nothing fits
    box: Float32[np.ndarray, " 4"] | None  # None: the model predicts no box, or nothing fits
    top_answers: list[tuple[str, float]]  # best first
    boxes: Float32[np.ndarray, "candidates 4"]  # the candidates that the detector found, best detection first
    box_scores: Float32[np.ndarray, " candidates"]  # probabilities; those of the detector if no box is predicted
    box_names: list[str]  # their classes; "" without class names


class OnnxModel:
    """The ONNX files of a model, see `e2e_vl.load_onnx`."""

    def __init__(self, folder: str | Path, providers: Sequence[Any] = ("CPUExecutionProvider",)) -> None:
        """Load the files of `e2e-vl export --format onnx`; `providers` of onnxruntime compute the graphs."""
        try:
            import onnxruntime  # late: an extra
        except ImportError as error:
            raise UserError('ONNX files need onnxruntime; install it with pip install "e2e-vl[onnx]".') from error
        folder = Path(folder)
        if not (folder / SETTINGS).is_file():
            raise MissingFileError(f"{folder}: no {SETTINGS}; give a folder that e2e-vl export --format onnx wrote.")
        self.settings = read_json(folder / SETTINGS, OnnxSettings)
        self.tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self._detector = onnxruntime.InferenceSession(folder / DETECTOR, providers=list(providers))
        self._answer = onnxruntime.InferenceSession(folder / ANSWER, providers=list(providers))

    def ask(self, image: Any, text: str | Sequence[str], *, top_k: int | None = None) -> OnnxAnswer | list[OnnxAnswer]:
        """Answer a text, or several, about an image as `TrainedModel.ask` does; the detector runs once.

        Args:
            image: a path, an address, bytes, an open file, a PIL image or an array, see `to_image_file`.
            text: a list of texts gives a list of answers.
            top_k: number of `top_answers`.
        """
        texts = [text] if isinstance(text, str) else list(text)
        pixels, original_size = self.read(image)
        regions = self.detect(pixels)
        size = np.array(pixels.shape[:2], dtype=np.int64)
        scale = (size / original_size)[::-1].astype(np.float32)  # of x and y
        original_boxes = regions.boxes / np.tile(scale, 2)
        answers = []
        for words in texts:
            input_ids, segments = self.encode(words)
            probabilities = self.run_answer(input_ids, segments, size, regions.boxes, regions.features)
            answers.append(self._make_answer(words, probabilities, regions, original_boxes, top_k))
        return answers[0] if isinstance(text, str) else answers

    def read(self, image: Any) -> tuple[UInt8[np.ndarray, "height width 3"], tuple[int, int]]:
        """Return an image in RGB as the detector sees it, and (height, width) of the original one."""
        file = to_image_file(image)
        source = file if isinstance(file, Path) else file.content
        original = read_image(source, str(file))
        settings = self.settings
        rule = ResizeRule(settings.short_edge, settings.long_edge, settings.rounding, settings.library)
        size = (original.height, original.width)
        new_size = rule.target_size(*size)
        if rule.library == "pil":
            return np.asarray(resize_image(original, new_size)), size
        return resize_like_torch(np.asarray(original), new_size), size

    def encode(self, text: str) -> tuple[Int64[np.ndarray, " L"], Int64[np.ndarray, " L"]]:
        """Return the wordpieces of a text with special tokens, and their segments."""
        if not text.strip():
            raise UserError("The text is empty; write a question or a phrase.")
        settings = self.settings
        pieces = self.tokenizer.encode(text, add_special_tokens=False).ids
        if settings.max_length is not None:
            pieces = pieces[: max(settings.max_length - len(settings.tokens) + 1, 0)]
        ids: list[int] = []
        segments: list[int] = []
        for token, segment in zip(settings.tokens, settings.segments, strict=True):
            part = pieces if token is None else [token]
            ids += part
            segments += [segment] * len(part)
        return np.array(ids, dtype=np.int64), np.array(segments, dtype=np.int64)

    def detect(self, pixels: UInt8[np.ndarray, "height width 3"]) -> ImageRegions:
        """Find and describe the regions of a resized image."""
        return ImageRegions(*self._detector.run(list(ImageRegions._fields), {"image": pixels}))

    def run_answer(
        self,
        input_ids: Int64[np.ndarray, " L"],
        token_type_ids: Int64[np.ndarray, " L"],
        image_size: Int64[np.ndarray, " 2"],
        boxes: Float32[np.ndarray, "R 4"],
        features: Float32[np.ndarray, "R D"],
    ) -> Float32[np.ndarray, " _"]:
        """Return the probability of each answer; or of each region, and last that nothing fits, if the model knows.

        `image_size` is (height, width) of the resized image.
        """
        inputs = {
            "input_ids": input_ids,
            "token_type_ids": token_type_ids,
            "image_size": image_size,
            "boxes": boxes,
            "features": features,
        }
        [probabilities] = self._answer.run(["probabilities"], inputs)
        return probabilities

    def _make_answer(
        self,
        text: str,
        probabilities: Float32[np.ndarray, " _"],
        regions: ImageRegions,
        original_boxes: Float32[np.ndarray, "R 4"],
        top_k: int | None,
    ) -> OnnxAnswer:
        settings = self.settings
        first = int(settings.whole_image)
        names = [*settings.class_names, ""]  # the last one: without names, or of no class
        box_names = [names[min(number, len(names) - 1)] for number in regions.classes[first:].tolist()]
        answer = None
        box = None
        score = 0.0
        top_answers: list[tuple[str, float]] = []
        box_scores = regions.scores[first:]
        if settings.predicts_box:
            box_scores = probabilities[first : len(original_boxes)]
            if len(probabilities) and probabilities.max() > 0:
                winner = int(probabilities.argmax())
                score = float(probabilities[winner])
                box = original_boxes[winner] if winner < len(original_boxes) else None
        else:
            if top_k is None:
                top_k = settings.top_answers
            for number in np.argsort(-probabilities, kind="stable").tolist():
                if settings.answers[number] not in settings.never_answered:
                    top_answers.append((settings.answers[number], float(probabilities[number])))
            top_answers = top_answers[:top_k]
            answer, score = top_answers[0]
        return OnnxAnswer(text, answer, score, box, top_answers, original_boxes[first:], box_scores, box_names)
