"""``rlhf doctor``: finds problems of this installation and this machine before a run does.

Packages that are slow to import or may crash (torch, plugins, a Ray cluster) are imported in a child process with a
deadline (``child.py``), so that a broken package is one failed line and the other checks continue.
"""
