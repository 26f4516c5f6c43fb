"""From a run file to a run that is ready for its first step."""
