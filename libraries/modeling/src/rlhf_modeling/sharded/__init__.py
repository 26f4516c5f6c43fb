"""A role's model whose state is divided over the ranks of a process group, for trainers of several ranks."""
