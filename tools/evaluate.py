"""Evaluate a trained run on any split with any source of boxes; see e2e_vl/cli/evaluate.py."""

from e2e_vl.cli.evaluate import main

if __name__ == "__main__":
    raise SystemExit(main())
