"""Everything recorded from the official evaluators, over the sets under `--golden-root`.

The checks are in files of their own, one for each data set; here they are collected.
"""

from tests.parity.evaluation_flickr30k_checks import *  # noqa: F403
from tests.parity.evaluation_gqa_checks import *  # noqa: F403
from tests.parity.evaluation_nlvr2_checks import *  # noqa: F403
from tests.parity.evaluation_refcoco_checks import *  # noqa: F403
from tests.parity.evaluation_vcr_checks import *  # noqa: F403
from tests.parity.evaluation_vqa_checks import *  # noqa: F403
