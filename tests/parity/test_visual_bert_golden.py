"""Everything recorded from the official VisualBERT code, over the set under `--golden-root`.

The checks are in files of their own, one for each part; here they are collected.
"""

from tests.parity.visual_bert_adam_checks import *  # noqa: F403
from tests.parity.visual_bert_data_checks import *  # noqa: F403
from tests.parity.visual_bert_encoder_checks import *  # noqa: F403
from tests.parity.visual_bert_finetuning_checks import *  # noqa: F403
from tests.parity.visual_bert_keys_checks import *  # noqa: F403
from tests.parity.visual_bert_optimiser_checks import *  # noqa: F403
from tests.parity.visual_bert_pretraining_checks import *  # noqa: F403
from tests.parity.visual_bert_task_rules_checks import *  # noqa: F403
from tests.parity.visual_bert_vcr_detector_checks import *  # noqa: F403
from tests.parity.visual_bert_vcr_text_checks import *  # noqa: F403
