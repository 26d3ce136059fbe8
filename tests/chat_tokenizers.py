"""Small tokenizers of four families, each with a chat template as such models carry it: without `{% generation %}` marks."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

# SmolLM's manner: a system turn of its own when none is given.
CHATML = """\
{%- for message in messages -%}
    {%- if loop.first and message['role'] != 'system' -%}
        {{- '<|im_start|>system\\nYou are a small and friendly model.<|im_end|>\\n' -}}
    {%- endif -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

# Llama 3.1's manner: a system turn with dates in any case, contents trimmed, strings of tools written as JSON.
LLAMA3 = """\
{{- bos_token -}}
{%- if messages[0]['role'] == 'system' -%}
    {%- set system_message = messages[0]['content'] | trim -%}
    {%- set messages = messages[1:] -%}
{%- else -%}
    {%- set system_message = '' -%}
{%- endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: 26 Jul 2024\\n\\n' -}}
{%- if tools is not none -%}
    {{- 'You have access to the following functions.\\n\\n' -}}
    {%- for t in tools -%}{{- t | tojson(indent=4) -}}{{- '\\n\\n' -}}{%- endfor -%}
{%- endif -%}
{{- system_message + '<|eot_id|>' -}}
{%- for message in messages -%}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) -%}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' -}}
    {%- elif 'tool_calls' in message -%}
        {%- if not message.tool_calls | length == 1 -%}
            {{- raise_exception('This model only supports single tool-calls at once!') -}}
        {%- endif -%}
        {%- set tool_call = message.tool_calls[0].function -%}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' -}}
        {{- tool_call.arguments | tojson -}}
        {{- '}<|eot_id|>' -}}
    {%- else -%}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' -}}
        {%- if message.content is mapping or message.content is iterable -%}
            {{- message.content | tojson -}}
        {%- else -%}
            {{- message.content -}}
        {%- endif -%}
        {{- '<|eot_id|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""

# Mistral's manner with Tekken: no generation prompt at all, strict alternation, calls and results between tokens.
MISTRAL = """\
{{- bos_token -}}
{%- if messages[0]['role'] == 'system' -%}
    {{- '[SYSTEM_PROMPT]' + messages[0]['content'] + '[/SYSTEM_PROMPT]' -}}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- set ns = namespace(index=0) -%}
{%- for message in loop_messages -%}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) -%}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) -%}
            {{- raise_exception('After the optional system message, conversation roles must alternate user/assistant') -}}
        {%- endif -%}
        {%- set ns.index = ns.index + 1 -%}
    {%- endif -%}
{%- endfor -%}
{%- if tools -%}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if message.role == 'user' -%}
        {{- '[INST]' + message.content + '[/INST]' -}}
    {%- elif message.role == 'tool' -%}
        {{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' -}}
    {%- elif message.role == 'assistant' -%}
        {%- if message.content is string -%}
            {{- message.content -}}
        {%- else -%}
            {%- for block in message.content -%}
                {%- if block.type == 'thinking' -%}{{- '[THINK]' + block.thinking + '[/THINK]' -}}{%- else -%}{{- block.text -}}{%- endif -%}
            {%- endfor -%}
        {%- endif -%}
        {%- for tool_call in message.tool_calls or [] -%}
            {%- if tool_call.id | length != 9 -%}{{- raise_exception('Tool call IDs should be strings with length 9!') -}}{%- endif -%}
            {{- '[TOOL_CALLS]' + tool_call.function.name + '[ARGS]' + (tool_call.function.arguments | tojson) -}}
        {%- endfor -%}
        {{- eos_token -}}
    {%- else -%}
        {{- raise_exception('Only user, assistant, tool and system roles are supported') -}}
    {%- endif -%}
{%- endfor -%}
"""

# An older Mistral's manner: the system prompt and the tools move to the last question, so no prefix is stable.
MISTRAL_V3 = """\
{%- if messages[0]['role'] == 'system' -%}
    {%- set system_message = messages[0]['content'] -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- set user_messages = loop_messages | selectattr('role', 'equalto', 'user') | list -%}
{{- bos_token -}}
{%- for message in loop_messages -%}
    {%- if message['role'] == 'user' -%}
        {%- if tools and message == user_messages[-1] -%}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}{%- endif -%}
        {%- if system_message is defined and message == user_messages[-1] -%}
            {{- '[INST] ' + system_message + '\\n\\n' + message['content'] + '[/INST]' -}}
        {%- else -%}
            {{- '[INST] ' + message['content'] + '[/INST]' -}}
        {%- endif -%}
    {%- elif message['role'] == 'assistant' -%}
        {{- ' ' + message['content'] | trim + eos_token -}}
    {%- endif -%}
{%- endfor -%}
"""

# Qwen3's manner: thinking of earlier turns is dropped, an empty block is added to the last answer.
QWEN = """\
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
    {{- '# Tools\\n\\n<tools>' -}}
    {%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}
    {{- '\\n</tools><|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) -%}
{%- for message in messages[::-1] -%}
    {%- set index = (messages|length - 1) - loop.index0 -%}
    {%- if ns.multi_step_tool and message.role == 'user' and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) -%}
        {%- set ns.multi_step_tool = false -%}
        {%- set ns.last_query_index = index -%}
    {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- if message.content is string -%}{%- set content = message.content -%}{%- else -%}{%- set content = '' -%}{%- endif -%}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' -}}
    {%- elif message.role == 'assistant' -%}
        {%- set reasoning_content = '' -%}
        {%- if message.reasoning_content is string -%}
            {%- set reasoning_content = message.reasoning_content -%}
        {%- elif '</think>' in content -%}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
        {%- endif -%}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) -%}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') -}}
        {%- else -%}
            {{- '<|im_start|>' + message.role + '\\n' + content -}}
        {%- endif -%}
        {%- for tool_call in message.tool_calls or [] -%}
            {%- if (loop.first and content) or (not loop.first) -%}{{- '\\n' -}}{%- endif -%}
            {{- '<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' -}}
            {{- tool_call.function.arguments | tojson -}}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- elif message.role == 'tool' -%}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' -}}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

