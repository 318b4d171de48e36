"""Extract region features of many images; see e2e_vl/cli/extract_features.py."""

from e2e_vl.cli.extract_features import main

if __name__ == "__main__":
    raise SystemExit(main())
