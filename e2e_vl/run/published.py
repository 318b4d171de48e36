"""Build a whole model from a checkpoint that another project published, to ask it without training."""

from __future__ import annotations

from pathlib import Path

import msgspec
from transformers import PreTrainedTokenizerBase

from detector.checkpoint import read_tensors
from detector.errors import UserError, user_path
from detector.weight_names import strip_wrappers
from e2e_vl.config import RunConfig
from e2e_vl.config_files import load_config
from e2e_vl.model import VisionLanguageModel
from e2e_vl.registry import TASKS
from e2e_vl.run.build import ADAPTERS, InitialWeights, build_model, build_tokenizer, log_initial_weights, resolve_config
from e2e_vl.weights.base import ModelWeights, WeightAdapter
from e2e_vl.weights.loading import FILES

PAGE = "docs/python_api.md"
WEIGHT_SUFFIXES = (".bin", ".model", ".pt", ".pth", ".safetensors", ".th")


def find_published(source: str | Path) -> Path | None:
    """Return the weights file that `source` names, or that is in this folder of transformers.

    None: `source` is a run, a saved model, another file, or does not exist.
    """
    path = user_path(source)
    if path.is_file():
        return path if path.suffix in WEIGHT_SUFFIXES else None
    is_model = any((path / name).is_file() for name in ("config.yaml", "model/config.yaml"))
    files = [path / name for name in FILES if (path / name).is_file()]
    if is_model or not files:
        return None
    return files[0]


def build_published(
    weights: Path,
    config: str | Path | None = None,
    *,
    answers: str | Path | list[str] | None = None,
    detector: str | Path | None = None,
    tokenizer: str | Path | None = None,
) -> tuple[RunConfig, VisionLanguageModel, PreTrainedTokenizerBase]:
    """Build detector, encoder and head with the weights of a published file.

    Args:
        weights: file of the official code of LXMERT, VisualBERT or VL-BERT, or of a folder of transformers.
        config: the config of that model, see `find_config`; None: the one of its adapter for its task.
        answers: the answers of its head, as a list or a file, in the order of the classes; None: those of `config`.
        detector: weights of the detector, by name or file; None: those in the file, or else those of `config`.
        tokenizer: vocabulary, as `data.vocabulary`; None: that of `config`.

    Raises:
        UserError: the file is of no known format, or a part of the model would stay random.
    """
    adapter, contents = read_published(weights)
    if config is None:
        config = adapter.question_configs.get(contents.task_name)
    if config is None:
        raise UserError(
            f"{weights} is a {adapter.layout} file with {_head_of(contents)}; give the config of its model, see {PAGE}."
        )
    run_config = load_config(config, ["data.root=."])  # no data are read
    if answers is not None:
        if TASKS[run_config.task.name].cls.vocabulary_class is None:
            raise UserError(f"The task {run_config.task.name} chooses from no list of answers; leave out answers.")
        if not isinstance(answers, list):
            answers = str(answers)
        run_config = _with_task(run_config, config=msgspec.structs.replace(run_config.task.config, answers=answers))
    elif TASKS[run_config.task.name].cls.vocabulary_class is not None and run_config.task.config.answers is None:
        raise UserError(f"{weights} has scores of answers, but not their words; give answers=FILE, see {PAGE}.")
    if tokenizer is not None:
        data = msgspec.structs.replace(run_config.data, vocabulary=str(tokenizer))
        run_config = msgspec.structs.replace(run_config, data=data)
    if detector is not None:
        run_config = _with_detector(run_config, weights=str(detector), expect="all")
    elif contents.detector:
        run_config = _with_detector(run_config, weights=str(weights), expect="backbone")
    encoder = msgspec.structs.replace(run_config.encoder, weights=str(weights))
    phrases = msgspec.structs.replace(run_config.phrases, weight=0.0)  # no published file has such a head
    run_config = msgspec.structs.replace(run_config, encoder=encoder, phrases=phrases)
    run_config = resolve_config(_with_task(run_config, weights=str(weights)))
    loaded_tokenizer = build_tokenizer(run_config)
    vocab_size = len(loaded_tokenizer)
    model = build_model(run_config, vocab_size=vocab_size, tokenizer=loaded_tokenizer, on_init=_require_complete)
    return run_config, model, loaded_tokenizer


def read_published(weights: Path) -> tuple[WeightAdapter, ModelWeights]:
    """Return the adapter that recognises a published file, and what the file has."""
    tensors = strip_wrappers(read_tensors(weights))
    for adapters in ADAPTERS.values():
        for adapter in adapters:
            if adapter.question_configs and adapter.recognises(tensors):
                return adapter, adapter.convert(tensors, weights)
    raise UserError(
        f"{weights} has weights without a run, and they are no whole model of LXMERT, VisualBERT or VL-BERT; a "
        "detector is loaded by e2e_vl.load_detector."
    )


def _head_of(contents: ModelWeights) -> str:
    return f"the head of {contents.task_name}" if contents.task_name else "no head that is known here"


def _with_task(run_config: RunConfig, **changes: object) -> RunConfig:
    return msgspec.structs.replace(run_config, task=msgspec.structs.replace(run_config.task, **changes))


def _with_detector(run_config: RunConfig, **changes: object) -> RunConfig:
    return msgspec.structs.replace(run_config, detector=msgspec.structs.replace(run_config.detector, **changes))


def _require_complete(initial: InitialWeights) -> None:
    """Log what was loaded; raise a UserError if parameters of the encoder or the head would stay random."""
    log_initial_weights(initial)
    if initial.part in ("encoder", "task") and initial.report.missing:
        raise UserError(
            f"{initial.path} lacks {len(initial.report.missing)} parameters of the {initial.part}, such as "
            f"{initial.report.missing[0]}, so its answers would be random; give the config of this model."
        )
