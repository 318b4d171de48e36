"""The encoders, one file each; transformers' Auto classes know all of them, see `e2e_vl/auto_classes.py`."""
