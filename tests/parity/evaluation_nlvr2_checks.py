"""NLVR2's accuracy and consistency are those of the official script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e_vl.data.nlvr2 import read_examples
from e2e_vl.tasks.nlvr2 import NLVR2Prediction, group_of, nlvr2_metrics, nlvr2_scores, write_submission
from tests.parity.evaluation_common import folder_of

FILES = ("predictions.csv", "predictions_edge.csv")


FOLDERS = ("nlvr2", "nlvr2_real")  # sentences that were made up, and some of the published ones, which are optional


def read_predictions(path: Path) -> dict[str, str]:
    """As the official script reads a CSV file: the first two columns, and of an identifier twice the last line."""
    return dict(line.rstrip().split(",")[:2] for line in path.read_text("utf-8").splitlines())


@pytest.fixture(scope="module", params=FOLDERS)
def nlvr2_folder(golden_root: Path, request: pytest.FixtureRequest) -> Path:
    return folder_of(golden_root, request.param)


@pytest.fixture(scope="module")
def nlvr2_expected(nlvr2_folder: Path) -> dict:
    return json.loads((nlvr2_folder / "expected.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def nlvr2_labels(nlvr2_folder: Path) -> dict[str, str]:
    [path] = nlvr2_folder.glob("*_subset.json")
    return {example.id: example.label for example in read_examples(path)}


@pytest.mark.parametrize("name", FILES)
def test_nlvr2_scores_of_the_official_script(nlvr2_folder, nlvr2_expected, nlvr2_labels, name):
    if name != FILES[0] and name not in nlvr2_expected:
        pytest.skip(f"the set has no {name}; it is optional")
    assert nlvr2_expected[name].keys() == {"accuracy", "consistency"}
    ours = nlvr2_scores(nlvr2_labels, read_predictions(nlvr2_folder / name))
    for key, value in nlvr2_expected[name].items():
        assert ours[key] == pytest.approx(value, abs=1e-12), key


def test_nlvr2_groups_are_told_from_identifiers(nlvr2_folder, nlvr2_expected, nlvr2_labels):
    [path] = nlvr2_folder.glob("*_subset.json")
    assert len(nlvr2_labels) == nlvr2_expected["examples"]
    assert len({group_of(identifier) for identifier in nlvr2_labels}) == nlvr2_expected["consistency_groups"]
    sentences = {example.words for example in read_examples(path)}
    assert len(sentences) == nlvr2_expected["distinct_sentences"]


def test_nlvr2_metrics_of_a_run_are_the_same_numbers(nlvr2_folder, nlvr2_expected, nlvr2_labels, tmp_path):
    predicted = read_predictions(nlvr2_folder / FILES[0])
    spelled = {identifier: predicted[identifier].capitalize() for identifier in nlvr2_labels}
    records = [
        NLVR2Prediction(
            identifier=identifier, label=label, prediction=spelled[identifier], score=1.0, true=1.0, file_names=()
        )
        for identifier, label in nlvr2_labels.items()
    ]
    metrics = nlvr2_metrics(records)
    for key, value in nlvr2_expected[FILES[0]].items():
        assert metrics[key] == pytest.approx(value, abs=1e-12), key
    write_submission(tmp_path / "again.csv", records)
    assert read_predictions(tmp_path / "again.csv") == spelled
