"""Train variants of a run one after the other and put their metrics into one table.

    python tools/experiments/compare.py --config configs/demo/refcoco.yaml --variants configs/demo/variants.yaml \\
        --output runs/demo_compare
    python tools/experiments/compare.py --config FILE --output DIR --variant joint --variant frozen detector.freeze=true
    python tools/experiments/compare.py --config FILE --output DIR --variants FILE --seeds 1 2 3 --jobs 2

Each variant is a run of tools/train.py in the folder of OUTPUT with its name; with --seeds it is a run per seed, and
the table has the mean over them and the spread. A finished run is not run again and an unfinished run is continued, so
the same command can be given until all are done. Writes OUTPUT/comparison.json and OUTPUT/comparison.md, a table of the
chosen metrics and the minutes of training.
"""

from __future__ import annotations

import re
import shlex
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from detector.errors import MissingFileError, UserError
from detector.io import read_yaml
from e2e_vl.cli.common import make_parser, says_errors
from jobs import Job, add_common_options, made_by, markdown_table, run_jobs, write_table


@says_errors
def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run that all variants change")
    parser.add_argument("--variants", type=Path, metavar="FILE", help="YAML file: name -> list of key=value words")
    parser.add_argument(
        "--variant",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "key=value"),
        help="a name and the settings it changes; can be given several times",
    )
    parser.add_argument("--metrics", nargs="+", help="keys of metrics.json to show (default: all accuracies)")
    parser.add_argument("--seeds", type=int, nargs="+", help="a run of each variant per seed (default: the config's)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, with logs beside the runs (default: 1)")
    add_common_options(parser)
    arguments = parser.parse_args(argv)
    if arguments.jobs < 1:
        raise UserError(f"--jobs is {arguments.jobs}; give a positive number.")
    variants = read_variants(arguments.variants, arguments.variant)
    jobs = make_jobs(arguments.config, arguments.output, variants, arguments.set, arguments.seeds)
    train(jobs, arguments.launch, arguments.jobs)
    comparison = {"config": str(arguments.config), "common_overrides": arguments.set, "seeds": arguments.seeds}
    comparison |= compare(jobs, variants, arguments.metrics)
    write_table(arguments.output / "comparison", comparison, [*as_markdown(comparison), made_by(__file__, argv)])
    return 0


def read_variants(path: Path | None, words: list[list[str]]) -> dict[str, list[str]]:
    """Name -> overrides, of the file and then of the command line.

    Raises:
        FileNotFoundError, ValueError: the file does not exist, there is no variant, a name is given twice, or a name
            cannot be the name of a folder.
    """
    variants = {} if path is None else _read_file(path)
    for name, *overrides in words:
        if name in variants:
            raise UserError(f"Variant '{name}' is given twice.")
        variants[name] = overrides
    if not variants:
        raise UserError("There is nothing to compare; give --variants FILE or --variant NAME key=value ...")
    folders: dict[str, str] = {}
    for name in variants:
        folder = folder_of(name)
        if "=" in name or not folder.strip("_"):
            raise UserError(f"'{name}' cannot name a variant; give --variant NAME key=value ..., a name of words.")
        if folder in folders:
            raise UserError(
                f"The variants '{folders[folder]}' and '{name}' would share the folder {folder}; rename one."
            )
        folders[folder] = name
    return variants


def _read_file(path: Path) -> dict[str, list[str]]:
    if not path.is_file():
        raise MissingFileError(f"Variants file {path} does not exist.")
    content = read_yaml(path)
    if not isinstance(content, dict) or not all(
        isinstance(value, list) and all(isinstance(word, str) for word in value) for value in content.values()
    ):
        raise UserError(f"{path} must map names to lists of key=value words, such as `frozen: [detector.freeze=1]`.")
    return {str(name): overrides for name, overrides in content.items()}


def folder_of(name: str) -> str:
    """The name, with underscores for all characters that are awkward in folder names."""
    return re.sub(r"[^\w.-]+|^[.]+", "_", name)


