"""A page in the browser to explore a trained run; see e2e_vl/cli/explore.py."""

from e2e_vl.cli.explore import main

if __name__ == "__main__":
    raise SystemExit(main())
