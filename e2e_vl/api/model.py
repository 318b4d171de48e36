"""A trained model to use: asked about images, shown regions, saved and shared."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, snapshot_download
from transformers import PreTrainedTokenizerBase

from detector.config import SelectionRule
from detector.errors import MissingFileError, UserError, first_line, user_path
from detector.images import ResizeRule
from detector.io import atomic_files, write_json
from e2e_vl.api.detector import TrainedDetector, chosen_device
from e2e_vl.api.inputs import (
    ImageFile,
    ImageInput,
    as_answers,
    as_choices,
    as_lists,
    content_key,
    given_boxes,
    image_file,
    stamp_of,
)
from e2e_vl.api.results import Answer, FoundRegions, GroundedPhrase
from e2e_vl.config import INPUTS, RunConfig
from e2e_vl.data.base import open_options
from e2e_vl.extraction.regions import RANDOM_BOXES, LoadedDetector
from e2e_vl.extraction.settings import SHOWN
from e2e_vl.io import errors_naming, is_shared_model, looks_like_hub_name, model_folder, read_metrics
from e2e_vl.model import VisionLanguageModel
from e2e_vl.run.build import named_parts
from e2e_vl.run.checkpoint import load_model, save_model, saved_settings
from e2e_vl.run.inference import Reply, look_at, reply_to
from e2e_vl.samples import Question, Sample
from e2e_vl.structures import Batch, ModelOutput
from e2e_vl.tasks.base import Task
from e2e_vl.text import unknown_words

# What a saved model tells others: a model card, and settings without the paths of the machine it was trained on.


CARD = """---
{{ card_data }}
---

# {{ name }}

A vision-and-language model of e2e-vl, trained end to end from raw pixels: the detector `{{ detector }}`, the
encoder `{{ encoder }}` and the task `{{ task }}`, trained on the data `{{ data }}`.

