"""Times tiles of the kernels on a GPU, beside what each takes of a multiprocessor.

For each kernel and head dimension a grid of tiles goes through three steps. What cannot fit is pruned. The
others are compiled, by processes that do what a launch does but launch nothing: a tiny problem is compiled to
the same kernel as a large one, since neither strides nor lengths are specialised, and Triton's cache has it
afterwards. Then, on a machine that does nothing else, one process times them in turns, in rounds, each in
another order; the shipped tile takes part. The best of them and the shipped one have more rounds of their
own, which decide what is claimed. Timed is the kernel in question alone, launched with the arguments that
`kernels.launch` makes: no allocation, and for dkdv and dq not the delta kernel, which runs once, before.
Afterwards each tile's result is compared with that of the shipped one.

A tile that does not compile, or launch, or that takes its process with it, is an entry with its reason.
Written are tiles.json, tiles.md and tiles.png (`reports.tile_sweep`).

__main__.py    the command line
run.py         a whole sweep: compiles, times, writes
grid.py        which tiles, and why one is pruned
launches.py    a kernel with a tile of choice and its arguments: compiled, or launched
timing.py      rounds, in turns, of the tiles of a kernel and head dimension; whether their results are right
outcomes.py    what became of a tile, while it is measured and as an entry of the file
processes.py   tasks in processes that may die, hang, or lose the GPU
"""
