"""Make a data set of drawn scenes in the official formats; see e2e_vl/cli/make_synthetic.py."""

from e2e_vl.cli.make_synthetic import main

if __name__ == "__main__":
    raise SystemExit(main())