```python
import e2e_vl

model = e2e_vl.load("{{ name }}")
{{ example }}
```
{% if metrics %}
| metric | value |
|---|---:|
{% for key, value in metrics.items() %}| {{ key }} | {{ "%.3f" | format(value) }} |
{% endfor %}{% endif %}"""
NOT_SHOWN = ("count", "ceiling")  # metrics that do not measure the model


def make_card(
    name: str,
    settings: RunConfig,
    task: Task,
    metrics: Mapping[str, Any],
    *,
    accepts_answer: bool = False,
    license: str | None = None,
    **more: Any,
) -> ModelCard:
    """What the model is made of, how to load and ask it, and its metrics where the run has them.

    Args:
        metrics: by name, such as "val/accuracy_predicted_boxes".
        accepts_answer: a given answer belongs to the questions.
        license: of the weights, which only their owner can name; None: the card names none.
        more: further values of the template.
    """
    shown = {key: value for key, value in metrics.items() if "/" in key and isinstance(value, float)}
    data = ModelCardData(library_name="e2e-vl", tags=["vision-and-language", settings.task.name])
    if license is not None:
        data.license = license
    return ModelCard.from_template(
        card_data=data,
        template_str=CARD,
        name=name,
        detector=settings.detector.backend,
        encoder=settings.encoder.name,
        task=settings.task.name,
        data=settings.data.name,
        example=_example(settings, task, accepts_answer),
        metrics={key: value for key, value in shown.items() if not key.partition("/")[2].startswith(NOT_SHOWN)},
        **more,
    )


def _example(settings: RunConfig, task: Task, accepts_answer: bool) -> str:
    """A call that the model answers."""
    if settings.detector.backend == "precomputed":
        return "# it reads saved region features, so `tools/evaluate.py` and `tools/predict.py split` run it"
    if not task.answers_questions:
        return 'found = model.regions("photo.jpg")'
    words = f'{task.example_call}, answer="because [1] is happy"' if accepts_answer else task.example_call
    return f"answer = model.ask({words})"


def without_paths(settings: RunConfig) -> RunConfig:
    """The settings with the plain names of files and folders in place of their paths; names on the hub stay.

    A saved model needs none of the files, and whether weights were loaded (`DetectorSettings.proposes_at_random`) can
    still be told.
    """
    shared = _without_absolute(settings)
    changes: dict[str, Any] = {"output": _name(shared.output)}
    for section, keys in INPUTS.items():
        first, _, inner = section.partition(".")
        part = changes.get(first, getattr(shared, first))
        values = getattr(part, inner) if inner else {key: getattr(part, key) for key in keys}
        named = {key: _name(values[key]) for key in keys if isinstance(values.get(key), str)}
        changes[first] = dataclasses.replace(part, **({inner: {**values, **named}} if inner else named))
    return dataclasses.replace(shared, **changes)


def _name(path: str) -> str:
    is_on_hub = looks_like_hub_name(path) and not user_path(path).exists()
    return path if is_on_hub else PureWindowsPath(path).name


def _without_absolute(value: Any) -> Any:
    """The names of all absolute paths, at any depth."""
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: _without_absolute(getattr(value, name)) for name in fields})
    if isinstance(value, dict):
        return {key: _without_absolute(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_absolute(one) for one in value]
    is_absolute = isinstance(value, str) and (value.startswith(("/", "~")) or bool(PureWindowsPath(value).drive))
    return PureWindowsPath(value).name if is_absolute else value


class TrainedModel(
    ModelHubMixin,
    library_name="e2e-vl",
    tags=["vision-and-language", "object-detection"],
    model_card_template=CARD,
):
    """A detector, an encoder and a task with their tokenizer and settings; `e2e_vl.load` makes one.

    It is loaded once and may be asked from several threads at a time. Boxes are xyxy in pixels of the original image.
    """

    def __init__(
        self,
        settings: RunConfig,
        network: VisionLanguageModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        source: Path,
        saved: RunConfig,
        metrics: Mapping[str, Any] | None = None,
        device: str | torch.device | None = None,
    ):
        """A model in memory; nothing of its files is read again.

        Args:
            settings: with which the network was built.
            source: where it was loaded from, for messages.
            saved: the settings as they were saved, which say how the detector was trained.
            metrics: of the run, for the model card.
            device: see `chosen_device`.
        """
        self.settings, self.tokenizer, self.source = settings, tokenizer, source
        self._saved, self._metrics = saved, dict(metrics or {})
        self._has_warned_of_boxes = False
        self.device = chosen_device(device)
        self.network = network.to(self.device).eval()
        dataset = named_parts(settings).dataset
        self._options = open_options(dataset, settings.data)[1]
        self._dataset = dataset
        self._given_names = dataset.class_names_of(self._options)

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Of the detector's classes; None: unknown."""
        return self.network.detector.class_names

    def ask(
        self,
        image: ImageInput | tuple[ImageInput, ...] | list[Any],
        text: str | list[str],
        *,
        boxes: Any = None,
        choices: Sequence[Any] = (),
        answer: Any = None,
    ) -> Answer | list[Answer]:
        """Answer texts about images: a box, the best answers, the best choice, or the words at each [MASK].

        Args:
            image: a path, bytes, a PIL image or a uint8 array (`e2e_vl.api.inputs.image_file`); a tuple of them for a
                model whose texts are about several images; or a list of any of these. The detector runs once per
                distinct image.
            text: a text, or a list of texts. One image or text beside a list of the other stands for each of them.
            boxes: candidates [R, 4] instead of the detector's, or words such as "person:10,20,80,200", or a file of
                boxes. They hold for all questions and must lie in the images.
            choices: the texts to choose from, for a task that chooses; the same for all questions, or a list of them
                per question.
            answer: the answer that a rationale is asked for; one for all questions, or a list.

        Returns:
            One answer, or a list of answers in the order of the questions.

        Raises:
            FileNotFoundError, ValueError: no image there, an empty text, a box outside the image, or something that the
                task needs or does not take.
        """
        given = given_boxes(boxes, "boxes")
        images, texts, is_single = as_lists(image, text)
        files = _image_files(images)
        all_choices, all_answers = as_choices(choices, len(texts)), as_answers(answer, len(texts))
        questions = [
            Question(
                files[row][0],
                texts[row],
                boxes=given,
                choices=all_choices[row],
                answer=all_answers[row],
                others=files[row][1:],
            )
            for row in range(len(texts))
        ]
        answers, _ = self.replies(questions)
        self._warn(questions, answers)
        return answers[0] if is_single else answers

    def hide(self, image: ImageInput, boxes: Any, text: str = "") -> Answer:
        """Let a pre-training model say what is in boxes whose pixels are hidden from it, and which words are masked.

        Args:
            boxes: [Q, 4], or words or a file as in `ask`.
            text: a caption, maybe with [MASK].
        """
        questions = [Question(image_file(image), text, boxes_to_mask=given_boxes(boxes, "boxes"))]
        answers, _ = self.replies(questions)
        self._warn(questions, answers)
        return answers[0]

    def regions(
        self,
        image: ImageInput,
        *,
        boxes: Any = None,
        min_score: float = SHOWN.min_score,
        min_regions: int = SHOWN.min_regions,
        max_regions: int = SHOWN.max_regions,
    ) -> FoundRegions:
        """What the model's detector finds, or says about given boxes; see `TrainedDetector.regions`.

        Raises:
            ValueError: a model without a detector.
        """
        self._require_detector()
        if boxes is None:
            self.detector.warn_of_random_boxes(stacklevel=3)
        rule = SelectionRule(min_score, min_regions, max_regions)
        return self.detector.find(image_file(image), given_boxes(boxes, "boxes"), rule)

    @functools.cached_property
    def detector(self) -> TrainedDetector:
        """The model's detector, at the image size of its evaluation."""
        size = self.settings.data.resize
        resize = ResizeRule(size.short_edge[-1], size.long_edge, size.rounding)
        warning = RANDOM_BOXES if self._saved.detector.proposes_at_random else ""
        return TrainedDetector(LoadedDetector(self.network.detector, resize, warning=warning), self.device)

    def answer_all(self, questions: Sequence[Question]) -> list[Answer]:
        """Answer prepared questions; those about the same images with the same boxes share one detector pass.

        Raises:
            FileNotFoundError, ValueError: as `ask`.
        """
        answers, _ = self.replies(questions)
        self._warn(questions, answers)
        return answers

    def replies(
        self, questions: Sequence[Question], *, keep_going: bool = False
    ) -> tuple[list[Answer | None], dict[int, Exception]]:
        """`answer_all` without its warnings, for programs that print them in their own way.

        Args:
            keep_going: an image that cannot be read, or that a given box leaves, is an error of its questions only.

        Returns:
            the answers, None where there is an error, and the errors by the number of the question.

        Raises:
            FileNotFoundError, ValueError: as `ask`.
        """
        self._require_detector()
        self._require_answers(questions)
        groups: dict[Any, list[int]] = {}
        for number, question in enumerate(questions):
            key = (number,) if not self.network.task.answers_together else _sharing_key(question)
            groups.setdefault(key, []).append(number)
        stamps = [tuple(stamp_of(file) for file in question.images) for question in questions]
        samples = [self._sample([questions[number] for number in group]) for group in groups.values()]
        found = reply_to(self.settings, self.network, self.tokenizer, samples, keep_going=keep_going)
        answers: list[Answer | None] = [None] * len(questions)
        errors: dict[int, Exception] = {}
        for group, replies in zip(groups.values(), found, strict=True):
            if isinstance(replies, Exception):
                errors |= dict.fromkeys(group, replies)
                continue
            for number, reply in zip(group, replies, strict=True):
                answers[number] = self._answer(questions[number], reply, stamps[number])
        return answers, errors

    def look(self, question: Question, change: Callable[[Batch], Batch] | None = None) -> tuple[Answer, ModelOutput]:
        """Answer one prepared question and keep all that the model computed, attention maps included.

        Args:
            change: see `e2e_vl.run.inference.look_at`.

        Raises:
            FileNotFoundError, ValueError: as `ask`.
        """
        self.check_question(question)
        stamps = tuple(stamp_of(file) for file in question.images)
        reply, output = look_at(self.settings, self.network, self.tokenizer, self._sample([question]), change)
        return self._answer(question, reply, stamps), output

    def check_question(self, question: Question) -> None:
        """Raises ValueError if the model does not answer such a question; opens no image."""
        self._require_detector()
        self._require_answers([question])
        self._sample([question])

    def warning_of_boxes(self, questions: Sequence[Question]) -> str:
        """One sentence if boxes that mean nothing stand behind an answer; else empty."""
        if not self._saved.detector.proposes_at_random or all(question.boxes is not None for question in questions):
            return ""
        return (
            f"The detector of {self.source} never learned to find objects, so it looks at random places and the answer "
            "means little; give boxes of your own, or a run whose detector was trained."
        )

    def _warn(self, questions: Sequence[Question], answers: Sequence[Answer]) -> None:
        """Python warnings that point at the line which called the method that calls this one."""
        about_boxes = self.warning_of_boxes(questions)
        if about_boxes and not self._has_warned_of_boxes:
            self._has_warned_of_boxes = True
            warnings.warn(about_boxes, stacklevel=3)
        unknown = sorted({word for one in answers for word in one.unknown_words})
        if unknown:
            named = ", ".join(unknown)
            warnings.warn(
                f"The vocabulary of {self.source} lacks {named}; the model reads such words as unknown.", stacklevel=3
            )

    def require_boxes(self) -> None:
        """Raises ValueError unless the model answers a phrase with a box."""
        if not self.network.task.points_at_box:
            raise UserError(
                f"{self.source} was trained for the task '{self.settings.task.name}', which does not answer a phrase "
                "with a box; give a run of a task that does."
            )

    def _sample(self, questions: list[Question]) -> Sample:
        """Questions about the same images as one sample."""
        samples = []
        for question in questions:
            known = dataclasses.replace(
                question,
                class_names=self._given_names,
                accepts_answer=self._dataset.wants_given_answer(self._options),
            )
            samples.append(self._dataset.narrowed(self.network.task.question(known), self._options))
        texts = [dataclasses.replace(sample.texts[0], index=row) for row, sample in enumerate(samples)]
        return dataclasses.replace(samples[0], texts=tuple(texts))

    def _answer(self, question: Question, reply: Reply, stamps: tuple[tuple[int, int] | None, ...]) -> Answer:
        texts = [question.text, *question.choices, *([] if question.answer is None else [question.answer])]
        ranked = reply.task.ranked(reply.record)
        box, score = reply.box, reply.record.get("score", ranked[0][1] if ranked else None)
        return Answer(
            text=question.text,
            answer=ranked[0][0] if ranked else next(iter(reply.lines), ""),
            score=score,
            box=None if box is None else torch.tensor(box).numpy(),
            top=ranked,
            lines=reply.lines,
            boxes=reply.boxes,
            box_images=reply.images,
            box_names=reply.record.get("objects") or reply.names,
            attention=reply.attention,
            unknown_words=tuple(dict.fromkeys(word for text in texts for word in unknown_words(text, self.tokenizer))),
            pointed=reply.task.pointed(reply.record),
            phrases=[
                GroundedPhrase(one["text"], tuple(one["characters"]), one["box"], one["score"])
                for one in reply.record.get("grounded", ())
            ],
            record=reply.record,
            images=question.images,
            stamps=stamps,
        )

    def _require_detector(self) -> None:
        if self.settings.detector.backend == "precomputed":
            raise UserError(
                f"{self.source} reads saved region features, so it cannot look at an image; give a run with a detector."
            )

    def _require_answers(self, questions: Sequence[Question]) -> None:
        """Raises ValueError if the model does not answer texts about images, or if a text is empty or no text."""
        if not self.network.task.answers_questions:
            raise UserError(
                f"{self.source} was trained for the task '{self.settings.task.name}', which does not answer a text; "
                "give a run of a task that does."
            )
        data = self.settings.data
        if data.blank_text or data.blank_image:
            missing = "text" if data.blank_text else "image"
            raise UserError(
                f"{self.source} is a control that was trained without seeing any {missing}; give another run."
            )
        if not all(question.text.strip() or question.boxes_to_mask is not None for question in questions):
            raise UserError("The text is empty; write what to ask or to look for.")

    @classmethod
    def from_folder(cls, folder: str | Path, device: str | torch.device | None = None) -> TrainedModel:
        """Load a run directory of tools/train.py, or a folder that `save_pretrained` wrote.

        Raises:
            FileNotFoundError, ValueError: no model there, or files that do not fit together.
        """
        path, device = Path(folder), chosen_device(device)
        metrics = path / "metrics.json"
        found = read_metrics(metrics) if metrics.is_file() else None
        parts, saved = load_model(path), saved_settings(path)
        with errors_naming(model_folder(path) / "config.yaml"):  # what only asking needs of the settings
            return cls(*parts, source=path, saved=saved, metrics=found, device=device)

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        device: str | torch.device | None = None,
        revision: str | None,
        cache_dir: str | Path | None,
        force_download: bool,
        local_files_only: bool,
        token: str | bool | None,
        **unused: Any,
    ) -> TrainedModel:
        folder = model_id
        if not Path(model_id).is_dir():
            folder = snapshot_download(
                model_id,
                revision=revision,
                cache_dir=cache_dir,
                force_download=force_download,
                local_files_only=local_files_only,
                token=token,
            )
        return cls.from_folder(folder, device)

    def _save_pretrained(self, save_directory: Path) -> None:
        with atomic_files(save_directory, "config.yaml") as part:
            save_model(part, without_paths(self._saved), self.network, self.tokenizer)
            write_json(part / "config.json", {"library_name": "e2e-vl", "e2e_vl_version": version("e2e-vl")})

    def generate_model_card(self, **more: Any) -> ModelCard:
        """What the model is made of, how to load it, and its metrics where the run has them; see `make_card`."""
        name = more.pop("repo_id", None) or self.source.name
        accepts_answer = self._dataset.wants_given_answer(self._options)
        return make_card(name, self.settings, self.network.task, self._metrics, accepts_answer=accepts_answer, **more)


