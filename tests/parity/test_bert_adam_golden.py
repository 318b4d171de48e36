"""BertAdam against the official VisualBERT and LXMERT code, over the sets under `--golden-root`."""

from tests.parity.bert_adam_checks import *  # noqa: F403