def make_jobs(
    config: Path, output: Path, variants: dict[str, list[str]], common: Sequence[str], seeds: Sequence[int] | None
) -> dict[str, list[Job]]:
    """The runs of each variant: one, or one per seed.

    Raises:
        ValueError: a seed is given twice, settings do not load, or a folder holds another run.
    """
    if seeds is not None and len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds names a seed twice: {' '.join(map(str, seeds))}.")
    jobs = {}
    for name, overrides in variants.items():
        run = output / folder_of(name)
        if seeds is None:
            jobs[name] = [Job(config, (*common, *overrides), run)]
        else:
            words = [(*common, *overrides, f"seed={seed}") for seed in seeds]
            jobs[name] = [
                Job(config, own, run.with_name(f"{run.name}_{seed}")) for own, seed in zip(words, seeds, strict=True)
            ]
    every = [job for own in jobs.values() for job in own]
    if len({job.run for job in every}) < len(every):
        raise UserError("Two variants would share a folder: a name ends as another one with a seed does; rename it.")
    for job in every:  # all of them before the first hour is spent
        job.check()
    return jobs


def train(jobs: dict[str, list[Job]], launch: str, parallel: int) -> None:
    """Train what is not finished, each run in a process of its own.

    Raises:
        ValueError: a run failed.
    """
    if parallel > 1:
        run_jobs([job for own in jobs.values() for job in own], launch=launch, parallel=parallel)
        return
    for name, job in ((name, job) for name, own in jobs.items() for job in own if job.metrics is None):
        command = job.command(launch)
        print(f"{name}: {shlex.join(command)}", flush=True)
        status = subprocess.run(command, check=False).returncode
        if status != 0 or job.metrics is None:
            raise UserError(
                f"Variant '{name}' failed with exit status {status}, see above; give the same command again to go on."
            )


def compare(
    jobs: dict[str, list[Job]], variants: dict[str, list[str]], metrics: Sequence[str] | None
) -> dict[str, Any]:
    """The metrics of all variants, whose runs are finished.

    Args:
        metrics: which; None: all accuracies over all kinds of texts.

    Raises:
        ValueError: an unknown metric.
    """
    results = {name: [job.metrics for job in own] for name, own in jobs.items()}
    first = next(iter(results.values()))[0]
    metrics = metrics or [key for key in first if re.fullmatch(r"[^/]*/accuracy[^/]*", key)]
    rows = {}
    for name, found in results.items():
        unknown = [key for key in metrics if key not in found[0]]
        if unknown:
            known = ", ".join(key for key, value in found[0].items() if isinstance(value, int | float))
            raise UserError(f"Variant '{name}' has no metric '{unknown[0]}'; it has {known}.")
        rows[name] = {
            "overrides": variants[name],
            "runs": [str(job.run) for job in jobs[name]],
            "metrics": {key: [one[key] for one in found] for key in metrics},
            "steps": [one["steps"] for one in found],
            "training_minutes": [one["seconds_training"] / 60 for one in found],
        }
    return {"metrics": metrics, "variants": rows}


def as_markdown(comparison: dict[str, Any]) -> list[str]:
    """The lines of the table."""
    metrics = comparison["metrics"]
    rows = {
        name: [
            *(_shown(row["metrics"][key]) for key in metrics),
            f"{statistics.mean(row['training_minutes']):.1f}",
        ]
        for name, row in comparison["variants"].items()
    }
    seeds = comparison["seeds"] or []
    note = [f"Means over the seeds {', '.join(map(str, seeds))}, and the spread.", ""] if len(seeds) > 1 else []
    return [*markdown_table([*metrics, "minutes of training"], rows), "", *note]


def _shown(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    spread = f" ({min(known):.3f} to {max(known):.3f})" if len(known) > 1 else ""
    return f"{statistics.mean(known):.3f}{spread}"


if __name__ == "__main__":
    raise SystemExit(main())
