"""How fast, how lean: what runs on a GPU only, and in one process (`tox -e bench`).

problems.py      which calls are timed, and what they compute
timer.py         GPU time by events and by graph replay, cold L2; the clock of pytest-benchmark
pairs.py         ratios of paired rounds, and what can be claimed of them
contenders.py    who is timed, called as its users would, and the kernels that must have run
contest.py       contenders in turns on one problem, judged afterwards (correct.py)
memory.py        peak memory against T              first_call.py    what a fresh process pays
sweep.py         tile sizes: time beside registers, shared memory, spills, occupancy
plugin.py bench_*.py    the pytest side
"""
