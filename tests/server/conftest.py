from tests.grammar_processes import shared_grammar_processes  # noqa: F401
