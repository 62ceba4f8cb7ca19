"""How fast, how lean: what runs on a GPU only, and in one process (`tox -e bench`).

Each module is one of these:

- `problems`: which calls are timed, and what they compute
- `timer`: GPU time by events and by graph replay, cold L2; the clock of pytest-benchmark
- `pairs`: ratios of paired rounds, and what can be claimed of them
- `contenders`: who is timed, called as its users would, and the kernels that must have run
- `contest`: contenders in turns on one problem, judged afterwards by `correct`; `bench` has them all
- `gates`: ratios that must be reached, and what verdicts are worth
- `memory`, `first_call`: peak memory against T; what a fresh process pays, and the host for each call
- `ratios`, `ragged`: a run of the baseline of speed; ragged against dense batches
- `sweep`, `occupancy`: tile sizes: time beside registers, shared memory, spills, occupancy
- `machine`: the GPU that is here
- `plugin`, `timed`, `bench_*`, `__main__`: the pytest side
"""
