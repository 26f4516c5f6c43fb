"""The engines of a generator, called as one generator."""
