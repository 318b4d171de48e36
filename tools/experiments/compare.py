"""Train variants of a run and put their metrics into one table.

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
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from detector.errors import UserError
from detector.io import read_yaml
from e2e_vl.cli.common import make_parser, print_errors
from jobs import Job, add_common_options, made_by, markdown_table, run_jobs, write_table


@print_errors
def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run that all variants change")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--variants", type=Path, metavar="FILE", help="YAML file: name -> list of key=value words")
    given.add_argument(
        "--variant",
        nargs="+",
        action="append",
        metavar=("NAME", "key=value"),
        help="a name and the settings it changes; can be given several times",
    )
    parser.add_argument("--metrics", nargs="+", help="keys of metrics.json to show (default: all accuracies)")
    parser.add_argument("--seeds", type=int, nargs="+", help="a run of each variant per seed (default: the config's)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    add_common_options(parser)
    arguments = parser.parse_args(argv)
    if arguments.variants is not None:
        variants = read_yaml(arguments.variants)
    else:
        variants = {name: overrides for name, *overrides in arguments.variant}
    for name in variants:
        if "=" in name:
            raise UserError(f"--variant needs a name before its settings; found '{name}'.")
    jobs = make_jobs(arguments.config, arguments.output, variants, arguments.set, arguments.seeds)
    every = [job for own in jobs.values() for job in own]
    run_jobs(every, launch=arguments.launch, parallel=arguments.jobs)
    comparison = {"config": str(arguments.config), "common_overrides": arguments.set, "seeds": arguments.seeds}
    comparison |= compare(jobs, variants, arguments.metrics)
    write_table(arguments.output / "comparison", comparison, [*as_markdown(comparison), made_by(__file__, argv)])
    return 0


def make_jobs(
    config: Path, output: Path, variants: dict[str, list[str]], common: Sequence[str], seeds: Sequence[int] | None
) -> dict[str, list[Job]]:
    """The runs of each variant: one, or one per seed."""
    jobs = {}
    for name, overrides in variants.items():
        run = output / name.replace(" ", "_")
        if seeds is None:
            jobs[name] = [Job(config, (*common, *overrides), run)]
        else:
            words = [(*common, *overrides, f"seed={seed}") for seed in seeds]
            jobs[name] = [
                Job(config, own, run.with_name(f"{run.name}_{seed}")) for own, seed in zip(words, seeds, strict=True)
            ]
    return jobs


def compare(
    jobs: dict[str, list[Job]], variants: dict[str, list[str]], metrics: Sequence[str] | None
) -> dict[str, Any]:
    """The metrics of all variants.

    Args:
        jobs: finished runs.
        metrics: names of metrics; None: all accuracies over all kinds of texts.
    """
    results = {name: [job.metrics for job in own] for name, own in jobs.items()}
    first = next(iter(results.values()))[0]
    metrics = metrics or [key for key in first if re.fullmatch(r"[^/]*/accuracy[^/]*", key)]
    rows = {}
    for name, found in results.items():
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
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "–"
    spread = f" ({min(numbers):.3f} to {max(numbers):.3f})" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):.3f}{spread}"


if __name__ == "__main__":
    raise SystemExit(main())
