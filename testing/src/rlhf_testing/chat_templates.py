"""Chat templates with tools and reasoning for tiny tokenizers. They end messages with ``<eos>``."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<eos>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Messages of any role, no tools."""

_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}{{ '<tools>' }}"
    "{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '\\n</tools><eos>\\n' }}"
    "{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<eos>\\n' }}{% endif %}"
)
_CALLS = (
    "{% for call in m.tool_calls or [] %}{% if not loop.first or m.content %}{{ '\\n' }}{% endif %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}{{ '}\\n</tool_call>' }}{% endfor %}"
)
_RESULTS = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<eos>\\n' }}{% endif %}"
)
_MESSAGE_BLOCK = (
    "{% elif m.role == 'user' or m.role == 'system' and not loop.first %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<eos>\\n' }}{% endif %}{% endfor %}"
)
_HEAD = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

HERMES = (
    f"{_TOOLS}{{% for m in messages %}}{{% if m.role == 'assistant' %}}{{{{ '<|im_start|>assistant\\n' + m.content }}}}"
    f"{_CALLS}{{{{ '<eos>\\n' }}}}{{% elif m.role == 'tool' %}}{_RESULTS}{_MESSAGE_BLOCK}{_HEAD}"
)
"""Tools in the system message, calls as JSON in ``<tool_call>``. Consecutive results share one user block."""

QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    f"{{% endif %}}{{% endfor %}}{_TOOLS}{{% for m in messages %}}{{% if m.role == 'assistant' %}}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{% if loop.index0 > ns.last and (m.reasoning_content or loop.last) %}"
    "{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}{{ m.content }}"
    f"{_CALLS}{{{{ '<eos>\\n' }}}}{{% elif m.role == 'tool' %}}{_RESULTS}{_MESSAGE_BLOCK}{_HEAD}"
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)
"""As :data:`HERMES`, with reasoning as in Qwen3: kept after the last user message, dropped before it."""

LLAMA3 = (
    "{% for m in messages %}{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) }}"
    "{{ '<|end_header_id|>\\n\\n' }}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' + (call.arguments | tojson) + '}' }}"
    "{% elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}{% if tools and loop.first %}"
    "{{ (tools | tojson) + '\\n' }}{% endif %}{{ m.content | trim }}{% endif %}{{ '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
"""One call as JSON instead of the text of its message; results as JSON."""

GENERATION = HERMES.replace(
    "{{ '<|im_start|>assistant\\n' + m.content }}", "{{ '<|im_start|>assistant\\n' }}{% generation %}{{ m.content }}"
).replace(f"{_CALLS}{{{{ '<eos>\\n' }}}}", f"{_CALLS}{{{{ '<eos>' }}}}{{% endgeneration %}}{{{{ '\\n' }}}}")
"""As :data:`HERMES`, with the answers marked for training."""
