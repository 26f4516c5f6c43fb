"""The controllers: one page for online runs, one for offline runs, and what they share beside them.

They are algorithm-blind: they ask what an algorithm needs and never name one.
"""
