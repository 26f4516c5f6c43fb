"""Rollouts: single_turn and multi_turn."""
