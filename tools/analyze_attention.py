"""Measure what the attention heads of a trained run ground; see e2e_vl/commands/analyze_attention.py."""

from e2e_vl.commands.analyze_attention import main

if __name__ == "__main__":
    raise SystemExit(main())
