"""A trained miniature has heads that ground entities; the command writes what was measured, whoever measures it.

The miniature is a tiny encoder that learns to describe what phrases name, on perfect features of synthetic scenes.
From the state of a phrase's last wordpiece all attributes of its object are read, also those that the phrase does not
say; so that wordpiece must attend to the region of the object.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from detector.errors import UserError
from e2e_vl.analysis.collect import CONFIDENCE, ENTITIES, LARGEST, RELATIONS, make_inputs
from e2e_vl.analysis.options import AnalysisConfig
from e2e_vl.analysis.run import AnalysisArguments, caption_examples, replace_data, require_attention_maps
from e2e_vl.cli.analyze_attention import main
from e2e_vl.config import BoxSource, EncoderConfig, RunConfig
from e2e_vl.config_files import load_config, save_config
from e2e_vl.data.batching import Request, collate
from e2e_vl.data.features import RegionFeatures, write_tsv
from e2e_vl.model import VisionLanguageModel
from e2e_vl.run.build import build_model, read_training_texts
from e2e_vl.run.checkpoint import save_model
from e2e_vl.samples import BoxPredictions
from e2e_vl.synthetic.config import SceneConfig
from e2e_vl.synthetic.generate import make_scenes
from e2e_vl.text import build_vocabulary, load_tokenizer
from tests.conftest import cpu_with_one_thread

pytestmark = pytest.mark.usefixtures("on_cpu")

ROOT = Path(__file__).parents[2]
STEPS = 220
SCENES = {"train": 300, "val": 20}
WIDTH, SHAPES, STRENGTH = 64, 6, 4.0  # of a feature; of its 17 attributes the first are shapes; the value of each
CONFIG = """
seed: 1
detector:
  config: {root}/configs/detector/tiny.yaml
  backend: precomputed
  loss_weight: 0.0
  overrides: {{MODEL: {{RESNETS: {{RES2_OUT_CHANNELS: 8}}}}}}
encoder:
  name: visual_bert
  config: {{hidden_size: 48, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 96,
    hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0, initializer_range: 0.1}}
task: {{name: flickr30k}}
data:
  name: flickr30k
  root: {folder}/data
  config: {{image_name: "COCO_train2014_{{id:0>12}}.jpg"}}
  files: {{images: images/train2014, ids: "flickr30k/{{split}}.txt", sentences: flickr30k/Sentences,
    annotations: flickr30k/Annotations, features: features.tsv}}
  boxes: {{train: precomputed}}
  resize: {{short_edge: [96], long_edge: 96}}
  flip: 0.0
  workers: 0
eval: {{boxes: [precomputed], images_per_batch: 8}}
output: {folder}/run
"""


def perfect_features(path: Path) -> Iterator[RegionFeatures]:
    """A row per annotated object, with a constant where it has an attribute or a shape; confidences are random."""
    content = json.loads(path.read_text(encoding="utf-8"))
    rng = np.random.default_rng(0)
    for image in content["images"]:
        objects = [one for one in content["annotations"] if one["image_id"] == image["id"]]
        features = np.zeros((len(objects), WIDTH), np.float32)
        for row, one in enumerate(objects):
            features[row, [one["category_id"] - 1, *(SHAPES + number for number in one["attribute_ids"])]] = STRENGTH
        boxes = np.array([one["bbox"] for one in objects], np.float32)
        boxes[:, 2:] += boxes[:, :2]
        found = {
            "scores": rng.random(len(objects), dtype=np.float32),
            "classes": np.array([one["category_id"] - 1 for one in objects]),
            "attributes": np.array([one["attribute_ids"][0] for one in objects]),
            "attribute_scores": np.ones(len(objects), np.float32),
        }
        yield RegionFeatures(
            str(image["id"]), (image["height"], image["width"]), boxes, features, BoxPredictions(**found)
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Scenes with captions, gold parses and features of the annotated boxes, and a model that is trained on them.

    `features.tsv` has random confidences, by which its boxes are sorted when they are read; `plain.tsv` has none.
    """
    folder = tmp_path_factory.mktemp("miniature")
    data = folder / "data"
    size = SceneConfig(min_side=96, max_side=96, min_objects=4, max_objects=6)
    make_scenes(data, scenes=SCENES, seed=0, formats=["refcoco+", "flickr30k"], config=size)
    annotations = data / "refcoco+" / "instances.json"
    write_tsv(data / "features.tsv", perfect_features(annotations), {}, layout="lxmert")
    write_tsv(data / "plain.tsv", perfect_features(annotations), {})
    (folder / "config.yaml").write_text(CONFIG.format(root=ROOT, folder=folder))
    with cpu_with_one_thread():
        train_miniature(load_config(folder / "config.yaml"), folder / "run")
    return folder / "run"


