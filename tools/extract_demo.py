"""Describe the regions of one image, and find what a phrase refers to; see e2e_vl/cli/extract.py."""

from e2e_vl.cli.extract import one_image as main

if __name__ == "__main__":
    raise SystemExit(main())
