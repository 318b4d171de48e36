"""Measure what the attention heads of a trained run ground; see e2e_vl/cli/analyze_attention.py."""

from e2e_vl.cli.analyze_attention import main

if __name__ == "__main__":
    raise SystemExit(main())
