"""A plugin of SGLang: lets a CPU sample by seeds. SGLang offers its deterministic mode for attention kernels of GPUs
only; ``torch_native`` computes each sequence by itself, so it needs nothing of it but the sampler."""


def register():
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    HookRegistry.register(f"{runner}.maybe_enable_batch_invariant_mode", lambda self: None, HookType.REPLACE)
