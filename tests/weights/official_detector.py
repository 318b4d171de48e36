"""Settings that make a tiny detector one of the official VL-BERT code: no weight shows them."""

from __future__ import annotations

OFFICIAL_DETECTOR = {
    "MODEL": {
        "PIXEL_MEAN": [102.9801, 115.9465, 122.7717],
        "PIXEL_STD": [1.0, 1.0, 1.0],
        "RESNETS": {"STRIDE_IN_1X1": True, "RES5_DILATION": 2},
        "ROI_BOX_HEAD": {"POOLER_TYPE": "ROIAlign", "POOLER_RESOLUTION": 14, "POOLER_SAMPLING_RATIO": 1},
    }
}