def train_miniature(config: RunConfig, run: Path) -> None:
    build_vocabulary(read_training_texts(config), run / "vocab.txt")
    tokenizer = load_tokenizer(run / "vocab.txt")
    torch.manual_seed(0)
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    examples = caption_examples(config, model, tokenizer, AnalysisArguments(run, "train", BoxSource.PRECOMPUTED), None)
    items = [examples[Request(group, tuple(texts))] for group, texts in enumerate(examples.groups)]
    batches = [lesson(model, collate(items[start : start + 15])) for start in range(0, len(items), 15)]
    head = nn.Linear(model.encoder.hidden_size, WIDTH)
    learned = [*model.encoder.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(learned, lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
    model.encoder.train()
    for step in range(STEPS):
        texts, regions, owner, place, wanted = batches[step % len(batches)]
        found = head(model.encoder(texts, regions).text[owner, place])
        loss = F.binary_cross_entropy_with_logits(found, wanted, reduction="none").sum(dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        schedule.step()
    save_model(run / "model", config, model, tokenizer)


def lesson(model: VisionLanguageModel, batch):
    """Texts and regions of a batch, the last wordpiece of each phrase, and the mean of what its regions are."""
    with torch.no_grad():
        _, regions, _ = model.encode(batch)
    owner, place, wanted = [], [], []
    for text in range(len(batch)):
        view = make_inputs(batch, regions, text, AnalysisConfig(), None)
        for (_, end), right in zip(view.caption.phrase_spans.tolist(), view.is_correct, strict=True):
            if right.any():
                owner.append(text)
                place.append(end - 1)
                wanted.append(regions.features[text][right].mean(dim=0) / STRENGTH)
    return batch.texts, regions, torch.tensor(owner), torch.tensor(place), torch.stack(wanted)


def analyze(run: Path, *words: object, boxes: str = "precomputed") -> int:
    return main([str(word) for word in ("--run", run, "--boxes", boxes, *words)])


def read(folder: Path) -> dict:
    return json.loads((folder / "attention.json").read_text())


@pytest.fixture(scope="module")
def parses(run) -> Path:
    return run.parent / "data" / "flickr30k" / "parses" / "val.conllu"


@pytest.fixture(scope="module")
def output(run, parses) -> Path:
    folder = run.parent / "output"
    with cpu_with_one_thread():
        assert analyze(run, "--parses", parses, "--output", folder, "--pictures", 3) == 0
    return folder


def test_heads_of_the_miniature_ground_entities_far_above_the_baselines(output):
    measures = read(output)["graphs"]["joint"]["measures"]
    rules, best = measures[ENTITIES]["baselines"], measures[ENTITIES]["best_active_head"]
    assert set(rules) == {CONFIDENCE, LARGEST, "chance"} and min(rules.values()) > 0.2
    assert max(rules.values()) < 0.5 and best["accuracy"] > max(rules.values()) + 0.2
    assert best["head"].startswith("1-"), "the upper layer knows what a phrase means"
    amod = measures[RELATIONS]["by_relation"]["amod"]
    highest = np.array(amod["accuracy"]).max()
    assert highest > amod["baselines"]["chance"] + 0.1, "nouns, if not adjectives, know their phrase's region"


def test_all_entities_of_the_split_are_counted(output, run):
    folder = run.parent / "data" / "flickr30k"
    captions = entities = 0
    for image in (folder / "val.txt").read_text().split():
        objects = re.findall(r"<object>.*?</object>", (folder / "Annotations" / f"{image}.xml").read_text(), re.DOTALL)
        boxed = {name for one in objects if "<bndbox>" in one for name in re.findall(r"<name>(\d+)</name>", one)}
        for line in (folder / "Sentences" / f"{image}.txt").read_text().splitlines():
            named = [chain for chain in re.findall(r"/EN#(\d+)/", line) if chain in boxed]
            captions += bool(named)
            entities += len(named)
    found = read(output)
    assert found["counts"]["captions"] == captions and captions > 4 * SCENES["val"]
    assert found["graphs"]["joint"]["measures"][ENTITIES]["examples"] == entities


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
    one, two = (read(folder) for folder in (output, tmp_path / "two"))
    assert one["counts"] == two["counts"] and one["images"] == SCENES["val"]
    for name, measure in one["graphs"]["joint"]["measures"].items():
        other = two["graphs"]["joint"]["measures"][name]
        assert measure["examples"] == other["examples"] > 0
        for matrix in ("accuracy", "attention"):
            assert np.array(other[matrix]) == pytest.approx(np.array(measure[matrix]), abs=1e-6)
    pictures = [sorted(path.name for path in (folder / "overlays").iterdir()) for folder in (output, tmp_path / "two")]
    assert pictures[0] == pictures[1]


def test_the_command_writes_tables_of_what_was_measured(output):
    found = read(output)
    graph = found["graphs"]["joint"]
    entities = graph["measures"][ENTITIES]
    assert found["options"]["--entity-piece"] == "last" and found["counts"]["captions without a parse"] == 0
    assert not any("highest one" in note for note in found["notes"]), "there are confidences"
    with (output / "heads.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if (row["measure"], row["relation"]) == (ENTITIES, "")]
    assert len(rows) == np.size(entities["accuracy"])
    for row in rows:
        layer, head = int(row["layer"]), int(row["head"])
        assert float(row["accuracy"]) == pytest.approx(entities["accuracy"][layer][head])
        assert row["active"] == ("yes" if entities["attention"][layer][head] > 0.2 else "no")
    with (output / "table2_joint.csv").open() as file:
        table = {row["relation"]: row for row in csv.DictReader(file)}
    assert list(table) == graph["shown_relations"] and {"amod", "det", "punct", "prep"} <= set(table)
    amod = graph["measures"][RELATIONS]["by_relation"]["amod"]
    assert int(table["amod"]["pairs"]) == amod["examples"]
    assert float(table["amod"]["accuracy"]) == pytest.approx(amod["best_active_head"]["accuracy"])
    page = (output / "attention.html").read_text()
    sources = re.findall(r'src="([^"]{1,60})', page)
    assert len(sources) >= 8 and all(source.startswith("data:image/") for source in sources)
    assert "http" not in re.sub(r'src="[^"]*"', "", page), "the page is one file with its pictures"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--heads 5-0", "--heads has '5-0', but there are 2 heads and the graphs joint with 2 layers"),
        ("--parses {run}/train.conllu", "--missing-parse skip"),
        ("--boxes online", "precomputed"),
        ("--entity-piece head", "--entity-piece head needs parses"),
    ],
)
def test_what_does_not_fit_is_one_sentence(run, tmp_path, capsys, words, message):
    (run / "train.conllu").write_text("1\tx\t_\t_\t_\t_\t0\troot\t_\t_\n")
    assert analyze(run, "--output", tmp_path / "out", *words.format(run=run).split()) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in line


def test_results_replace_those_of_an_earlier_analysis_and_nothing_else(run, tmp_path, capsys):
    output = tmp_path / "out"
    (output / "overlays").mkdir(parents=True)
    for name in ("table2_cross.csv", "overlays/000001_cross_0-0_0.jpg"):
        (output / name).write_text("old")
    words = ["--output", output, "--pictures", 1, "--max-images", 2]
    assert analyze(run, *words) == 0
    names = {path.relative_to(output).as_posix() for path in output.rglob("*") if path.parent.name != "overlays"}
    assert names == {"attention.html", "attention.json", "heads.csv", "entities_joint.png", "overlays"}
    assert not [*output.rglob("*cross*")]
    (output / "notes.txt").write_text("mine")
    assert analyze(run, *words) == 2
    assert f"{output} contains files that are not from an analysis" in capsys.readouterr().err
    assert (output / "notes.txt").exists()


def test_data_of_another_config_are_read_in_the_sizes_of_the_run(run, tmp_path, capsys):
    """The run's own data are elsewhere now; the other config has other sizes, which do not count."""
    data, sentences = run.parent / "data", tmp_path / "Sentences"
    shutil.copytree(data / "flickr30k" / "Sentences", sentences)
    for path in sentences.iterdir():
        path.write_text(f"Nobody is here .\n{path.read_text()}")  # names nothing, so the data set leaves it out
    few = (data / "flickr30k" / "val.txt").read_text().split()[:3]
    (data / "few_other.txt").write_text("\n".join(few))
    written = sum(len((sentences / f"{image}.txt").read_text().splitlines()) for image in few)
    words = ["data.resize.short_edge=[48]", f"data.files.sentences={sentences}", 'data.files.ids="{split}_other.txt"']
    save_config(load_config(run.parent / "config.yaml", words), tmp_path / "other.yaml")
    moved = tmp_path / "moved"
    shutil.copytree(run / "model", moved / "model")
    own = load_config(moved / "model" / "config.yaml", ["data.root=nowhere"])
    save_config(own, moved / "model" / "config.yaml")
    words = ["--data", tmp_path / "other.yaml", "--split", "few", "--pictures", 0, "data.max_text_length=7"]
    assert analyze(moved, *words) == 0
    found = read(moved / "attention" / "few_precomputed")
    assert found["images"] == 3 and found["counts"]["truncated phrases"] > 0
    left_out = found["counts"]["captions skipped by the data set (whole split)"]
    assert left_out == written - found["counts"]["captions"] >= len(few)
    config = replace_data(own, tmp_path / "other.yaml", ["data.root=there"])
    assert (config.data.root, config.data.resize.short_edge) == ("there", [96])
    assert analyze(moved, *words, "data.files.ids=none.txt") == 2
    assert "none.txt" in capsys.readouterr().err


def save_untrained(config: RunConfig, vocabulary: Path, run: Path, encoder: str = "", **sizes: int) -> None:
    """With `encoder` it replaces that of the config, small and with two heads."""
    if encoder:
        sizes |= {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
        config = msgspec.structs.replace(config, encoder=EncoderConfig(encoder, sizes))
    tokenizer = load_tokenizer(vocabulary)
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    save_model(run / "model", config, model, tokenizer)


def test_boxes_of_the_detector_itself_with_an_encoder_that_reads_the_whole_image(run, parses, tmp_path):
    """Untrained VL-BERT on proposals: their scores are the paper's baseline, and the whole image is no candidate."""
    words = ["detector.backend=builtin", "detector.overrides.MODEL.RESNETS.DEPTH=18", "eval.boxes=[online]"]
    words += [f"detector.overrides.MODEL.RESNETS.{name}=8" for name in ("STEM_OUT_CHANNELS", "WIDTH_PER_GROUP")]
    config = load_config(run.parent / "config.yaml", [*words, "data.boxes.train=online"])
    save_untrained(config, run / "vocab.txt", tmp_path, "vl_bert", num_hidden_layers=2, geometry_dim=16)
    assert analyze(tmp_path, "--parses", parses, "--pictures", 1, "--max-images", 2, boxes="online") == 0
    output = tmp_path / "attention" / "val_online"
    found = read(output)
    entities = found["graphs"]["joint"]["measures"][ENTITIES]
    assert CONFIDENCE in entities["baselines"] and entities["examples"] > 0 and len(entities["accuracy"]) == 2
    assert not any("highest one" in note for note in found["notes"])
    assert found["counts"]["candidate regions"] > found["counts"]["captions"]
    assert [*(output / "overlays").iterdir()]


def test_three_graphs_are_measured_one_by_one(run, parses, tmp_path):
    """Untrained, on a few images: language, vision and cross attention each have their measures and pictures."""
    config = load_config(run.parent / "config.yaml")
    save_untrained(config, run / "vocab.txt", tmp_path, "lxmert", l_layers=2, r_layers=1, x_layers=1)
    words = ["--parses", parses, "--entity-piece", "head", "--pictures", 2, "--max-images", 4, "--first-number", 1]
    words += ["--directions", "separate", "--mean-over", "sentences", "data.files.features=plain.tsv"]
    assert analyze(tmp_path, *words) == 0
    output = tmp_path / "attention" / "val_precomputed"
    found = read(output)
    assert found["images"] == 4 and 10 < found["counts"]["captions"] <= 20
    assert {name: list(graph["measures"]) for name, graph in found["graphs"].items()} == {
        "language": ["word dependency"],
        "vision": ["region grouping"],
        "cross": ["entity grounding", "region naming", "syntactic grounding"],
    }
    cross = found["graphs"]["cross"]["measures"][ENTITIES]
    assert any("highest one" in note for note in found["notes"]), "the missing confidences are said"
    assert set(cross["baselines"]) == {LARGEST, "chance"}
    assert cross["denominator"] == found["counts"]["captions"] < cross["examples"]
    assert np.array(cross["attention"][0]) == pytest.approx(1), "words read nothing but regions"
    assert "amod, to its governor" in found["graphs"]["cross"]["shown_relations"]
    assert (output / "heads.csv").read_text().splitlines()[1].startswith("language,word dependency,,1,1,")
    names = {path.name.split("_")[1] for path in (output / "overlays").iterdir()}
    assert names == {"language", "vision", "cross"}


def test_a_run_of_another_task_measures_the_same_phrases(run_of, tmp_path):
    """An untrained pre-training run without data of its own, on the captions of a run of their task."""
    own, other = run_of("flickr30k"), tmp_path / "other"
    words = [f"detector.config={ROOT / 'configs' / 'detector' / 'tiny.yaml'}", "data.root=nowhere", "output=unused"]
    config = load_config(ROOT / "configs" / "tiny" / "pretraining.yaml", words)
    save_untrained(config, own / "model" / "tokenizer", other)
    settings = own / "model" / "config.yaml"
    parses = Path(load_config(settings).data.root) / "flickr30k" / "parses" / "val.conllu"
    words = ["--data", settings, "--max-images", 2, "--pictures", 0, "--parses", parses]
    for run in (own, other):
        assert analyze(run, *words, "--output", tmp_path / f"attention_{run.name}", boxes="gt") == 0
    first, second = (read(tmp_path / f"attention_{run.name}") for run in (own, other))
    assert second["images"] == 2 and second["counts"] == first["counts"], "the same captions and regions"
    first, second = (one["graphs"]["joint"]["measures"] for one in (first, second))
    assert {name: one["examples"] for name, one in second.items()} == {
        name: one["examples"] for name, one in first.items()
    }
    entities = second[ENTITIES]
    assert entities["examples"] > 0 and all(0 < share < 1 for heads in entities["attention"] for share in heads)
    for rule in (LARGEST, "chance"):
        assert entities["baselines"][rule] == pytest.approx(first[ENTITIES]["baselines"][rule])


def test_a_run_without_attention_maps_says_why(run):
    config = load_config(run / "model" / "config.yaml")
    with pytest.raises(UserError, match="the encoder visual_bert returns no attention maps"):
        require_attention_maps(run, config, {})
    for setting in ("blank_text", "blank_image"):
        blank = msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, **{setting: True}))
        with pytest.raises(UserError, match=rf"blank \(data.{setting}\)"):
            require_attention_maps(run, blank, {})
