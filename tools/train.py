"""Train detector, encoder and task together; see e2e_vl/cli/train.py."""

from e2e_vl.cli.train import main

if __name__ == "__main__":
    raise SystemExit(main())
