"""A trained miniature has heads that ground entities; the command writes what was measured, whoever measures it."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from e2e_vl.analysis.captions import read_parses
from e2e_vl.analysis.collect import CONFIDENCE, ENTITIES, LARGEST, RELATIONS, Collected, MeasureKey, collect_attention
from e2e_vl.analysis.options import AttentionOptions
from e2e_vl.analysis.run import AttentionRequest, caption_examples, replace_data
from e2e_vl.cli.analyze_attention import main
from e2e_vl.config import BoxSource, EncoderSettings, RunConfig, load_config, save_config
from e2e_vl.run.build import build_collate, build_model
from e2e_vl.run.checkpoint import load_model, save_model
from e2e_vl.run.launch import make_accelerator
from e2e_vl.text import load_tokenizer
from tests.analysis.miniature import SCENES, train_miniature
from tests.conftest import cpu_with_one_thread

ROOT = Path(__file__).parents[2]
STEPS = 220


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("miniature")
    with cpu_with_one_thread():
        train_miniature(folder, STEPS)
    return folder / "run"


@pytest.fixture(scope="module")
def parses(run) -> Path:
    return run.parent / "data" / "flickr30k" / "parses" / "val.conllu"


@pytest.fixture(scope="module")
def output(run, parses) -> Path:
    folder = run.parent / "output"
    words = ["--run", run, "--boxes", "precomputed", "--parses", parses, "--output", folder, "--pictures", 3]
    with cpu_with_one_thread():
        assert main([str(word) for word in words]) == 0
    return folder


def measured(run: Path, parses: Path, options: AttentionOptions, accelerator) -> Collected:
    config, model, tokenizer = load_model(run)
    request = AttentionRequest(run, "val", BoxSource.PRECOMPUTED, options=options)
    examples = caption_examples(config, model, tokenizer, request, read_parses(parses))
    collate = build_collate(config, model)
    return collect_attention(model, examples, collate, options, accelerator, images_per_batch=8, shown=[0, 7])


@pytest.fixture(scope="module")
def alone(run, parses) -> Collected:
    with cpu_with_one_thread():
        return measured(run, parses, AttentionOptions(), make_accelerator("no"))


def test_heads_of_the_miniature_ground_entities_far_above_the_baselines(alone):
    sums = alone.sums[MeasureKey("joint", ENTITIES)]
    best = sums.best(sums.mean_attention > 0.2)
    rules = [sums.baseline(name) for name in (CONFIDENCE, LARGEST, "chance")]
    assert min(rules) > 0.2 and max(rules) < 0.5 and sums.accuracy[best] > max(rules) + 0.2
    assert best[0] == 1, "the upper layer knows what a phrase means"
    amod = alone.sums[MeasureKey("joint", RELATIONS, "amod")]
    assert amod.accuracy.max() > amod.baseline("chance") + 0.1, "nouns, if not adjectives, know their phrase's region"


def test_all_entities_of_the_split_are_counted(alone, run):
    folder = run.parent / "data" / "flickr30k"
    captions = entities = 0
    for image in (folder / "val.txt").read_text().split():
        boxes = (folder / "Annotations" / f"{image}.xml").read_text()
        lines = (folder / "Sentences" / f"{image}.txt").read_text().splitlines()
        known = {chain for chain in re.findall(r"/EN#(\d+)/", " ".join(lines)) if has_box(boxes, chain)}
        named = [[chain for chain in re.findall(r"/EN#(\d+)/", line) if chain in known] for line in lines]
        captions += sum(bool(own) for own in named)
        entities += sum(map(len, named))
    assert alone.numbers["captions"] == captions and captions > 4 * SCENES["val"]
    assert alone.sums[MeasureKey("joint", ENTITIES)].examples == entities


def has_box(xml: str, chain: str) -> bool:
    objects = re.findall(r"<object>.*?</object>", xml, re.DOTALL)
    return any(f"<name>{chain}</name>" in one and "<bndbox>" in one for one in objects)


def test_two_processes_measure_what_one_does(run, parses, output, tmp_path):
    """Started as a user starts them: they gather over gloo, and the main one writes."""
    words = ["--run", run, "--boxes", "precomputed", "--parses", parses, "--output", tmp_path / "two", "--pictures", 3]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "--"]
    own = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *launch, "e2e_vl", "analyze-attention", *map(str, words)],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("page: ") == 1
    one, two = (json.loads((folder / "attention.json").read_text()) for folder in (output, tmp_path / "two"))
    assert one["numbers"] == two["numbers"] and one["images"] == SCENES["val"]
    for name, measure in one["graphs"]["joint"]["measures"].items():
        other = two["graphs"]["joint"]["measures"][name]
        assert measure["examples"] == other["examples"] > 0
        for matrix in ("accuracy", "attention"):
            assert np.array(other[matrix]) == pytest.approx(np.array(measure[matrix]), abs=1e-6)
    pictures = [sorted(path.name for path in (folder / "overlays").iterdir()) for folder in (output, tmp_path / "two")]
    assert pictures[0] == pictures[1]


def test_the_command_writes_tables_of_what_was_measured(alone, output):
    found = json.loads((output / "attention.json").read_text())
    sums = alone.sums[MeasureKey("joint", ENTITIES)]
    entities = found["graphs"]["joint"]["measures"][ENTITIES]
    assert entities["examples"] == sums.examples and entities["accuracy"] == sums.accuracy.tolist()
    assert found["options"]["--entity-piece"] == "last" and found["numbers"]["captions without a parse"] == 0
    assert not any("highest one" in note for note in found["notes"]), "there are confidences"
    assert entities["baselines"][CONFIDENCE] == sums.baseline(CONFIDENCE) > 0
    with (output / "heads.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["measure"] == ENTITIES]
    assert len(rows) == sums.hits.numel()
    for row in rows:
        place = int(row["layer"]), int(row["head"])
        assert float(row["accuracy"]) == pytest.approx(float(sums.accuracy[place]))
        assert row["active"] == ("yes" if sums.mean_attention[place] > 0.2 else "no")
    with (output / "table2_joint.csv").open() as file:
        table = {row["relation"]: row for row in csv.DictReader(file)}
    assert list(table) == found["graphs"]["joint"]["shown_relations"] and {"amod", "det", "punct", "prep"} <= set(table)
    amod = alone.sums[MeasureKey("joint", RELATIONS, "amod")]
    assert int(table["amod"]["pairs"]) == amod.examples
    assert float(table["amod"]["accuracy"]) == pytest.approx(float(amod.accuracy[amod.best(amod.mean_attention > 0.2)]))


def test_the_page_is_one_file_with_its_pictures(output):
    page = (output / "attention.html").read_text()
    sources = re.findall(r'src="([^"]{1,60})', page)
    assert len(sources) >= 8 and all(source.startswith("data:image/") for source in sources)
    assert "http" not in re.sub(r'src="[^"]*"', "", page)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--heads 5-0", "--heads has '5-0', but there are 2 heads and the graphs joint with 2 layers"),
        ("--parses {run}/train.conllu", "--missing-parse skip"),
        ("--boxes online", "precomputed"),
    ],
)
@pytest.mark.usefixtures("on_cpu")
def test_what_does_not_fit_is_one_sentence(run, tmp_path, capsys, words, message):
    (run / "train.conllu").write_text("1\tx\t_\t_\t_\t_\t0\troot\t_\t_\n")
    given = ["--run", str(run), "--boxes", "precomputed", "--output", str(tmp_path / "out")]
    assert main([*given, *words.format(run=run).split()]) == 2
    error = capsys.readouterr().err
    line = next(line for line in error.splitlines() if line.startswith("error: "))
    assert message in line


@pytest.mark.usefixtures("on_cpu")
def test_results_replace_those_of_an_earlier_analysis_and_nothing_else(run, parses, tmp_path, capsys):
    output = tmp_path / "out"
    (output / "overlays").mkdir(parents=True)
    for name in ("table2_cross.csv", "overlays/000001_cross_0-0_0.jpg"):
        (output / name).write_text("old")
    words = ["--run", run, "--boxes", "precomputed", "--output", output, "--pictures", 1, "--max-images", 2]
    assert main([str(word) for word in words]) == 0
    names = {path.relative_to(output).as_posix() for path in output.rglob("*") if path.parent.name != "overlays"}
    assert names == {"attention.html", "attention.json", "heads.csv", "entities_joint.png", "overlays"}
    assert not [*output.rglob("*cross*")]
    (output / "notes.txt").write_text("mine")
    assert main([str(word) for word in words]) == 2
    assert f"{output} contains other files than those of an analysis" in capsys.readouterr().err
    assert (output / "notes.txt").exists()


@pytest.mark.usefixtures("on_cpu")
def test_data_of_another_config_are_read_in_the_sizes_of_the_run(run, tmp_path, capsys):
    """The run's own data are elsewhere now; the other config has other sizes, which do not count."""
    shutil.copytree(run.parent / "data" / "flickr30k" / "Sentences", tmp_path / "Sentences")
    for path in (tmp_path / "Sentences").iterdir():
        path.write_text(f"Nobody is here .\n{path.read_text()}")  # names nothing, so the data set leaves it out
    words = ["data.resize.short_edge=[48]", f"data.files.sentences={tmp_path / 'Sentences'}"]
    other = load_config(run.parent / "config.yaml", [*words, 'data.files.ids="{split}_other.txt"'])
    save_config(other, tmp_path / "other.yaml")
    few = (run.parent / "data" / "flickr30k" / "val.txt").read_text().split()[:3]
    (run.parent / "data" / "few_other.txt").write_text("\n".join(few))
    written = sum(len((tmp_path / "Sentences" / f"{image}.txt").read_text().splitlines()) for image in few)
    moved = tmp_path / "moved"
    shutil.copytree(run / "model", moved / "model")
    own = load_config(moved / "model" / "config.yaml", ["data.root=nowhere"])
    save_config(own, moved / "model" / "config.yaml")
    words = ["--run", str(moved), "--data", str(tmp_path / "other.yaml"), "--split", "few", "--boxes", "precomputed"]
    assert main([*words, "--pictures", "0", "data.max_text_length=7"]) == 0
    found = json.loads((moved / "attention" / "few_precomputed" / "attention.json").read_text())
    assert found["images"] == 3 and found["numbers"]["phrases cut off with the end of a caption"] > 0
    left_out = found["numbers"]["captions of the whole split that the data set leaves out"]
    assert left_out == written - found["numbers"]["captions"] >= len(few)
    config = replace_data(own, tmp_path / "other.yaml", ["data.root=there"])
    assert (config.data.root, config.data.resize.short_edge) == ("there", [96])
    assert main([*words, "data.files.ids=none.txt"]) == 2
    assert "none.txt" in capsys.readouterr().err


