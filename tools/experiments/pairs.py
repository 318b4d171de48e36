"""Every encoder on every task, from scratch on drawn data: accuracy, chance, blind controls, and the frozen detector.

    python tools/experiments/pairs.py --output runs/pairs
    python tools/experiments/pairs.py --output runs/pairs --encoders lxmert --tasks vqa nlvr2 --only joint image_blind
    python tools/experiments/pairs.py --output runs/pairs --tasks refcoco --set train.max_steps=300 --dry-run

A cell is one run of tools/train.py in a process of its own, in OUTPUT/<task>_<encoder>_<variant>_<seed>: the config of
the task in configs/pairs with the encoder of configs/pairs/encoders.yaml. All start from one detector, which is trained
first, on objects and attributes (configs/pairs/detector.yaml, OUTPUT/detector); encoders start at random. Variants:

    joint        detector and encoder trained together by the task; RefCOCO+, VQA and NLVR2 with several seeds
    frozen       the detector stays as it is
    image_blind  data.blank_image=true: every pixel is the mean colour; boxes that would tell the answer are left out
    text_blind   data.blank_text=true: every text is empty

Chance is computed from the data, see `chance_of`. Writes OUTPUT/pairs.json and pairs.md with what is finished, also
after a failure. A finished cell is not run again and an interrupted one goes on, so the same command can be given until
all are done.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from compare import Job, add_common_options, made_by, markdown_table, mean_and_spread, run_jobs, shown, write_table
from detector.boxes import pairwise_iou
from detector.io import read_yaml
from e2e_vl import parts
from e2e_vl.cli.main import make_parser, print_errors
from e2e_vl.config import BoxSource, EncoderSettings, RunConfig, load_config, save_config
from e2e_vl.data.base import VLDataset
from e2e_vl.metrics.vqa import answer_accuracy
from e2e_vl.run.build import make_synthetic_data, open_split
from e2e_vl.run.evaluate import MetricName
from e2e_vl.samples import (
    AnnotatedObjects,
    ChoiceText,
    CorrectAnswer,
    HumanAnswers,
    PhraseBoxes,
    ReferredBox,
    SampleText,
)
from e2e_vl.text import basic_tokenize

RIGHT_IOU = 0.5
ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs" / "pairs"
ENCODERS = CONFIGS / "encoders.yaml"
TASKS = {  # name, as of its config -> what it is called, and its metric
    "refcoco": ("RefCOCO+", "accuracy"),
    "vqa": ("VQA", "accuracy"),
    "vcr": ("VCR Q -> A", "accuracy"),
    "gqa": ("GQA", "accuracy"),
    "nlvr2": ("NLVR2", "accuracy"),
    "flickr30k": ("Flickr30K Entities", "accuracy"),
    "pretraining": ("pre-training: phrases", "phrase_accuracy"),
}
VARIANTS = {  # name -> heading and settings
    "joint": ("detector trained", ()),
    "frozen": ("detector frozen", ("detector.freeze=true",)),
    "image_blind": ("without the image", ("data.blank_image=true", "detector.freeze=true")),  # there is nothing to see
    "text_blind": ("without the text", ("data.blank_text=true",)),
}
NO_CELL = {("pretraining", "text_blind")}  # without words there are none to predict
SEEDED = ("refcoco", "vqa", "nlvr2")
SIZES = ("hidden_size", "num_attention_heads", "intermediate_size")  # that every encoder has
DETECTOR = "detector"  # the run, and its config, that all others start from


class Cell(NamedTuple):
    """One run of the table."""

    task: str
    encoder: str
    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}_{self.encoder}_{self.variant}_{self.seed}"


@print_errors
def main(argv: list[str] | None = None) -> int:
    encoders = read_yaml(ENCODERS)
    parser = make_parser(__doc__)
    parser.add_argument("--encoders", nargs="+", choices=tuple(encoders), default=list(encoders), help="default: all")
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS), help="default: all")
    parser.add_argument("--only", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS), help="variants")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2; the first is of all")
    parser.add_argument(
        "--configs", type=Path, default=CONFIGS, metavar="DIR", help="the tasks' configs (default: configs/pairs)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--dry-run", action="store_true", help="only show the commands of unfinished cells")
    add_common_options(parser)
    args = parser.parse_args(argv)
    cells = plan(args.encoders, args.tasks, args.only, args.seeds)
    jobs, configs = make_jobs(cells, encoders, args.output, args.configs, args.set)
    if args.dry_run:
        unfinished = [job for job in jobs.values() if job.metrics is None]
        print("\n".join(" ".join(job.command(args.launch)) for job in unfinished))
        return 0
    try:
        run_jobs(list(jobs.values()), launch=args.launch, parallel=args.jobs, keep_going=True)
    finally:  # after a failure the other cells belong into the table all the same
        table = collect(cells, jobs, configs)
        write_table(args.output / "pairs", table, [*as_markdown(table), "", made_by(__file__, argv)])
    return 0


def plan(encoders: Sequence[str], tasks: Sequence[str], variants: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """The cells, task after task. All seeds are for the joint runs of `SEEDED`; others have the first one."""
    return [
        Cell(task, encoder, variant, seed)
        for task, encoder, variant in itertools.product(tasks, encoders, variants)
        if (task, variant) not in NO_CELL
        for seed in (seeds if variant == "joint" and task in SEEDED else seeds[:1])
    ]


def make_jobs(
    cells: Sequence[Cell],
    encoders: Mapping[str, Any],
    output: Path,
    folder: Path,
    settings: Sequence[str],
) -> tuple[dict[str, Job], dict[tuple[str, str], RunConfig]]:
    """All runs by name, the detector first if one starts from it, and the settings of each pair.

    Writes the settings of each pair as OUTPUT/configs/<task>_<encoder>.yaml.
    """
    jobs: dict[str, Job] = {}
    configs: dict[tuple[str, str], RunConfig] = {}
    written = output / "configs"
    written.mkdir(parents=True, exist_ok=True)
    for cell in cells:
        pair = (cell.task, cell.encoder)
        name = f"{cell.task}_{cell.encoder}"
        if pair not in configs:
            own = encoders[cell.encoder]
            words = [*own.get("words", ()), *own.get("task_words", {}).get(cell.task, ()), *settings]
            configs[pair] = with_encoder(load_config(folder / f"{cell.task}.yaml", words), cell.encoder, own, cell.task)
            save_config(configs[pair], written / f"{name}.yaml")
        words, after = [f"seed={cell.seed}", *VARIANTS[cell.variant][1]], ()
        if cell.variant == "image_blind" and configs[pair].data.boxes.train != BoxSource.ONLINE:
            words.append("detector.loss_weight=0")  # there is nothing to detect
        start = configs[pair].detector.weights
        is_own = not any(word.startswith("detector.weights=") for word in settings)
        if start is not None and is_own and Path(start).parent.name == DETECTOR:
            run = output / DETECTOR
            jobs.setdefault(DETECTOR, Job(CONFIGS / f"{DETECTOR}.yaml", (f"data.root={output / 'drawn'}",), run))
            words.append(f"detector.weights={run / 'model'}")
            after = (run,)
        jobs[cell.name] = Job(written / f"{name}.yaml", tuple(words), output / cell.name, after)
    return jobs, configs


def with_encoder(config: RunConfig, name: str, settings: Mapping[str, Any], task: str) -> RunConfig:
    """The run with another encoder of the same sizes; see configs/pairs/encoders.yaml."""
    if settings["config"] is None:
        return config
    sizes = {key: getattr(config.encoder.config, key) for key in SIZES}
    if "layers" in settings:
        sizes[settings["layers"]] = config.encoder.config.num_hidden_layers
    own = {**sizes, **settings["config"], **settings.get("tasks", {}).get(task, {})}
    return msgspec.structs.replace(config, encoder=EncoderSettings(name, own))


def collect(
    cells: Sequence[Cell], jobs: Mapping[str, Job], configs: Mapping[tuple[str, str], RunConfig]
) -> dict[str, dict[str, Any]]:
    """task -> "chance", "split" and "encoders": encoder -> variant -> values of the seeds, mean, spread, minutes."""
    table: dict[str, dict[str, Any]] = {}
    for cell in cells:
        metrics = jobs[cell.name].metrics
        if metrics is None:
            continue
        config = configs[cell.task, cell.encoder]
        split = config.data.eval_splits[0]
        if cell.task not in table:
            table[cell.task] = {"split": split, "chance": chance_of(config, split), "encoders": {}}
        variants = table[cell.task]["encoders"].setdefault(cell.encoder, {})
        entry = variants.setdefault(cell.variant, {"seeds": [], "values": [], "minutes": []})
        entry["seeds"].append(cell.seed)
        entry["values"].append(metrics[str(MetricName(split, TASKS[cell.task][1], BoxSource.GT))])
        entry["minutes"].append(metrics["seconds_training"] / 60)
        entry |= {"steps": metrics["steps"], **mean_and_spread(entry["values"])}
    return table


def as_markdown(table: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The lines of the table; a row for each pair."""
    rows = {}
    for task, own in table.items():
        for encoder, variants in own["encoders"].items():
            cells = [shown(variants[one], "{:.3f}") if one in variants else "–" for one in VARIANTS]
            minutes = sum(sum(entry["minutes"]) for entry in variants.values())
            steps = max(entry["steps"] for entry in variants.values())
            rows[f"{TASKS[task][0]}, {encoder}"] = [
                *cells[:1],
                f"{own['chance']:.3f}",
                *cells[1:],
                str(steps),
                f"{minutes:.0f}",
            ]
    headings = [heading for heading, _ in VARIANTS.values()]
    columns = [headings[0], "chance", *headings[1:], "steps", "minutes"]
    note = (
        "Accuracy on unseen drawn scenes with annotated boxes; ± is the standard deviation over the seeds, where there "
        "are several; minutes of training are of all cells of the row together."
    )
    return [*markdown_table(columns, rows), "", note] if rows else ["No cell is finished yet."]


