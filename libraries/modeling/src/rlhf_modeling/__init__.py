"""Models of transformers for trainers: packed attention, heads without [T, V] logits, precision, optimizers.

Trainer plugins based on torch and transformers share this library, so they compute the same numbers.
"""
