"""The public API: ask a trained model about images, find regions, save and share the model."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

import msgspec
import numpy as np
import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, snapshot_download
from transformers import PreTrainedTokenizerBase

from detector.boxes import pairwise_iou
from detector.errors import MissingFileError, UserError, first_line
from detector.images import ResizeRule
from detector.io import atomic_files, read_json, read_yaml, write_json
from e2e_vl.api.detector import Images, RegionOptions, TrainedDetector
from e2e_vl.api.questions import check_min_score, check_top_k, make_questions
from e2e_vl.api.results import GREY, Answer, ExampleScene, ImageRegions, Region, box_marks, draw_on
from e2e_vl.api.sharing import MODEL_CARD, evaluation_results, without_absolute_paths
from e2e_vl.config import BoxSource, RunConfig
from e2e_vl.data.batching import collate, random_generator
from e2e_vl.data.user_images import ImageFile, to_image_file
from e2e_vl.data.user_inputs import boxes_of_image, convert_boxes, require_inside
from e2e_vl.extraction.regions import RANDOM_BOXES, LoadedDetector
from e2e_vl.io import DEMO, find_run
from e2e_vl.metrics.sureness import SURE
from e2e_vl.model import VisionLanguageModel
from e2e_vl.predictions import Prediction, box_text
from e2e_vl.preprocessing import EncodedSample
from e2e_vl.registry import DATASETS
from e2e_vl.run.build import build_loader, build_text_tokenizer
from e2e_vl.run.checkpoint import load_model, save_model
from e2e_vl.run.devices import choose_device, choose_precision, computing_in
from e2e_vl.run.evaluate import find_sure_threshold
from e2e_vl.run.metric_names import MetricName, metrics_from_json
from e2e_vl.run.published import build_published, find_published
from e2e_vl.samples import BrokenImageError, Question, Sample
from e2e_vl.structures import Batch, ModelOutput, class_names_of
from e2e_vl.tasks.phrase_head import add_grounded_phrases
from e2e_vl.text import has_content, unknown_words

__all__ = [
    "GREY",
    "Answer",
    "ExampleScene",
    "ImageRegions",
    "Region",
    "TrainedDetector",
    "TrainedModel",
    "box_marks",
    "choose_device",
    "draw_on",
    "load",
]

SAME_REGION = 0.5  # IoU from which two boxes are of one region


class AskOptions(TypedDict, total=False):
    """The options of `TrainedModel.ask`, for type checkers."""

    boxes: Any
    scores: Any
    names: Sequence[str] | None
    choices: Sequence[Any]
    answer: Any
    top_k: int | None
    min_score: float | None


class TrainedModel(
    ModelHubMixin,
    library_name="e2e-vl",
    tags=["vision-and-language", "object-detection"],
    model_card_template=MODEL_CARD,
):
    """A detector, an encoder and a task with their tokenizer and config, see `e2e_vl.load`.

    It is thread-safe. Boxes are xyxy in pixels of the original image.
    """

    def __init__(
        self,
        config: RunConfig,
        network: VisionLanguageModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        source: Path,
        name: str | None = None,
        metrics: Mapping[str, Any] | None = None,
        device: str | int | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
    ):
        """Wrap a loaded model.

        Args:
            source: the folder that the model was loaded from.
            name: what messages call the model; None: the folder, or "demo".
            metrics: metrics of the run, for the model card and for the threshold of sure answers.
            device: see `choose_device`.
            dtype: what the model computes in, see `TrainedModel.dtype`; None: the run's mixed precision.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.source = source
        if not name:
            name = "demo" if source == DEMO else str(source)
        self.name = name
        self._dtype = None if dtype is None else choose_precision(dtype)
        self._device = choose_device(device)
        self.network = network.to(self._device).eval()
        self._metrics = dict(metrics or {})
        self._named_metrics = metrics_from_json(self._metrics)
        self._sure_thresholds = {}
        self._loaders = {}
        for boxes in (BoxSource.ONLINE, BoxSource.GT):
            self._sure_thresholds[boxes] = find_sure_threshold(self._named_metrics, config.data.eval_splits, boxes)
            self._loaders[boxes] = build_loader(config, network, None, boxes)
        self._dataset = DATASETS[config.data.name].cls
        self._options = config.data.config
        self._preprocessor = network.task.preprocessor(build_text_tokenizer(config, network, tokenizer))

    def __repr__(self) -> str:
        config = self.config
        size = config.data.resize
        dtype = str(self.dtype).removeprefix("torch.")
        num_parameters = sum(parameter.numel() for parameter in self.network.parameters())
        rows = {
            "task": config.task.name,
            "detector": f"{config.detector.backend}, {self.network.detector.num_classes} classes",
            "encoder": config.encoder.name,
            "size": f"{num_parameters / 1e6:.1f} million parameters",
            "images": f"short edge {size.short_edge[-1]}, long edge at most {size.long_edge} pixels",
            "device": self.device,
            "dtype": dtype if dtype != "float32" else "",
            "knows": ", ".join(f"{len(values)} {kind}s" for kind, values in self.knows.items()),
        }
        scores: dict[str, list[str]] = {}
        for name, value in self._scores().items():
            if not name.detail:
                scores.setdefault(f"{name.split}, {name.boxes}", []).append(f"{name.metric} {value:.3f}")
        lines = [f"TrainedModel {self.name}"]
        lines += [f"  {key:9s} {value}" for key, value in rows.items() if value]
        lines += [f"  {evaluation}: {', '.join(texts)}" for evaluation, texts in scores.items()]
        return "\n".join(lines)

    @property
    def device(self) -> torch.device:
        """The device that the model is on; `to` changes it."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in; its weights, and the coordinates of boxes, are float32 in any case."""
        if self._dtype is not None:
            return self._dtype
        precision = self.config.train.mixed_precision
        is_slow = precision == "fp16" and self.device.type == "cpu"
        if precision == "no" or is_slow:
            return torch.float32
        return choose_precision(precision)

    def to(
        self, device: str | int | torch.device | torch.dtype | None = None, dtype: str | torch.dtype | None = None
    ) -> TrainedModel:
        """Move the model to a device, let it compute in another dtype, or both, and return it."""
        if isinstance(device, torch.dtype):  # `to(torch.bfloat16)`, as for torch's modules
            dtype = device
            device = None
        precision = self._dtype if dtype is None else choose_precision(dtype)
        if device is not None:
            self._device = choose_device(device)
            self.network.to(self._device)
        self._dtype = precision
        self.__dict__.pop("detector", None)  # it is made anew with this dtype
        return self

    def _scores(self) -> dict[MetricName, float]:
        """Return the run's metrics that measure the model."""
        scores = {}
        for name, value in self._named_metrics.items():
            if isinstance(value, float) and name.measures_model:
                scores[name] = value
        return scores

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the detector's classes; None: unknown."""
        return self.network.detector.class_names

    @overload
    def ask(self, image: Any, text: list[str] | Iterator[str], **options: Unpack[AskOptions]) -> list[Answer]: ...
    @overload
    def ask(self, image: Images, text: str, **options: Unpack[AskOptions]) -> list[Answer]: ...
    @overload
    def ask(self, image: Any, text: str, **options: Unpack[AskOptions]) -> Answer | Any: ...  # a list for a folder
    def ask(
        self,
        image: Any,
        text: str | Iterable[str],
        *,
        boxes: Any = None,
        scores: Any = None,
        names: Sequence[str] | None = None,
        choices: Sequence[Any] = (),
        answer: Any = None,
        top_k: int | None = None,
        min_score: float | None = None,
    ) -> Answer | list[Answer]:
        """Answer texts about images with a box, the best answers, the best choice, or the words at each [MASK].

        `model(image, text)` is the same.

        Args:
            image: a path, an address, bytes, an open file, a PIL image, an array or a tensor (`to_image_file` in
                `e2e_vl/data/user_images.py`); a tuple of them for a text about several images; or many of any of these:
                a folder, a pattern, a list, an iterator or a batch (`expand_images`). The detector runs once per
                distinct image.
            text: a text, or a list of texts. A single image or text is combined with each element of the other list.
            boxes: candidate boxes instead of predicted ones: [R, 4], strings such as "person:10,20,80,200", or a file.
                They apply to all questions and must lie inside the images. What a detector of transformers returns,
                with its scores and text labels, will do. A file of `e2e-vl detect`, or of COCO's annotations, has
                those of many images.
            scores: of the boxes, 0 to 1, from the detector that proposed them; only a model that was trained with
                `encoder.config.proposal_scores` reads them.
            names: class names of the boxes, or the phrases that their detector looked for.
            choices: the texts to choose from (VCR); one list for all questions, or one per question.
            answer: the answer to justify, if the model chooses rationales (VCR); one for all questions, or a list.
            top_k: number of `top_answers`, or of `top_boxes` for a task that predicts a box; at least 1.
            min_score: lowest score of `top_answers` and `top_boxes`, 0 to 1; a task that predicts a box then returns
                all such boxes, unless `top_k` is stated. The best answer itself stays, whatever its score.

        Returns:
            One answer; or a list of answers in the order of the questions, if there are many images or texts.
        """
        if scores is not None and not self.network.encoder.reads_proposals:
            warnings.warn(
                f"{self.name} does not read the scores of boxes, so they change nothing; train with "
                "encoder.config.proposal_scores=true.",
                stacklevel=2,
            )
        given_boxes = convert_boxes(boxes, scores, names)
        questions, is_list = make_questions(image, text, given_boxes, choices, answer)
        top_k = check_top_k(top_k)
        min_score = check_min_score(min_score)
        if min_score is not None and top_k is None and self.network.task.predicts_box:
            top_k = sys.maxsize
        answers = self._answer_with_warnings(questions, top_k)
        if min_score is not None:
            answers = [answer.from_score(min_score) for answer in answers]
        return answers if is_list else answers[0]

    __call__ = ask

    def predict_masked(self, image: Any, boxes: Any, text: str = "") -> Answer:
        """Mask the pixels of boxes and predict their classes and the words at each [MASK], with a pre-trained model.

        Args:
            boxes: [Q, 4], or strings or a file as in `ask`.
            text: a caption, optionally with [MASK].
        """
        file = to_image_file(image)
        question = Question(file, text, boxes_to_mask=boxes_of_image(convert_boxes(boxes), file))
        return self._answer_with_warnings([question])[0]

    @overload
    def regions(self, image: Images, **options: Unpack[RegionOptions]) -> list[ImageRegions]: ...
    @overload
    def regions(self, image: Any, **options: Unpack[RegionOptions]) -> ImageRegions | Any: ...  # a list for a folder
    def regions(self, image: Any, **options: Unpack[RegionOptions]) -> ImageRegions | list[ImageRegions]:
        """Predict or describe regions with the model's detector; see `TrainedDetector.regions`."""
        self._require_detector()
        options.setdefault("stacklevel", 3)
        return self.detector.regions(image, **options)

    @functools.cached_property
    def detector(self) -> TrainedDetector:
        """The model's detector, with the image size used in evaluation."""
        size = self.config.data.resize
        resize = ResizeRule(size.short_edge[-1], size.long_edge, size.rounding, size.library)
        loaded = LoadedDetector(
            self.network.detector, resize, warning=self.boxes_warning, drawn_scenes=self.config.data.synthetic
        )
        return TrainedDetector(loaded, self.device, self._dtype)

    @property
    def boxes_warning(self) -> str:
        """What is wrong with all boxes that the detector predicts; "": nothing is known."""
        return RANDOM_BOXES if self.config.detector.proposes_at_random else ""

    def answer_questions(
        self, questions: Sequence[Question], top_k: int | None = None, *, keep_going: bool = False
    ) -> list[Answer | Exception]:
        """Answer questions without warnings.

        Questions about the same images and boxes share one detector pass.
        A batch contains at most `eval.images_per_batch` groups of such questions, all with images of one size: with
        padding, an answer would depend on the other questions.

        Args:
            keep_going: return the error for questions with an unreadable image or a given box outside the image,
                instead of raising it.
        """
        groups: dict[Any, list[int]] = {}
        for number, question in enumerate(questions):
            key: Any = number
            if self.network.task.batches_questions:
                key = (_identify_images(question), id(question.boxes), id(question.boxes_to_mask))
            groups.setdefault(key, []).append(number)
        samples = [self._sample([questions[number] for number in group]) for group in groups.values()]
        limit = 1
        if self.network.task.batches_questions:
            limit = self.config.eval.images_per_batch
        answers: dict[int, Answer | Exception] = {}
        waiting: list[tuple[list[int], EncodedSample]] = []  # question indices and their example

        def answer_waiting() -> None:
            task = self.network.task
            output = self._run(
                [example for _, example in waiting],
                output_attentions=task.reads_attention or not task.predicts_box,
            )
            numbers: list[int] = []
            for group, _ in waiting:
                numbers += group
            batch_answers = self._answers([questions[number] for number in numbers], output, top_k)
            answers.update(zip(numbers, batch_answers, strict=True))
            waiting.clear()

        for group, sample in zip(groups.values(), samples, strict=True):
            try:
                example = self._read(sample)
            except (ValueError, OSError) as error:
                if not keep_going:
                    raise
                answers |= dict.fromkeys(group, error)
                continue
            if waiting:
                _, first_example = waiting[0]
                if len(waiting) == limit or _largest_size(example) != _largest_size(first_example):
                    answer_waiting()
            waiting.append((group, example))
        if waiting:
            answer_waiting()
        return [answers[number] for number in range(len(questions))]

    def ask_with_output(
        self, question: Question, change: Callable[[Batch], Batch] | None = None
    ) -> tuple[Answer, ModelOutput]:
        """Return the answer to one question, and the model's output with its attention maps.

        `change` is applied to the batch before the forward pass, for example to mask pixels.
        """
        output = self._run([self._read(self._sample([question]))], change, output_attentions=True)
        [answer] = self._answers([question], output)
        return answer, output

    def check_question(self, question: Question) -> None:
        """Raise a UserError if the model cannot answer such a question; the image is not opened."""
        self._sample([question])

    def _answer_with_warnings(self, questions: Sequence[Question], top_k: int | None = None) -> list[Answer]:
        """Answer questions, with warnings attributed to the caller of the public method."""
        answers = self.answer_questions(questions, top_k)
        all_warnings = itertools.chain.from_iterable(answer.warnings for answer in answers)
        for warning in dict.fromkeys(all_warnings):
            warnings.warn(warning, stacklevel=3)
        return answers

    def _sample(self, questions: list[Question]) -> Sample:
        """Return a sample with questions about the same images."""
        self._require_detector()
        data = self.config.data
        samples = []
        if data.blank_text or data.blank_image:
            missing = "text" if data.blank_text else "image"
            raise UserError(f"{self.name} was trained without the {missing} as a control; use another run.")
        for question in questions:
            if not question.text.strip() and question.boxes_to_mask is None:
                raise UserError("The text is empty; write a question or a phrase.")
            for text in (question.text, *question.choices, question.answer or ""):
                _require_unicode(text)
            asked = dataclasses.replace(
                question,
                class_names=self._dataset.class_names_of(self._options),
                accepts_answer=self._dataset.accepts_answer(self._options),
            )
            samples.append(self._dataset.select_candidates(self.network.task.question(asked), self._options))
        texts = [dataclasses.replace(sample.texts[0], index=row) for row, sample in enumerate(samples)]
        return dataclasses.replace(samples[0], texts=tuple(texts))

    def _read(self, sample: Sample) -> EncodedSample:
        """Load and preprocess the images and texts of a sample."""
        box_source = BoxSource.ONLINE if sample.images[0].objects is None else BoxSource.GT
        loader = self._loaders[box_source]
        make_generator = functools.partial(random_generator, self.config.seed, 0)
        images = []
        for image in sample.images:
            try:
                example = loader.load(image, loader.draw_augmentation(make_generator(0)))
            except BrokenImageError as error:
                raise error.__cause__ from None
            size = example.image_transform.original_size
            for objects in (image.boxes, image.objects):
                if objects is not None:
                    require_inside(objects.boxes, size, objects.origin, example.name)
            if image.boxes_to_mask is not None:
                require_inside(image.boxes_to_mask, size, "boxes to mask", example.name)
            images.append(example)
        return EncodedSample(images, list(self._preprocessor(sample, images, make_generator)))

    @torch.no_grad()
    def _run(
        self,
        examples: list[EncodedSample],
        change: Callable[[Batch], Batch] | None = None,
        *,
        output_attentions: bool,
    ) -> ModelOutput:
        """Run the model in its `dtype`; outputs are on the CPU, except for the encoder's."""
        batch = collate(examples, canvas=self.config.data.canvas).to(self.device)
        with computing_in(self.dtype, self.device):
            if change is not None:
                batch = change(batch)
            output = self.network(batch, output_attentions=output_attentions)
        return add_grounded_phrases(output.on_cpu())

    @torch.no_grad()
    def _answers(self, questions: Sequence[Question], output: ModelOutput, top_k: int | None = None) -> list[Answer]:
        predictions = self.network.task.predict_answers(output, top_k)
        texts_of_each = len(output.batch) // len(predictions)  # a question with four choices is four texts
        answers = []
        for number, (question, prediction) in enumerate(zip(questions, predictions, strict=True)):
            text = number * texts_of_each + prediction.chosen_text
            answers.append(self._answer(question, prediction, output, text, top_k))
        return answers

    def _answer(
        self, question: Question, prediction: Prediction, output: ModelOutput, text: int, top_k: int | None
    ) -> Answer:
        """Return the answer to a question, from row `text` of the batch."""
        batch = output.batch
        regions = output.text_regions
        task = self.network.task
        is_candidate = regions.row[text] >= 0  # neither the whole image nor padding
        all_names = class_names_of(output)[text]
        names = [all_names[row] for row in is_candidate.nonzero()[:, 0].tolist()]
        given_names = None
        if question.boxes is not None and question.boxes.names is not None and question.boxes_to_mask is None:
            given_names = [question.boxes.names[row] for row in regions.row[text, is_candidate].tolist()]
        boxes = regions.original_boxes(batch.images.scales)[text, is_candidate].numpy()
        refined_boxes = output.refined_regions.original_boxes(batch.images.scales)[text, is_candidate].numpy()
        attention = None
        if output.encoded.attentions is not None and not task.predicts_box:
            position = _answer_position(output, text)
            length = batch.texts.input_ids.shape[1]  # regions come after the wordpieces
            to_regions = slice(length, length + len(is_candidate))
            maps = [layer[text, :, position, to_regions].float().cpu() for layer in output.encoded.attentions]
            last = next((heads for heads in reversed(maps) if heads.any()), maps[-1])  # not all maps attend to regions
            attention = last.mean(dim=0)[is_candidate].numpy()
        sentences = [question.text, *question.choices]
        if question.answer is not None:
            sentences.append(question.answer)
        unknown_in_each = [unknown_words(sentence, self.tokenizer) for sentence in sentences]
        unknown = tuple(dict.fromkeys(itertools.chain.from_iterable(unknown_in_each)))
        doubts = tuple(self._doubts(question, unknown, prediction))
        prediction.is_unsure = bool(doubts)
        ranked = task.ranked(prediction)
        lines = task.answer_lines(prediction)
        answer_text = next(iter(lines), "")
        if ranked:
            answer_text = ranked[0][0]
        box = None
        top_answers = ranked[:top_k]
        top_boxes = []
        if task.predicts_box and prediction.box is not None:
            box = np.array(prediction.box, dtype=np.float32)
            top_boxes = [prediction.box]
        if task.predicts_box and top_k is not None:
            answer_boxes = prediction.refined_boxes or prediction.candidate_boxes
            candidates = zip(answer_boxes, prediction.candidate_scores, strict=True)
            best_answers = []
            top_boxes = []
            for corners, score in sorted(candidates, key=lambda candidate: -candidate[1])[:top_k]:
                top_boxes.append(corners)
                candidate_prediction = msgspec.structs.replace(prediction, box=corners, score=score)
                best_answers.append(task.ranked(candidate_prediction)[0])
            top_answers = tuple(best_answers)
        box_names = prediction.box_names or given_names or names
        labelled_boxes = []
        for label, corners in task.answer_boxes(prediction):
            if given_names is not None and box is not None:  # the label has no class, because none was predicted
                label = f"{box_names[_nearest_box(refined_boxes, corners)]} {label}"
            labelled_boxes.append((label, np.array(corners, np.float32)))
        return Answer(
            question=question.text,
            text=answer_text,
            score=task.score_of(prediction),
            box=box,
            top_answers=top_answers,
            top_boxes=np.array(top_boxes, dtype=np.float32).reshape(-1, 4),
            lines=lines,
            boxes=boxes,
            refined_boxes=None if output.refinement is None else refined_boxes,
            box_images=regions.image_slot[text, is_candidate].numpy(),
            box_names=box_names,
            attention=attention,
            unknown_words=unknown,
            warnings=(*doubts, *self._contradictions(prediction, refined_boxes, box_names)),
            answer_boxes=labelled_boxes,
            prediction=prediction,
            images=question.images,
        )

    def _doubts(self, question: Question, unknown: Sequence[str], prediction: Prediction) -> Iterator[str]:
        """Yield the reasons why an answer is unsure: low certainty, or a question unlike the validation questions."""
        if question.boxes is None and self.boxes_warning:
            yield self.boxes_warning
        if self.network.encoder.reads_proposals and question.boxes is not None and question.boxes.scores is None:
            yield f"The boxes have no scores, but {self.name} was trained with the scores of proposed boxes."
        if prediction.image_size:
            size_warning = self.config.data.synthetic.size_warning(prediction.image_size)
            if size_warning:
                yield size_warning
        if unknown:
            yield f"Not in the vocabulary of {self.name}: {', '.join(unknown)}; the model does not know these words."
        elif question.boxes_to_mask is None and not has_content(question.text):
            yield "The text names nothing: it has only punctuation, articles or the like."
        certainty = self.network.task.certainty(prediction)
        box_source = BoxSource.ONLINE if question.boxes is None else BoxSource.GT
        threshold = self._sure_thresholds[box_source]
        if certainty is not None and certainty < threshold:
            yield f"Unsure: fewer than {100 * SURE:.0f} % of answers as uncertain as this one were right in validation."

    def _contradictions(self, prediction: Prediction, boxes: np.ndarray, names: list[str]) -> Iterator[str]:
        """Yield a sentence if the first phrase clearly names another class than that of the answer's box.

        An answer is not called unsure for that: most of them are right on synthetic scenes.

        Args:
            boxes: [R, 4], the candidates, refined where boxes are.
            names: their R classes, predicted or given by the user.
        """
        first = next(iter(prediction.grounded), None)
        box = getattr(prediction, "box", None)
        if box is None or first is None or not first.is_clear:
            return
        named = names[_nearest_box(boxes, first.box)]
        chosen = names[_nearest_box(boxes, box)]
        if named != chosen and pairwise_iou(np.array([first.box]), np.array([box]))[0, 0] < SAME_REGION:
            region = f"the '{named}' at {box_text(first.box)}"
            yield f"The words '{first.text}' name another region: {region}, not this '{chosen}'."

    def _require_detector(self) -> None:
        if self.config.detector.backend == "precomputed":
            raise UserError(
                f"{self.name} uses precomputed features, so it cannot process images; use a run with a detector."
            )

    @functools.cached_property
    def _about(self) -> dict[str, Any]:
        path = self.source / "about.json"
        return read_json(path) if path.is_file() else {}

    @property
    def knows(self) -> dict[str, list[str]]:
        """All that a model of synthetic scenes knows: shapes, colours, ..., words; empty for other models."""
        return self._about.get("knows", {})

    @property
    def examples(self) -> list[ExampleScene]:
        """Scenes that ship with the model, for `ask(scene.image, scene.texts)`."""
        rows = self._about.get("examples", ())
        return [ExampleScene(self.source / row["image"], row["texts"], row["boxes"]) for row in rows]

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        device: str | int | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        name: str | None = None,
    ) -> TrainedModel:
        """Load a run directory of e2e-vl train, or a folder written by `save_pretrained`; `name` is for messages."""
        path = Path(folder)
        device = choose_device(device)  # a wrong name is an error before the model is loaded
        if dtype is not None:
            dtype = choose_precision(dtype)
        metrics = None
        if (path / "metrics.json").is_file():
            metrics = read_json(path / "metrics.json", dict[str, Any])
        return cls(*load_model(path), source=path, name=name, metrics=metrics, device=device, dtype=dtype)

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        device: str | int | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        **kwargs: Any,
    ) -> TrainedModel:
        if not Path(model_id).is_dir():
            known = ("revision", "cache_dir", "force_download", "local_files_only", "token")
            options = {key: kwargs[key] for key in known if key in kwargs}
            return cls.from_folder(snapshot_download(model_id, **options), device, dtype, name=model_id)
        return cls.from_folder(model_id, device, dtype)

    def _save_pretrained(self, save_directory: Path) -> None:
        with atomic_files(save_directory, "config.yaml") as part:
            save_model(part, self.config, self.network, self.tokenizer)
            config = without_absolute_paths(read_yaml(part / "config.yaml"))
            (part / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
            write_json(part / "config.json", {"library_name": "e2e-vl", "e2e_vl_version": version("e2e-vl")})
            if self._metrics:
                write_json(part / "metrics.json", self._metrics)

    def generate_model_card(self, repo_id: str | None = None, license: str | None = None, **more: Any) -> ModelCard:
        """Make a model card with the parts of the model, an example and the metrics of its run.

        The metrics are also evaluation results in its metadata (`model-index`), as the Hugging Face hub reads them.

        Args:
            repo_id: the model's name on the hub; None: the name of its folder.
            license: licence of the weights; None: not stated.
            more: further values for the template.
        """
        config = self.config
        task = self.network.task
        name = repo_id or Path(self.name).name
        scores = self._scores()
        data = ModelCardData(
            library_name="e2e-vl",
            tags=["vision-and-language", config.task.name],
            license=license,
            model_name=name,
            eval_results=evaluation_results(task.hub_task, config.data, scores) or None,
        )
        example = f"answer = model.ask({task.example_call})"
        if config.detector.backend == "precomputed":
            example = "# uses precomputed features: run `tools/evaluate.py` or `e2e-vl predict`"
        elif not task.answers_questions:
            example = 'regions = model.regions("photo.jpg")'
        elif self._dataset.accepts_answer(self._options):
            example = f'answer = model.ask({task.example_call}, answer="because [1] is happy")'
        thresholds = {}
        for boxes, threshold in self._sure_thresholds.items():
            if math.isfinite(threshold):
                thresholds[boxes.metric_suffix.replace("_", " ")] = threshold
        return ModelCard.from_template(
            card_data=data,
            template_str=MODEL_CARD,
            name=name,
            detector=config.detector.backend,
            encoder=config.encoder.name,
            task=config.task.name,
            data=config.data.name,
            example=example,
            knows=self.knows,
            metrics={str(name): value for name, value in scores.items()},
            thresholds=thresholds,
            sure=round(100 * SURE),
            **more,
        )


def _require_unicode(text: str) -> None:
    """Raise a UserError if a text has bytes of another encoding, which Python keeps as single surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"The text {text!a} has characters that are not Unicode; write it in UTF-8.") from error


def _identify_images(question: Question) -> tuple[ImageFile, ...]:
    """Return the images of a question, as keys that are equal for the same images."""
    keys = []
    for image in question.images:
        keys.append(image.resolve() if isinstance(image, Path) else image)
    return tuple(keys)


def _nearest_box(boxes: np.ndarray, box: Sequence[float]) -> int:
    """Return which of the boxes [R, 4] has the corners of `box`, but for rounding."""
    return int(np.abs(boxes - box).sum(axis=1).argmin())


def _largest_size(example: EncodedSample) -> tuple[int, int]:
    """Return the largest height and the largest width of the images of an example."""
    heights = [image.pixels.shape[0] for image in example.images]
    widths = [image.pixels.shape[1] for image in example.images]
    return max(heights), max(widths)


def _answer_position(output: ModelOutput, text: int) -> int:
    """Return the position of the answer: the summary, the first labelled wordpiece or masked region, or else 0."""
    batch = output.batch
    if batch.texts.summary is not None:
        return int(batch.texts.summary[text])
    if batch.targets is not None:
        labelled = batch.targets.labelled_wordpieces(text)
        if labelled:
            return labelled[0]
    is_masked = output.text_regions.is_masked[text]
    if not is_masked.any():
        return 0
    return batch.texts.input_ids.shape[1] + int(is_masked.int().argmax())


def load(
    source: str | Path,
    device: str | int | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    **published: Any,
) -> TrainedModel:
    """Load a run, a saved model, a model of the hub or a published checkpoint; see `e2e_vl.load`.

    `published`: options of a published checkpoint, see `build_published`; those that are None are not stated.
    """
    device = choose_device(device)  # before a download
    weights = find_published(source)
    if weights is not None:
        return TrainedModel(
            *build_published(weights, **published), source=weights, name=str(source), device=device, dtype=dtype
        )
    folder = find_run(source)
    if folder is not None:
        stated = [name for name, value in published.items() if value is not None]
        if stated:
            raise UserError(f"{source} has its own {stated[0]}; leave out {stated[0]}, which published files need.")
        return TrainedModel.from_folder(folder, device, dtype)
    try:
        folder = snapshot_download(str(source))
    except (OSError, ValueError) as error:  # no such model, no connection, or offline
        raise MissingFileError(
            f"{source} is neither a local folder nor a model that could be loaded from the hub "
            f"({first_line(error)}); check the name and the connection, or give a run directory."
        ) from error
    weights = find_published(folder)
    if weights is not None:
        return TrainedModel(
            *build_published(weights, **published), source=weights, name=str(source), device=device, dtype=dtype
        )
    return TrainedModel.from_folder(folder, device, dtype, name=str(source))
