"""The launcher ``torchrun``: one process of torchrun drives the run, and the others start workers on their machines."""
