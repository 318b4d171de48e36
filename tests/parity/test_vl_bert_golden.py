"""Everything recorded from the official VL-BERT code, over the set under `--golden-root`.

The checks are in files of their own, one for each part; here they are collected.
"""

from tests.parity.vl_bert_captions_checks import *  # noqa: F403
from tests.parity.vl_bert_encoder_checks import *  # noqa: F403
from tests.parity.vl_bert_optimiser_checks import *  # noqa: F403
from tests.parity.vl_bert_pretraining_checks import *  # noqa: F403
from tests.parity.vl_bert_rules_checks import *  # noqa: F403
from tests.parity.vl_bert_vcr_checks import *  # noqa: F403
from tests.parity.vl_bert_vqa_checks import *  # noqa: F403
