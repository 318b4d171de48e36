"""The analysis of a trained run's attention on a split with captions and boxes, and its result files."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from transformers import PreTrainedTokenizerBase

from detector.errors import UserError
from detector.images import load_image
from detector.io import atomic_folder, write_json
from e2e_vl.analysis.captions import CaptionPreprocessor, Parses, parse_with_spacy, read_parses
from e2e_vl.analysis.collect import ENTITIES, RELATIONS, AttentionStatistics, choose_texts, collect_attention
from e2e_vl.analysis.options import AnalysisConfig
from e2e_vl.analysis.results import (
    AnalysisResults,
    AttentionHead,
    Overlay,
    draw_head_figure,
    draw_overlays,
    parse_heads,
    write_tables,
)
from e2e_vl.config import BoxSource, DataConfig, RunConfig
from e2e_vl.config_files import load_config
from e2e_vl.data.base import open_options
from e2e_vl.data.batching import EncodedDataset
from e2e_vl.data.image_loader import DetectedBoxes
from e2e_vl.io import file_name
from e2e_vl.model import VisionLanguageModel
from e2e_vl.registry import DATASETS
from e2e_vl.run.build import build_loader, build_text_tokenizer, open_split, warn_of_random_boxes
from e2e_vl.run.checkpoint import load_model
from e2e_vl.run.evaluate import make_loader
from e2e_vl.run.launch import make_accelerator
from e2e_vl.run.report import Picture, data_uri, encode_picture, render, typed_command
from e2e_vl.structures import AttentionGraph
from e2e_vl.terminal import lasting_output


def write_page(path: Path, results: AnalysisResults, figures: Mapping[str, bytes], overlays: Sequence[Overlay]) -> Path:
    """Write the page with all results.

    Args:
        figures: content of PNG files by name.
        overlays: pictures, grouped by caption.
    """
    captions = []
    for (_, text), overlays_of_text in itertools.groupby(overlays, key=lambda overlay: (overlay.index, overlay.text)):
        captions.append((text, [(overlay, _encode_overlay(overlay)) for overlay in overlays_of_text]))
    return render(
        path,
        "attention_page.html.jinja",
        results=results,
        command=typed_command("--run"),
        figures={name: data_uri(content, "png") for name, content in figures.items()},
        captions=captions,
    )


def _encode_overlay(overlay: Overlay) -> Picture:
    """Return the picture of an overlay for the page, or why there is none."""
    if overlay.file is None:
        return Picture(problem=overlay.problem)
    if overlay.file.suffix == ".png":  # maps of words, which would be illegible in a small picture
        return Picture(data_uri(overlay.file.read_bytes(), "png"), is_wide=True)
    return encode_picture(load_image(overlay.file, "RGB"))


RESULTS_FOLDER = "attention"  # of a run directory
RESULTS_PAGE = "attention.html"
# all files of an analysis
RESULT_FILES = (
    RESULTS_PAGE,
    "attention.json",
    "heads.csv",
    "table2_*.csv",
    "entities_*.png",
    "relations_*.png",
    "overlays",
)
# `data` settings that always come from the run, even with the data of another config
RUN_SETTINGS = ("resize", "canvas", "vocabulary", "max_text_length", "blank_text", "blank_image", "workers")


@dataclasses.dataclass(frozen=True)
class AnalysisArguments:
    """The arguments of an analysis."""

    run: Path
    split: str
    boxes: BoxSource
    output: Path | None = None  # None: a folder of the run
    data: Path | None = None  # config with the data to read; None: the run's own
    parses: Path | None = None  # CoNLL-U
    spacy_model: str | None = None
    options: AnalysisConfig = dataclasses.field(default_factory=AnalysisConfig)
    heads: tuple[str, ...] = ()  # heads to draw; by default the best ones
    pictures: int = 6  # number of captions with pictures
    max_images: int | None = None
    overrides: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder of the result files."""
        return self.output or self.run / RESULTS_FOLDER / file_name(f"{self.split}_{self.boxes}")


def require_attention_maps(run: Path, config: RunConfig, graphs: Mapping[str, AttentionGraph]) -> None:
    """Raise a UserError if a run's encoder has no attention maps between words and regions that were read."""
    reason = None
    if config.data.blank_text:
        reason = "its texts are blank (data.blank_text)"
    elif config.data.blank_image:
        reason = "its images are blank (data.blank_image)"
    elif not graphs:
        reason = f"the encoder {config.encoder.name} returns no attention maps (`attention_graphs` is empty)"
    if reason is not None:
        raise UserError(f"{run}: cannot analyze this run, because {reason}; use another run.")