# How often a guess is right that looks neither at the image nor at the text


def chance_of(config: RunConfig, split: str) -> float:
    """The accuracy of the best guess on a split, with annotated boxes as candidates.

    Boxes: any candidate, each as likely. Answers and labels: the one that is most frequent in the training split.
    Choices among texts: any, each as likely. Captions, for masked words: the most frequent word of the training split.
    The data are drawn first if the settings ask for it.
    """
    make_synthetic_data(config)
    dataset = open_split(config, split, BoxSource.GT, training=False)
    spell = parts.TASKS[config.task.name].cls.canonical_answer
    usual: list[str] = []

    def guess(own: Callable[[SampleText], str | None]) -> str:
        if not usual:
            trained = open_split(config, config.data.train_split, BoxSource.GT, training=True)
            counts = Counter(own(text) for text, _ in _texts(trained))
            counts.pop(None, None)
            usual.append(min(counts, key=lambda answer: (-counts[answer], answer)))
        return usual[0]

    scores: list[float] = []
    for text, objects in _texts(dataset):
        truth = text.truth
        if isinstance(truth, ReferredBox):
            scores.append(_share_right(objects, np.array([truth.box])))
        elif isinstance(truth, PhraseBoxes):
            scores += [_share_right(objects, boxes) for boxes in truth.boxes or () if len(boxes)]
        elif isinstance(truth, HumanAnswers):
            scores.append(answer_accuracy(guess(lambda one: _most_frequent(one, spell)), truth.answers))
        elif isinstance(truth, CorrectAnswer):
            if text.metadata.get("is_balanced", True):  # only they are scored
                scores.append(float(guess(lambda one: spell(one.truth.answer)) == spell(truth.answer)))
        elif isinstance(text, ChoiceText):
            scores.append(1 / len(text.choices))
        elif truth is not None:
            scores.append(float(guess(lambda one: str(one.truth.number)) == str(truth.number)))
    if scores:
        return float(np.mean(scores))
    return _most_frequent_word(config, dataset)


