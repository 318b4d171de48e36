"""`python -m e2e_vl` is the command `e2e-vl`; `accelerate launch -m e2e_vl` starts it in several processes."""

from e2e_vl.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
