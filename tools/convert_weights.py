"""Read published weights, or write a run as an official file; see e2e_vl/cli/convert_weights.py."""

from e2e_vl.cli.convert_weights import main

if __name__ == "__main__":
    raise SystemExit(main())
