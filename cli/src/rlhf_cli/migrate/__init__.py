"""`rlhf migrate`: a run file from the command line or the configuration of another framework."""
