"""A run of LXMERT as a folder of transformers, by the command."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LxmertForQuestionAnswering

from e2e_vl.cli.convert_weights import build_parser, main
from e2e_vl.run.build import build_model, build_tokenizer
from e2e_vl.run.checkpoint import save_model
from tests.weights.starts import replaced

SMALL = {"hidden_size": 32, "l_layers": 1, "r_layers": 1, "x_layers": 1, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 48}
TASK = {"answers": ["yes", "2", "at night"], "head_width": 2, "initialise_from_words": False}


def test_a_run_becomes_a_folder_of_transformers(tiny_config, tmp_path: Path, capsys):
    config = tiny_config()
    config = replaced(config, encoder={"name": "lxmert", "config": SMALL}, task={"name": "vqa", "config": TASK})
    tokenizer = build_tokenizer(config)
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    save_model(tmp_path / "run", config, model, tokenizer)
    assert main([str(tmp_path / "run"), "--output", str(tmp_path / "folder" / "model.safetensors")]) == 0
    printed = capsys.readouterr().out
    assert f"written: {tmp_path / 'folder' / 'model.safetensors'}" in printed and "  detector." in printed
    theirs = LxmertForQuestionAnswering.from_pretrained(tmp_path / "folder")
    for name, value in model.encoder.state_dict().items():
        assert torch.equal(theirs.lxmert.state_dict()[name], value), name
    assert torch.equal(theirs.answer_head.logit_fc[3].weight, model.task.head.output.weight)
    answers = (tmp_path / "folder" / "model.answers.txt").read_text(encoding="utf-8")
    assert answers.splitlines() == TASK["answers"]


def test_the_help_names_it():
    text = " ".join(build_parser().format_help().split())
    assert "with LXMERT: x.pth for its official code" in text
