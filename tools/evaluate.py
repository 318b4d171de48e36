"""Evaluate a trained run on any split with any source of boxes; see e2e_vl/commands/evaluate.py."""

from e2e_vl.commands.evaluate import main

if __name__ == "__main__":
    raise SystemExit(main())
