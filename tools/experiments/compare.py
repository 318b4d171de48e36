"""Train variants of a run one after the other and put their metrics into one table.

    python tools/experiments/compare.py --config configs/demo/refcoco.yaml --variants configs/demo/variants.yaml \\
        --output runs/demo_compare
    python tools/experiments/compare.py --config FILE --output DIR --variant joint --variant frozen detector.freeze=true

Each variant is a run of tools/train.py in the folder of OUTPUT with its name. A finished run is not run again and an
unfinished run is continued, so the same command can be given until all are done. Writes OUTPUT/comparison.json and
OUTPUT/comparison.md, a table of the chosen metrics and the minutes of training.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import yaml

from e2e_vl.command_line import make_parser, says_errors
from jobs import Job, add_common_options, made_by, markdown_table, write_table


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
    add_common_options(parser)
    arguments = parser.parse_args(argv)
    variants = read_variants(arguments.variants, arguments.variant)
    comparison = compare(
        arguments.config, arguments.output, variants, arguments.set, arguments.metrics, arguments.launch
    )
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
            raise ValueError(f"Variant '{name}' is given twice.")
        variants[name] = overrides
    if not variants:
        raise ValueError("There is nothing to compare; give --variants FILE or --variant NAME key=value ...")
    folders: dict[str, str] = {}
    for name in variants:
        folder = folder_of(name)
        if "=" in name or not folder.strip("_"):
            raise ValueError(f"'{name}' cannot name a variant; give --variant NAME key=value ..., a name of words.")
        if folder in folders:
            raise ValueError(
                f"The variants '{folders[folder]}' and '{name}' would share the folder {folder}; rename one."
            )
        folders[folder] = name
    return variants


def _read_file(path: Path) -> dict[str, list[str]]:
    if not path.is_file():
        raise FileNotFoundError(f"Variants file {path} does not exist.")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not all(
        isinstance(value, list) and all(isinstance(word, str) for word in value) for value in content.values()
    ):
        raise ValueError(f"{path} must map names to lists of key=value words, such as `frozen: [detector.freeze=1]`.")
    return {str(name): overrides for name, overrides in content.items()}


def folder_of(name: str) -> str:
    """The name, with underscores for all characters that are awkward in folder names."""
    return re.sub(r"[^\w.-]+|^[.]+", "_", name)


def compare(
    config: Path,
    output: Path,
    variants: dict[str, list[str]],
    common: list[str],
    metrics: list[str] | None,
    launch: str,
) -> dict[str, Any]:
    """Train the variants that are not finished and collect the metrics of all of them.

    Raises:
        ValueError: settings that do not load, a folder that holds another run, a failed run or an unknown metric.
    """
    jobs = {name: Job(config, (*common, *overrides), output / folder_of(name)) for name, overrides in variants.items()}
    for job in jobs.values():  # all of them before the first hour is spent
        job.check()
    results = {name: train_variant(name, job, launch) for name, job in jobs.items()}
    metrics = metrics or [key for key in next(iter(results.values())) if re.fullmatch(r"[^/]*/accuracy[^/]*", key)]
    rows = {}
    for name, result in results.items():
        unknown = [key for key in metrics if key not in result]
        if unknown:
            known = ", ".join(key for key, value in result.items() if isinstance(value, int | float))
            raise ValueError(f"Variant '{name}' has no metric '{unknown[0]}'; it has {known}.")
        rows[name] = {
            "overrides": variants[name],
            "run": str(jobs[name].run),
            "metrics": {key: result[key] for key in metrics},
            "steps": result["steps"],
            "training_minutes": result["seconds_training"] / 60,
        }
    return {"config": str(config), "common_overrides": common, "metrics": metrics, "variants": rows}


def train_variant(name: str, job: Job, launch: str) -> dict[str, Any]:
    """The metrics of one variant, trained by tools/train.py in a process of its own if it is not finished."""
    if job.metrics is None:
        command = job.command(launch)
        print(f"{name}: {shlex.join(command)}", flush=True)
        status = subprocess.run(command, check=False).returncode
        if status != 0 or job.metrics is None:
            raise ValueError(
                f"Variant '{name}' failed with exit status {status}, see above; give the same command again to go on."
            )
    return job.metrics


def as_markdown(comparison: dict[str, Any]) -> list[str]:
    """The lines of the table."""
    metrics = comparison["metrics"]
    rows = {
        name: [*(_shown(row["metrics"][key]) for key in metrics), f"{row['training_minutes']:.1f}"]
        for name, row in comparison["variants"].items()
    }
    return [*markdown_table([*metrics, "minutes of training"], rows), ""]


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    raise SystemExit(main())
