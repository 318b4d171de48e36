"""Evaluate a trained run on any split with any source of boxes; see e2e_vl/cli/run.py."""

from e2e_vl.cli.run import evaluate as main

if __name__ == "__main__":
    raise SystemExit(main())
