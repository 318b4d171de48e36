"""A trained miniature has heads that ground entities; the command writes what was measured, whoever measures it."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from e2e_vl.analysis import collect
from e2e_vl.analysis.attention_choices import AttentionChoices
from e2e_vl.analysis.attention_run import AttentionRequest, caption_examples
from e2e_vl.analysis.collect import CONFIDENCE, ENTITIES, LARGEST, RELATIONS, Collected, MeasureKey, collect_attention
from e2e_vl.analysis.parses import read_parses
from e2e_vl.box_sources import BoxSource
from e2e_vl.commands.analyze_attention import main
from e2e_vl.config import EncoderSettings, load_config
from e2e_vl.engine.build import build_model
from e2e_vl.engine.build_data import build_collate
from e2e_vl.engine.launch import make_accelerator
from e2e_vl.engine.saving import load_model, save_model
from e2e_vl.text import load_tokenizer
from tests.analysis.miniature import SCENES, train_miniature
from tests.conftest import cpu_with_one_thread

STEPS = 320


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


def measured(run: Path, parses: Path, choices: AttentionChoices, accelerator) -> Collected:
    config, model, tokenizer = load_model(run)
    request = AttentionRequest(run, "val", BoxSource.PRECOMPUTED, choices=choices)
    examples = caption_examples(config, model, tokenizer, request, read_parses(parses))
    collate = build_collate(config, model)
    return collect_attention(model, examples, collate, choices, accelerator, images_per_batch=8, shown=[0, 7])


@pytest.fixture(scope="module")
def alone(run, parses) -> Collected:
    with cpu_with_one_thread():
        return measured(run, parses, AttentionChoices(), make_accelerator("no"))


def test_heads_of_the_miniature_ground_entities_far_above_the_baselines(alone):
    sums = alone.sums[MeasureKey("joint", ENTITIES)]
    best = sums.best(0.2)
    rules = max(sums.baseline(LARGEST), sums.baseline("chance"))
    assert 0.3 < rules < 0.5 and sums.accuracy[best] > rules + 0.2
    assert best[0] == 1, "the upper layer knows what a phrase means"
    amod = alone.sums[MeasureKey("joint", RELATIONS, "amod")]
    assert amod.accuracy.max() > amod.baseline("chance") + 0.1, "nouns, if not adjectives, know their phrase's region"
    assert CONFIDENCE not in sums.baselines


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


@pytest.mark.usefixtures("on_cpu")
def test_two_processes_measure_what_one_does(alone, run, parses, monkeypatch):
    real = make_accelerator("no")
    parts = []
    for rank in range(2):
        fake = SimpleNamespace(
            process_index=rank, num_processes=2, is_local_main_process=False, device=real.device, autocast=real.autocast
        )
        monkeypatch.setattr(collect, "gather_object", list)
        parts.append(measured(run, parses, AttentionChoices(), fake))
    assert 0 < parts[0].numbers["captions"] < alone.numbers["captions"]
    parts[0].join(parts[1])
    assert parts[0].numbers == alone.numbers and parts[0].sums.keys() == alone.sums.keys()
    for key, sums in parts[0].sums.items():
        assert sums.hits.tolist() == alone.sums[key].hits.tolist() and sums.examples == alone.sums[key].examples
        assert sums.attention.flatten().tolist() == pytest.approx(alone.sums[key].attention.flatten().tolist())
    assert sorted(text.index for text in parts[0].seen) == [text.index for text in alone.seen] == [0, 7]


def test_the_command_writes_tables_of_what_was_measured(alone, output):
    found = json.loads((output / "attention.json").read_text())
    sums = alone.sums[MeasureKey("joint", ENTITIES)]
    entities = found["graphs"]["joint"]["measures"][ENTITIES]
    assert entities["examples"] == sums.examples and entities["accuracy"] == sums.accuracy.tolist()
    assert found["choices"]["--entity-piece"] == "last" and found["numbers"]["captions without a parse"] == 0
    assert any("highest one" in note for note in found["notes"]), "the missing confidences are said"
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
    assert float(table["amod"]["accuracy"]) == pytest.approx(float(amod.accuracy[amod.best(0.2)]))


def test_the_page_is_one_file_with_its_pictures(output):
    page = (output / "attention.html").read_text()
    sources = re.findall(r'src="([^"]{1,60})', page)
    pictures = sorted((output / "overlays").iterdir())
    assert len(sources) == len(pictures) + 2 and all(source.startswith("data:image/") for source in sources)
    assert len(pictures) >= 6 and "http" not in re.sub(r'src="[^"]*"', "", page)
    for name in ("--entity-piece", "--gold-boxes", "amod", "entity grounding", "Choices"):
        assert name in page
    for path in (*pictures, output / "entities_joint.png", output / "relations_joint.png"):
        with Image.open(path) as picture:
            assert min(picture.size) >= 160


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--heads 5-0", "the graph joint has the layers 0 to 1 with the heads 0 to 1"),
        ("--heads cross:0-0", "the encoder has the graphs joint"),
        ("--parses {run}/train.conllu", "has no parse; parse it, or give --missing-parse skip"),
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
def test_three_graphs_are_measured_one_by_one(run, parses, tmp_path):
    """Untrained, on a few images: language, vision and cross attention each have their measures and pictures."""
    layers = {"l_layers": 2, "r_layers": 1, "x_layers": 1}
    sizes = {"num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
    config = load_config(run.parent / "config.yaml")
    config = dataclasses.replace(config, encoder=EncoderSettings("lxmert", layers | sizes))
    tokenizer = load_tokenizer(run / "vocab.txt")
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    save_model(tmp_path / "run" / "model", config, model, tokenizer)
    words = ["--run", tmp_path / "run", "--boxes", "precomputed", "--parses", parses, "--pictures", 2]
    words += ["--max-images", 4, "--first-number", 1, "--directions", "separate", "--mean-over", "sentences"]
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
    assert cross["divided_by"] == found["numbers"]["captions"] < cross["examples"]
    for row in cross["attention"][0]:
        assert row == pytest.approx(1), "words read nothing but regions"
    assert "amod, to its governor" in found["graphs"]["cross"]["shown_relations"]
    names = {path.name.split("_")[1] for path in (output / "overlays").iterdir()}
    assert names == {"language", "vision", "cross"}