# Words as delimiters, which no special token protects.
VICUNA = """\
{%- for message in messages -%}
    {%- if message['role'] == 'user' -%}{{- 'USER: ' + message['content'] + '\\n' -}}
    {%- elif message['role'] == 'assistant' -%}{{- 'ASSISTANT: ' + message['content'] + '\\n' -}}
    {%- else -%}{{- message['content'] + '\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT: ' -}}{%- endif -%}
"""

_CHATML_TOKENS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
_MISTRAL_TOKENS = [
    "<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[THINK]", "[/THINK]",
]  # fmt: skip
_LLAMA_TOKENS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
_QWEN_MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

# family: template, special tokens, added tokens that are not special, begin, end, pad, whether a begin is put before texts
_FAMILIES: dict[str, tuple[str, list[str], list[str], str | None, str, str, bool]] = {
    "chatml": (CHATML, _CHATML_TOKENS, [], "<|im_start|>", "<|im_end|>", "<|im_end|>", False),
    "llama3": (LLAMA3, _LLAMA_TOKENS, [], "<|begin_of_text|>", "<|eot_id|>", "<|eot_id|>", True),
    "mistral": (MISTRAL, _MISTRAL_TOKENS, [], "<s>", "</s>", "<pad>", True),
    "mistral_v3": (MISTRAL_V3, _MISTRAL_TOKENS, [], "<s>", "</s>", "</s>", True),
    "qwen": (QWEN, _CHATML_TOKENS, _QWEN_MARKS, None, "<|im_end|>", "<|endoftext|>", False),
    "vicuna": (VICUNA, ["<s>", "</s>"], [], "<s>", "</s>", "</s>", True),
}
FAMILIES = tuple(_FAMILIES)


@cache
def chat_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE of a few hundred tokens with the family's special tokens and its chat template."""
    template, special, added, bos, eos, pad, begins = _FAMILIES[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    lines = ["user assistant system tool", "the answer is forty two", "what is the weather in Paris", "\n\n\n\n"]
    tokenizer.train_from_iterator(lines * 5, trainer)
    if begins and bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, special.index(bos))]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad)
    fast.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    fast.chat_template = template
    return fast


def with_template(family: str, template: str | None) -> PreTrainedTokenizerFast:
    """The family's tokenizer with another template (a copy: tests share the first)."""
    import copy

    tokenizer = copy.deepcopy(chat_tokenizer(family))
    tokenizer.chat_template = template
    return tokenizer
