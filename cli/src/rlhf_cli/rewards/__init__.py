"""`rlhf rewards try`: rewards on given or recorded answers, and what to know of them before a run."""
