"""``rlhf doctor``: what this installation and this machine can do, found before a run finds it out.

    for check in examine(Request()):
        print(check.status, check.name, check.found, check.remedy)

Whatever is heavy or may crash (torch, vLLM, plugins, a Ray cluster) is imported in a child process with a deadline
(:mod:`rlhf_plugin_doctor.child`), so that a broken package is one failed line and not the end of the examination.
"""

from rlhf_plugin_doctor.examine import Request, examine

__all__ = ["Request", "examine"]
