"""Faults planted in our own kernels: what the suite is measured by.

`mutant` says what one is, `catalogue` has them all, `runner` plants them, `score` is the process that looks
for one, `matrix` what came of it; `diagnoses` is what is said of them, `expected` what should be.
`python -m tests.mutants --help`.
"""
