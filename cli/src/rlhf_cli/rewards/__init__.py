"""`rlhf rewards try`: checks rewards on answers of the data or recorded answers before a run."""
