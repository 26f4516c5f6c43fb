"""Jobs that use parts of a run and train nothing."""
