"""Command line: one module a command, the table in `main`.

Product on stdout, everything else on stderr. Exit codes: 0 done, 1 the spec is at fault, 2 usage or options,
3 the environment is (no DSL, no GPU, no cache folder), 70 a bug in attngen.
"""
