"""fp32 masters of weights that are stored in bf16.

bf16 has 8 bits of precision, so a step of less than 1/512 of a weight would be rounded away. The optimizer therefore
updates fp32 copies, the masters. Every bf16 weight is its master, rounded to nearest. Small steps add up in the master
until the weight changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from rlhf_modeling.optimizer import Parameters, to_device, to_host


class Masters:
    """Masters of ``parameters``, initialised with the stored weights. Gradients of micro-batches are accumulated in
    fp32 in the masters. The bf16 gradient of a micro-batch is freed at once."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.stepped: Parameters = {}
        """{name: tensor that the optimizer updates}: a master, or a parameter that is stored in fp32."""
        for name, p in parameters.items():
            self.stepped[name] = p
            if p.dtype != torch.float32:
                self.stepped[name] = nn.Parameter(p.detach().float())
                p.register_post_accumulate_grad_hook(self._collector(self.stepped[name]))

    @staticmethod
    def _collector(master: nn.Parameter) -> Callable[[Tensor], None]:
        def collect(p: Tensor) -> None:
            assert p.grad is not None
            if master.grad is None:
                master.grad = p.grad.float()
            else:
                master.grad.add_(p.grad)
            p.grad = None

        return collect

    @property
    def rounded(self) -> Parameters:
        """{name: parameter with a master}."""
        return {name: p for name, p in self.parameters.items() if p is not self.stepped[name]}

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the weights. Call it after every change of the masters."""
        for name, p in self.rounded.items():
            p.copy_(self.stepped[name])

    def substitute(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``tensors`` of the model by name, with weights replaced by their masters, also under the second name of a
        tied weight."""
        masters = {p.data_ptr(): self.stepped[name].data for name, p in self.parameters.items()}
        return {name: masters.get(t.data_ptr(), t) for name, t in tensors.items()}

    def offload(self) -> None:
        """Move the masters to host memory, from a GPU, until :meth:`reload`."""
        masters = {name: self.stepped[name].data for name in self.rounded}
        to_host(masters)
        self._set(masters)

    def reload(self, device: torch.device) -> None:
        masters = {name: self.stepped[name].data for name in self.rounded}
        to_device(masters, device)
        self._set(masters)

    def _set(self, masters: Mapping[str, Tensor]) -> None:
        for name, value in masters.items():
            self.stepped[name].data = value
