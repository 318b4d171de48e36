"""Train every encoder on every task from scratch on synthetic data, with blind controls and with the detector frozen.

    python tools/experiments/pairs.py --output runs/pairs
    python tools/experiments/pairs.py --output runs/pairs --encoders lxmert --tasks vqa --variants joint image_blind
    python tools/experiments/pairs.py --output runs/pairs --tasks refcoco --set train.max_steps=300 --dry-run

Each cell of the table is one run of tools/train.py, in OUTPUT/<task>_<encoder>_<variant>_<seed>, with the task's config
in configs/pairs and the encoder of configs/pairs/encoders.yaml. All runs start from one detector, which is first
trained on objects and attributes (configs/pairs/detector.yaml, OUTPUT/detector), and from random encoders. Variants:

    joint        the task trains detector and encoder; RefCOCO+, VQA and NLVR2 with several seeds
    frozen       the detector is frozen
    image_blind  data.blank_image=true: every pixel is the mean colour; boxes that reveal the answer are left out
    text_blind   data.blank_text=true: every text is empty; VCR: task.config.blank_question=true, without the question

The table also has the accuracy of guessing and of the best rule that does not read everything
(e2e_vl/synthetic/shortcuts.py). Writes OUTPUT/pairs.json and pairs.md with all finished cells, also after a failure.
Finished cells are not repeated and interrupted ones are continued: repeat the command until all are done.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from compare import Job, add_common_options, format_mean, made_by, markdown_table, mean_and_std, run_jobs, write_table
from detector.io import read_yaml
from e2e_vl.cli.main import make_parser, print_errors
from e2e_vl.config import BoxSource, EncoderConfig, RunConfig
from e2e_vl.config_files import load_config, save_config
from e2e_vl.metrics.baselines import CHANCE, read_baselines
from e2e_vl.run.metric_names import MetricName

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs" / "pairs"
ENCODERS = CONFIGS / "encoders.yaml"
TASKS = {  # name of the config -> name in the table, and metric
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
    "image_blind": ("without the image", ("data.blank_image=true", "detector.freeze=true")),
    "text_blind": ("without the text", ("data.blank_text=true",)),
}
BLANK_QUESTION = ("task.config.blank_question=true",)  # without the choices as well, VCR would be guessing
SKIPPED = {("pretraining", "text_blind")}  # pre-training predicts words of the text
SEEDED = ("refcoco", "vqa", "nlvr2")  # tasks with several seeds
SIZES = ("hidden_size", "num_attention_heads", "intermediate_size")  # settings of every encoder
DETECTOR = "detector"  # name of the detector's run and config


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
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS), help="default: all")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="most runs use the first (default: 0 1 2)"
    )
    parser.add_argument(
        "--configs", type=Path, default=CONFIGS, metavar="DIR", help="the tasks' configs (default: configs/pairs)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of runs in parallel (default: 1)")
    parser.add_argument("--dry-run", action="store_true", help="only show the commands of unfinished cells")
    add_common_options(parser)
    args = parser.parse_args(argv)
    cells = plan(args.encoders, args.tasks, args.variants, args.seeds)
    jobs, configs = make_jobs(cells, encoders, args.output, args.configs, args.set)
    if args.dry_run:
        unfinished = [job for job in jobs.values() if job.metrics is None]
        print("\n".join(" ".join(job.command(args.launch)) for job in unfinished))
        return 0
    try:
        run_jobs(list(jobs.values()), launch=args.launch, parallel=args.jobs, keep_going=True)
    finally:  # the table has the finished cells even after a failure
        table = collect(cells, jobs, configs)
        write_table(args.output / "pairs", table, [*as_markdown(table), "", made_by(__file__, argv)])
    return 0


def plan(encoders: Sequence[str], tasks: Sequence[str], variants: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """Return the cells, task by task. The joint runs of `SEEDED` have all seeds; other runs have the first one."""
    cells = []
    for task, encoder, variant in itertools.product(tasks, encoders, variants):
        if (task, variant) in SKIPPED:
            continue
        has_all_seeds = variant == "joint" and task in SEEDED
        for seed in seeds if has_all_seeds else seeds[:1]:
            cells.append(Cell(task, encoder, variant, seed))
    return cells


def make_jobs(
    cells: Sequence[Cell], encoders: Mapping[str, Any], output: Path, folder: Path, settings: Sequence[str]
) -> tuple[dict[str, Job], dict[tuple[str, str], RunConfig]]:
    """Return all runs by name, the detector first if any starts from it, and the config of each (task, encoder) pair.

    Writes the configs to OUTPUT/configs/<task>_<encoder>.yaml.
    """
    jobs: dict[str, Job] = {}
    configs: dict[tuple[str, str], RunConfig] = {}
    config_folder = output / "configs"
    config_folder.mkdir(parents=True, exist_ok=True)
    settings_name_weights = any(word.startswith("detector.weights=") for word in settings)
    for cell in cells:
        pair = (cell.task, cell.encoder)
        config_file = config_folder / f"{cell.task}_{cell.encoder}.yaml"
        if pair not in configs:
            configs[pair] = make_config(folder, cell.task, cell.encoder, encoders[cell.encoder], settings)
            save_config(configs[pair], config_file)
        config = configs[pair]

        if (cell.task, cell.variant) == ("vcr", "text_blind"):
            changes = BLANK_QUESTION
        else:
            _, changes = VARIANTS[cell.variant]
        overrides = [f"seed={cell.seed}", *changes]
        if cell.variant == "image_blind" and config.data.boxes.train != BoxSource.ONLINE:
            overrides.append("detector.loss_weight=0")  # there is nothing to detect

        after: tuple[Path, ...] = ()
        weights = config.detector.weights
        if weights is not None and Path(weights).parent.name == DETECTOR and not settings_name_weights:
            run = output / DETECTOR
            jobs.setdefault(DETECTOR, Job(CONFIGS / f"{DETECTOR}.yaml", (f"data.root={output / 'drawn'}",), run))
            overrides.append(f"detector.weights={run / 'model'}")
            after = (run,)
        jobs[cell.name] = Job(config_file, tuple(overrides), output / cell.name, after)
    return jobs, configs


def make_config(folder: Path, task: str, encoder: str, entry: Mapping[str, Any], settings: Sequence[str]) -> RunConfig:
    """Return the config of a task with an encoder.

    Args:
        folder: of the tasks' configs.
        entry: of the encoder in configs/pairs/encoders.yaml.
        settings: `key=value` settings that override both.
    """
    overrides = [*entry.get("overrides", ()), *entry.get("task_overrides", {}).get(task, ()), *settings]
    config = load_config(folder / f"{task}.yaml", overrides)
    return with_encoder(config, encoder, entry, task)


def with_encoder(config: RunConfig, name: str, settings: Mapping[str, Any], task: str) -> RunConfig:
    """Return the config with another encoder of the same sizes; see configs/pairs/encoders.yaml."""
    if settings["config"] is None:
        return config
    sizes = {key: getattr(config.encoder.config, key) for key in SIZES}
    if "layers" in settings:
        sizes[settings["layers"]] = config.encoder.config.num_hidden_layers
    fields = {**sizes, **settings["config"], **settings.get("tasks", {}).get(task, {})}
    return msgspec.structs.replace(config, encoder=EncoderConfig(name, fields))


def collect(
    cells: Sequence[Cell], jobs: Mapping[str, Job], configs: Mapping[tuple[str, str], RunConfig]
) -> dict[str, dict[str, Any]]:
    """Return the results of finished cells.

    Returns:
        task -> "split", "chance", "shortcut" and "encoders": encoder -> variant -> results of its seeds.
    """
    table: dict[str, dict[str, Any]] = {}
    for cell in cells:
        metrics = jobs[cell.name].metrics
        if metrics is None:
            continue
        config = configs[cell.task, cell.encoder]
        split = config.data.eval_splits[0]
        if cell.task not in table:
            rules = read_baselines(Path(config.data.root), config.data.name, split)
            shortcut = max((rules[rule] for rule in rules if "/" not in rule), default=None)
            table[cell.task] = {"split": split, "chance": rules.get(CHANCE), "shortcut": shortcut, "encoders": {}}
        variants = table[cell.task]["encoders"].setdefault(cell.encoder, {})
        entry = variants.setdefault(cell.variant, {"seeds": [], "values": [], "minutes": []})
        _, metric = TASKS[cell.task]
        entry["seeds"].append(cell.seed)
        entry["values"].append(metrics[str(MetricName(split, metric, BoxSource.GT))])
        entry["minutes"].append(metrics["seconds_training"] / 60)
        entry |= {"steps": metrics["steps"], **mean_and_std(entry["values"])}
    return table


def as_markdown(table: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines of the table, which has a row for each task and encoder, and a note."""
    if not table:
        return ["No cell is finished yet."]
    rows = {}
    for task, results in table.items():
        task_name, _ = TASKS[task]
        chance = _format_accuracy(results["chance"])
        shortcut = _format_accuracy(results["shortcut"])
        for encoder, variants in results["encoders"].items():
            cells = dict.fromkeys(VARIANTS, "–")
            for variant, entry in variants.items():
                cells[variant] = format_mean(entry, "{:.3f}")
            joint, *controls = cells.values()
            steps = max(entry["steps"] for entry in variants.values())
            minutes = sum(sum(entry["minutes"]) for entry in variants.values())
            rows[f"{task_name}, {encoder}"] = [joint, chance, shortcut, *controls, str(steps), f"{minutes:.0f}"]
    joint_heading, *control_headings = [heading for heading, _ in VARIANTS.values()]
    columns = [joint_heading, "chance", "best shortcut", *control_headings, "steps", "minutes"]
    note = (
        "Accuracy on unseen synthetic scenes with annotated boxes; ± is the standard deviation over several seeds; "
        "minutes are the training time of the whole row."
    )
    return [*markdown_table(columns, rows), "", note]


def _format_accuracy(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    raise SystemExit(main())
