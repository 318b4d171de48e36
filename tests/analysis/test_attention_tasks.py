"""Runs of other tasks are analysed on Flickr30K Entities as runs of its own task are: the captions are the same.

All of them are tiny and untrained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from e2e_vl.analysis.collect import CONFIDENCE, ENTITIES, LARGEST
from e2e_vl.cli.analyze_attention import main
from e2e_vl.config import load_config
from e2e_vl.data.features import write_tsv
from e2e_vl.run.build import build_model, training_texts
from e2e_vl.run.checkpoint import save_model
from e2e_vl.synthetic import SceneConfig, make_scenes
from e2e_vl.text import build_vocabulary, load_tokenizer
from tests.analysis.miniature import perfect_features
from tests.conftest import cpu_with_one_thread

ROOT = Path(__file__).parents[2]
DATA = ROOT / "configs" / "tiny" / "flickr30k.yaml"
IMAGES = 2
ELSEWHERE = ["data.root=nowhere", "output=unused", "data.workers=0"]
TINY_DETECTOR = f"detector.config={ROOT / 'configs' / 'detector' / 'tiny.yaml'}"
NO_START = ["encoder.weights=null", "task.weights=null"]
NARROW_R2C = [
    f"detector.config={ROOT / 'configs' / 'detector' / 'r2c_R_50.yaml'}",
    "detector.overrides.MODEL.RESNETS={STEM_OUT_CHANNELS: 8, RES2_OUT_CHANNELS: 16, WIDTH_PER_GROUP: 4}",
    "detector.overrides.MODEL.R2C={FEATURE_DIM: 8, MASK_CHANNELS: 4, CLASS_DIM: 4, CANVAS: [192, 192]}",
    "data.resize={short_edge: [96], long_edge: 192}",
]
GIVEN_FEATURES = [TINY_DETECTOR, "detector.overrides.MODEL.RESNETS.RES2_OUT_CHANNELS=8", *NO_START]


def encoder(**more: Any) -> str:
    """A small one of a config whose encoder is of BASE size."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, **more}
    return f"encoder.config={json.dumps(sizes)}"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks") / "data"
    size = SceneConfig(min_side=96, max_side=96, min_objects=3, max_objects=5)
    make_scenes(folder, scenes={"train": 2, "val": 3}, seed=0, formats=["refcoco+", "flickr30k"], config=size)
    write_tsv(folder / "features.tsv", perfect_features(folder / "refcoco+" / "instances.json"), {}, layout="lxmert")
    config = load_config(DATA, [f"data.root={folder}", "output=unused"])
    build_vocabulary(training_texts(config), folder.parent / "vocab.txt")
    return folder


def analysed(data: Path, run: Path, config_file: str, words: list[str], boxes: str) -> dict[str, Any]:
    """Build and save a run of a config, whose own data are nowhere, and analyse it on the drawn captions."""
    config = load_config(ROOT / "configs" / config_file, [*words, *ELSEWHERE])
    tokenizer = load_tokenizer(data.parent / "vocab.txt")
    save_model(run / "model", config, build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer), tokenizer)
    given = ["--run", run, "--data", DATA, "--boxes", boxes, "--max-images", IMAGES, "--pictures", 1]
    given += ["--parses", data / "flickr30k" / "parses" / "val.conllu", f"data.root={data}"]
    given += ["data.files.features=features.tsv"] if boxes == "precomputed" else []
    assert main([str(word) for word in given]) == 0
    return json.loads((run / "attention" / f"val_{boxes}" / "attention.json").read_text())


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory) -> dict[str, Any]:
    """What a run of the task of the captions finds."""
    with cpu_with_one_thread():
        return analysed(data, tmp_path_factory.mktemp("own"), "tiny/flickr30k.yaml", [TINY_DETECTOR], "gt")


def examples(measures: dict[str, Any]) -> dict[str, int]:
    return {name: one["examples"] for name, one in measures.items()}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("config_file", "words", "boxes"),
    [
        pytest.param("tiny/pretraining.yaml", [TINY_DETECTOR], "gt", id="VL-BERT's pre-training"),
        pytest.param("tiny/visual_bert_pretraining.yaml", [TINY_DETECTOR], "gt", id="VisualBERT, first phase"),
        pytest.param(
            "pretraining/visual_bert_flickr30k.yaml",
            [*GIVEN_FEATURES, encoder(with_box_numbers=True)],
            "precomputed",
            id="VisualBERT, second phase for Flickr30K",
        ),
        pytest.param(
            "pretraining/visual_bert_nlvr2.yaml",
            [*GIVEN_FEATURES, encoder()],
            "precomputed",
            id="VisualBERT, second phase for NLVR2",
        ),
        pytest.param(
            "pretraining/visual_bert_vcr.yaml",
            [*NARROW_R2C, *NO_START, "detector.weights=null", encoder(uses_whole_image=True)],
            "gt",
            id="VisualBERT, second phase for VCR",
        ),
        pytest.param("tiny/vcr.yaml", [TINY_DETECTOR], "gt", id="VCR"),
        pytest.param("tiny/nlvr2.yaml", [TINY_DETECTOR], "gt", id="NLVR2"),
    ],
)
def test_a_run_of_another_task(data, expected, tmp_path, config_file, words, boxes):
    found = analysed(data, tmp_path / "run", config_file, words, boxes)
    assert found["images"] == IMAGES and found["numbers"] == expected["numbers"], "the same captions and regions"
    own, joint = (one["graphs"]["joint"]["measures"] for one in (expected, found))
    assert {name: one["examples"] for name, one in joint.items()} == {
        name: one["examples"] for name, one in own.items()
    }
    entities = joint[ENTITIES]
    assert entities["examples"] > 0 and {len(heads) for heads in entities["accuracy"]} == {2}
    assert all(0 < share < 1 for heads in entities["attention"] for share in heads)
    for rule in (LARGEST, "chance"):
        assert entities["baselines"][rule] == pytest.approx(own[ENTITIES]["baselines"][rule])
    assert (CONFIDENCE in entities["baselines"]) == (boxes == "precomputed")
    assert [*(tmp_path / "run" / "attention" / f"val_{boxes}" / "overlays").iterdir()]
