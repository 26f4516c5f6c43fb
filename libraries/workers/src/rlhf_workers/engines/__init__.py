"""The engines of a generator behind one front."""
