"""The analysis of a trained run on a split whose captions name boxes: from the run's folder to the files of results."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence
from pathlib import Path

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from detector.errors import UserError
from e2e_vl.analysis.attention_choices import AttentionChoices
from e2e_vl.analysis.attention_figures import draw_entity_figure, draw_relation_figure
from e2e_vl.analysis.attention_page import write_page
from e2e_vl.analysis.attention_tables import AttentionResults, write_tables
from e2e_vl.analysis.caption_wording import CaptionWording
from e2e_vl.analysis.collect import ENTITIES, RELATIONS, Collected, collect_attention, texts_to_show
from e2e_vl.analysis.overlays import ChosenHead, chosen_heads, draw_overlays
from e2e_vl.analysis.parses import Parses, parse_with_spacy, read_parses
from e2e_vl.box_sources import BoxSource
from e2e_vl.config import RunConfig, load_config
from e2e_vl.data.base import open_options
from e2e_vl.data.images.candidates import DetectedBoxes
from e2e_vl.data.loading.example_dataset import ExampleDataset
from e2e_vl.engine.build import named_parts
from e2e_vl.engine.build_data import build_collate, build_loader, build_writer, open_split, warn_of_random_boxes
from e2e_vl.engine.launch import make_accelerator
from e2e_vl.engine.saving import load_model, saved_settings
from e2e_vl.file_names import name_of
from e2e_vl.model import VisionLanguageModel
from e2e_vl.whole_files import whole_folder, write_json

FOLDER = "attention"  # of a run directory
PAGE = "attention.html"
# all that an analysis writes
WRITTEN = (
    PAGE,
    "attention.json",
    "heads.csv",
    "relations.csv",
    "table2_*.csv",
    "entities_*.png",
    "relations_*.png",
    "overlays",
    "overlays/[0-9]*.[jp][pn]g",
)
# settings of `data` about the input of the model and the work: those of the run, whichever data are read
OF_RUN = ("resize", "canvas", "vocabulary", "max_text_length", "blank_text", "blank_image", "workers")


@dataclasses.dataclass(frozen=True)
class AttentionRequest:
    """What is to be analysed, and how."""

    run: Path
    split: str
    boxes: BoxSource
    output: Path | None = None  # None: a folder of the run
    data: Path | None = None  # config whose `data` says where the captions are; None: the run's own
    parses: Path | None = None  # CoNLL-U
    spacy_model: str | None = None
    choices: AttentionChoices = dataclasses.field(default_factory=AttentionChoices)
    heads: tuple[str, ...] = ()  # whose pictures are drawn; none given: the best ones
    pictures: int = 6  # captions with pictures
    max_images: int | None = None
    overrides: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where the results go."""
        return self.output or self.run / FOLDER / name_of(f"{self.split}_{self.boxes}", flat=True)


def analyze_attention(request: AttentionRequest) -> tuple[AttentionResults, Path | None]:
    """Measure all heads of a trained run on a split and write tables, figures, pictures and a page.

    Returns:
        The results, and the page on the main process (None on the others).

    Raises:
        FileNotFoundError, ValueError: no model there, data that do not fit or state no phrases, an encoder without
            attention maps, a head that does not exist, or a choice that needs parses without any.
    """
    request.choices.require_parses(given=request.parses is not None or request.spacy_model is not None)
    check_results_folder(request.folder)
    own, of_data = divided(request.overrides, has_data=request.data is not None)
    config, model, tokenizer = load_model(request.run, overrides=own)
    if config.data.blank_text or config.data.blank_image:
        missing = "text" if config.data.blank_text else "image"
        raise UserError(f"{request.run}: a run without the {missing} grounds nothing; choose another run.")
    if not model.encoder.attention_graphs:
        raise UserError(
            f"{request.run}: the encoder {config.encoder.name} gives no attention maps; choose another run."
        )
    if request.data is not None:
        config = with_data_of(config, request.data, of_data)
    if request.boxes is BoxSource.ONLINE:
        warn_of_random_boxes(saved_settings(request.run).detector)
    accelerator = make_accelerator(config.train.mixed_precision)
    model.to(accelerator.device)
    parses = open_parses(request, config)
    examples = caption_examples(config, model, tokenizer, request, parses)
    groups = examples.groups if request.max_images is None else examples.groups[: request.max_images]
    number = model.encoder.config.num_attention_heads
    heads = chosen_heads(request.heads, model.encoder.attention_graphs, request.choices, number)
    found = collect_attention(
        *(model, examples, build_collate(config, model), request.choices, accelerator),
        images_per_batch=config.eval.images_per_batch,
        workers=config.data.workers,
        sorted_boxes=isinstance(examples.loader.boxes, DetectedBoxes),
        max_images=request.max_images,
        shown=texts_to_show(groups, request.pictures, config.seed),
    )
    results = AttentionResults(
        run=str(request.run),
        encoder=config.encoder.name,
        data=config.data.name,
        split=request.split,
        boxes=str(request.boxes),
        parses=None if parses is None else parses.origin,
        choices=request.choices,
        graphs=model.encoder.attention_graphs,
        sums=found.sums,
        numbers={
            **found.numbers,
            "captions of the whole split that the data set leaves out": examples.dataset.left_out,
        },
        relations={graph: found.labels(graph, RELATIONS, request.choices) for graph in model.encoder.attention_graphs},
        images=len(groups),
    )
    page = write_results(request.folder, results, found, heads, accelerator)
    return results, page


