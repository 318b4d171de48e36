"""Baselines: what rules reach that do not read all of an example. A model that reads does better than the best of them.

They lie beside the data, in `shortcuts.json` in the folder named after the data set: split -> rule -> accuracy. A rule
about one family of texts, or one kind of question, begins with that and a slash; "chance" is a guess without image
and text.
"""

from __future__ import annotations

from pathlib import Path

from detector.io import read_json

METRIC = "best_shortcut"  # of the best rule, in metrics
CHANCE = "chance"  # the rule
FILE = "shortcuts.json"


def read_baselines(root: Path, data: str, split: str) -> dict[str, float]:
    """Return all rules of a split and their accuracies; empty if there is no file.

    Args:
        data: name of the data set. Its folder may end in "+", as that of RefCOCO+'s expressions does.
        split: name of the split, perhaps with an ending, as in GQA's "val_balanced".
    """
    for folder in (data, f"{data}+"):
        path = root / folder / FILE
        if path.is_file():
            measured = read_json(path)
            return measured.get(split) or measured.get(split.split("_")[0], {})
    return {}


def best_baselines(root: Path, data: str, split: str) -> dict[str, float]:
    """Return the best rule of all examples and of each family, "best_shortcut/<rule>" -> accuracy.

    Empty if there is no file; see `read_baselines`.
    """
    accuracies = read_baselines(root, data, split)
    best_rules: dict[str, str] = {}  # by family; "": of all examples
    for rule in sorted(accuracies, key=accuracies.__getitem__):
        family = rule.rpartition("/")[0]
        best_rules[family] = rule
    return {f"{METRIC}/{rule}": accuracies[rule] for rule in best_rules.values()}
