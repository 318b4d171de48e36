"""`e2e-vl download` of models of the Hugging Face hub: what training finds in the cache, without a network."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import BertConfig, BertForMaskedLM, BertTokenizer

from e2e_vl.cli.download import main, read_table
from e2e_vl.config_files import CONFIGS, load_config
from e2e_vl.text import SPECIAL_TOKENS, load_tokenizer
from e2e_vl.weights.loading import find_weights

NAME = "bert-base-uncased"


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """A folder with a small BERT in place of the hub, and an empty cache; return the model's folder of the cache."""
    published = tmp_path / "published"
    words = [*SPECIAL_TOKENS, "red", "circle"]
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    BertForMaskedLM(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(published)
    BertTokenizer(vocab={word: index for index, word in enumerate(words)}).save_pretrained(published)
    (published / "vocab.txt").write_text("\n".join(words) + "\n")
    model_folder = tmp_path / "cache" / f"models--{NAME}"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    def hf_hub_download(repository: str, file: str) -> str:
        assert repository == NAME
        commit = "0" * 40
        path = model_folder / "snapshots" / commit / file
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(published / file, path)
        (model_folder / "refs").mkdir(exist_ok=True)
        (model_folder / "refs/main").write_text(commit)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    return model_folder


def test_a_node_without_a_network_finds_tokenizer_and_weights(hub, tmp_path, monkeypatch, capsys):
    arguments = [NAME, "--data", str(tmp_path / "data")]
    assert main([*arguments, "--check"]) == 1
    assert f"missing: config.json in {hub}" in capsys.readouterr().out
    assert main(arguments) == 0
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert len(load_tokenizer(NAME)) == 7
    assert find_weights(NAME, "encoder").parent.parent.parent == hub
    monkeypatch.delattr(huggingface_hub, "hf_hub_download")  # nothing is downloaded again
    assert main(arguments) == main([*arguments, "--check"]) == 0
    assert f"there: {hub}" in capsys.readouterr().out


def test_a_model_that_cannot_be_fetched_is_one_sentence(hub, tmp_path, monkeypatch, capsys):
    def fail(*_: object) -> str:
        raise LocalEntryNotFoundError("no connection\nand more")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    assert main([NAME, "--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {NAME} cannot be fetched from the Hugging Face hub (no connection): repeat the command later, or copy "
        f"{hub} from another machine.\n"
    )


def test_a_set_brings_the_tokenizer_of_its_configs():
    table = read_table()
    for name, file_set in table.sets.items():
        vocabularies = {
            load_config(CONFIGS / f"{config}.yaml", ["data.root=DATA"]).data.vocabulary for config in file_set.configs
        }
        named = vocabularies - {None}
        assert named <= set(table.models)
        assert not named or NAME in file_set.files, name
