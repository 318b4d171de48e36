"""Train detector, encoder and task together; see e2e_vl/cli/run.py."""

from e2e_vl.cli.run import train as main

if __name__ == "__main__":
    raise SystemExit(main())
