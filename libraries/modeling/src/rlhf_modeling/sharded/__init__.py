"""A role's model whose state is divided over the ranks of a process group, as trainers of several ranks need it."""
