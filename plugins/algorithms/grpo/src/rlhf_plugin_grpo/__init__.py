"""GRPO and Dr. GRPO."""