@lasting_output()
def analyze_attention(args: AnalysisArguments) -> tuple[AnalysisResults, Path | None]:
    """Measure all heads of a trained run on a split and write tables, figures, pictures and a page.

    Returns:
        The results, and the page on the main process (None on the others).
    """
    check_results_folder(args.folder)
    run_overrides, data_overrides = split_overrides(args.overrides, has_data=args.data is not None)
    config, model, tokenizer = load_model(args.run, overrides=run_overrides)
    graphs = model.encoder.attention_graphs
    require_attention_maps(args.run, config, graphs)
    if args.data is not None:
        config = replace_data(config, args.data, data_overrides)
    if args.boxes is BoxSource.ONLINE:
        warn_of_random_boxes(config.detector)
    accelerator = make_accelerator(config.train.mixed_precision, tf32=config.train.tf32)
    model.to(accelerator.device)
    parses = None
    if args.parses is not None:
        parses = read_parses(args.parses)
    elif args.spacy_model is not None:
        dataset_class = DATASETS[config.data.name].cls
        texts = dataset_class.texts_of(*open_options(dataset_class, config.data), args.split)
        parses = parse_with_spacy(texts, args.spacy_model)
    examples = caption_examples(config, model, tokenizer, args, parses)
    groups = examples.groups[: args.max_images]
    heads = parse_heads(args.heads, graphs, args.options, model.encoder.config.num_attention_heads)
    box_reader = examples.loader.box_reader
    statistics = collect_attention(
        model,
        make_loader(config, examples, accelerator, max_images=args.max_images),
        args.options,
        accelerator,
        sorted_boxes=box_reader is not None and isinstance(box_reader.of_split(0), DetectedBoxes),
        keep_texts=choose_texts(groups, args.pictures, config.seed),
    )
    relations = {graph: statistics.most_common_relations(graph, RELATIONS, args.options) for graph in graphs}
    left_out = {"captions skipped by the data set (whole split)": examples.dataset.left_out}
    results = AnalysisResults(
        run=str(args.run),
        encoder=config.encoder.name,
        data=config.data.name,
        split=args.split,
        boxes=str(args.boxes),
        parses=None if parses is None else parses.origin,
        options=args.options,
        graphs=graphs,
        sums=statistics.sums,
        counts={**statistics.counts, **left_out},
        relations=relations,
        images=len(groups),
    )
    page = None
    if accelerator.is_main_process:
        with atomic_folder(args.folder.resolve()) as folder:  # replaces an earlier analysis
            write_results(folder, results, statistics, heads)
        page = args.folder.resolve() / RESULTS_PAGE
    accelerator.wait_for_everyone()
    return results, page


def write_results(
    folder: Path, results: AnalysisResults, statistics: AttentionStatistics, heads: list[AttentionHead]
) -> None:
    """Write the tables, figures, pictures and the page of an analysis into a folder.

    Args:
        heads: those to draw; empty: the best ones.
    """
    write_json(folder / "attention.json", results.as_json())
    write_tables(folder, results)
    figures: dict[str, bytes] = {}
    for graph in results.graphs:
        if results.get_sums(graph, ENTITIES) is not None:
            figures[f"entities_{graph}.png"] = draw_head_figure(results, graph, ENTITIES)
        relations = results.relations[graph]
        if relations:
            figures[f"relations_{graph}.png"] = draw_head_figure(results, graph, RELATIONS, relations)
    for name, content in figures.items():
        (folder / name).write_bytes(content)
    overlays = draw_overlays(folder / "overlays", results, statistics.texts, heads)
    write_page(folder / RESULTS_PAGE, results, figures, overlays)


def check_results_folder(folder: Path, patterns: Sequence[str] = RESULT_FILES) -> None:
    """Raise an error unless the folder is new or contains an earlier analysis only, whose files match `patterns`."""
    other_names = []
    if folder.is_dir():
        for path in folder.iterdir():
            if not any(fnmatch.fnmatchcase(path.name, pattern) for pattern in patterns):
                other_names.append(path.name)
    if folder.is_file() or other_names:
        raise UserError(f"{folder} contains files that are not from an analysis; choose another --output.")


def split_overrides(overrides: Sequence[str], *, has_data: bool) -> tuple[list[str], list[str]]:
    """Split overrides into those of the run and those of the other config's data.

    Settings in `RUN_SETTINGS` belong to the run, because the model was trained with them.
    """
    if not has_data:
        return list(overrides), []
    pattern = re.compile(rf"data\.(?!({'|'.join(RUN_SETTINGS)})\b)")
    data_overrides = [word for word in overrides if pattern.match(word)]
    run_overrides = [word for word in overrides if not pattern.match(word)]
    return run_overrides, data_overrides


def replace_data(config: RunConfig, path: Path, overrides: list[str]) -> RunConfig:
    """Replace the data of a run's config by those of another config, except for `RUN_SETTINGS`."""
    return use_data(config, load_config(path, [*overrides, "output=unused"]).data)


def use_data(config: RunConfig, data: DataConfig) -> RunConfig:
    """Return the settings of a run with other data, except for `RUN_SETTINGS`."""
    run_settings = {name: getattr(config.data, name) for name in RUN_SETTINGS}
    evaluation = msgspec.structs.replace(config.eval, boxes=[])  # the other data may lack the boxes of the run
    return msgspec.structs.replace(config, data=msgspec.structs.replace(data, **run_settings), eval=evaluation)


def with_phrases(config: RunConfig) -> RunConfig:
    """Return settings with which a data set reads its phrases, as for a phrase head."""
    return msgspec.structs.replace(config, phrases=msgspec.structs.replace(config.phrases, weight=1.0))


def caption_examples(
    config: RunConfig,
    model: VisionLanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    args: AnalysisArguments,
    parses: Parses | None,
) -> EncodedDataset:
    """Open the captions of a split as encoder inputs, without masked words."""
    dataset = open_split(with_phrases(config), args.split, args.boxes, training=False)
    loader = build_loader(config, model, dataset, args.boxes)
    loader.require_images(dataset.image_keys(), args.split)
    text_tokenizer = dataclasses.replace(build_text_tokenizer(config, model, tokenizer), with_phrase_spans=False)
    preprocessor = CaptionPreprocessor(text_tokenizer, parses, args.options.missing_parse == "error")
    return EncodedDataset(dataset, loader, preprocessor, seed=config.seed)
