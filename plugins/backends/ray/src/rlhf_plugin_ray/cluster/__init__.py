"""The Ray cluster: connecting to it, and reserving its devices."""
