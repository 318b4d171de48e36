"""Predictions of a trained run as a file, or one answer; see e2e_vl/cli/predict.py."""

from e2e_vl.cli.predict import main

if __name__ == "__main__":
    raise SystemExit(main())
