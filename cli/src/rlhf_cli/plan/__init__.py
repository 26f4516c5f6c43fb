"""``rlhf plan``: which role is on which device, how much memory each phase needs there, and whether it fits.

A run file and flags become a ``Layout`` (``from_run_file``). Trainers and generators state the memory of one rank
(``Trainer.memory``, ``Generator.memory``), and ``make_plan`` (``phases``) adds it up by device and phase. No weights
are loaded and nothing is started.
"""