def _texts(dataset: VLDataset) -> Iterable[tuple[SampleText, AnnotatedObjects | None]]:
    """All texts, and the annotated objects of their first image."""
    for texts in dataset.groups:
        sample = dataset.sample(texts)
        for text in sample.texts:
            yield text, sample.images[0].objects


def _share_right(objects: AnnotatedObjects, boxes: np.ndarray) -> float:
    candidates, wanted = (torch.as_tensor(np.asarray(one, dtype=np.float64)) for one in (objects.boxes, boxes))
    return float((pairwise_iou(candidates, wanted).amax(dim=1) >= RIGHT_IOU).double().mean())


def _most_frequent(text: SampleText, spell: Callable[[str], str]) -> str | None:
    if text.truth is None:
        return None
    return Counter(map(spell, text.truth.answers)).most_common(1)[0][0]


def _most_frequent_word(config: RunConfig, dataset: VLDataset) -> float:
    trained = open_split(config, config.data.train_split, BoxSource.GT, training=True)
    seen, asked = (
        Counter(word for text, _ in _texts(one) for word in basic_tokenize(text.words)) for one in (trained, dataset)
    )
    word = min(seen, key=lambda one: (-seen[one], one))
    return asked[word] / asked.total()


if __name__ == "__main__":
    raise SystemExit(main())
