"""Train detector, encoder and task together; see e2e_vl/commands/train.py."""

from e2e_vl.commands.train import main

if __name__ == "__main__":
    raise SystemExit(main())
