"""Well-known chat templates by name, for models whose GGUF has none or a broken one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BuiltinTemplate:
    """Jinja source, and the texts that end an answer written in it: the end of a turn, and the
    start of the next one, which base models tend to write instead."""

    source: str
    ends: tuple[str, ...]


_SYSTEM_FIRST = (
    "{%- if messages[0]['role'] == 'system' -%}"
    "{%- set system = messages[0]['content'] -%}{%- set turns = messages[1:] -%}"
    "{%- else -%}{%- set system = '' -%}{%- set turns = messages -%}{%- endif -%}"
)

BUILTIN: dict[str, BuiltinTemplate] = {
    "chatml": BuiltinTemplate(
        "{%- for message in messages -%}"
        "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}",
        ("<|im_end|>", "<|im_start|>"),
    ),
    "llama2": BuiltinTemplate(
        _SYSTEM_FIRST + "{%- for message in turns -%}"
        "{%- if message['role'] == 'user' -%}"
        "{{- bos_token + '[INST] ' -}}"
        "{%- if loop.first and system -%}"
        "{{- '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' -}}"
        "{%- endif -%}"
        "{{- message['content'] + ' [/INST]' -}}"
        "{%- else -%}{{- ' ' + message['content'] + ' ' + eos_token -}}{%- endif -%}"
        "{%- endfor -%}",
        ("</s>",),
    ),
    "llama3": BuiltinTemplate(
        "{{- bos_token -}}{%- for message in messages -%}"
        "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
        " + message['content'] + '<|eot_id|>' -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}"
        "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}",
        ("<|eot_id|>", "<|start_header_id|>"),
    ),
    "gemma": BuiltinTemplate(
        "{{- bos_token -}}" + _SYSTEM_FIRST + "{%- for message in turns -%}"
        "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
        "{{- '<start_of_turn>' + role + '\\n' -}}"
        "{%- if loop.first and system -%}{{- system + '\\n\\n' -}}{%- endif -%}"
        "{{- message['content'] + '<end_of_turn>\\n' -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}",
        ("<end_of_turn>", "<start_of_turn>"),
    ),
    "mistral": BuiltinTemplate(
        "{{- bos_token -}}" + _SYSTEM_FIRST + "{%- for message in turns -%}"
        "{%- if message['role'] == 'user' -%}"
        "{{- '[INST] ' -}}"
        "{%- if loop.first and system -%}{{- system + '\\n\\n' -}}{%- endif -%}"
        "{{- message['content'] + ' [/INST]' -}}"
        "{%- else -%}{{- ' ' + message['content'] + eos_token -}}{%- endif -%}"
        "{%- endfor -%}",
        ("</s>",),
    ),
    "zephyr": BuiltinTemplate(
        "{%- for message in messages -%}"
        "{{- '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}",
        ("</s>", "<|user|>"),
    ),
}
