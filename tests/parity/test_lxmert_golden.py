"""Everything recorded from the official LXMERT code, over the set under `--golden-root`.

The checks are in files of their own, one for each part; here they are collected.
"""

from tests.parity.lxmert_adam_checks import *  # noqa: F403
from tests.parity.lxmert_data_checks import *  # noqa: F403
from tests.parity.lxmert_encoder_checks import *  # noqa: F403
from tests.parity.lxmert_files_checks import *  # noqa: F403
from tests.parity.lxmert_finetuning_checks import *  # noqa: F403
from tests.parity.lxmert_keys_checks import *  # noqa: F403
from tests.parity.lxmert_pretraining_checks import *  # noqa: F403
from tests.parity.lxmert_training_checks import *  # noqa: F403