def load(source: str | Path, device: str | torch.device | None = None) -> TrainedModel:
    """Load a run directory, a saved model folder, or a model of the Hugging Face hub; see `e2e_vl.load`."""
    if not is_shared_model(source):
        return TrainedModel.from_folder(user_path(source), device)
    chosen_device(device)  # before the download
    try:
        folder = snapshot_download(str(source))
    except (OSError, ValueError) as error:  # no such model, no connection, or offline
        raise MissingFileError(
            f"{source}: neither a local folder nor a model that could be loaded from the hub "
            f"({first_line(error)}); check the name and the connection, or give a run directory."
        ) from error
    return TrainedModel.from_folder(folder, device)


def _image_files(images: list[Any]) -> list[tuple[ImageFile, ...]]:
    """Image files of each question; an object that is given several times is converted once."""
    made: dict[int, ImageFile] = {}
    parts = [image if isinstance(image, tuple) else (image,) for image in images]
    for one in (one for part in parts for one in part):
        if id(one) not in made:
            made[id(one)] = image_file(one)
    return [tuple(made[id(one)] for one in part) for part in parts]


def _sharing_key(question: Question) -> Any:
    """Equal for questions whose images and boxes are the same."""
    return tuple(content_key(file) for file in question.images), id(question.boxes), id(question.boxes_to_mask)
