"""Prompts of /v1/completions with a `suffix`: the text between prompt and suffix is generated (fill in the middle).

Models trained for it have three special tokens, which identify them in the vocabulary. Names are SGLang's
(`--completion-template`).
"""

from __future__ import annotations

from moe_engine.errors import InputError
from moe_engine.tokenizer.tokenizer import Tokenizer

FORMS = {
    "deepseek_coder": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "qwen_coder": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "star_coder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
}
"""Tokens before the prompt, before the suffix, and before the answer."""


def fill_in_middle(tokenizer: Tokenizer, prompt: str, suffix: str, form: str | None) -> str:
    """The prompt whose continuation lies between `prompt` and `suffix`.

    Args:
        form: one of `FORMS`; None: by the vocabulary.

    Raises:
        InputError: the vocabulary lacks the tokens.
    """
    for name in FORMS if form is None else (form,):
        before, hole, end = FORMS[name]
        if all(tokenizer.token_id(token) is not None for token in (before, hole, end)):
            return f"{before}{prompt}{hole}{suffix}{end}"
    missing = "tokens for the middle of a text" if form is None else f"{' '.join(FORMS[form])} (--completion-template)"
    raise InputError.at("suffix", f"the vocabulary of this model has no {missing}; leave it out")
