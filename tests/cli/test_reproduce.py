"""Chains of `e2e-vl reproduce`: their commands, files and numbers, for every row of every paper."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from detector.io import write_json
from e2e_vl.cli.download import read_table
from e2e_vl.cli.main import COMMANDS
from e2e_vl.cli.reproduce import PAPERS, Chain, main, read_paper
from e2e_vl.config_files import load_config

ROWS = [
    (path.stem, table, row)
    for path in sorted(PAPERS.glob("*.yaml"))
    for table, rows in read_paper(path.stem).tables.items()
    for row in rows
]


def chain_of(
    paper: str, table: str, row: str, data: Path, output: Path = Path("runs"), seed: int | None = None
) -> Chain:
    found = read_paper(paper)
    return Chain(found, row, found.tables[table][row], data, data / "runs", [], seed)


@pytest.mark.parametrize(("paper", "table", "row"), ROWS)
def test_a_chain_goes_from_published_files_to_the_numbers(paper, table, row, tmp_path):
    chain = chain_of(paper, table, row, tmp_path)
    steps = list(chain.steps)
    lines = "\n".join(chain.describe())
    for name in steps:
        assert not any("{output}" in word for word in chain.command(name))
        assert all(steps.index(other) < steps.index(name) for other in chain._names(name) if other in chain.steps)
    for number in chain.row.numbers.values():
        assert number.step in steps and number.text in lines
    assert all(str(tmp_path / file.path) in lines for file in chain.missing())
    assert sum("e2e-vl download " in line for line in lines.splitlines()) <= 1


def test_a_published_file_takes_the_place_of_the_training_before_it(tmp_path):
    long = chain_of("vl_bert", "1", "base", tmp_path)
    assert list(long.steps) == ["pretrain_base", "q2a_base", "qa2r_base", "vcr_val_base"]
    file = tmp_path / long.paper.files["base_e2e"].path
    file.parent.mkdir()
    file.touch()
    short = chain_of("vl_bert", "1", "base", tmp_path, seed=3)
    assert list(short.steps) == ["q2a_base", "qa2r_base", "vcr_val_base"]
    words = short.command("q2a_base")
    assert (
        f"encoder.weights={file}" in words and "seed=3" in words and f"output={tmp_path}/runs/q2a_base_base_3" in words
    )
    assert "resnet" not in short.files and "resnet" in long.files


@pytest.mark.parametrize(
    ("row", "weights", "first_step"),
    [
        (["vl_bert", "3", "base_gt"], "vl_bert_base_e2e", "refcoco_gt_base"),
        (["vl_bert", "1", "large"], "vl_bert_large_e2e", "q2a_large"),
        (["lxmert", "2", "lxmert"], "lxmert", "vqa_run"),
        (["visual_bert", "4", "full"], "visual_bert_vcr_2", "finetune_q2a"),
    ],
)
def test_a_row_prints_its_shortest_chain_first_with_one_download(
    row, weights, first_step, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main([*row, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert str(tmp_path) not in printed and "from memory" not in printed
    short, long = printed.split("with every training, instead of published weights:\n")
    [download], [other] = ([line for line in part.splitlines() if "e2e-vl download" in line] for part in (short, long))
    names = download.split()[2:-2]
    assert weights in names and read_table().named(names)
    assert weights not in other.split()
    assert short.index(download) < short.index(f"1. {first_step}\n") and "1. pretrain" not in short


def test_a_row_without_published_weights_has_one_chain(capsys):
    assert main(["vl_bert", "4", "a", "--dry-run"]) == 0
    assert "with every training" not in capsys.readouterr().out


def test_features_are_named_as_the_data_set_reads_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paper = read_paper("vl_bert")
    row = paper.tables["2"]["base"]
    relative = Chain(paper, "base", row, Path("DATA"), Path("runs"), [])
    words = relative.command("vqa_base")
    assert "data.files.features=../runs/vqa_features.h5" in words and "output=runs/vqa_base_base" in words
    (tmp_path / "disk").mkdir()
    (tmp_path / "DATA").symlink_to(tmp_path / "disk" / "folder")
    assert "data.files.features=../../runs/vqa_features.h5" in relative.command("vqa_base")


def test_a_chain_is_written_as_a_shell_script(tmp_path, capsys):
    script = tmp_path / "new" / "chain.sh"
    launch = "accelerate launch --num_processes 4"
    assert main(["vl_bert", "2", "base", "--seeds", "0", "1", "--launch", launch, "--script", str(script)]) == 0
    lines = script.read_text("utf-8").splitlines()
    assert lines[0].startswith("#!") and lines[2] == "set -euo pipefail" and os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    commands = [next(word for word in shlex.split(line) if word in COMMANDS) for line in lines[3:]]
    another_seed = ["train", "predict"]
    assert commands == ["download", "import-features", "train", "import-features", "predict", *another_seed]
    assert lines[3].startswith("e2e-vl download vl_bert_base_prec ")
    launched = [name for line, name in zip(lines[3:], commands, strict=True) if line.startswith(f"{launch} -m e2e_vl ")]
    assert launched == ["train", "predict", *another_seed]
    assert str(tmp_path) not in "\n".join(lines)
    assert main(["vl_bert", "2", "--script", str(script)]) == 2 and "a row" in capsys.readouterr().err


def test_what_the_shortest_chain_lacks_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["vl_bert", "3", "base_gt"]) == 2
    error = capsys.readouterr().err
    assert "DATA/pretrained/vl-bert-base-e2e.model" in error and "conceptual" not in error


def test_a_training_reads_the_folder_that_its_step_names(tmp_path):
    chain = chain_of("vl_bert_drawn", "4", "full", tmp_path)
    roots = {}
    for step in ("detector", "pretrain_full"):
        roots[step] = [word for word in chain.command(step) if word.startswith("data.root=")]
    assert roots == {"detector": [f"data.root={tmp_path}_detector"], "pretrain_full": [f"data.root={tmp_path}"]}


def test_an_output_is_of_one_command(tmp_path):
    commands: dict[tuple[str, Path], list[str]] = {}
    for paper, table, row in ROWS:
        chain = chain_of(paper, table, row, tmp_path)
        for step in chain.steps:
            assert commands.setdefault((paper, chain.path_of(step)), chain.command(step)) == chain.command(step)


def test_steps_go_on_from_the_best_model_whose_numbers_count(tmp_path):
    chain = chain_of("visual_bert", "7", "full_36", tmp_path)
    assert f"{tmp_path}/features/nlvr2/dev.h5" in chain.command("import_nlvr2_dev")
    assert f"encoder.weights={tmp_path}/runs/some_task_nlvr2_full_36/best" in chain.command("finetune_nlvr2")
    chain.output, number = tmp_path, chain.row.numbers["dev"]
    chain.path_of(number.step).mkdir()
    for more, expected in (({}, 25.0), ({"best": {"step": 2, "metrics": {number.metric: 0.5}}}, 50.0)):
        write_json(chain.path_of(number.step) / "metrics.json", {number.metric: 0.25, **more})
        assert chain.measured(number) == expected


def test_finished_steps_are_not_repeated_and_their_numbers_are_read(tmp_path):
    chain = chain_of("vl_bert", "1", "none", tmp_path)
    with pytest.raises(ValueError, match="The step q2a_base ended with status 1"):
        chain.run("false")
    chain.run("echo")
    chain.run("false")
    chain.settings = ["train.lr=1"]
    with pytest.raises(ValueError, match="choose another --output"):
        chain.run("echo")
    chain.settings = []
    run, joint = (chain.path_of(name) for name in ("q2a_base", "vcr_val_base"))
    assert f"output={run}" in run.with_name(f"{run.name}.log").read_text()
    run.mkdir()
    (run / "metrics.json").write_text('{"val/accuracy_gt_boxes": 0.5}')
    joint.with_name(f"{joint.name}.log").write_text("val/QA->R_gt_boxes    0.5000\nval/Q->AR_gt_boxes    0.2500\n")
    answers, _, both = chain.row.numbers.values()
    assert (chain.measured(answers), chain.measured(both)) == (50, 25)


def test_half_of_the_epochs_have_half_of_the_steps_and_the_same_shares_of_them(tmp_path):
    """Table 4 of VL-BERT is fine-tuned for half as many epochs."""
    full, half = chain_of("vl_bert", "1", "base", tmp_path), chain_of("vl_bert", "4", "full", tmp_path)
    for name in ("q2a", "qa2r"):
        one, other = (
            load_config(words[2], words[3:]).train
            for words in (full.command(f"{name}_base"), half.command(f"{name}_half"))
        )
        assert other.epochs == one.epochs / 2 and other.warmup_steps == one.warmup_steps / 2
        assert other.milestones == one.milestones == [0.7, 0.9]


def test_rows_are_listed_and_unknown_ones_refused(capsys):
    assert main(["vl_bert", "1"]) == 0
    assert "Q->AR val 55.2" in capsys.readouterr().out
    assert main(["grounding"]) == 0
    printed = capsys.readouterr().out
    assert "refined boxes: val –" in printed and "compare: MDETR" in printed
    assert main(["vl_bert", "1", "nothing"]) == main(["no_paper"]) == 2
    assert "no such row" in capsys.readouterr().err
    assert main(["vl_bert", "base"]) == 2, "a row without its table"
    assert "no table base" in capsys.readouterr().err


def test_features_are_imported_by_one_process(tmp_path, monkeypatch):
    chain, calls = chain_of("vl_bert", "2", "none", tmp_path), []
    monkeypatch.setattr("e2e_vl.cli.reproduce.run_command", lambda call, file: calls.append(call) or 0)
    chain.run("accelerate launch")
    starts = {call[call.index("e2e_vl") + 1]: call[0] for call in calls}
    assert starts == {"import-features": sys.executable, "train": "accelerate", "predict": "accelerate"}
