"""Boxes as annotation tools export them: COCO JSON, LabelMe, Pascal VOC, YOLO and tables.

Each format has a file, which turns an export into `Annotation`s as they are written; `placement.py` finds their images
and puts the boxes into pixels of the upright image.
"""

from e2e_vl.data.annotation_tools.images import ImageFolder, UprightImage
from e2e_vl.data.annotation_tools.reading import read_boxes
from e2e_vl.data.annotation_tools.records import Remarks, Row
from e2e_vl.data.annotation_tools.tables import read_rows

__all__ = ["ImageFolder", "Remarks", "Row", "UprightImage", "read_boxes", "read_rows"]
