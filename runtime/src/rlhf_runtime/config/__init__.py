"""The run file: its sections, reading and checking it."""
