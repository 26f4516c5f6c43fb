"""What each vLLM worker gets beside its own methods: taking weights and showing what it took.

vLLM mixes this class into its worker by name, so that nothing but names and buckets crosses to worker processes.
"""

from __future__ import annotations

from typing import Any

from rlhf.errors import SyncError
from rlhf.sync.bucket import Bucket
from vllm.config import set_current_vllm_config

from rlhf_plugin_vllm.probe import differing
from rlhf_plugin_vllm.reload import Reload


class WeightReceiver:
    """Methods for ``collective_rpc``; ``self`` is a vLLM worker."""

    _rlhf_reload: Reload | None = None

    def rlhf_begin(self: Any) -> None:
        """A reload that was under way is abandoned."""
        with set_current_vllm_config(self.vllm_config):
            if self._rlhf_reload is not None:
                self._rlhf_reload.abandon()
            self._rlhf_reload = Reload(self.get_model(), self.model_config)

    def rlhf_take(self: Any, bucket: Bucket) -> None:
        if self._rlhf_reload is None:
            raise SyncError("weights came before begin_load()")
        with set_current_vllm_config(self.vllm_config), self.device:
            self._rlhf_reload.take(bucket)

    def rlhf_end(self: Any) -> tuple[int, dict[str, str], int, list[str]]:
        """(rank, fingerprints of what came, its bytes, names of what did not come)."""
        reload, self._rlhf_reload = self._rlhf_reload, None
        if reload is None:
            raise SyncError("end_load() without begin_load()")
        with set_current_vllm_config(self.vllm_config), self.device:
            missing = reload.end()
        self.model_runner.reset_lora_state()
        return self.rank, reload.received, reload.nbytes, missing

    def rlhf_differing(self: Any, bucket: Bucket) -> list[str]:
        """See :func:`rlhf_plugin_vllm.probe.differing`."""
        with set_current_vllm_config(self.vllm_config), self.device:
            return differing(self.get_model(), bucket)
