"""The commands `e2e-vl NAME`, one module each.

Parsing and checking options does not import torch, transformers, accelerate or matplotlib, which take seconds to
import, so `--help` and errors in settings appear at once. Functions that need these libraries import them.
"""
