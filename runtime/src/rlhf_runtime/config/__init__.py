"""The run file: its sections, how it is read, and the checks of what it says."""
