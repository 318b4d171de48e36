"""Read the annotation files of a run before training; see e2e_vl/cli/check_data.py."""

from e2e_vl.cli.check_data import main

if __name__ == "__main__":
    raise SystemExit(main())
