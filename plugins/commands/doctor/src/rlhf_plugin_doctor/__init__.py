"""``rlhf doctor``: what this installation and this machine can do, found before a run finds it out.

Whatever is heavy or may crash (torch, plugins, a Ray cluster) is imported in a child process with a deadline
(``child.py``), so that a broken package is one failed line and the examination goes on.
"""
