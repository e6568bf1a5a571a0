"""The prompt of GME embedding models on Qwen2-VL: instruction, image and text in a turn, and an end token, whose state
is the vector (source: model card of Alibaba-NLP/gme-Qwen2-VL-2B-Instruct; SGLang's chat template of the same name).

A system message replaces the instruction.
"""

from __future__ import annotations

_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + _IMAGE + "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<|endoftext|>"
)
