"""Transformers models as trainers hold them: packed attention, heads without [T, V] logits, precision, optimizers.

What any trainer plugin built on torch and transformers needs, so that all of them give the same numbers. It imports
torch; nothing in the core's light rooms imports it.
"""
