"""The commands of users, one module each: `e2e-vl NAME`.

Importing a module, reading its options and checking them imports no torch, transformers, accelerate or matplotlib,
which take seconds: `--help` and a mistyped setting are answered at once. What needs these libraries is imported late,
inside the functions that do the work.
"""
