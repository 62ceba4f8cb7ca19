"""The definition of attention, three times over: `oracle`, `emulation`, `sdpa`. None imports another."""
