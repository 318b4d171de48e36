"""Describe the regions of one image, and find what a phrase refers to; see e2e_vl/cli/extract_demo.py."""

from e2e_vl.cli.extract_demo import main

if __name__ == "__main__":
    raise SystemExit(main())
