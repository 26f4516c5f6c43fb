"""RLOO: leave-one-out baseline."""
