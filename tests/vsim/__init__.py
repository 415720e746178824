"""Deterministic simulation of whole federations: the production aggregator, sites and stores, on a clock, a
network and disks that follow from one seed. Nothing waits, so that thousands of runs go wrong in a minute;
and whatever a seed does it does again:

    python -m tests.vsim SEED --trace

`clock.py` has the processes and their event loop, `network.py` a transport of the star, `disk.py` what a
power cut leaves, `world.py` a run with its faults, `claims.py` what must be true of it, whatever went wrong,
`wires.py` connections between peers, `village.py` a run of them (`--gossip`), `hunt.py` many seeds,
`mutants.toml` the faults that 500 seeds must find.
"""
