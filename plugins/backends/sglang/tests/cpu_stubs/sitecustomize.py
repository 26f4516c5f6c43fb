"""Lets torchvision, whose build here may be one for CUDA, be imported beside torch's build for CPUs: SGLang imports it,
and text models use none of its operators, which only need a schema to be imported."""

import importlib.abc
import sys

_libraries = []


class _Vision(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            _libraries.append(torch.library.Library("torchvision", "DEF"))
            for operator in ("nms", "qnms"):
                _libraries[0].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _Vision())
