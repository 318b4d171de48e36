"""Options and fixtures shared by all tests. What takes long to import is imported where it is used."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import jaxtyping
import pytest

if TYPE_CHECKING:
    from e2e_vl.api.model import TrainedModel

if "PYTEST_XDIST_WORKER" in os.environ:  # tests in several processes: one thread each, also in what they start
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torchvision.ops  # noqa: F401  (before the hook below: a library first imported under it is compiled anew)
from filelock import FileLock
from transformers import PreTrainedConfig

from tests import shape_checker

# ---- Shapes. Annotations such as Float[Tensor, "N 3 H W"] in these modules and packages are enforced while the tests
# run: calls and dataclasses that break one raise jaxtyping.TypeCheckError. Add a module by its dotted name. The hook
# must be in place before a module is imported, so it comes before all imports of this project's code; processes that a
# test spawns do not have it. In a call every axis name stands for one size, except names that begin with an underscore;
# of a list, one random entry is checked. The fixture `unchecked_shapes` switches the checks off.
CHECKED_PARTS = ("analysis", "encoders", "examples", "model", "region_masking", "structures", "tasks", "text")
CHECKED = ("detector", *(f"e2e_vl.{name}" for name in CHECKED_PARTS))
PreTrainedConfig.__no_type_check__ = True  # its constructors take more keys than their signatures say
sys.modules["shape_checker"] = shape_checker  # the hook imports it by a plain name
jaxtyping.jaxtyped = shape_checker.jaxtyped  # what the hook decorates with
jaxtyping.install_import_hook(CHECKED, "shape_checker.check_shapes")


@pytest.fixture
def unchecked_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of errors that users get for wrong shapes: without it the annotations are violated first."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


# ---- End of shapes.

import e2e_vl  # noqa: E402
from e2e_vl.config import RunConfig  # noqa: E402
from e2e_vl.config_files import load_config  # noqa: E402
from tests.run.runs import ROOT, TINY_DETECTOR, tiny  # noqa: E402

# Six objects in every scene: all texts then have the same number of annotated regions.
SAME_SIZE = "data.synthetic.config={scene: {min_objects: 6, max_objects: 6}}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-root",
        type=Path,
        default=Path(__file__).parent / "golden",
        help="folder of golden sets, with the folders of tests/golden, to test against",
    )


@pytest.fixture(scope="session")
def golden_root(request: pytest.FixtureRequest) -> Path:
    return request.config.getoption("--golden-root").resolve()


@pytest.fixture(scope="session")
def tiny_words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """`key=value` words that run configs/tiny/refcoco.yaml on a data set that is drawn once for all tests."""
    from e2e_vl.run.build import make_synthetic_data

    words = [TINY_DETECTOR, f"data.root={tmp_path_factory.mktemp('tiny') / 'data'}", SAME_SIZE]
    make_synthetic_data(load_config(ROOT / "configs" / "tiny" / "refcoco.yaml", [*words, "output=unused"]))
    return words


@pytest.fixture(scope="session")
def tiny_data(tiny_words: list[str]) -> Path:
    """The folder of that data set; tests change copies of it."""
    return next(Path(word.removeprefix("data.root=")) for word in tiny_words if word.startswith("data.root="))


@pytest.fixture(scope="session")
def demo_model() -> TrainedModel:
    """The trained model that comes along."""
    return e2e_vl.load("demo", "cpu")


@pytest.fixture
def tiny_config(tiny_words: list[str], tmp_path: Path) -> Callable[..., RunConfig]:
    """`tiny_config("train.lr=1", ...)`: settings of a tiny run into `tmp_path / "run"`."""

    def make(*words: str) -> RunConfig:
        own = [*tiny_words, f"output={tmp_path / 'run'}", *words]
        return load_config(ROOT / "configs" / "tiny" / "refcoco.yaml", own)

    return make


@pytest.fixture(autouse=True)
def own_log_handlers() -> Iterator[None]:
    """What a command sets up for its log ends with its test: the stream of its handler is closed then."""
    before, level = list(logging.root.handlers), logging.root.level
    yield
    logging.root.setLevel(level)
    for handler in logging.root.handlers[:]:
        if handler not in before and type(handler) is logging.StreamHandler:
            logging.root.removeHandler(handler)


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Ctrl-C and hang-up work as in a terminal, also where the tests run in the background, which ignores them."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def curves_drawn_once() -> Iterator[None]:
    """Reports of runs whose logs have the same keys share one picture of curves; drawing takes long."""
    from e2e_vl.run import report as page

    draw, drawn = page.draw_curves, {}

    def draw_once(lines: list[dict]) -> bytes | None:
        names = frozenset(name for line in lines for name in (line["kind"], *line))
        if names not in drawn:
            drawn[names] = draw(lines)
        return drawn[names]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "draw_curves", draw_once)
        yield


@contextlib.contextmanager
def cpu_with_one_thread() -> Iterator[None]:
    """A fresh Accelerator on the CPU, fixed random numbers, and one thread: two runs are equal bit by bit."""
    import torch
    from accelerate.state import AcceleratorState
    from accelerate.utils import set_seed

    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.set_num_threads(1)
        set_seed(0)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """See `cpu_with_one_thread`."""
    with cpu_with_one_thread():
        yield


@pytest.fixture(scope="session")
def trained_run(tiny_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """One tiny training run: its `path`, `config`, `metrics`, and the `model` as it was in memory at the end."""
    from e2e_vl.run import train as training

    path = tmp_path_factory.mktemp("trained") / "run"
    config = load_config(ROOT / "configs" / "tiny" / "refcoco.yaml", [*tiny_words, f"output={path}"])
    kept, build = [], training.build_run

    def build_and_keep(*words, **more):
        kept.append(build(*words, **more))
        return kept[0]

    with cpu_with_one_thread(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "build_run", build_and_keep)
        metrics = training.train(config)
    return SimpleNamespace(path=path, config=config, metrics=metrics, run=kept[0], model=kept[0].model)


@pytest.fixture(scope="session")
def phrase_run(trained_run: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model that takes every word for a phrase and points with each of them clearly at a region."""
    import torch

    from e2e_vl.run.build import build_model
    from e2e_vl.run.checkpoint import save_model
    from e2e_vl.text import load_tokenizer
    from tests.weights.starts import replaced

    path = tmp_path_factory.mktemp("phrases") / "run"
    config = replaced(trained_run.config, phrases={"weight": 1.0, "layer": 1, "size": 8})
    tokenizer = load_tokenizer(str(trained_run.path / "model" / "tokenizer"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    head = model.phrase_head
    with torch.no_grad():
        head.tags.weight.zero_()
        head.tags.bias.copy_(torch.tensor([0.0, 0.0, 1.0]))
        for part in (head.query, head.key):
            part.weight.mul_(1000)
    save_model(path / "model", config, model, tokenizer)
    return path


# ---- Short runs that many tests read. Each is trained once, also where the tests run in several processes.


SMALL = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
ENCODERS = {
    "vl_bert": None,  # as the tiny configs have it
    "visual_bert": {"name": "visual_bert", "config": SMALL | {"num_hidden_layers": 2}},
    "lxmert": {"name": "lxmert", "config": SMALL | {"l_layers": 1, "r_layers": 1, "x_layers": 1}},
}


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the test run, the same for all processes of it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def train_once(config: RunConfig) -> Path:
    """The run directory of the settings, in which one process of the session trains."""
    from e2e_vl.run.train import train

    run = Path(config.output)
    with FileLock(f"{run}.once"):
        if not (run / "metrics.json").exists():
            with cpu_with_one_thread():
                train(config)
    return run


def tiny_run(folder: Path, name: str, run: str, *words: str) -> Path:
    """A run of one step of configs/tiny/<name>.yaml, on data drawn for these settings."""
    return train_once(tiny(name, folder / f"{name}_data", folder / run, "train.max_steps=1", *words))


@pytest.fixture(scope="session")
def run_of(shared_folder: Path) -> Callable[..., Path]:
    """`run_of("gqa", "lxmert")`: a run of one step of GQA, NLVR2 or Flickr30K with an encoder, on small scenes."""
    from tests.weights.starts import replaced

    def make(task: str, encoder: str = "vl_bert") -> Path:
        words = [
            "data.synthetic={scenes: {train: 4, val: 4}, formats: [refcoco+, detections, gqa, nlvr2, flickr30k]}",
            "data.resize={short_edge: [64], long_edge: 80}",
            "train={max_steps: 1, images_per_batch: 2, warmup_steps: 0}",
            "eval={boxes: [gt], every_epochs: 0, report_pictures: 1}",
        ]
        config = tiny(task, shared_folder / "small_data", shared_folder / f"{task}_{encoder}", *words)
        chosen = ENCODERS[encoder]
        if chosen is not None:
            more = {"max_images": 2} if (task, encoder) == ("nlvr2", "lxmert") else {}
            config = replaced(config, encoder={**chosen, "config": chosen["config"] | more})
        return train_once(config)

    return make


@pytest.fixture(scope="session")
def vqa_run(shared_folder: Path) -> Path:
    """A run with a split `test` that has no annotations."""
    run = tiny_run(shared_folder, "vqa", "vqa", "eval.boxes=[gt]")
    files = shared_folder / "vqa_data" / "vqa"
    test = files / "v2_OpenEnded_mscoco_test_questions.json"
    if not test.exists():
        shutil.copy(files / "v2_OpenEnded_mscoco_val_questions.json", test)
    return run


@pytest.fixture(scope="session")
def vcr_runs(shared_folder: Path) -> tuple[Path, Path]:
    """Q->A and QA->R."""
    rationale = "data.config.question=rationale"
    return tiny_run(shared_folder, "vcr", "vcr"), tiny_run(shared_folder, "vcr", "vcr_qa2r", rationale)


@pytest.fixture(scope="session")
def pretraining_run(shared_folder: Path) -> Path:
    """All four objectives of VL-BERT."""
    return tiny_run(shared_folder, "pretraining", "pretraining")
