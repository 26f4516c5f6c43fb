"""Supervised fine-tuning: completions, conversations, continued pre-training."""
