"""Two processes on one machine are one process with the joined batch, for every kind of loss.

All trainings of two processes are made by one launch, whose last one is stopped by SIGTERM.
"""

from __future__ import annotations

import datetime
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from detector.io import read_json
from e2e_vl.config_files import load_config
from e2e_vl.io import read_log
from e2e_vl.run import launch
from e2e_vl.run.build import make_synthetic_data
from e2e_vl.run.evaluate import evaluate_run
from e2e_vl.run.launch import make_accelerator
from e2e_vl.run.train import train
from tests.conftest import SAME_SIZE, cpu_with_one_thread
from tests.run.runs import ROOT, TINY_DETECTOR, assert_same_run, logged, predictions_of
from tests.run.two_processes import start
from tests.same import assert_same

COMMON = (
    TINY_DETECTOR,
    *(f"encoder.config.{name}=0" for name in ("hidden_dropout_prob", "attention_probs_dropout_prob")),
    "encoder.config.region_dropout_prob=0",
    # with a smaller epsilon Adam would blow up the rounding of gradients near zero to whole steps
    "train={max_steps: 3, lr: 1.0e-3, eps: 1.0e-3, warmup_steps: 1, trackers: []}",
    "eval={boxes: [gt], images_per_batch: 2, every_epochs: 0, report_pictures: 0}",
)
# Samplers that take every anchor and every proposal, so that no random choice depends on the process; and box losses
# whose gradient does not jump at 0.
TAKE_ALL = (
    "detector.overrides.MODEL.RPN={BATCH_SIZE_PER_IMAGE: 4096, POSITIVE_FRACTION: 1.0, NMS_THRESH: 1.0, "
    "PRE_NMS_TOPK_TRAIN: 4096, POST_NMS_TOPK_TRAIN: 4096, SMOOTH_L1_BETA: 1.0}",
    "detector.overrides.MODEL.ROI_HEADS={BATCH_SIZE_PER_IMAGE: 4096, POSITIVE_FRACTION: 1.0}",
    "detector.overrides.MODEL.ROI_BOX_HEAD.SMOOTH_L1_BETA=1.0",
)
FROZEN = "detector.overrides.MODEL.RESNETS.NORM=FrozenBN"
TASK_ONLY = (FROZEN, "data.boxes.train=gt", "detector.loss_weight=0")
MISS = "task.config={loss: binary, allow_no_regions: true}"
PHRASES = (
    MISS,
    "segmentation.weight=0.5",
    "detector.overrides.MODEL.MASK_ON=true",
    "detector.overrides.MODEL.ROI_MASK_HEAD={CONV_DIM: 8, CLS_AGNOSTIC_MASK: true}",
    "phrases={weight: 1.0, layer: 1, size: 8}",
    "data.files.phrases=refcoco+_phrases/Sentences",
    "data.files.phrase_boxes=refcoco+_phrases/Annotations",
)
# of each variant: its tiny config, its words, its losses, and the largest difference of a parameter
VARIANTS = {
    "phrases": (
        "refcoco",
        (*TASK_ONLY, *PHRASES, "data.workers=1", "train.ema_decay=0.9"),
        {"referring", "phrases", "phrase_tags", "segmentation"},
        1e-6,
    ),
    "detection": (
        "refcoco",
        (
            *TAKE_ALL,
            FROZEN,
            MISS,
            "data.boxes.train=online",
            "eval.boxes=[gt, online]",
            "train.gradient_accumulation_steps=2",
        ),
        {"referring", "loss_rpn_cls", "loss_cls", "loss_box_reg"},
        1e-5,
    ),
    "pretraining": ("pretraining", (FROZEN,), {"masked_words", "masked_text", "masked_regions", "relationship"}, 1e-6),
}
# batch statistics of both processes, and everything that draws random numbers, for a run that is resumed
OTHERS = {
    "synchronised": ("refcoco", ("detector.overrides.MODEL.RESNETS.NORM=SyncBN", *TASK_ONLY[1:], MISS)),
    "whole": (
        "refcoco",
        (
            *("detector.overrides.MODEL.RESNETS.NORM=BN", "encoder.config.hidden_dropout_prob=0.1", "data.workers=1"),
            *("data.flip=0.5", "train.max_steps=4", "train.save_every_epochs=0.0001", "train.log_every=3"),
            "train.ema_decay=0.9",
        ),
    ),
}


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> tuple[dict[tuple[str, int], Path], str, int]:
    """Run directories by variant and number of processes; what the launch printed, and its exit status."""
    folder = tmp_path_factory.mktemp("processes")
    kinds = {name: kind[:2] for name, kind in VARIANTS.items()} | OTHERS
    kinds |= {"resumed": OTHERS["whole"], "stopped": OTHERS["whole"]}
    runs, jobs = {(name, number): folder / f"{name}_{number}" for name in kinds for number in (1, 2)}, []

    def words(name: str, number: int) -> tuple[Path, list[str]]:
        task, own = kinds[name]
        same_size = [SAME_SIZE] if task == "refcoco" else []
        data = f"data.root={folder / f'data_{task}'}"
        return ROOT / f"configs/tiny/{task}.yaml", [*COMMON, *same_size, data, f"output={runs[name, number]}", *own]

    for name in kinds:
        config, own = words(name, 2)
        make_synthetic_data(load_config(config, own))
        endless = ["train.max_steps=100000", "train.save_every_epochs=0", "train.log_every=1"]
        own += endless if name == "stopped" else []
        jobs.append((config, own, runs["whole", 2] if name == "resumed" else None))
    process = start(jobs, folder)
    try:
        with cpu_with_one_thread():
            for name in (*VARIANTS, "synchronised"):
                train(load_config(*words(name, 1)))
        log, end = runs["stopped", 2] / "log.jsonl", time.monotonic() + 600
        while process.poll() is None and len(read_log(log)) < 2 and time.monotonic() < end:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (runs["stopped", 2] / "log.jsonl").is_file(), printed[-4000:]
    return runs, printed, process.returncode


