"""A byte-level tokenizer without a vocabulary file, and chat templates of five styles."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>"]
SPECIAL += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
WHOLE = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

# As Qwen3.5 does: contents trimmed, think blocks only after the last question, where an empty one is added if need
# be; tool calls as XML; consecutive tool results in one user turn; thinking on unless switched off.
QWEN = r"""
{%- if tools %}{{ '<|im_start|>system\n# Tools\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}
  {%- if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}{{ '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content | trim + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
  {%- if message.role == 'user' and not (message.content | trim).startswith('<tool_response>') %}
    {%- set ns.last = loop.index0 %}
  {%- endif %}
{%- endfor %}
{%- if ns.last < 0 %}{{ raise_exception('No user query found in messages.') }}{% endif %}
{%- for message in messages %}
  {%- set content = message.content | trim %}
  {%- if message.role == 'system' %}
    {%- if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
  {%- elif message.role == 'user' %}{{ '<|im_start|>user\n' + content + '<|im_end|>\n' }}
  {%- elif message.role == 'assistant' %}
    {%- set reason = '' %}
    {%- if message.reasoning_content is string %}{% set reason = message.reasoning_content %}
    {%- elif '</think>' in content %}
      {%- set reason = content.split('</think>')[0].split('<think>')[-1] %}
      {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\n' }}
    {%- if loop.index0 > ns.last %}{{ '<think>\n' + reason | trim + '\n</think>\n\n' }}{% endif %}
    {{- content }}
    {%- for call in message.tool_calls or [] %}
      {%- set call = call.function or call %}
      {{- ('\n' if content or not loop.first else '') + '<tool_call>\n<function=' + call.name + '>\n' }}
      {%- for name, value in call.arguments | items %}
        {{- '<parameter=' + name + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}
      {%- endfor %}
      {{- '</function>\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- elif message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
    {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\n<think>\n' }}{% if enable_thinking is false %}{{ '\n</think>\n\n' }}{% endif %}
{%- endif %}"""

# ChatML that knows no system role.
PLAIN = r"""
{%- for message in messages %}
  {%- if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
  {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# The generation prompt opens a think block that the full render does not have.
SUFFIX = PLAIN.replace("raise_exception('System role not supported')", "''").replace(
    "{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>assistant\\n<think>\\n' }}"
)

# Think blocks are stripped from every turn but the last.
STRIPS = r"""
{%- for message in messages %}
  {%- set content = message.content if loop.last else message.content.split('</think>')[-1].lstrip('\n') %}
  {{- '<|im_start|>' + message.role + '\n' + (content if message.role == 'assistant' else message.content) }}
  {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA = r"""{{- '<|begin_of_text|>' }}
{%- for message in messages %}
  {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

TEMPLATES = {"qwen": QWEN, "plain": PLAIN, "suffix": SUFFIX, "strips": STRIPS, "llama": LLAMA}


def toy_tokenizer(
    template: str | None, *, merges: tuple[tuple[str, str], ...] = (), trim_offsets: bool = False, special: bool = True
) -> PreTrainedTokenizerFast:
    """A fast tokenizer with one token a byte, one for each merge, and those of SPECIAL and WHOLE (unless not special,
    when their texts are plain bytes too)."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    if special:
        backend.add_special_tokens(SPECIAL)
        backend.add_tokens([AddedToken(token, normalized=False) for token in WHOLE])
    eos = ("<|eot_id|>" if template == "llama" else "<|im_end|>") if special else "<|endoftext|>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
    tokenizer.chat_template = TEMPLATES[template] if template else None
    return tokenizer
