"""Extract region features of many images; see e2e_vl/cli/extract.py."""

from e2e_vl.cli.extract import many_images as main

if __name__ == "__main__":
    raise SystemExit(main())