def write_results(
    folder: Path,
    results: AttentionResults,
    found: Collected,
    heads: list[ChosenHead],
    accelerator: Accelerator,
) -> Path | None:
    """Write all files on the main process, in the place of an earlier analysis; the page."""
    page = None
    if accelerator.is_main_process:
        folder = folder.resolve()
        with whole_folder(folder) as part:
            write_json(part / "attention.json", results.as_json())
            write_tables(part, results)
            figures: dict[str, bytes] = {}
            for graph in results.graphs:
                if results.of(graph, ENTITIES) is not None:
                    figures[f"entities_{graph}.png"] = draw_entity_figure(results, graph)
                if results.relations[graph]:
                    figures[f"relations_{graph}.png"] = draw_relation_figure(results, graph)
            for name, content in figures.items():
                (part / name).write_bytes(content)
            overlays = draw_overlays(part / "overlays", results, found.seen, heads)
            write_page(part / PAGE, results, figures, overlays)
            check_results_folder(folder)  # nothing else came while this was measured
        page = folder / PAGE
    accelerator.wait_for_everyone()
    return page


def check_results_folder(folder: Path) -> None:
    """Raises ValueError if the folder holds anything but an earlier analysis, which is replaced as a whole."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose another --output, a folder for the results.")
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not any(fnmatch.fnmatchcase(name, own) for own in WRITTEN):
            raise UserError(
                f"{folder} holds {name}, which is no result of an analysis, and is not replaced; choose another "
                "--output, or take it out."
            )


def divided(overrides: Sequence[str], *, has_data: bool) -> tuple[list[str], list[str]]:
    """What changes the settings of the run, and what changes the data that another config names.

    How images and texts become input stays with the run, as it was trained (see `OF_RUN`).
    """
    of_data = [
        word for word in overrides if has_data and _section(word)[0] == "data" and _section(word)[1] not in OF_RUN
    ]
    return [word for word in overrides if word not in of_data], of_data


def _section(word: str) -> list[str]:
    return [*word.partition("=")[0].split("."), ""]


def with_data_of(config: RunConfig, path: Path, overrides: list[str]) -> RunConfig:
    """The settings of a run, with the data of a config; what `OF_RUN` names stays that of the run.

    Args:
        overrides: changes of the config's data, of which `divided` left out what stays.
    """
    data = load_config(path, [*overrides, "output=unused"]).data
    own = {name: getattr(config.data, name) for name in OF_RUN}
    return dataclasses.replace(config, data=dataclasses.replace(data, **own))


def open_parses(request: AttentionRequest, config: RunConfig) -> Parses | None:
    """The parses of the captions; None if there are none."""
    if request.parses is not None:
        return read_parses(request.parses)
    if request.spacy_model is None:
        return None
    kind = named_parts(config).dataset
    return parse_with_spacy(kind.texts_of(*open_options(kind, config.data), request.split), request.spacy_model)


def caption_examples(
    config: RunConfig,
    model: VisionLanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    request: AttentionRequest,
    parses: Parses | None,
) -> ExampleDataset:
    """The captions of a split as plain texts."""
    wanting = dataclasses.replace(config, phrases=dataclasses.replace(config.phrases, weight=1.0))  # phrases are read
    dataset = open_split(wanting, request.split, request.boxes, training=False)
    loader = build_loader(config, model, dataset, request.boxes)
    loader.require_images(dataset.image_ids(), request.split)
    writer = dataclasses.replace(build_writer(config, model, tokenizer), marks_phrases=False)
    wording = CaptionWording(writer, parses, request.choices.missing_parse == "error")
    return ExampleDataset(dataset, loader, wording, seed=config.seed)
