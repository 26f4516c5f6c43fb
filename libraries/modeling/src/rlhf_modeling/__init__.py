"""Models of transformers for trainers: packed attention, heads without [T, V] logits, precision, optimizers.

Trainer plugins that are built on torch and transformers share this library, so that they compute the same numbers.
"""