@pytest.fixture
def runs(launched) -> dict[tuple[str, int], Path]:
    return launched[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_and_parameters_are_those_of_one_process(runs, variant):
    *_, losses, tolerance = VARIANTS[variant]
    for one, two in zip(*(logged(runs[variant, number])[:3] for number in (1, 2)), strict=True):
        assert set(one) == set(two) > losses
        for name in set(one) - {"kind"}:
            assert one[name] == pytest.approx(two[name], rel=1e-3, abs=1e-6), name
        assert all(one[name] > 0 for name in losses)
    folders = ["model/detector", "model/encoder", "model/task"]
    if variant == "phrases":
        folders += ["model/phrases", "checkpoints/step_00000003/state"]  # its model is an average, the state is not
    for folder in folders:
        one, two = (load_file(runs[variant, number] / folder / "model.safetensors") for number in (1, 2))
        assert set(one) == set(two)
        for name in one:
            torch.testing.assert_close(two[name], one[name], rtol=0, atol=tolerance, msg=name)
    assert [read_json(runs[variant, number] / "metrics.json")["processes"] for number in (1, 2)] == [1, 2]


def test_a_step_has_one_collective_beside_the_buckets_of_gradients(runs):
    """The sums of the losses of each micro-batch."""
    others = {"phrases": 1, "detection": 2, "pretraining": 1}  # detection accumulates two micro-batches
    for variant, count in others.items():
        found = read_json(runs[variant, 2] / "collectives.json")
        assert set(found) == {"trained", "gloo:all_reduce"}, variant
        *small, gradients = sorted(found["gloo:all_reduce"])
        assert len(small) == count and sum(small) < 1000, variant
        assert gradients == found["trained"], "each is summed once a step; all are in one bucket"


def test_batch_statistics_are_those_of_both_processes(runs):
    """Up to the first update; later, rounding flips ReLUs of flat image areas, which batch statistics make large."""
    lines = [logged(runs["synchronised", number])[:2] for number in (1, 2)]
    for one, two in zip(*lines, strict=True):
        assert one["referring"] == pytest.approx(two["referring"], rel=2e-6)
    assert lines[0][0]["lr_head"] == 0 < lines[0][1]["lr_head"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_text_is_predicted_once(runs, variant):
    """Also when the saved run is evaluated by two processes."""
    one, two = (predictions_of(runs[variant, number]) for number in (1, 2))
    indices = [[record.get("text_index", 0) for record in records] for records in (one, two)]
    assert indices == [list(range(len(one)))] * 2
    for key in ("label", "box"):
        assert [record.get(key) for record in one] == [record.get(key) for record in two], key
    assert all(record.get("grounded", variant != "phrases") for record in (*one, *two))
    assert_same(read_json(runs[variant, 2] / "again.json"), two)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("boxes", ["gt", "online"])
def test_evaluation_does_not_depend_on_the_number_of_processes(runs, boxes, tmp_path):
    """The same weights, evaluated by two processes at the end of their training and by one now."""
    run = runs["detection", 2]
    metrics, path = evaluate_run(run, split="val", boxes=boxes, output=tmp_path / "one.json")
    assert_same(read_json(path), predictions_of(run, f"val_{boxes}"))
    by_two = read_json(run / "metrics.json")
    assert_same(metrics, {name: by_two[name] for name in metrics})


def test_a_resumed_run_is_the_same_bit_for_bit(runs):
    assert_same_run(runs["whole", 2], runs["resumed", 2])


@pytest.mark.usefixtures("on_cpu")
def test_one_process_continues_a_run_of_two(runs, tmp_path, caplog):
    """Where nothing is random, it ends as the run of one process does."""
    outputs = []
    for number in (1, 2):
        output = tmp_path / f"by_{number}"
        shutil.copytree(runs["phrases", number], output)
        config = load_config(output / "config.yaml", [f"output={output}", "train.max_steps=5"])
        train(config, resume=True)
        outputs.append(output)
    assert caplog.text.count("was saved by 2 processes, and 1 resume it") == 1
    one, two = (logged(output)[-1] for output in outputs)
    assert one["step"] == two["step"] == 5
    assert one["referring"] == pytest.approx(two["referring"], rel=1e-3)
    for part in ("detector", "encoder", "task", "phrases"):
        one, two = (load_file(output / "model" / part / "model.safetensors") for output in outputs)
        for name in one:
            torch.testing.assert_close(two[name], one[name], rtol=0, atol=1e-5, msg=name)


def test_sigterm_to_the_launcher_saves_a_checkpoint(launched):
    """It reaches the data workers, too."""
    runs, printed, status = launched
    [checkpoint] = (runs["stopped", 2] / "checkpoints").iterdir()
    last = read_log(runs["stopped", 2] / "log.jsonl")[-1]["step"]
    assert checkpoint.name == f"step_{last:08d}" and (checkpoint / "checksums.json").is_file()
    assert status == 143 and f"stopped by SIGTERM. --resume continues from step {last}" in printed, printed[-3000:]


# The accelerator of one process


@pytest.fixture
def launched_by_accelerate(monkeypatch, on_cpu):
    """What `accelerate launch` tells a process on a machine with four cores."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setattr("os.cpu_count", lambda: 4)


@pytest.mark.usefixtures("launched_by_accelerate")
@pytest.mark.parametrize(("processes", "threads"), [("2", 2), ("8", 1)])
def test_processes_of_accelerate_share_all_cores(monkeypatch, processes, threads):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    torch.set_num_threads(1)  # what `accelerate launch` leaves
    accelerator = make_accelerator("no")
    assert torch.get_num_threads() == threads
    assert (accelerator.device.type, accelerator.num_processes) == ("cpu", 1)


@pytest.mark.usefixtures("launched_by_accelerate")
def test_sharded_models_are_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"^FSDP .* is not supported"):
        make_accelerator("no")


@pytest.mark.usefixtures("launched_by_accelerate")
def test_accumulation_is_what_the_settings_say(monkeypatch):
    """From the environment it would divide every loss."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    weight = torch.ones((), requires_grad=True)
    make_accelerator("no").backward(3 * weight)
    assert weight.grad == 3


@pytest.mark.usefixtures("launched_by_accelerate")
def test_processes_wait_for_each_other_as_long_as_the_settings_say():
    accelerator = make_accelerator("no", max_wait_minutes=7.0)
    assert accelerator.init_handler.timeout == datetime.timedelta(minutes=7)


@pytest.fixture
def has_tf32() -> Iterator[Callable[[], set[bool]]]:
    """What the backends of a GPU are set to, which does not change in other tests."""
    backends = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [backend.allow_tf32 for backend in backends]
    yield lambda: {backend.allow_tf32 for backend in backends}
    for backend, allowed in zip(backends, before, strict=True):
        backend.allow_tf32 = allowed


@pytest.mark.usefixtures("launched_by_accelerate")
def test_tf32_is_what_the_settings_say(has_tf32):
    for tf32 in (True, False):
        make_accelerator("no", tf32=tf32)
        assert has_tf32() == {tf32}
        make_accelerator("no", tf32=None)
        assert has_tf32() == {tf32}, "null leaves it as it is"


def test_bf16_on_a_cpu_without_its_instructions_gets_a_warning(monkeypatch, tmp_path, caplog, on_cpu):
    for flags, warnings in {"avx2": 1, "avx512f avx512_bf16": 0}.items():
        (tmp_path / "cpuinfo").write_text(f"flags\t: {flags}\n")
        monkeypatch.setattr(launch, "CPU_INFO", tmp_path / "cpuinfo")
        caplog.clear()
        make_accelerator("bf16")
        assert [record.message.startswith("This CPU has no bf16") for record in caplog.records] == [True] * warnings