def save_untrained(config: RunConfig, vocabulary: Path, run: Path) -> None:
    tokenizer = load_tokenizer(vocabulary)
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    save_model(run / "model", config, model, tokenizer)


@pytest.mark.usefixtures("on_cpu")
def test_boxes_of_the_detector_itself_with_an_encoder_that_reads_the_whole_image(run, parses, tmp_path, capsys):
    """Untrained VL-BERT on proposals: their scores are the paper's baseline, and the whole image is no candidate."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    words = ["detector.backend=builtin", "detector.overrides.MODEL.RESNETS.DEPTH=18", "eval.boxes=[online]"]
    widths = [f"detector.overrides.MODEL.RESNETS.{name}=8" for name in ("STEM_OUT_CHANNELS", "WIDTH_PER_GROUP")]
    config = load_config(run.parent / "config.yaml", [*words, *widths, "data.boxes.train=online"])
    config = msgspec.structs.replace(config, encoder=EncoderSettings("vl_bert", {**sizes, "geometry_dim": 16}))
    save_untrained(config, run / "vocab.txt", tmp_path / "run")
    given = ["--run", tmp_path / "run", "--boxes", "online", "--parses", parses, "--pictures", 1, "--max-images", 2]
    assert main([str(word) for word in given]) == 0
    found = json.loads((tmp_path / "run" / "attention" / "val_online" / "attention.json").read_text())
    entities = found["graphs"]["joint"]["measures"]["entity grounding"]
    assert CONFIDENCE in entities["baselines"] and entities["examples"] > 0 and len(entities["accuracy"]) == 2
    assert not any("highest one" in note for note in found["notes"])
    assert found["numbers"]["candidate regions"] > found["numbers"]["captions"]
    assert [*(tmp_path / "run" / "attention" / "val_online" / "overlays").iterdir()]


@pytest.mark.usefixtures("on_cpu")
def test_three_graphs_are_measured_one_by_one(run, parses, tmp_path):
    """Untrained, on a few images: language, vision and cross attention each have their measures and pictures."""
    layers = {"l_layers": 2, "r_layers": 1, "x_layers": 1}
    sizes = {"num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
    config = load_config(run.parent / "config.yaml")
    config = msgspec.structs.replace(config, encoder=EncoderSettings("lxmert", layers | sizes))
    save_untrained(config, run / "vocab.txt", tmp_path / "run")
    words = ["--run", tmp_path / "run", "--boxes", "precomputed", "--parses", parses, "--pictures", 2]
    words += ["--max-images", 4, "--first-number", 1, "--directions", "separate", "--mean-over", "sentences"]
    words += ["data.files.features=plain.tsv"]
    assert main([str(word) for word in words]) == 0
    output = tmp_path / "run" / "attention" / "val_precomputed"
    found = json.loads((output / "attention.json").read_text())
    assert found["images"] == 4 and 10 < found["numbers"]["captions"] <= 20
    assert {name: list(graph["measures"]) for name, graph in found["graphs"].items()} == {
        "language": ["word dependency"],
        "vision": ["region grouping"],
        "cross": ["entity grounding", "region naming", "syntactic grounding"],
    }
    cross = found["graphs"]["cross"]["measures"]["entity grounding"]
    assert any("highest one" in note for note in found["notes"]), "the missing confidences are said"
    assert set(cross["baselines"]) == {LARGEST, "chance"}
    assert cross["divided_by"] == found["numbers"]["captions"] < cross["examples"]
    for row in cross["attention"][0]:
        assert row == pytest.approx(1), "words read nothing but regions"
    assert "amod, to its governor" in found["graphs"]["cross"]["shown_relations"]
    names = {path.name.split("_")[1] for path in (output / "overlays").iterdir()}
    assert names == {"language", "vision", "cross"}


@pytest.mark.usefixtures("on_cpu")
def test_a_run_of_another_task_measures_the_same_phrases(run_of, tmp_path):
    """An untrained pre-training run without data of its own, on the captions of a run of their task."""
    own, other = run_of("flickr30k"), tmp_path / "other"
    words = [f"detector.config={ROOT / 'configs' / 'detector' / 'tiny.yaml'}", "data.root=nowhere", "output=unused"]
    config = load_config(ROOT / "configs" / "tiny" / "pretraining.yaml", words)
    save_untrained(config, own / "model" / "tokenizer", other)
    settings = own / "model" / "config.yaml"
    parses = Path(load_config(settings).data.root) / "flickr30k" / "parses" / "val.conllu"
    found = []
    for run in (own, other):
        words = ["--run", run, "--data", settings, "--boxes", "gt", "--max-images", 2, "--pictures", 0]
        words += ["--parses", parses, "--output", tmp_path / f"attention_{run.name}"]
        assert main([str(word) for word in words]) == 0
        found.append(json.loads((tmp_path / f"attention_{run.name}" / "attention.json").read_text()))
    assert found[1]["images"] == 2 and found[1]["numbers"] == found[0]["numbers"], "the same captions and regions"
    own, other = (one["graphs"]["joint"]["measures"] for one in found)
    assert {name: one["examples"] for name, one in other.items()} == {
        name: one["examples"] for name, one in own.items()
    }
    entities = other[ENTITIES]
    assert entities["examples"] > 0 and all(0 < share < 1 for heads in entities["attention"] for share in heads)
    for rule in (LARGEST, "chance"):
        assert entities["baselines"][rule] == pytest.approx(own[ENTITIES]["baselines"][rule])
