"""Chat templates of the shapes in which families write tool calls, each as small as its shape allows."""

from __future__ import annotations

_TURN = "<|im_start|>{{ message.role }}\n{{ message.content }}"
_START = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_TOLD = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
)

HERMES = (
    _TOLD + "{% for message in messages %}{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ message.content }}\n</tool_response>{% else %}" + _TURN + "{% for call in message.tool_calls or [] %}"
    '\n<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}" + _START
)
"""Hermes 3, Qwen2.5, Qwen3."""

HERMES_TURNED = HERMES.replace(
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}',
    '{"arguments": {{ call.function.arguments | tojson }}, "name": "{{ call.function.name }}"}',
)
"""Hermes 2 Pro."""

HERMES_LIST = HERMES.replace("<tool_call>\n{", "<tool_call>[{").replace("}\n</tool_call>", "}]</tool_call>")

LLAMA = (
    "<|begin_of_text|>{% for message in messages %}{% if message.role == 'tool' %}"
    "<|start_header_id|>ipython<|end_header_id|>\n\n{{ message.content | tojson }}{% elif 'tool_calls' in message %}"
    "{% if message.tool_calls | length != 1 %}{{ raise_exception('single tool-calls at once') }}{% endif %}"
    "{% set call = message.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    "{% else %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{% if tools and loop.first %}{% for tool in tools %}{{ tool | tojson(indent=4) }}\n\n{% endfor %}{% endif %}"
    "{{ message.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""Llama 3.1 to 3.3."""

LLAMA_TAGGED = LLAMA.replace('{"name"', '<|python_tag|>{"name"')

_IDS = (
    "{% if call_id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{% endif %}"
)
MISTRAL = (
    "<s>{% for message in messages %}{% if message.role == 'user' %}{% if tools and loop.last %}[AVAILABLE_TOOLS] "
    "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ message.content }}[/INST]"
    "{% elif message.role == 'tool' %}{% set call_id = message.tool_call_id %}"
    + _IDS
    + '[TOOL_RESULTS] {"content": {{ message.content | tojson }}, "call_id": "{{ call_id }}"}[/TOOL_RESULTS]'
    "{% elif message.tool_calls is defined %}[TOOL_CALLS] [{% for call in message.tool_calls %}"
    "{% set call_id = call.id %}" + _IDS + '{{ (call.function | tojson)[:-1] }}, "id": "{{ call_id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]</s>{% else %} {{ message.content }}</s>{% endif %}{% endfor %}"
)
"""Mistral 7B v0.3, Nemo, Small 3.1."""

MISTRAL_NAMED = (
    "<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for message in messages %}"
    "{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]{% elif message.role == 'tool' %}"
    "[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]{% elif message.tool_calls is defined %}"
    "{% for call in message.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
    "{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}"
    "{{ call.function.arguments | tojson }}{% endif %}{% endfor %}</s>"
    "{% else %}{{ message.content }}</s>{% endif %}{% endfor %}"
)
"""Mistral Small 3.2, Devstral, Magistral."""

XML = HERMES.replace(
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}',
    "<function={{ call.function.name }}>\n</function>",
)
"""Qwen3-Coder: calls are no JSON."""

SILENT = _TOLD + "{% for message in messages %}" + _TURN + "<|im_end|>\n{% endfor %}" + _START
"""Tells the model of tools, and forgets its calls."""

TOOLLESS = "{% for message in messages %}" + _TURN + "<|im_end|>\n{% endfor %}" + _START
