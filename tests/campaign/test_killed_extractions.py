"""Extractions that are killed at random moments give the files of the undisturbed one, in every format.

`pytest -m campaign` kills each format 20 times, with one and with two processes; the test without the mark is the
short form of it.
"""

from __future__ import annotations

import functools
import random
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from e2e_vl.cli import extract_features
from e2e_vl.data.features import FORMATS, SUFFIXES, open_features
from e2e_vl.extraction import bulk
from tests.campaign.disturbed import FILE_MOMENTS, Ended, run_disturbed

ROOT = Path(__file__).parents[2]
IMAGES = 12
KILLS = 20
# an image that is described, that is written, that is read to be joined; files that take their names or go
MOMENTS = (*FILE_MOMENTS, (bulk, "_save"), (bulk, "save_npz"), (bulk, "load_npz"), (Path, "unlink"))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    (folder / "images").mkdir()
    for number in range(IMAGES):
        pixels = generator.integers(0, 256, (40 + 8 * (number % 3), 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number:03}.png")
    base = ROOT / "configs" / "detector" / "tiny.yaml"
    sizes = "INPUT: {MIN_SIZE_TEST: 64, MAX_SIZE_TEST: 96}"
    attributes = "MODEL: {ROI_BOX_HEAD: {ATTRIBUTES: {NUM_CLASSES: 5}}}"
    (folder / "small.yaml").write_text(f"_BASE_: {base}\n{sizes}\n{attributes}\n")
    rule = "--rule maxnms --num-boxes 4 --max-proposals 10 --workers 0 --batch-size 1 --attributes"
    return ["--images", str(folder / "images"), "--config", str(folder / "small.yaml"), *rule.split()]


def extraction(words: list[str], layout: str, folder: Path) -> tuple[Path, Callable[[], int]]:
    """What is written, and the command that writes it."""
    output = folder / ("features" + (SUFFIXES[layout][0] if layout in SUFFIXES else ""))
    return output, functools.partial(extract_features.main, [*words, "--format", layout, "--output", str(output)])


def contents(output: Path) -> dict[str, dict[str, np.ndarray]]:
    """Image id -> columns of its regions."""
    store = open_features(output)
    return {image_id: store.read(image_id).columns() for image_id in store.ids}


def kill_often(words: list[str], layout: str, tmp_path: Path, times: int, *, processes: int, seed: int) -> list[Ended]:
    """Kill extractions `times` times, going on each time; each that ends is compared with an undisturbed one."""
    (tmp_path / "undisturbed").mkdir()
    expected_output, command = extraction(words, layout, tmp_path / "undisturbed")
    undisturbed = run_disturbed(command, MOMENTS, tmp_path)
    assert undisturbed.statuses == [0], undisturbed.texts[0][-2000:]
    expected = contents(expected_output)
    assert len(expected) == IMAGES

    draw, killed, round_number, ends = random.Random(seed), 0, 0, []
    while killed < times or not ends or any(ends[-1].statuses):
        folder = tmp_path / f"round_{round_number}"
        folder.mkdir(exist_ok=True)
        output, command = extraction(words, layout, folder)
        moment = draw.randint(1, undisturbed.moments // processes) if killed < times else None
        victim = draw.randrange(processes)
        ends.append(run_disturbed(command, MOMENTS, tmp_path, processes=processes, moment=moment, victim=victim))
        killed += ends[-1].statuses[victim] == -signal.SIGKILL
        if any(ends[-1].statuses):
            continue
        found = contents(output)
        assert list(found) == list(expected) if layout != "npz" else set(found) == set(expected)
        for image_id, columns in expected.items():
            assert columns.keys() == found[image_id].keys()
            for name, values in columns.items():
                np.testing.assert_array_equal(values, found[image_id][name], err_msg=f"{image_id} {name}")
        left = sorted(path.name for path in folder.iterdir() if path != output)
        assert left == ([output.name + ".json"] if layout in ("tsv", "lxmert") else [])
        assert not [path for path in output.rglob("*") if path.suffix == ".part" or path.name.startswith(".")]
        round_number += 1
    print(f"killed {killed} times, {round_number} extractions ended equal")
    return ends


@pytest.mark.parametrize("layout", ["npz", "tsv"])
def test_a_killed_extraction_ends_as_the_undisturbed_one(layout, words, tmp_path):
    kill_often(words, layout, tmp_path, 2, processes=1, seed=1)


@pytest.mark.campaign
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("layout", FORMATS)
def test_killed_extractions_end_as_the_undisturbed_one(layout, processes, words, tmp_path):
    kill_often(words, layout, tmp_path, KILLS, processes=processes, seed=2)
