"""Damaged files of every format: a reader either states sane facts or raises one UserError that names the file.

The short form damages 300 files; `pytest -m campaign tests/campaign/test_fuzzed_readers.py` damages 20,000.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import random
import re
import sys
import traceback
from pathlib import Path
from types import CodeType, SimpleNamespace

import pytest

from detector.errors import UserError
from e2e_vl.data import formats, storage
from e2e_vl.run.build import DATASETS
from tests.campaign.mutations import damaged
from tests.campaign.roads_of_files import Road, all_roads, draw, opened_files
from tests.campaign.roads_of_published import draw_published, published_roads
from tests.campaign.roads_of_runs import RUN, UNREAD, draw_run, run_roads
from tests.campaign.roads_of_storage import draw_storage, storage_roads

SHORT, LONG = 300, int(os.environ.get("FUZZED_FILES", "20000"))
ROADS = {road.name: road for road in (*all_roads(), *run_roads(), *storage_roads(), *published_roads())}
START = 1_800_000_000 * 10**9  # nanoseconds; each damaged file has a time of its own, as indices know files by it
# readers that only another reader of the same file calls on the way, or that read one line
INNER = {"read_polygons", "read_entry"}


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory, trained_run: SimpleNamespace) -> Path:
    root = draw(tmp_path_factory.mktemp("fuzzed") / "data")
    draw_run(root, trained_run.path)
    draw_storage(root)
    draw_published(root)
    for path in root.rglob("*"):  # an index made now stays the file's own
        os.utime(path, ns=(START - 1, START - 1))
    return root


@pytest.fixture(scope="session")
def files(drawn: Path) -> dict[str, list[Path]]:
    """Of each road the files that it opens."""
    return {name: opened_files(road, drawn) for name, road in ROADS.items()}


@pytest.fixture(scope="session")
def called(drawn: Path) -> set[CodeType]:
    """The functions that are called while every road reads good files."""
    found = set()
    sys.setprofile(lambda frame, event, _: found.add(frame.f_code) if event == "call" else None)
    try:
        for road in ROADS.values():
            road.read(drawn)
    finally:
        sys.setprofile(None)
    return found


def failure(road: Road, path: Path, root: Path, content: bytes, number: int) -> str | None:
    """What is wrong with the way in which a road reads a damaged file; None: nothing."""
    path.write_bytes(content)
    os.utime(path, ns=(START + number, START + number))
    try:
        road.read(root)
    except UserError as error:
        sentence = str(error)
        if str(root) not in sentence:
            return f"the sentence does not name the file: {sentence[:300]}"
        if len(sentence) > 2500 or "Traceback" in sentence:
            return f"the sentence is too long: {sentence[:300]}"
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "e2e_vl" in frame.filename] or frames
        at = (
            f"{Path(frames[-1].filename).name}:{frames[-1].lineno}, by {Path(ours[-1].filename).name}:{ours[-1].lineno}"
        )
        return f"{type(error).__name__} ({at}): {str(error)[:300]}"
    return None


def cases(number: int, files: dict[str, list[Path]]) -> list[tuple[str, Path]]:
    """The road and the file of each case, every pair about equally often."""
    only = re.compile(os.environ.get("FUZZED_ROADS", ""))
    pairs = [(name, path) for name, paths in files.items() if only.search(name) for path in _few(paths)]
    order = random.Random(7).sample(pairs, len(pairs))
    return [order[case % len(order)] for case in range(number)]


def _few(paths: list[Path]) -> list[Path]:
    """One file of each folder and kind is enough where there are many alike, such as one of each image."""
    alike: dict[tuple[Path, str], list[Path]] = {}
    for path in paths:
        alike.setdefault((path.parent, path.suffix), []).append(path)
    return [path for group in alike.values() for path in (group if len(group) <= 4 else group[:1])]


def damage(number: int, drawn: Path, files: dict[str, list[Path]]) -> None:
    only = os.environ.get("FUZZED_CASE")
    chosen = "".join(f"{name}='{os.environ[name]}' " for name in ("FUZZED_ROADS",) if name in os.environ)
    failures = []
    for case, (name, path) in enumerate(cases(number, files)):
        if only not in (None, str(case)):
            continue
        good = path.read_bytes()
        content = damaged(path, good, random.Random(f"{path.name} {case}"))
        try:
            found = failure(ROADS[name], path, drawn, content, case)
        finally:
            path.write_bytes(good)
            os.utime(path, ns=(START - 1, START - 1))
        if found:
            again = (
                f"FUZZED_CASE={case} {chosen}pytest -m 'campaign or not campaign' tests/campaign/test_fuzzed_readers.py"
            )
            failures.append(f"{name}, {path.relative_to(drawn)}: {found}\n    again: {again}")
    kinds = {line.partition(": ")[2].partition("\n")[0][:90]: line for line in reversed(failures)}
    assert not failures, f"{len(failures)} of {number} cases; of each kind one:\n" + "\n".join(kinds.values())


def test_a_few_damaged_files(drawn: Path, files: dict[str, list[Path]]):
    damage(SHORT, drawn, files)


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_many_damaged_files(drawn: Path, files: dict[str, list[Path]]):
    damage(LONG, drawn, files)


def test_every_data_set_has_a_road(files: dict[str, list[Path]]):
    assert {road.dataset for road in ROADS.values()} - {None} == set(DATASETS)
    assert all(files[name] for name, road in ROADS.items() if "shards" not in name), files


def test_every_reader_of_a_format_is_on_a_road(called: set[CodeType]):
    """A function or class of e2e_vl/data/formats that takes a path is called while good files are read."""
    readers = {}
    for found in pkgutil.iter_modules(formats.__path__):
        module = importlib.import_module(f"{formats.__name__}.{found.name}")
        for name, one in inspect.getmembers(module, inspect.isfunction):
            if one.__module__ == module.__name__ and name.startswith(("read_", "list_")) and name not in INNER:
                readers[one.__code__] = f"{found.name}.{name}"
    missing = sorted(name for code, name in readers.items() if code not in called)
    assert not missing, f"add a road to tests/campaign/roads_of_files.py that reads with {', '.join(missing)}"


def test_every_reader_of_stored_files_is_on_a_road(called: set[CodeType]):
    """A class or function of e2e_vl/data/storage that is built from, or called with, a path."""
    readers = {}
    for found in pkgutil.walk_packages(storage.__path__, f"{storage.__name__}."):
        module = importlib.import_module(found.name)
        for name, one in inspect.getmembers(module, lambda one: inspect.isfunction(one) or inspect.isclass(one)):
            begins = one.__init__ if inspect.isclass(one) else one
            is_reader = inspect.isclass(one) or name.startswith(
                ("read_", "open_", "load_", "json_", "find_", "cached_")
            )
            is_own = one.__module__ == module.__name__ and is_reader and inspect.isfunction(begins)
            if is_own and {"path", "root"} & set(inspect.signature(begins).parameters):
                readers[begins.__code__] = f"{found.name}.{name}"
    missing = sorted(name for code, name in readers.items() if code not in called)
    assert len(readers) > 10 and not missing, f"add a road to tests/campaign that reads with {', '.join(missing)}"


def test_every_file_of_a_run_is_on_a_road(drawn: Path, files: dict[str, list[Path]]):
    of_runs = {path for road in run_roads() for path in files[road.name]}
    written = {path for path in (drawn / RUN).rglob("*") if path.is_file() and path.suffix not in UNREAD}
    without = {path.relative_to(drawn / RUN).as_posix() for path in written - of_runs}
    # a resumed training reads the vocabulary, and transformers a model's own settings of its encoder
    assert without <= {"tokenizer/vocab.txt", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"} | {
        "model/encoder/config.json"
    }, without


def test_a_damaged_file_is_the_same_each_time(drawn: Path):
    path = drawn / "detection" / "instances_train.json"
    first, second = (damaged(path, path.read_bytes(), random.Random("3")) for _ in range(2))
    assert first == second != path.read_bytes()
