"""Read region features that other projects published; see e2e_vl/cli/import_features.py."""

from e2e_vl.cli.import_features import main

if __name__ == "__main__":
    raise SystemExit(main())
